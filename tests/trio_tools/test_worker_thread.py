"""The one thread in which something runs: order, cancellation, and that it ends."""

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
from trioserve.engine.shell.engine_loop import ThreadedExecutor
from trioserve.trio_tools.cpu_affinity import CpuAffinity
from trioserve.trio_tools.worker_thread import WorkerThread


async def test_jobs_run_in_order_in_one_named_thread():
    async with WorkerThread("test") as thread:
        names = [await thread.run(lambda: threading.current_thread().name) for _ in range(3)]
        assert names == ["trioserve-test"] * 3
        assert await thread.run(divmod, 7, 2) == (3, 1)


async def test_an_error_of_a_job_is_its_callers():
    async with WorkerThread("test") as thread:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 / 0)
        assert await thread.run(lambda: "goes on") == "goes on"


async def test_leaving_ends_the_thread():
    async with WorkerThread("test") as thread:
        worker = await thread.run(threading.current_thread)
    assert not worker.is_alive()


def test_ctrl_c_while_threads_begin_leaves_none(monkeypatch):
    before = set(threading.enumerate())
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with TextThreads(), WorkerThread("test"):
            pass

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            trio.run(main)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not set(threading.enumerate()) - before


async def test_run_stays_when_cancelled_until_the_job_has_ended():
    begun, go_on, cancels = threading.Event(), threading.Event(), []

    def job() -> str:
        begun.set()
        go_on.wait(10)
        return "done"

    def on_cancel() -> None:
        cancels.append(1)
        go_on.set()

    async with WorkerThread("test") as thread:
        with trio.CancelScope() as scope:
            scope.cancel()
            assert await thread.run(job, on_cancel=on_cancel) == "done"
    assert cancels == [1]
    assert begun.is_set()


async def test_run_cancellable_leaves_at_once_and_drops_what_was_not_begun():
    go_on, ran = threading.Event(), []
    async with WorkerThread("test") as thread, trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, go_on.wait, 10)
        with trio.CancelScope() as scope:
            scope.cancel()
            await thread.run_cancellable(ran.append, 1)
        assert scope.cancelled_caught
        go_on.set()
    assert ran == []


async def test_the_response_of_a_job_that_was_left_is_thrown_away():
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def job() -> str:
        token.run_sync_soon(begun.set)
        go_on.wait(10)
        return "nobody wants it"

    async with WorkerThread("test") as thread:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.run_cancellable, job)
            await begun.wait()
            nursery.cancel_scope.cancel()
        go_on.set()
        assert await thread.run(lambda: "next") == "next"


@pytest.mark.slow
async def test_the_thread_keeps_neither_a_job_nor_its_response():
    class Large:
        pass

    async with WorkerThread("test") as thread:
        large = Large()
        gone = weakref.ref(large)
        assert await thread.run(lambda given: given, large) is large
        await trio.lowlevel.checkpoint()
        del large
        # A job later it is certain that the thread has let go of the one before.
        await thread.run(gc.collect)
        assert gone() is None


async def test_what_is_begun_is_done_in_order_and_waited_for_also_when_cancelled():
    go_on, done = threading.Event(), []

    def job(name: str) -> str:
        go_on.wait(10)
        done.append(name)
        return name

    async with WorkerThread("test") as thread:
        first, second = thread.begin(job, "first"), thread.begin(job, "second")
        with trio.CancelScope() as scope:
            scope.cancel()
            go_on.set()
            assert [await first, await second] == ["first", "second"]
    assert done == ["first", "second"]


async def test_a_response_that_is_there_already_gives_others_their_turn():
    turns = []

    async def other() -> None:
        turns.append("other")

    async with WorkerThread("test") as thread, trio.open_nursery() as nursery:
        responses = [thread.begin(lambda: "answer") for _ in range(2)]
        await thread.run(lambda: None)  # those before it are done, too
        nursery.start_soon(other)
        assert [await response for response in responses] == [
            "answer"
        ] * 2  # one turn may still come before the other's
        assert turns == ["other"]


async def test_an_error_of_what_was_begun_is_raised_where_it_is_awaited():
    async with WorkerThread("test") as thread:
        response = thread.begin(lambda: 1 / 0)
        await thread.run(lambda: None)
        with pytest.raises(ZeroDivisionError):
            await response


class NothingComputed:
    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        return None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a thread's CPU be chosen")
async def test_a_job_begins_on_its_callers_cpu_and_may_leave_it(monkeypatch):
    allowed = os.sched_getaffinity(0)
    wishes: list[tuple[int, set[int]]] = []
    set_affinity = os.sched_setaffinity

    def noted(thread_id: int, cpus: set[int]) -> None:
        wishes.append((thread_id, set(cpus)))
        set_affinity(thread_id, cpus)

    cpu = min(allowed)
    async with WorkerThread("test") as thread:
        worker = await thread.run(threading.get_native_id)
        set_affinity(0, {cpu})  # this is where the caller is
        try:
            monkeypatch.setattr(os, "sched_setaffinity", noted)
            assert await thread.begin(os.sched_getaffinity, 0) != set()
            assert wishes == []
            assert await thread.begin(os.sched_getaffinity, 0, here=True) == allowed
            assert wishes == [(worker, {cpu}), (0, allowed)]
            await ThreadedExecutor(NothingComputed(), thread, takes_cpu=True).run_step(
                StepPlan(0, (), 0), never_abandoned
            )
            assert wishes[2:] == wishes[:2]
            await ThreadedExecutor(NothingComputed(), thread).run_step(StepPlan(0, (), 0), never_abandoned)
            assert len(wishes) == 4
        finally:
            set_affinity(0, allowed)


async def test_a_system_that_does_not_let_us_choose_a_cpu_is_asked_once(monkeypatch):
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


async def test_a_thread_that_cannot_be_asked_for_its_cpu_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(sys, "platform", "elsewhere")
    affinity = CpuAffinity()
    monkeypatch.setattr(os, "sched_setaffinity", pytest.fail, raising=False)
    affinity.pin_to_caller(1)
