"""A Trio run in a thread of its own, and tasks in it that belong to asyncio tasks.

What ends a task there is one message that never waits. Waiting for the end of it comes second, and may be left out.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import outcome
import trio

from trioserve.asyncio.thread_event import ThreadEvent
from trioserve.contracts.errors import AlreadyEnded
from trioserve.trio_tools.errors_unwrapped import unwrapped
from trioserve.trio_tools.own_run import OwnProcess

__all__ = ["NoteStarted", "ThreadOwner", "TrioTask", "TrioThread"]

T = TypeVar("T")
NoteStarted = Callable[[], None]
EXIT_SECONDS_MAX = 10.0  # of a process that ends with an engine open: for the step in flight


class TrioThread:
    """`async with TrioThread() as thread`, in an asyncio task. Leaving cancels what runs in it, waits for the end of
    that also when cancelled, and leaves no thread behind."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery
        self._token: trio.lowlevel.TrioToken | None = None
        self.is_stopped = False  # stop was called
        self.own_process = OwnProcess()
        self._is_running = threading.Event()
        self._is_over = ThreadEvent()
        # A daemon: whoever abandons an engine without leaving its scope must still be able to end the process.
        self._thread = threading.Thread(target=self._work, name="trioserve-trio", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            self._is_running.wait()  # not for long: nothing is opened yet
        except BaseException:  # a Ctrl-C
            self._is_running.wait()
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.own_process.check("leaving the engine's scope")
        self.stop()
        if kind is not GeneratorExit:
            await self._is_over.wait()
            self._thread.join()

    def stop(self) -> None:
        """Cancel everything in it, also if it has not begun. Never waits. May be called from any thread, by the garbage
        collector too. Does nothing in a forked child."""
        self.is_stopped = True
        if self._token is not None and self.own_process.is_here:
            self.soon(lambda: self._nursery.cancel_scope.cancel("the scope of the engine was left"))

    def join(self, seconds_max: float) -> None:
        self._thread.join(seconds_max)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a function that never waits, called in the Trio run. Holds the caller up until it is that
        run's turn, which is soon: nothing blocks it. When it is over the function is called right here. Raises
        WrongLoop in a forked child, which has no such thread."""
        self.own_process.check("an engine")
        assert self._token is not None, "the thread was not started"
        try:
            return trio.from_thread.run_sync(function, *arguments, trio_token=self._token)
        except trio.RunFinishedError:
            return function(*arguments)

    def begin(self, function: Callable[[NoteStarted], Awaitable[T]]) -> TrioTask[T]:
        """A task in the Trio run. Never waits. Raises WrongLoop in a forked child."""
        self.own_process.check("an engine")
        task = TrioTask(function, self.soon)
        if not self.soon(task.start, self):
            task.refuse()
        return task

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """The result of an async function there. Being cancelled cancels it, and waits for its end."""
        task = self.begin(lambda _note_started: function())
        try:
            await task.ended.wait(cancel=task.cancel)
        finally:
            task.cancel()
        return task.result()

    @asynccontextmanager
    async def entered(self, opens: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
        """Inside of a scope that is entered and left in the Trio run. Raises what entering and leaving it raise."""
        opened: list[T] = []

        async def keep(note_started: NoteStarted) -> None:
            async with opens() as value:
                opened.append(value)
                note_started()
                await trio.sleep_forever()

        task = self.begin(keep)
        try:
            await task.started.wait(cancel=task.cancel)
            if not opened:
                task.result()
            yield opened[0]
        except GeneratorExit:  # nothing may be awaited
            task.cancel()
            raise
        except BaseException:
            task.cancel()
            await task.ended.wait()
            raise
        task.cancel()
        await task.ended.wait()
        task.raise_failure()

    def spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        """To be called in the Trio run. Raises RuntimeError when it ends."""
        self._nursery.start_soon(function)

    def soon(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Have it called in the Trio run, after what was asked before. False: that is over.

        Raises:
            WrongLoop: This is a forked child. It shares the parent's wake-up socket, and must not write to it.
        """
        self.own_process.check("an engine")
        assert self._token is not None, "the thread was not started"
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            return False
        return True

    def _work(self) -> None:
        _RUNNING.add(self)
        try:
            trio.run(self._run)
        finally:
            _RUNNING.discard(self)
            self._is_running.set()
            self._is_over.set()

    async def _run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._is_running.set()
            if self.is_stopped:
                self._nursery.cancel_scope.cancel("the scope of the engine was left")
            await trio.sleep_forever()


class ThreadOwner:
    """Stops a TrioThread when the garbage collector takes this object.

    Keep it in the frame that enters the thread. A second Ctrl-C ends an asyncio loop in the middle of a callback. Then
    nobody runs the `finally` of an async generator, and only the end of its frame shows that it was abandoned.
    """

    def __init__(self, thread: TrioThread) -> None:
        self._thread = thread

    def __del__(self) -> None:
        if not self._thread.is_stopped:
            self._thread.stop()


class TrioTask(Generic[T]):
    """Made by TrioThread.begin. started: the function has said so, or has ended."""

    def __init__(self, function: Callable[[NoteStarted], Awaitable[T]], soon: Callable[..., bool]) -> None:
        self.started = ThreadEvent()
        self.ended = ThreadEvent()
        self._result: outcome.Outcome[T] = outcome.Error(AlreadyEnded("the engine was closed meanwhile"))
        self._function = function
        self._soon = soon
        self._scope = trio.CancelScope()

    def cancel(self) -> None:
        """From any thread, any number of times. Never waits."""
        if not self.ended.is_set:
            self._soon(self._scope.cancel, "what it was begun for has left")

    def start(self, thread: TrioThread) -> None:
        """To be called in the Trio run."""
        try:
            thread.spawn(self._work)
        except RuntimeError:  # it takes no tasks any more
            self.refuse()

    def refuse(self) -> None:
        self._result = outcome.Error(AlreadyEnded("the engine was closed: its `async with` was left"))
        self._end()

    def result(self) -> T:
        """Of one that has ended. Raises what it ended with, and AlreadyEnded if it was cancelled."""
        return self._result.unwrap()

    def raise_failure(self) -> None:
        """The same of one that may well have been cancelled."""
        if isinstance(self._result, outcome.Error) and not isinstance(self._result.error, AlreadyEnded):
            self._result.unwrap()

    async def _work(self) -> None:
        try:
            with self._scope:
                try:
                    self._result = outcome.Value(await self._function(self.started.set))
                except* Exception as group:  # which may hold a cancellation, too, and that goes on
                    self._result = outcome.Error(unwrapped(group))
        finally:
            self._end()

    def _end(self) -> None:
        self.ended.set()
        self.started.set()


_RUNNING: set[TrioThread] = set()
os.register_at_fork(after_in_child=_RUNNING.clear)  # the threads are the parent's: the child has none to stop


@atexit.register
def _stop_all() -> None:
    """The process ends, and somebody has not left: let the step in flight end before Python does."""
    threads = list(_RUNNING)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(EXIT_SECONDS_MAX)
