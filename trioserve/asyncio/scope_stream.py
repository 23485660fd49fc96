"""A request of any kind that an asyncio task makes."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import trio

from trioserve.asyncio.delta_box import DeltaBox
from trioserve.asyncio.trio_thread import NoteStarted, TrioTask, TrioThread
from trioserve.contracts.errors import AlreadyEnded, TrioserveError
from trioserve.contracts.output import AnyDelta
from trioserve.engine.shell.scope_stream import ScopeStream as TrioScopeStream

__all__ = ["ScopeStream"]

StreamT = TypeVar("StreamT", bound=TrioScopeStream[Any, Any])
DeltaT = TypeVar("DeltaT", bound=AnyDelta)


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
        if not isinstance(error, GeneratorExit):  # a generator that is being closed must not await
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
                    end = error  # the error to raise in the reader
                self._box.close(end)
                await trio.sleep_forever()  # blocks for another engine stay held until the scope is left
        except Exception as error:
            self._box.close(error)
            raise
        finally:
            # No reader may wait forever, however the request ends.
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
