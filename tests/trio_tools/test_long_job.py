"""Tests that a job ends at its next check after its caller is cancelled."""

from __future__ import annotations

import threading

import pytest
import trio

from trioserve.trio_tools.worker_thread import JobCancelled, LongJob, WorkerThread


async def test_long_job_returns_its_result_or_raises_its_error():
    async with WorkerThread("test") as thread:
        assert await LongJob().run(thread, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await LongJob().run(thread, divmod, 7, 0)


async def test_cancelled_job_ends_at_its_next_check_and_its_caller_gets_cancelled():
    begun, may_continue, ended = threading.Event(), threading.Event(), []
    job = LongJob()

    def work() -> None:
        job.check()
        begun.set()
        may_continue.wait()
        try:
            job.check()
        except JobCancelled:
            ended.append("cancelled")
            raise ValueError("only follows from the cancellation") from None

    async with WorkerThread("test") as thread:
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                await trio.to_thread.run_sync(begun.wait)
                scope.cancel()
                may_continue.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel)
                await job.run(thread, work)
    assert scope.cancelled_caught
    assert ended == ["cancelled"]
