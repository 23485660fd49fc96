"""What an asyncio task holds of a request, whatever that asks for: iterate for what is new, leave to abort."""

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
    """`async with engine.generate(...) as stream: async for delta in stream: ...`, in an asyncio task.

    Entering takes a place in the queue, and raises Overloaded, Draining, InvalidRequest or ContextTooLong; it then
    holds nothing. Leaving ends what still runs: by its end, an error, a break, a cancelled task, a timeout or a task
    group that failed. What it had is free when leaving returns, or right after the step in flight. Cancelling a task
    that waits for a delta loses none.

    A reader that is slower than the engine finds its deltas merged. Several tasks may iterate over one stream: each
    delta goes to one of them, and the end to all.
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
        self._task = task = self._thread.begin(self._keep)
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
            how = "was left before" if self._is_left else "is left, and was not entered"
            raise AlreadyEnded(f"request {self.id} {how}: leave its scope once, after entering it")
        await self._leave(self._task, error)

    async def _leave(self, task: TrioTask[None], error: BaseException | None) -> None:
        self._is_left = True
        task.cancel()
        self._box.leave(self._ended())
        if not isinstance(error, GeneratorExit):  # where nothing may be awaited
            await task.ended.wait()

    async def _keep(self, note_started: NoteStarted) -> None:
        """The request's scope, in the Trio run."""
        try:
            async with self._stream:
                note_started()
                end: Exception = StopAsyncIteration()
                try:
                    async for delta in self._stream:
                        if not self._box.put(delta):
                            return
                except TrioserveError as error:
                    end = error  # rises where it is read
                self._box.close(end)
                await trio.sleep_forever()  # what is held of it is held until it is left
        except Exception as error:
            self._box.close(error)
            raise
        finally:
            # Whichever way it ends, nobody waits for what does not come.
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
        """Returns when the request runs; or, if it ended in the queue, the delta that says so, which is read as well.
        Raises what it failed with, and AlreadyEnded outside of its scope."""
        begun: DeltaT | None = await self._thread.run(self._stream.wait_until_begun)
        return begun

    # What follows is read while the other thread goes on: what was true a moment ago.

    @property
    def id(self) -> str:
        """The caller's own, or the one that it was given."""
        return self._stream.id

    @property
    def is_finished(self) -> bool:
        """All that was asked for has its last delta, read or not, or the request failed."""
        return self._stream.is_finished
