"""Tests of a worker thread: order of jobs, cancellation, and the end of the thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref

import pytest
import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.engine.lifecycle.engine_loop import ThreadedExecutor
from trioserve.trio_tools.worker_thread import CpuAffinity, WorkerThread


async def test_jobs_run_in_order_in_one_named_thread():
    async with WorkerThread("test") as thread:
        names = [await thread.run(lambda: threading.current_thread().name) for _ in range(3)]
        assert names == ["trioserve-test"] * 3
        assert await thread.run(divmod, 7, 2) == (3, 1)


async def test_error_of_a_job_is_raised_in_its_caller():
    async with WorkerThread("test") as thread:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 / 0)
        assert await thread.run(lambda: "still works") == "still works"


async def test_worker_thread_ends_when_its_scope_is_left():
    async with WorkerThread("test") as thread:
        worker = await thread.run(threading.current_thread)
    assert not worker.is_alive()


def test_ctrl_c_during_the_start_of_a_worker_thread_leaves_no_threads(monkeypatch):
    before = set(threading.enumerate())
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with TextThreads(), WorkerThread("test"):
            pass

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs of a shell ignore SIGINT.
    try:
        with pytest.raises(KeyboardInterrupt):
            trio.run(main)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not set(threading.enumerate()) - before


async def test_cancelled_run_waits_for_the_end_of_the_job():
    begun, proceed, cancels = threading.Event(), threading.Event(), []

    def job() -> str:
        begun.set()
        proceed.wait(10)
        return "done"

    def on_cancel() -> None:
        cancels.append(1)
        proceed.set()

    async with WorkerThread("test") as thread:
        with trio.CancelScope() as scope:
            scope.cancel()
            assert await thread.run(job, on_cancel=on_cancel) == "done"
    assert cancels == [1]
    assert begun.is_set()


async def test_cancelled_run_cancellable_drops_a_job_that_has_not_begun():
    proceed, ran = threading.Event(), []
    async with WorkerThread("test") as thread, trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, proceed.wait, 10)
        with trio.CancelScope() as scope:
            scope.cancel()
            await thread.run_cancellable(ran.append, 1)
        assert scope.cancelled_caught
        proceed.set()
    assert ran == []


async def test_result_of_an_abandoned_job_is_discarded():
    begun, proceed = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def job() -> str:
        token.run_sync_soon(begun.set)
        proceed.wait(10)
        return "discarded"

    async with WorkerThread("test") as thread:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.run_cancellable, job)
            await begun.wait()
            nursery.cancel_scope.cancel()
        proceed.set()
        assert await thread.run(lambda: "next") == "next"


@pytest.mark.slow
async def test_thread_releases_jobs_and_their_results():
    class Large:
        pass

    async with WorkerThread("test") as thread:
        large = Large()
        gone = weakref.ref(large)
        assert await thread.run(lambda given: given, large) is large
        await trio.lowlevel.checkpoint()
        del large
        # Once the next job runs, the thread has released the previous job.
        await thread.run(gc.collect)
        assert gone() is None


async def test_begun_jobs_run_in_order_and_a_cancelled_caller_waits_for_them():
    proceed, done = threading.Event(), []

    def job(name: str) -> str:
        proceed.wait(10)
        done.append(name)
        return name

    async with WorkerThread("test") as thread:
        first, second = thread.begin(job, "first"), thread.begin(job, "second")
        with trio.CancelScope() as scope:
            scope.cancel()
            proceed.set()
            assert [await first, await second] == ["first", "second"]
    assert done == ["first", "second"]


async def test_awaiting_a_finished_job_lets_other_tasks_run():
    turns = []

    async def other() -> None:
        turns.append("other")

    async with WorkerThread("test") as thread, trio.open_nursery() as nursery:
        responses = [thread.begin(lambda: "answer") for _ in range(2)]
        await thread.run(lambda: None)  # The earlier jobs have ended, too.
        nursery.start_soon(other)
        assert [await response for response in responses] == [
            "answer"
        ] * 2  # The order of the two tasks may differ in each round.
        assert turns == ["other"]


async def test_error_of_a_begun_job_is_raised_where_it_is_awaited():
    async with WorkerThread("test") as thread:
        response = thread.begin(lambda: 1 / 0)
        await thread.run(lambda: None)
        with pytest.raises(ZeroDivisionError):
            await response


class NothingComputed:
    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        return None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can pin a thread to a CPU")
async def test_job_begins_on_its_callers_cpu_and_may_move(monkeypatch):
    allowed = os.sched_getaffinity(0)
    pins: list[tuple[int, set[int]]] = []
    set_affinity = os.sched_setaffinity

    def noted(thread_id: int, cpus: set[int]) -> None:
        pins.append((thread_id, set(cpus)))
        set_affinity(thread_id, cpus)

    cpu = min(allowed)
    async with WorkerThread("test") as thread:
        worker = await thread.run(threading.get_native_id)
        set_affinity(0, {cpu})  # This is the CPU of the caller.
        try:
            monkeypatch.setattr(os, "sched_setaffinity", noted)
            assert await thread.begin(os.sched_getaffinity, 0) != set()
            assert pins == []
            assert await thread.begin(os.sched_getaffinity, 0, here=True) == allowed
            assert pins == [(worker, {cpu}), (0, allowed)]
            await ThreadedExecutor(NothingComputed(), thread, takes_cpu=True).run_step(
                StepPlan(0, (), 0), never_abandoned
            )
            assert pins[2:] == pins[:2]
            await ThreadedExecutor(NothingComputed(), thread).run_step(StepPlan(0, (), 0), never_abandoned)
            assert len(pins) == 4
        finally:
            set_affinity(0, allowed)


async def test_thread_pinning_is_tried_only_once_if_not_permitted(monkeypatch):
    asked = []

    def refuse(thread_id: int, cpus: set[int]) -> None:
        asked.append(thread_id)
        raise PermissionError

    async with WorkerThread("test") as thread:
        monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
        assert await thread.begin(lambda: "done", here=True) == "done"
        calls = [thread_id for thread_id in asked if thread_id]
        assert await thread.begin(lambda: "done", here=True) == "done"
        assert [thread_id for thread_id in asked if thread_id] == calls


async def test_thread_pinning_does_nothing_on_systems_other_than_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "elsewhere")
    affinity = CpuAffinity()
    monkeypatch.setattr(os, "sched_setaffinity", pytest.fail, raising=False)
    affinity.pin_to_caller(1)
