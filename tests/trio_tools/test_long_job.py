"""A job that nobody waits for any more ends at its next look, and says nothing."""

from __future__ import annotations

import threading

import pytest
import trio

from trioserve.trio_tools.long_job import JobCancelled, LongJob
from trioserve.trio_tools.worker_thread import WorkerThread


async def test_a_job_gives_its_result_or_its_error():
    async with WorkerThread("test") as thread:
        assert await LongJob().run(thread, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await LongJob().run(thread, divmod, 7, 0)


async def test_a_cancelled_job_ends_at_its_next_look_and_its_caller_is_cancelled():
    begun, goes_on, ended = threading.Event(), threading.Event(), []
    job = LongJob()

    def work() -> None:
        job.check()
        begun.set()
        goes_on.wait()
        try:
            job.check()
        except JobCancelled:
            ended.append("cancelled")
            raise ValueError("what is said then is not the reason") from None

    async with WorkerThread("test") as thread:
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                await trio.to_thread.run_sync(begun.wait)
                scope.cancel()
                goes_on.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel)
                await job.run(thread, work)
    assert scope.cancelled_caught
    assert ended == ["cancelled"]
