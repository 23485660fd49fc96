"""The one thread in which something runs: order, cancellation, and that it ends."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import trio

from trioserve.runtime.worker_thread import WorkerThread


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


async def test_the_answer_of_a_job_that_was_left_is_thrown_away():
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


async def test_the_thread_keeps_neither_a_job_nor_its_answer():
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


async def test_an_answer_that_is_there_already_gives_others_their_turn():
    turns = []

    async def other() -> None:
        turns.append("other")

    async with WorkerThread("test") as thread, trio.open_nursery() as nursery:
        answers = [thread.begin(lambda: "answer") for _ in range(2)]
        await thread.run(lambda: None)  # those before it are done, too
        nursery.start_soon(other)
        assert [await answer for answer in answers] == ["answer"] * 2  # one turn may still come before the other's
        assert turns == ["other"]


async def test_an_error_of_what_was_begun_is_raised_where_it_is_awaited():
    async with WorkerThread("test") as thread:
        answer = thread.begin(lambda: 1 / 0)
        await thread.run(lambda: None)
        with pytest.raises(ZeroDivisionError):
            await answer
