"""The clients that are inside of a request's scope, by books of the simulation's own, and what an abort by id answers.

An id counts as used from when its client enters, also while it waits in line, unless it was refused at once. Several
clients may have one id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from trioserve.contracts.events import AbortOutcome

__all__ = ["ClientsInside"]


class AnyStream(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def is_finished(self) -> bool: ...


Stream = TypeVar("Stream", bound=AnyStream)


class ClientsInside(Generic[Stream]):
    """streams: of the clients inside, by number. progress: how much was made for a stream so far: behind an abort it
    does not grow. tell, count: what is told of an abort."""

    def __init__(
        self, progress: Callable[[Stream], int], *, tell: Callable[[str], None], count: Callable[[str], None]
    ) -> None:
        self.streams: dict[int, Stream] = {}
        self._progress = progress
        self._tell = tell
        self._count = count
        self._used_ids: set[str] = set()
        self._progress_at_abort: dict[int, int] = {}

    def begin(self, number: int, stream: Stream) -> bool:
        """It is about to enter. Whether its id is used for the first time."""
        is_new_id = stream.id not in self._used_ids
        self.streams[number] = stream
        self._used_ids.add(stream.id)
        return is_new_id

    def end(self, number: int, *, unused_id: str | None = None) -> None:
        """However it leaves, it is no longer inside. unused_id: it was refused at once, and nobody else has used it."""
        self.streams.pop(number, None)
        if unused_id is not None:
            self._used_ids.remove(unused_id)

    def was_aborted(self, number: int) -> bool:
        """By its id, or with all others, or otherwise by no wish of its client."""
        return number in self._progress_at_abort

    def is_used(self, request_id: str) -> bool:
        return request_id in self._used_ids

    def note_abort(self, request_id: str) -> None:
        """It is about to be aborted by this id."""
        for number in self._unfinished(request_id):
            self.note_end(number)

    def note_end(self, number: int) -> None:
        """It is about to be ended, whatever its id."""
        self._progress_at_abort[number] = self._progress(self.streams[number])

    def check_left(self, number: int, stream: Stream) -> None:
        """Assert that nothing was made for it since its abort. It is forgotten then."""
        before, now = self._progress_at_abort.pop(number, None), self._progress(stream)
        assert before in (None, now), f"client {number}: {before} was made for it before its abort, and now it is {now}"

    def abort(self, abort: Callable[[Iterable[str]], Mapping[str, AbortOutcome]], ids: tuple[str, ...]) -> None:
        """As an operator does, and asserts that it says and does what it has to. abort: the engine's."""
        unfinished = {name: self._unfinished(name) for name in ids}
        outcomes = abort(ids)
        assert list(outcomes) == list(unfinished), f"the abort of {ids} answers for {list(outcomes)}"
        for name, outcome in outcomes.items():
            self._tell(f"abort {name}: {outcome.value}")
            self._count(f"aborts: {outcome.value}")
            numbers = unfinished[name]
            known = AbortOutcome.ALREADY_FINISHED if name in self._used_ids else AbortOutcome.UNKNOWN
            expected = AbortOutcome.ABORTED if numbers else known
            assert outcome is expected, f"the abort of {name} says {outcome}, with clients {numbers} unfinished"
            for number in numbers:
                stream = self.streams[number]
                assert stream.is_finished, f"client {number} was aborted, and goes on"
                self._progress_at_abort[number] = self._progress(stream)

    def _unfinished(self, request_id: str) -> list[int]:
        return [number for number, stream in self.streams.items() if stream.id == request_id and not stream.is_finished]
