"""Tests of tasks in a Trio run of another thread: how the tasks end, and how their errors are reported."""

from __future__ import annotations

import pytest
import trio

from trioserve.asyncio.trio_thread import TrioThread


@pytest.mark.parametrize("way", ["the task", "the thread"])
def test_error_raised_during_cancellation_is_not_lost(run, way):
    async def sleep_and_raise() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("while it was cancelled")

    async def work(note_started) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep_and_raise)
            nursery.start_soon(trio.sleep_forever)
            note_started()

    async def program() -> None:
        async with TrioThread() as thread:
            task = thread.begin(work)
            await task.started.wait()
            if way == "the task":
                task.cancel()
                await task.ended.wait()
        with pytest.raises(ValueError, match="while it was cancelled"):
            task.result()

    run(program)


def test_call_after_the_end_of_the_trio_run_is_executed_in_the_thread_of_the_caller(run):
    async def program() -> None:
        async with TrioThread() as thread:
            assert thread.call(trio.lowlevel.in_trio_run)
        assert not thread.call(trio.lowlevel.in_trio_run)

    run(program)
