"""Shared parts of simulations in virtual time: a trace, a check for forgotten requests, and records of clients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

import trio

from trioserve.contracts.events import AbortOutcome

__all__ = ["ClientsInside", "IdleWatch", "TracedRun", "waits_for_a_step", "without_log_lines"]


class TracedRun:
    """Base of a simulation that writes a trace.

    Args:
        trace: receives each line of the trace. None: the lines are only added to the digest.

    Attributes:
        counts: number of occurrences by name.
        digest: digest of the trace so far.
    """

    def __init__(self, trace: Callable[[str], None] | None) -> None:
        self.counts: Counter[str] = Counter()
        self._trace = trace
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def log_line(self, line: str) -> None:
        line = f"{trio.current_time():.3f} {line}"
        self._digest.update(line.encode() + b"\n")
        if self._trace is not None:
            self._trace(line)

    def count(self, what: str) -> None:
        self.counts[what] += 1


@contextmanager
def without_log_lines(name: str) -> Iterator[None]:
    """Silence a logger and its children, because the plan causes errors on purpose.

    Args:
        name: name of the logger.
    """
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class WatchedCore(Protocol):
    @property
    def flights(self) -> Any:
        """The steps in flight, as a value that is false if there are none."""
        ...

    def live_requests(self) -> Iterable[Any]: ...


class WatchedEngine(Protocol):
    @property
    def fault(self) -> object: ...
    @property
    def core(self) -> WatchedCore: ...
    @property
    def first_unfinished_id(self) -> str | None: ...


class IdleWatch(trio.abc.Instrument):
    """An instrument of trio.run that detects requests that wait forever. It observes every pass of the scheduler.

    Attributes:
        who_waits: returns the name of a request that waits although no event will ever continue it, or None. Set this
            attribute after the engine was opened.
    """

    def __init__(self) -> None:
        self.who_waits: Callable[[], str | None] = _no_name
        self._since: tuple[str, float] | None = None
        self._violation: str | None = None

    def stop(self) -> None:
        self.who_waits = _no_name

    def before_io_wait(self, timeout: float) -> None:
        now, who = trio.current_time(), self.who_waits()
        if who is None:
            self._since = None
        elif self._since is None or self._since[0] != who:
            self._since = who, now
        elif now > self._since[1] and self._violation is None:
            self._violation = f"{who} waits from {self._since[1]:.3f} to {now:.3f}, but no step runs"

    def check(self) -> None:
        """Assert that the time has never advanced while a request waited for an event that never comes.

        This check is a separate call, since a Trio instrument must not raise.
        """
        assert self._violation is None, self._violation


def waits_for_a_step(engine: WatchedEngine) -> str | None:
    """Return the id of a request that waits although no step runs, or None.

    Args:
        engine: the engine. Without a connector, its requests wait only for steps.
    """
    if engine.fault is not None or engine.core.flights:
        return None
    first = next(iter(engine.core.live_requests()), None)
    return engine.first_unfinished_id if first is None else str(first.request.id)


def _no_name() -> None:
    return None


class AnyStream(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def is_finished(self) -> bool: ...


Stream = TypeVar("Stream", bound=AnyStream)


class ClientsInside(Generic[Stream]):
    """Records of the clients that are inside an engine.

    Args:
        progress: returns the amount of output of a stream, which must not grow after an abort.
        log_line: receives a trace line for each abort.
        count: counts aborts by result.

    Attributes:
        streams: streams of the clients inside, by number of the client.
    """

    def __init__(
        self, progress: Callable[[Stream], int], *, log_line: Callable[[str], None], count: Callable[[str], None]
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self._progress = progress
        self._log_line = log_line
        self._count = count
        self._used_ids: set[str] = set()
        self._progress_at_abort: dict[int, int] = {}

    def begin(self, number: int, stream: Stream) -> bool:
        """Record that a client is about to enter the engine.

        Args:
            number: number of the client.
            stream: the client's stream.

        Returns:
            True if no earlier client had its id.
        """
        is_new_id = stream.id not in self._used_ids
        self.streams[number] = stream
        self._used_ids.add(stream.id)
        return is_new_id

    def end(self, number: int, *, unused_id: str | None = None) -> None:
        """Record that a client is no longer inside the engine.

        Args:
            number: number of the client.
            unused_id: id of a client that was refused at once, if no other client has used this id. None: the id counts
                as used.
        """
        self.streams.pop(number, None)
        if unused_id is not None:
            self._used_ids.remove(unused_id)

    def was_aborted(self, number: int) -> bool:
        """Return True if the client's request was ended without the client: by an abort, or together with all requests.

        Args:
            number: number of the client.
        """
        return number in self._progress_at_abort

    def is_used(self, request_id: str) -> bool:
        return request_id in self._used_ids

    def note_abort(self, request_id: str) -> None:
        """Record that requests are about to be aborted by id."""
        for number in self._unfinished(request_id):
            self.note_end(number)

    def note_end(self, number: int) -> None:
        """Record that a request is about to be ended, for any reason.

        Args:
            number: number of the client.
        """
        self._progress_at_abort[number] = self._progress(self.streams[number])

    def check_left(self, number: int, stream: Stream) -> None:
        """Assert that a stream has produced no output after its abort, and forget the abort.

        Args:
            number: number of the client.
            stream: the client's stream.
        """
        before, now = self._progress_at_abort.pop(number, None), self._progress(stream)
        assert before in (None, now), f"client {number}: its progress was {before} at its abort, and is {now} now"

    def abort(self, abort: Callable[[Iterable[str]], Mapping[str, AbortOutcome]], ids: tuple[str, ...]) -> None:
        """Abort requests by id, as an operator does, and check the result and the effect.

        Args:
            abort: abort function of the engine.
        """
        unfinished = {name: self._unfinished(name) for name in ids}
        outcomes = abort(ids)
        assert list(outcomes) == list(unfinished), f"the abort of {ids} returns outcomes for {list(outcomes)}"
        for name, outcome in outcomes.items():
            self._log_line(f"abort {name}: {outcome.value}")
            self._count(f"aborts: {outcome.value}")
            numbers = unfinished[name]
            known = AbortOutcome.ALREADY_FINISHED if name in self._used_ids else AbortOutcome.UNKNOWN
            expected = AbortOutcome.ABORTED if numbers else known
            assert outcome is expected, f"the abort of {name} returns {outcome}, with clients {numbers} unfinished"
            for number in numbers:
                stream = self.streams[number]
                assert stream.is_finished, f"client {number} was aborted, but its stream has not finished"
                self._progress_at_abort[number] = self._progress(stream)

    def _unfinished(self, request_id: str) -> list[int]:
        return [number for number, stream in self.streams.items() if stream.id == request_id and not stream.is_finished]
