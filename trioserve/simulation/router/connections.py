"""The connections to one simulated endpoint: which go silent while nothing is closed, and what the router makes of it.

The rules:

- A response whose connection is well is not given up. A server that sends no beats may be taken for lost when its
  response has stalled.
- A response whose connection is silent is given up within its bound, counted in the time in which the router looked.
- When the router is told of another process at the address, it gives up the responses of the former one at once.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import LOOK_SECONDS, SETTLE_SECONDS, AwaitedResponse, SilenceWatch

__all__ = ["EndpointConnections"]

LOOKED_SECONDS_MAX = 2 * LOOK_SECONDS  # of the time between two looks, the router takes no more for silence
CLOSE_SECONDS = 1e-6
STEP_SECONDS = 1e-9  # between two moments that real life never has at once


class _Connection:
    """One response that is read.

    Attributes:
        process: which process of the endpoint has it.
        has_told: the router knows which process that is.
        quiet_seconds: how long nothing has come, in the time in which the router looked.
        replaced_at: when the router was told of another process.
    """

    def __init__(self, sent_at: float, process: int) -> None:
        self.awaited = AwaitedResponse(sent_at, computes=True)
        self.awaited.is_waiting = True
        self.process = process
        self.has_told = False
        self.is_silent = False
        self.heard_at = sent_at
        self.quiet_seconds = 0.0
        self.replaced_at: float | None = None


class EndpointConnections:
    """All connections of one endpoint, and the watch that judges them.

    Args:
        settings: None: nobody looks at connections, and none goes silent.
        sends_beats: it sends beats and names its process, as this project's engines do.
        count: called with what came to pass.
    """

    def __init__(
        self, id: str, settings: SilenceSettings | None, *, sends_beats: bool, count: Callable[[str], None]
    ) -> None:
        self.process = 0
        self._id = id
        self._settings = SilenceSettings() if settings is None else settings
        self._is_watched = settings is not None
        self._sends_beats = sends_beats
        self._count = count
        self._watch = SilenceWatch(self._settings)
        self._watch.sends_beats = sends_beats
        self._open: dict[str, _Connection] = {}
        self._told_process = 0  # the newest that the router knows
        self._looked_at = 0.0
        self._moment = 0.0

    @property
    def is_any_read(self) -> bool:
        return self._is_watched and bool(self._open)

    def is_silent(self, name: str) -> bool:
        connection = self._open.get(name)
        return connection is not None and connection.is_silent

    def former(self) -> set[str]:
        """Requests that a former process had."""
        return {name for name, connection in self._open.items() if connection.process != self.process}

    def instance(self) -> str:
        """How the process at its address calls itself."""
        return f"{self._id} {self.process}"

    def moment(self, now: float) -> float:
        """A moment of its own for each call."""
        self._moment = max(now, self._moment + STEP_SECONDS)
        return self._moment

    # --- what happens ---

    def open(self, name: str, now: float) -> None:
        """A request is sent."""
        self._open[name] = _Connection(self.moment(now), self.process)

    def close(self, name: str) -> None:
        """Its response is read no more. Nothing to do when there is none."""
        connection = self._open.pop(name, None)
        if connection is not None:
            self._watch.forget(connection.awaited)

    def hear(self, name: str, now: float) -> None:
        """Bytes of its response come."""
        connection = self._open[name]
        connection.awaited.has_body = True
        connection.awaited.beats = self._sends_beats
        self._hear(connection, now)

    def silence(self, name: str) -> None:
        """Nothing more comes over its connection. Nothing to do where the router could never tell."""
        connection = self._open.get(name)
        if not self._is_watched or connection is None or connection.is_silent:
            return
        if self._sends_beats or connection.awaited.has_body:
            connection.is_silent = True
            self._count("connections: silent")

    def replace(self) -> None:
        """Another process takes the address; whoever asks there hears nothing more of the one before."""
        if self._is_watched and self._sends_beats:
            for connection in self._open.values():
                connection.is_silent = True
            self.process += 1
            self._count("addresses taken by another process")

    def note_load(self, load: EndpointLoad, asked_at: float, now: float) -> None:
        """The router gets a report."""
        if self._is_watched:
            self._watch.note_load(load, self._awaited(), asked_at, now)
            if load.instance is not UNSET:
                self._tell(int(load.instance.rpartition(" ")[2]), now)

    def look(self, now: float) -> list[str]:
        """The router looks at all connections. Returns the requests whose responses it gives up; see the top."""
        passed = min(now - self._looked_at, LOOKED_SECONDS_MAX)
        self._looked_at = now
        for connection in self._open.values():
            connection.quiet_seconds += passed
        by_response = {connection.awaited: name for name, connection in self._open.items()}
        lost: list[str] = []
        for loss in self._watch.look(self._awaited(), now):
            name = by_response[loss.response]
            self._check_lost(name, self._open[name], loss.reason)
            self._count(f"connections given up: {loss.reason}")
            lost.append(name)
        assert not self._watch.is_shared, f"{self._id} is taken for several processes at one address"
        for name, connection in self._open.items():
            if name not in lost:
                self._check_kept(name, connection, now)
                if self._sends_beats and now >= connection.heard_at + self._settings.beat_seconds:
                    self._hear(connection, now)
        return lost

    def _awaited(self) -> list[AwaitedResponse]:
        return [connection.awaited for connection in self._open.values()]

    def _hear(self, connection: _Connection, now: float) -> None:
        if connection.is_silent:
            return
        awaited = connection.awaited
        awaited.pieces += 1
        connection.heard_at, connection.quiet_seconds = now, 0.0
        if self._sends_beats and self._is_watched and not connection.has_told:
            connection.has_told = True
            awaited.instance = self.instance()
            self._watch.note_instance(awaited.instance, self._awaited(), awaited.sent_at, now)
            self._tell(connection.process, now)

    def _tell(self, process: int, now: float) -> None:
        """The router is told which process is at the address."""
        if process > self._told_process:
            self._told_process = process
            for connection in self._open.values():
                if connection.process < process and connection.has_told:
                    connection.replaced_at = now

    # --- the rules ---

    def _check_lost(self, name: str, connection: _Connection, reason: str) -> None:
        has_stalled = connection.quiet_seconds >= self._settings.stalled_seconds_max - CLOSE_SECONDS
        may_end = connection.is_silent or (not self._sends_beats and connection.awaited.has_body and has_stalled)
        assert may_end, f"{name} is given up at {self._id}, and its connection is well: {reason}"

    def _check_kept(self, name: str, connection: _Connection, now: float) -> None:
        if not connection.is_silent:
            return
        settings = self._settings
        seconds_max = settings.silent_seconds_max if self._sends_beats else settings.stalled_seconds_max
        # The first look after the last byte begins to count, and the last one may come just before the bound.
        seconds_max += 2 * LOOKED_SECONDS_MAX
        seconds = connection.quiet_seconds
        assert seconds <= seconds_max, f"{name} has heard nothing of {self._id} for {seconds:.2f} s, and waits"
        replaced_at = connection.replaced_at
        assert replaced_at is None or now < replaced_at + SETTLE_SECONDS + CLOSE_SECONDS, (
            f"{name} waits at {self._id} for a process that another one has replaced"
        )
