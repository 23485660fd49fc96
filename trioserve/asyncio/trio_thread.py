"""A Trio run in a thread of its own, and Trio tasks that belong to asyncio tasks.

To end such a Trio task, the asyncio task sends one message, which never blocks. Waiting for the end of the Trio task is
a separate step, which may be skipped.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import outcome
import trio

from trioserve.contracts.errors import AlreadyEnded
from trioserve.trio_tools.errors_unwrapped import unwrapped
from trioserve.trio_tools.own_run import OwnProcess

__all__ = ["ThreadEvent", "Waiters", "NoteStarted", "ThreadOwner", "TrioTask", "TrioThread"]


class Waiters:
    """A list of asyncio tasks of any loop that wait until any thread wakes them.

    It keeps no reference to a task. So the garbage collector can remove the tasks of an abandoned loop. Then these
    tasks leave their scopes.

    A task must call `add` before it checks its condition. Otherwise a wake-up between the check and `add` would be
    lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    def add(self) -> asyncio.Future[None]:
        """Return a future that the next `wake` completes. The caller must keep a reference to the future until it is
        done.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.add(future)
        return future

    def wake(self) -> bool:
        """Wake all waiting tasks.

        Returns:
            False if the loop of a waiting task is closed.
        """
        with self._lock:
            if not self._futures:
                return True
            futures, self._futures = list(self._futures), weakref.WeakSet()
        are_awake = True
        for future in futures:
            try:
                future.get_loop().call_soon_threadsafe(_set, future)
            except RuntimeError:
                are_awake = False
        return are_awake


class ThreadEvent:
    """An event that any thread can set once, and for which asyncio tasks of any loop wait."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiters = Waiters()

    def set(self) -> None:
        self.is_set = True
        self._waiters.wake()

    def future(self) -> asyncio.Future[None]:
        """Return a future that is done once the event is set."""
        future = self._waiters.add()
        if self.is_set:
            _set(future)
        return future

    async def wait(self, *, cancel: Callable[[], None] = lambda: None) -> None:
        """Wait for the event. If the caller is cancelled, it still waits, and gets its CancelledError afterwards.

        Args:
            cancel: called once if the caller is cancelled. It should make the event be set soon.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self.is_set:
            try:
                await self.future()
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancel()
                cancelled = error
        if cancelled is not None:
            raise cancelled


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


T = TypeVar("T")
NoteStarted = Callable[[], None]
# When a process exits with an open engine, it waits for the step in flight for at most this time.
EXIT_SECONDS_MAX = 10.0


class TrioThread:
    """A thread that runs Trio: `async with TrioThread() as thread`, in an asyncio task.

    Leaving the scope cancels all tasks of the Trio run and waits until the thread has ended, even if the caller is
    cancelled.
    """

    def __init__(self) -> None:
        self._nursery: trio.Nursery
        self._token: trio.lowlevel.TrioToken | None = None
        self.is_stopped = False  # True once `stop` was called.
        self.own_process = OwnProcess()
        self._is_running = threading.Event()
        self._is_over = ThreadEvent()
        # The thread is a daemon, so that a program can exit after abandoning an engine without leaving its scope.
        self._thread = threading.Thread(target=self._work, name="trioserve-trio", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            self._is_running.wait()  # This wait is short, because the run opens nothing before the event is set.
        except BaseException:  # For example, Ctrl-C raises KeyboardInterrupt.
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
        """Cancel all tasks of the run, even if the run has not started yet. Never blocks.

        Any thread may call this, and so may the garbage collector. Does nothing in a forked child.
        """
        self.is_stopped = True
        if self._token is not None and self.own_process.is_here:
            self.soon(lambda: self._nursery.cancel_scope.cancel("the scope of the engine was left"))

    def join(self, seconds_max: float) -> None:
        self._thread.join(seconds_max)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that never waits in the Trio run, and return its result.

        The caller blocks until the function has run. This takes a short time, because nothing blocks the run. After the
        end of the run, the function is called in this thread.

        Args:
            *arguments: arguments of the function.

        Raises:
            WrongLoop: this process is a forked child, which does not have the thread.
        """
        self.own_process.check("an engine")
        assert self._token is not None, "the thread was not started"
        try:
            return trio.from_thread.run_sync(function, *arguments, trio_token=self._token)
        except trio.RunFinishedError:
            return function(*arguments)

    def begin(self, function: Callable[[NoteStarted], Awaitable[T]]) -> TrioTask[T]:
        """Start a task in the Trio run. Never blocks.

        Args:
            function: async function. Its argument is a callback, which the function calls when its work has started.

        Raises:
            WrongLoop: this process is a forked child, which does not have the thread.
        """
        self.own_process.check("an engine")
        task = TrioTask(function, self.soon)
        if not self.soon(task.start, self):
            task.refuse()
        return task

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function in the Trio run, and return its result. If the caller is cancelled, the function is
        cancelled, and the caller waits for its end.
        """
        task = self.begin(lambda _note_started: function())
        try:
            await task.ended.wait(cancel=task.cancel)
        finally:
            task.cancel()
        return task.result()

    @asynccontextmanager
    async def entered(self, opens: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
        """Keep a Trio scope open while the asyncio scope is open. Errors of entering and leaving the Trio scope are
        raised in the asyncio task.

        Args:
            opens: creates the Trio scope.
        """
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
        except GeneratorExit:  # A generator that is being closed must not await.
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
        """Start a task. Call this in the Trio run.

        Args:
            function: async function.

        Raises:
            RuntimeError: the run is ending.
        """
        self._nursery.start_soon(function)

    def soon(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Schedule a function call in the Trio run, after all calls that were scheduled before.

        Args:
            *arguments: arguments of the function.

        Returns:
            False if the run has ended.

        Raises:
            WrongLoop: this process is a forked child. It shares the parent's wake-up socket, and must not write to the
                socket.
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
    """Stops a TrioThread when the garbage collector removes this object.

    Keep this object in a local variable of the async generator that enters the thread. A second Ctrl-C ends an asyncio
    loop in the middle of a callback. Then the `finally` of an async generator never runs. Only the removal of its local
    variables shows that the generator was abandoned.

    Args:
        thread: the thread to stop.
    """

    def __init__(self, thread: TrioThread) -> None:
        self._thread = thread

    def __del__(self) -> None:
        if not self._thread.is_stopped:
            self._thread.stop()


class TrioTask(Generic[T]):
    """A task in the Trio run, created by TrioThread.begin.

    Args:
        function: async function of the task.
        soon: schedules a function in the Trio run.

    Attributes:
        started: event that is set when the function reports that it has started, or when it has ended.
        ended: event that is set when the function has ended.
    """

    def __init__(self, function: Callable[[NoteStarted], Awaitable[T]], soon: Callable[..., bool]) -> None:
        self.started = ThreadEvent()
        self.ended = ThreadEvent()
        self._result: outcome.Outcome[T] = outcome.Error(AlreadyEnded("the engine was closed meanwhile"))
        self._function = function
        self._soon = soon
        self._scope = trio.CancelScope()

    def cancel(self) -> None:
        """Cancel the task. Any thread may call this, any number of times. Never blocks."""
        if not self.ended.is_set:
            self._soon(self._scope.cancel, "its asyncio task has left")

    def start(self, thread: TrioThread) -> None:
        """Start the task. Call this in the Trio run.

        Args:
            thread: the thread of that run.
        """
        try:
            thread.spawn(self._work)
        except RuntimeError:  # The Trio run is ending.
            self.refuse()

    def refuse(self) -> None:
        self._result = outcome.Error(AlreadyEnded("the engine was closed: its `async with` was left"))
        self._end()

    def result(self) -> T:
        """Return the result of an ended task.

        Raises:
            AlreadyEnded: the task was cancelled.
            Exception: the error that ended the task.
        """
        return self._result.unwrap()

    def raise_failure(self) -> None:
        """Raise the error that ended the task. Do nothing if the task was cancelled."""
        if isinstance(self._result, outcome.Error) and not isinstance(self._result.error, AlreadyEnded):
            self._result.unwrap()

    async def _work(self) -> None:
        try:
            with self._scope:
                try:
                    self._result = outcome.Value(await self._function(self.started.set))
                # If the group also contains a cancellation, the cancellation is still raised.
                except* Exception as group:
                    self._result = outcome.Error(unwrapped(group))
        finally:
            self._end()

    def _end(self) -> None:
        self.ended.set()
        self.started.set()


_RUNNING: set[TrioThread] = set()
os.register_at_fork(after_in_child=_RUNNING.clear)  # A forked child has no threads that it could stop.


@atexit.register
def _stop_all() -> None:
    """Stop engines that are still open when Python exits, and wait for the steps in flight."""
    threads = list(_RUNNING)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(EXIT_SECONDS_MAX)
