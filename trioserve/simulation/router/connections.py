"""The connections to one simulated endpoint. Some go silent without being closed, and the router must notice it.

Rules:

- A response with a working connection is not given up. If the server sends no heartbeats, a stalled response may count
  as lost.
- A response with a silent connection is given up within its time limit. Only the time in which the router checks
  counts.
- When the router learns of another process at the address, it gives up the responses of the former process at once.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import LOOK_SECONDS, SETTLE_SECONDS, AwaitedResponse, SilenceWatch

__all__ = ["EndpointConnections"]

LOOKED_SECONDS_MAX = 2 * LOOK_SECONDS  # Of the time between two checks, the router counts at most this as silence.
CLOSE_SECONDS = 1e-6
STEP_SECONDS = 1e-9  # between two times that are never equal in reality


class _Connection:
    """One response that is being read.

    Attributes:
        awaited: the router's record of the response.
        process: number of the endpoint's process that has it.
        has_told: True if the router knows that process.
        is_silent: True if nothing more will come.
        heard_at: time of the last bytes.
        quiet_seconds: time without bytes, as far as the router checked.
        replaced_at: time at which the router learned of another process, or None.
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
        id: the endpoint.
        settings: settings for connections. None: the router does not check connections, and none goes silent.
        sends_beats: True if the endpoint sends heartbeats and names its process, as trioserve does.
        count: counts occurrences.

    Attributes:
        process: number of the current process.
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
        self._known_process = 0  # number of the newest process that the router knows
        self._looked_at = 0.0
        self._moment = 0.0

    @property
    def is_any_read(self) -> bool:
        return self._is_watched and bool(self._open)

    def is_silent(self, name: str) -> bool:
        connection = self._open.get(name)
        return connection is not None and connection.is_silent

    def former(self) -> set[str]:
        """Return the requests that a former process has."""
        return {name for name, connection in self._open.items() if connection.process != self.process}

    def instance(self) -> str:
        """Return the name of the current process."""
        return f"{self._id} {self.process}"

    def moment(self, now: float) -> float:
        """Return a time that no other call returns.

        Args:
            now: the time.
        """
        self._moment = max(now, self._moment + STEP_SECONDS)
        return self._moment

    # --- events ---

    def open(self, name: str, now: float) -> None:
        """Note that a request is sent.

        Args:
            name: the request.
            now: the time.
        """
        self._open[name] = _Connection(self.moment(now), self.process)

    def close(self, name: str) -> None:
        """Stop reading a response. Unknown names are ignored.

        Args:
            name: the request.
        """
        connection = self._open.pop(name, None)
        if connection is not None:
            self._watch.forget(connection.awaited)

    def hear(self, name: str, now: float) -> None:
        """Note that bytes of a response arrive.

        Args:
            name: the request.
            now: the time.
        """
        connection = self._open[name]
        connection.awaited.has_body = True
        connection.awaited.beats = self._sends_beats
        self._hear(connection, now)

    def silence(self, name: str) -> None:
        """Make a connection silent. Ignored if the router could never notice it.

        Args:
            name: the request.
        """
        connection = self._open.get(name)
        if not self._is_watched or connection is None or connection.is_silent:
            return
        if self._sends_beats or connection.awaited.has_body:
            connection.is_silent = True
            self._count("connections: silent")

    def replace(self) -> None:
        """Let another process take over the address. All connections to the former process go silent."""
        if self._is_watched and self._sends_beats:
            for connection in self._open.values():
                connection.is_silent = True
            self.process += 1
            self._count("addresses taken by another process")

    def note_load(self, load: EndpointLoad, asked_at: float, now: float) -> None:
        """Note that the router gets a load report.

        Args:
            load: the report.
            asked_at: time of the question.
            now: the time.
        """
        if self._is_watched:
            self._watch.note_load(load, self._awaited(), asked_at, now)
            if load.instance is not UNSET:
                self._note_process(int(load.instance.rpartition(" ")[2]), now)

    def look(self, now: float) -> list[str]:
        """Let the router check all connections. Return the requests whose responses it gives up.

        Args:
            now: the time.
        """
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
        assert not self._watch.is_shared, f"{self._id} counts as several processes at one address"
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
            self._note_process(connection.process, now)

    def _note_process(self, process: int, now: float) -> None:
        """Note that the router learns the process at the address."""
        if process > self._known_process:
            self._known_process = process
            for connection in self._open.values():
                if connection.process < process and connection.has_told:
                    connection.replaced_at = now

    # --- the rules ---

    def _check_lost(self, name: str, connection: _Connection, reason: str) -> None:
        has_stalled = connection.quiet_seconds >= self._settings.stalled_seconds_max - CLOSE_SECONDS
        may_end = connection.is_silent or (not self._sends_beats and connection.awaited.has_body and has_stalled)
        assert may_end, f"{name} is given up at {self._id}, but its connection works: {reason}"

    def _check_kept(self, name: str, connection: _Connection, now: float) -> None:
        if not connection.is_silent:
            return
        settings = self._settings
        seconds_max = settings.silent_seconds_max if self._sends_beats else settings.stalled_seconds_max
        # Counting begins at the first check after the last byte, and the last check may come just before the limit.
        seconds_max += 2 * LOOKED_SECONDS_MAX
        seconds = connection.quiet_seconds
        assert seconds <= seconds_max, (
            f"{name} has received nothing from {self._id} for {seconds:.2f} s, but still waits"
        )
        replaced_at = connection.replaced_at
        assert replaced_at is None or now < replaced_at + SETTLE_SECONDS + CLOSE_SECONDS, (
            f"{name} waits at {self._id} for a process that was replaced"
        )
