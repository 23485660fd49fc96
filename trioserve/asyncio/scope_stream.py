"""A request of any kind that an asyncio task makes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import trio

from trioserve.asyncio.trio_thread import NoteStarted, TrioTask, TrioThread, Waiters
from trioserve.contracts.errors import AlreadyEnded, TrioserveError
from trioserve.contracts.output import AnyDelta, hold_unread, take_unread
from trioserve.engine.lifecycle.scope_stream import ScopeStream as TrioScopeStream

__all__ = ["DeltaBox", "ScopeStream"]


DeltaT = TypeVar("DeltaT", bound=AnyDelta)


class DeltaBox(Generic[DeltaT]):
    """Passes the deltas of one request from the Trio thread to its asyncio readers.

    One thread calls `put` and `close`. Asyncio tasks of any loop call `get` and `leave`. Unread deltas of a choice are
    merged, so slow readers need only bounded memory. Cancelling a read loses no delta.

    Args:
        merge: joins two consecutive deltas of one choice.
    """

    def __init__(self, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
        self._merge = merge
        self._lock = threading.Lock()
        self._pending: dict[int, list[DeltaT]] = {}  # The unread deltas of each choice, see hold_unread.
        self._end: BaseException | None = None  # The error that `get` raises after the pending deltas.
        self._is_left = False
        self._waiters = Waiters()

    def put(self, delta: DeltaT) -> bool:
        """Add a delta.

        Args:
            delta: the delta.

        Returns:
            False if the loop of a waiting reader was closed, so that nothing will be read any more.
        """
        with self._lock:
            hold_unread(self._pending.setdefault(delta.index, []), delta, self._merge)
        return self._waiters.wake()

    def close(self, error: BaseException) -> None:
        """Add no more deltas.

        Args:
            error: error that `get` raises after the last delta. If `close` is called again, the first error is kept.
        """
        with self._lock:
            self._end = self._end or error
        self._waiters.wake()

    def leave(self, error: BaseException) -> None:
        """Record that the request's scope was left. Readers then get only the error, and no pending deltas.

        Args:
            error: error that `get` raises.
        """
        with self._lock:
            self._end = error
            self._is_left = True
        self._waiters.wake()

    async def get(self) -> DeltaT:
        """Return the next delta, or raise the error that was given to `close` or `leave`."""
        waiter = self._waiters.add()
        if self._has_something():
            await asyncio.sleep(0)  # If the engine is faster than the reader, this sleep lets other tasks run.
        while True:
            with self._lock:
                if self._pending and not self._is_left:
                    index, held = next(iter(self._pending.items()))
                    delta = take_unread(held, self._merge)
                    del self._pending[index]
                    if held:
                        # The choice moves to the end, so that the other choices are read first.
                        self._pending[index] = held
                    return delta
                if self._end is not None:
                    raise self._end
            await waiter
            waiter = self._waiters.add()

    def unread(self) -> tuple[DeltaT, ...]:
        """Return the deltas that no reader has taken."""
        with self._lock:
            return tuple(delta for held in self._pending.values() for delta in held)

    def _has_something(self) -> bool:
        return bool(self._pending) or self._end is not None


StreamT = TypeVar("StreamT", bound=TrioScopeStream[Any, Any])


class ScopeStream(Generic[StreamT, DeltaT]):
    """A request with a scope: `async with engine.generate(...) as stream: async for delta in stream: ...`.

    Entering puts the request into the queue. If it raises Overloaded, Draining, InvalidRequest or ContextTooLong, no
    resources are in use. Leaving the scope ends the request if it still runs. The reason for leaving does not matter:
    the end of the body, an error, a break, a cancelled task, a timeout, or a failed task group. All resources are free
    when the scope has been left, or right after the step in flight. Cancelling a task that waits for a delta loses no
    delta.

    A reader that is slower than the engine gets merged deltas. Several tasks may iterate over one stream: each delta
    goes to one task, and the end of the stream goes to all tasks.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
        merge: joins two consecutive deltas of one choice.
    """

    def __init__(self, thread: TrioThread, stream: StreamT, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
        self._thread = thread
        self._stream = stream
        self._box = DeltaBox[DeltaT](merge)
        self._task: TrioTask[None] | None = None
        self._is_left = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise AlreadyEnded(f"request {self.id} was entered before: ask for another one")
        self._task = task = self._thread.begin(self._hold_scope)
        try:
            await task.started.wait(cancel=task.cancel)
            if task.ended.is_set:
                task.result()
        except BaseException as error:
            await self._leave(task, error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.own_process.check("leaving a request")
        if self._task is None or self._is_left:
            how = "was left before" if self._is_left else "was not entered"
            raise AlreadyEnded(f"request {self.id} {how}: leave its scope once, after entering it")
        await self._leave(self._task, error)

    async def _leave(self, task: TrioTask[None], error: BaseException | None) -> None:
        self._is_left = True
        task.cancel()
        self._box.leave(self._ended())
        if not isinstance(error, GeneratorExit):  # A generator that is being closed must not await.
            await task.ended.wait()

    async def _hold_scope(self, note_started: NoteStarted) -> None:
        """Enter the request's scope in the Trio run, and keep it open until the asyncio scope is left."""
        try:
            async with self._stream:
                note_started()
                end: Exception = StopAsyncIteration()
                try:
                    async for delta in self._stream:
                        if not self._box.put(delta):
                            return
                except TrioserveError as error:
                    end = error  # `get` raises this error in the reader.
                self._box.close(end)
                await trio.sleep_forever()  # Blocks for another engine stay held until the scope is left.
        except Exception as error:
            self._box.close(error)
            raise
        finally:
            # However the request ends, no reader may wait forever.
            self._box.close(AlreadyEnded(f"request {self.id} has ended with its engine"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeltaT:
        if self._task is None:
            raise self._ended()
        self._thread.own_process.check("reading a request")
        return await self._box.get()

    def _ended(self) -> AlreadyEnded:
        return AlreadyEnded(f"request {self.id} can be read only inside its `async with`")

    async def wait_until_begun(self) -> DeltaT | None:
        """Wait until the request runs or has ended in the queue.

        Returns:
            None if the request runs, or the last delta of a request that ended in the queue. That delta then counts as
            read.

        Raises:
            TrioserveError: the request failed.
            AlreadyEnded: the scope was left.
        """
        begun: DeltaT | None = await self._thread.run(self._stream.wait_until_begun)
        return begun

    # The properties below are read while the engine's thread runs, so their values may be slightly old.

    @property
    def id(self) -> str:
        """Id of the request, which the caller gave or the engine generated."""
        return self._stream.id

    @property
    def is_finished(self) -> bool:
        """True if every choice has its last delta, read or not, or the request failed."""
        return self._stream.is_finished
