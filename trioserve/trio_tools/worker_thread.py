"""One dedicated thread that does jobs in order, for what must not block the Trio thread.

The engine has `compute`, the only one in which torch ever runs (a second one would give OpenMP a second team and cost a
third of every step), and some for long prompts (see text_threads). A hand-off costs about 20 us each way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import outcome
import trio

from trioserve.contracts.errors import AlreadyEnded
from trioserve.trio_tools.cpu_affinity import CpuAffinity
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["WorkerThread"]

T = TypeVar("T")


class _Job:
    __slots__ = ("arguments", "function", "is_cancelled", "is_here", "result", "task")

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], task: trio.lowlevel.Task | None
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.task = task  # that waits; None: nobody does yet
        self.result: outcome.Outcome[Any] | None = None  # that came before anybody waited
        self.is_cancelled = False
        self.is_here = False  # it begins on its caller's CPU


@uninterrupted
class WorkerThread:
    """`async with WorkerThread("compute") as thread: await thread.run(function, ...)`.

    Leaving waits for the job at hand, drops the ones whose callers have left, and ends the thread: none is left behind.
    Whoever asks it from then on gets AlreadyEnded.

    stack_bytes: how deep its jobs may recurse; None: as deep as any thread. Only what is used takes memory.
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
        # Waits for one job at most: a forward pass, a prompt, or one tensor of a loading that was cancelled. A deadline
        # would be of no use, since a thread cannot be ended from outside.
        self._is_left = True
        await self._run(lambda: None, (), lambda _job: trio.lowlevel.Abort.FAILED)
        self._jobs.put(None)
        self._thread.join()

    async def run(self, function: Callable[..., T], *arguments: Any, on_cancel: Callable[[], None] | None = None) -> T:
        """Call it in the thread and wait for the result, also when cancelled: whoever owns memory that the job uses
        may rely on it having ended. on_cancel is called when the caller is cancelled, to make a long job stop early."""

        self._check_open()

        def stay(_job: _Job) -> trio.lowlevel.Abort:
            if on_cancel is not None:
                on_cancel()
            return trio.lowlevel.Abort.FAILED

        return await self._run(function, arguments, stay)

    def begin(self, function: Callable[..., T], *arguments: Any, here: bool = False) -> Coroutine[Any, Any, T]:
        """Have it called in the thread, after what was asked before. To be awaited, once, by one task: that waits for
        the result as `run` does, also when cancelled.

        here: the job begins on the caller's CPU. For a thread that has nothing to do, and a caller who has nothing
        left to do but wait."""
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
        await trio.lowlevel.cancel_shielded_checkpoint()  # others have their turn, however fast the thread is
        return job.result.unwrap()

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        """The same, but a cancelled caller leaves at once: a job not yet begun is dropped, and the result of one that
        was is thrown away. For functions of values."""

        self._check_open()

        def leave(job: _Job) -> trio.lowlevel.Abort:
            job.is_cancelled = True
            job.function, job.arguments = _nothing, ()  # what it holds may be large, and its turn far off
            return trio.lowlevel.Abort.SUCCEEDED

        return await self._run(function, arguments, leave)

    def _check_open(self) -> None:
        if self._is_left:  # nobody would answer
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
            # Before it is asked: a caller that leaves meanwhile takes them away.
            function, arguments = job.function, job.arguments
            if not job.is_cancelled:
                result = outcome.capture(function, *arguments)
                self._token.run_sync_soon(_hand_back, job, result)
                del result
            del job, function, arguments  # a job may hold the model; a thread that waits for the next one must not


def _nothing() -> None:
    """What is left of a job that nobody wants."""


def _hand_back(job: _Job, result: outcome.Outcome[Any]) -> None:
    if job.is_cancelled:
        return
    if job.task is None:
        job.result = result
    else:
        trio.lowlevel.reschedule(job.task, result)
