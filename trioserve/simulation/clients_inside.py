"""Records the clients inside of a request's scope, and checks the result of an abort by id.

An id counts as used from the moment at which its client enters, also while the client waits in the queue, unless the
request is refused at once. Several clients may have one id.
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
    """Records of the clients inside.

    Args:
        progress: returns the amount of output of a stream. It must not grow after an abort.
        tell: receives a trace line for each abort.
        count: counts an abort by its result.

    Attributes:
        streams: streams of the clients inside, by number of the client.
    """

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
        """Note that a client is about to enter.

        Args:
            number: number of the client.
            stream: its stream.

        Returns:
            True if no earlier client had its id.
        """
        is_new_id = stream.id not in self._used_ids
        self.streams[number] = stream
        self._used_ids.add(stream.id)
        return is_new_id

    def end(self, number: int, *, unused_id: str | None = None) -> None:
        """Note that a client is no longer inside.

        Args:
            number: number of the client.
            unused_id: id of a client that was refused at once, if no other client has used it. None: the id counts as
                used.
        """
        self.streams.pop(number, None)
        if unused_id is not None:
            self._used_ids.remove(unused_id)

    def was_aborted(self, number: int) -> bool:
        """Return True if the request was ended by its id, with all others, or otherwise without its client.

        Args:
            number: number of the client.
        """
        return number in self._progress_at_abort

    def is_used(self, request_id: str) -> bool:
        return request_id in self._used_ids

    def note_abort(self, request_id: str) -> None:
        """Note that requests are about to be aborted by id.

        Args:
            request_id: the id.
        """
        for number in self._unfinished(request_id):
            self.note_end(number)

    def note_end(self, number: int) -> None:
        """Note that a request is about to be ended, for any reason.

        Args:
            number: number of the client.
        """
        self._progress_at_abort[number] = self._progress(self.streams[number])

    def check_left(self, number: int, stream: Stream) -> None:
        """Assert that a stream has no output from after its abort. Then forget the abort.

        Args:
            number: number of the client.
            stream: its stream.
        """
        before, now = self._progress_at_abort.pop(number, None), self._progress(stream)
        assert before in (None, now), f"client {number}: its progress was {before} at its abort, and is {now} now"

    def abort(self, abort: Callable[[Iterable[str]], Mapping[str, AbortOutcome]], ids: tuple[str, ...]) -> None:
        """Abort by ids, as an operator does, and assert the result and the effect.

        Args:
            abort: abort function of the engine.
            ids: the ids.
        """
        unfinished = {name: self._unfinished(name) for name in ids}
        outcomes = abort(ids)
        assert list(outcomes) == list(unfinished), f"the abort of {ids} returns outcomes for {list(outcomes)}"
        for name, outcome in outcomes.items():
            self._tell(f"abort {name}: {outcome.value}")
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
