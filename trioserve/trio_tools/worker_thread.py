"""Calls blocking functions in other threads, so that they do not block the Trio thread.

`WorkerThread` is the usual choice: its thread always ends with its scope. `LongJob` is a job of a worker thread that
may take minutes, such as loading a model. `call_abandonable` is for calls that cannot be interrupted, hold no resource
that other code needs, and may take minutes.

The engine has the thread `compute`, the only thread in which torch runs. If torch ran in a second thread, OpenMP would
create a second team of threads, which costs a third of every step. Other threads tokenize long prompts (see
text_threads). Passing a job to a thread takes about 20 us, and so does passing the result back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import outcome
import trio
from trio.lowlevel import enable_ki_protection

from trioserve.contracts.errors import AlreadyEnded
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["CpuAffinity", "WorkerThread", "JobCancelled", "LongJob", "call_abandonable"]


class CpuAffinity:
    """Starts a thread's job on the CPU of the task that requested it, if that task is about to wait.

    If the job started on another CPU, it would wait until that CPU wakes up. If another program was using that CPU, the
    job would wait until the program stops, or until the system moves the thread. This can take a millisecond, while the
    caller's CPU is idle. Only Linux supports this. On other systems, the methods do nothing.

    Create this object in a thread that is allowed to use all CPUs on which the other thread may run.
    """

    def __init__(self) -> None:
        self._cpu = None if sys.platform != "linux" else getattr(ctypes.CDLL(None), "sched_getcpu", None)
        self._allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()

    def pin_to_caller(self, thread_id: int) -> None:
        """Make a sleeping thread wake up on the caller's CPU, and stay there until it calls `unpin`.

        Args:
            thread_id: Native id of the thread.
        """
        if self._cpu is None:
            return
        try:
            os.sched_setaffinity(thread_id, (self._cpu(),))
        except OSError:  # The system does not permit this call, so do not try again.
            self._cpu = None

    def unpin(self) -> None:
        """Let the calling thread run on every allowed CPU again."""
        with contextlib.suppress(OSError):  # The call fails if this process may no longer use any of these CPUs.
            os.sched_setaffinity(0, self._allowed)


T = TypeVar("T")


class _Job:
    __slots__ = ("arguments", "function", "is_cancelled", "is_here", "result", "task")

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], task: trio.lowlevel.Task | None
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.task = task  # the task that waits for the job, or None if no task waits yet
        self.result: outcome.Outcome[Any] | None = None  # the result, if the job ended before a task waited for it
        self.is_cancelled = False
        self.is_here = False  # True if the job begins on the CPU of its caller


@uninterrupted
class WorkerThread:
    """One thread: `async with WorkerThread("compute") as thread: await thread.run(function, ...)`.

    Leaving the scope waits for the current job, drops the jobs of cancelled callers, and ends the thread. Later calls
    raise AlreadyEnded.

    Args:
        name: Suffix of the thread's name.
        stack_bytes: Stack size, for jobs with deep recursion. If None, the default. Only used pages take memory.
    """

    def __init__(self, name: str, *, stack_bytes: int | None = None) -> None:
        self._stack_bytes = stack_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"trioserve-{name}", daemon=True)
        self._is_left = False
        self._cpu_affinity = CpuAffinity()

    async def __aenter__(self) -> WorkerThread:
        self._token = trio.lowlevel.current_trio_token()
        usual_bytes = threading.stack_size()
        try:
            threading.stack_size(self._stack_bytes or usual_bytes)
            self._thread.start()
        finally:
            threading.stack_size(usual_bytes)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The exit waits for at most one job, such as a forward pass, the tokenizing of a prompt, or one tensor of a
        # cancelled load. A deadline would not help, because a thread cannot be ended from outside.
        self._is_left = True
        await self._run(lambda: None, (), lambda _job: trio.lowlevel.Abort.FAILED)
        self._jobs.put(None)
        self._thread.join()

    async def run(self, function: Callable[..., T], *arguments: Any, on_cancel: Callable[[], None] | None = None) -> T:
        """Call a function in the thread and wait for its result, even if the caller is cancelled.

        So if the job uses memory of the caller, the job has ended when this call returns.

        Args:
            function: Function to call.
            arguments: Arguments of the function.
            on_cancel: Called when the caller is cancelled, to make a long job end early.
        """

        self._check_open()

        def stay(_job: _Job) -> trio.lowlevel.Abort:
            if on_cancel is not None:
                on_cancel()
            return trio.lowlevel.Abort.FAILED

        return await self._run(function, arguments, stay)

    def begin(self, function: Callable[..., T], *arguments: Any, here: bool = False) -> Coroutine[Any, Any, T]:
        """Queue a call in the thread, after all earlier calls.

        Args:
            function: Function to call.
            arguments: Arguments of the function.
            here: True to begin the job on the caller's CPU. Use this only if the thread is idle and the caller does
                nothing but wait.

        Returns:
            A coroutine that one task must await once. The coroutine waits as `run` does, even if that task is
            cancelled.
        """
        self._check_open()
        job = _Job(function, arguments, None)
        if here:
            assert self._thread.native_id is not None, "a job for a thread that was not started"
            job.is_here = True
            self._cpu_affinity.pin_to_caller(self._thread.native_id)
        self._jobs.put(job)
        return self._result_of(job)

    async def _result_of(self, job: _Job) -> Any:
        if job.result is None:
            job.task = trio.lowlevel.current_task()
            return await trio.lowlevel.wait_task_rescheduled(lambda _raise_cancel: trio.lowlevel.Abort.FAILED)
        await trio.lowlevel.cancel_shielded_checkpoint()  # Other tasks must run, even if the job has already ended.
        return job.result.unwrap()

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread and wait for its result. If the caller is cancelled, it returns at once.

        If the caller is cancelled before the job begins, the job is dropped. If the job already runs, its result is
        discarded.

        Args:
            function: Function to call. It must not use state that other code changes.
            arguments: Arguments of the function.
        """

        self._check_open()

        def leave(job: _Job) -> trio.lowlevel.Abort:
            job.is_cancelled = True
            # Release large arguments now, because the thread may reach this job much later.
            job.function, job.arguments = _nothing, ()
            return trio.lowlevel.Abort.SUCCEEDED

        return await self._run(function, arguments, leave)

    def _check_open(self) -> None:
        if self._is_left:  # The thread runs no more jobs, so the caller would wait forever.
            raise AlreadyEnded(f"the thread {self._thread.name} has ended: the scope of its engine was left")

    async def _run(
        self,
        function: Callable[..., T],
        arguments: tuple[Any, ...],
        on_cancel: Callable[[_Job], trio.lowlevel.Abort],
    ) -> T:
        job = _Job(function, arguments, trio.lowlevel.current_task())
        self._jobs.put(job)
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _raise_cancel: on_cancel(job))
        return result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.is_here:
                self._cpu_affinity.unpin()
            # Read the function and the arguments before `is_cancelled`, because a cancelled caller replaces them.
            function, arguments = job.function, job.arguments
            if not job.is_cancelled:
                result = outcome.capture(function, *arguments)
                self._token.run_sync_soon(_deliver, job, result)
                del result
            # A job may refer to the model. While the thread waits for its next job, it must not keep the model alive.
            del job, function, arguments


def _nothing() -> None:
    """Do nothing. This replaces the function of a cancelled job."""


def _deliver(job: _Job, result: outcome.Outcome[Any]) -> None:
    if job.is_cancelled:
        return
    if job.task is None:
        job.result = result
    else:
        trio.lowlevel.reschedule(job.task, result)


class JobCancelled(Exception):
    """The caller of the job was cancelled. Raised in the job's thread."""


class LongJob:
    """One cancellable job: `await job.run(thread, function)`, where the function often calls `job.check()`."""

    def __init__(self) -> None:
        self._is_cancelled = trio.Event()  # The event loop sets this event, and the thread reads it.

    def check(self) -> None:
        """Raise an error if the caller no longer waits.

        Raises:
            JobCancelled: the caller was cancelled.
        """
        if self._is_cancelled.is_set():
            raise JobCancelled

    def cancel(self) -> None:
        """Make the next check raise JobCancelled."""
        self._is_cancelled.set()

    async def run(self, thread: WorkerThread, function: Callable[..., T], *arguments: Any) -> T:
        """Run the job in a thread and wait for its end, even if the caller is cancelled.

        If the caller is cancelled, Cancelled is raised, whatever the job returns or raises.

        Args:
            thread: Thread that runs the job.
            function: Function to call.
            arguments: Arguments of the function.
        """
        try:
            return await thread.run(function, *arguments, on_cancel=self._is_cancelled.set)
        except Exception:
            if self._is_cancelled.is_set():  # The job's error is only a consequence of the cancel.
                await trio.sleep_forever()  # This call raises Cancelled at once.
            raise


@enable_ki_protection
async def call_abandonable(function: Callable[..., T], *arguments: Any, thread_name: str) -> T:
    """Call a function in a new daemon thread. If the caller is cancelled, it returns at once.

    An abandoned thread runs until the function returns. Its result or error is discarded.

    Args:
        function: Function to call.
        arguments: Arguments of the function.
    """
    task = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()
    is_abandoned = False

    def work() -> None:
        result = outcome.capture(function, *arguments)
        with contextlib.suppress(trio.RunFinishedError):  # The caller was cancelled, and the Trio run has ended.
            token.run_sync_soon(deliver, result)

    def deliver(result: outcome.Outcome[T]) -> None:
        if not is_abandoned:
            thread.join()  # This call returns at once, because the thread has no work left.
            trio.lowlevel.reschedule(task, result)

    def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
        nonlocal is_abandoned
        is_abandoned = True
        return trio.lowlevel.Abort.SUCCEEDED

    thread = threading.Thread(target=work, name=thread_name, daemon=True)
    thread.start()
    returned: T = await trio.lowlevel.wait_task_rescheduled(leave)
    return returned
