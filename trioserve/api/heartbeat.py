"""Signs of life within a response: heartbeats for routers, and white space before a JSON response.

Routers ask for heartbeats to detect a connection that went silent.

A router asks for heartbeats with the header `x-trioserve-heartbeat: 5`. If nothing was sent for five seconds, the
server sends an interim response (102) before the head of its response, or a comment between two events. The head of
each response names the server process. The engine's own alarms send the heartbeats, and these alarms stop while a step
hangs. So a server whose engine hangs sends no heartbeats, but a server that computes a long prompt does.

With `x-trioserve-heartbeat: 5, now`, one heartbeat is sent at once. This first heartbeat shows a router whether
heartbeats arrive, because a proxy in between may drop interim responses.

JSON may begin with white space, so clients read a response with an early head like any other. The head has status 200,
because it is sent before the outcome is known. If the request fails later, the error becomes the body.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import trio

from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.surface import LINE_KEEP_ALIVE, LINES_TYPE
from trioserve.http.exchange import Beats, Exchange, HeaderFields, WrappedExchange

if TYPE_CHECKING:
    from trioserve.engine.lifecycle.step_times import StepWatch
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["HEARTBEAT_HEADER", "INSTANCE_HEADER", "Heartbeat", "WhiteSpaceExchange", "heartbeat_field"]

HEARTBEAT_HEADER = "x-trioserve-heartbeat"
INSTANCE_HEADER = "x-trioserve-instance"
SECONDS_MIN = 0.5  # A shorter interval is refused, because each heartbeat costs work at both ends of the connection.
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
    """Methods of an engine that are needed to send heartbeats."""

    @property
    def instance(self) -> str: ...
    @property
    def step_watch(self) -> StepWatch: ...
    def call_at(self, at: float, function: Callable[[], None], /) -> Alarm: ...


class Heartbeat:
    """Sends the heartbeats of one response. The caller must call `end`.

    Args:
        exchange: the HTTP exchange of the request.
        engine: the engine whose alarms send the heartbeats.
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
    def begin(cls, exchange: Exchange, engine: BeatingEngine, asked: str) -> Heartbeat | None:
        """Begin the heartbeats that a request asks for.

        Args:
            exchange: the HTTP exchange of the request.
            engine: the engine whose alarms send the heartbeats.
            asked: value of the request's header HEARTBEAT_HEADER.

        Returns:
            The heartbeats, or None if the header is malformed.
        """
        match = _ASKED.fullmatch(asked)
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


JSON_TYPE = "application/json"
WHITE_SPACE = b" "
NOT_BUFFERED = ("x-accel-buffering", "no")
"""Header against buffering proxies (nginx), which would delay the white space."""


class WhiteSpaceExchange(WrappedExchange):
    """An exchange that may send its head early. The handler answers as usual, and does not see the early head.

    After `fill_silence`, a task sends the head and then a space after each `seconds` of silence. The handler's response
    ends the spaces, and becomes the body after this head. The status and the headers of the handler's response are
    dropped.

    Args:
        exchange: exchange of the connection.
        nursery: runs the task. It must end before the exchange does.
        seconds: silence before each space.
        head: makes the header fields of a JSON response.

    Attributes:
        has_begun: True if the head was sent early, with status 200.
    """

    def __init__(
        self, exchange: Exchange, nursery: trio.Nursery, seconds: float, head: Callable[[], HeaderFields]
    ) -> None:
        super().__init__(exchange)
        self.has_begun = False
        self._nursery = nursery
        self._seconds = seconds
        self._head = head
        self._is_filling = False
        self._has_response = False  # True once the handler's response has begun.
        self._sending = trio.Lock()  # The lock lets a space finish before the handler's response begins.

    def fill_silence(self) -> None:
        if not self._is_filling:
            self._is_filling = True
            self._nursery.start_soon(self._fill)

    async def _fill(self) -> None:
        while True:
            await trio.sleep(self._seconds)
            async with self._sending:
                if self._has_response:
                    return
                if not self.has_begun:
                    self.has_begun = True
                    await self.exchange.start(200, [*self._head(), NOT_BUFFERED])
                await self.exchange.send(WHITE_SPACE)

    @property
    def started(self) -> bool:
        """True if the handler's response has begun. Before that, an error is sent as a separate response."""
        return self._has_response or (self.exchange.started and not self.has_begun)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self._end_white_space(headers)
        if self.has_begun:
            await self.exchange.finish(body)
        else:
            await self.exchange.respond(status, headers, body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        await self._end_white_space(headers)
        if not self.has_begun:
            await self.exchange.start(status, headers)

    async def _end_white_space(self, headers: HeaderFields) -> None:
        """Wait until the current space was sent. After that only the handler sends.

        Args:
            headers: header fields of the response.

        Raises:
            RuntimeError: the response is not JSON, but the early head said so.
        """
        async with self._sending:
            media_type = next((value for name, value in headers if name.lower() == "content-type"), JSON_TYPE)
            if self.has_begun and media_type.partition(";")[0].strip().lower() != JSON_TYPE:
                raise RuntimeError(f"a response of type {media_type[:80]!r} after the head of a JSON response")
            self._has_response = True
