"""Heartbeats within a response. Routers ask for them, to detect a connection that went silent.

A request has the header `x-trioserve-heartbeat: 5`. If nothing was sent for five seconds, the server sends an interim
response (102) before the head of its response, or a comment between two events. The heads name the server process.
The engine's own alarms send the heartbeats, and stop while a step hangs. So a server whose engine hangs
sends none. A slow prompt does not stop them.

With `x-trioserve-heartbeat: 5, now`, one heartbeat is sent at once. It shows a router whether heartbeats arrive, since
a proxy in between may drop interim responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import trio

from trioserve.api.ollama.surface import LINE_KEEP_ALIVE, LINES_TYPE
from trioserve.api.sse import KEEP_ALIVE
from trioserve.http.exchange import Beats

if TYPE_CHECKING:
    from trioserve.engine.lifecycle.step_watch import StepWatch
    from trioserve.http.exchange import Exchange
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["HEARTBEAT_HEADER", "INSTANCE_HEADER", "Heartbeat", "heartbeat_field"]

HEARTBEAT_HEADER = "x-trioserve-heartbeat"
INSTANCE_HEADER = "x-trioserve-instance"
SECONDS_MIN = 0.5  # each heartbeat costs both ends work
SECONDS_MAX = 3600.0
_ASKED = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)(, now)?")


def heartbeat_field(seconds: float, *, now: bool = False) -> tuple[str, str]:
    """Make the header field that asks for heartbeats.

    Args:
        seconds: silence before each heartbeat.
        now: True: send the first heartbeat at once.
    """
    return HEARTBEAT_HEADER, f"{seconds:.3f}".rstrip("0").rstrip(".") + (", now" if now else "")


class BeatingEngine(Protocol):
    """The part of an engine that sends heartbeats."""

    @property
    def instance(self) -> str: ...
    @property
    def step_watch(self) -> StepWatch: ...
    def call_at(self, at: float, function: Callable[[], None], /) -> Alarm: ...


class Heartbeat:
    """Sends the heartbeats of one response. The caller must call `end`.

    Args:
        exchange: the request, and the way to its client.
        engine: its alarms send the heartbeats.
        seconds: silence before each heartbeat.
        now: True: send the first heartbeat at once.
    """

    def __init__(self, exchange: Exchange, engine: BeatingEngine, seconds: float, *, now: bool) -> None:
        self._exchange = exchange
        self._engine = engine
        self._seconds = seconds
        self._alarm: Alarm | None = None
        fields = (heartbeat_field(seconds), (INSTANCE_HEADER, engine.instance))
        within = {"text/event-stream": KEEP_ALIVE, LINES_TYPE: LINE_KEEP_ALIVE}
        if exchange.expect_beats(Beats(fields=fields, within=within)):
            if now:
                exchange.beat()
            self._wait()

    @classmethod
    def of(cls, exchange: Exchange, engine: BeatingEngine) -> Heartbeat | None:
        """Begin the heartbeats that a request asks for.

        Args:
            exchange: the request, and the way to its client.
            engine: its alarms send the heartbeats.

        Returns:
            The heartbeats, or None if the request asks for none or its header is malformed.
        """
        asked = exchange.headers.get(HEARTBEAT_HEADER)
        match = None if asked is None else _ASKED.fullmatch(asked)
        if match is None or not SECONDS_MIN <= float(match[1]) <= SECONDS_MAX:
            return None
        return cls(exchange, engine, float(match[1]), now=match[2] is not None)

    def end(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _wait(self) -> None:
        self._alarm = self._engine.call_at(trio.current_time() + self._seconds, self._send)

    def _send(self) -> None:
        if self._engine.step_watch.overdue() is None:
            self._exchange.beat()
        self._wait()
