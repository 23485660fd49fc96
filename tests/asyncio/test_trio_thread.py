"""Tasks of a Trio run in another thread: how they end, and who hears of it."""

from __future__ import annotations

import pytest
import trio

from trioserve.asyncio.trio_thread import TrioThread


@pytest.mark.parametrize("way", ["the task", "the thread"])
def test_what_a_task_raises_while_it_is_cancelled_is_not_lost(run, way):
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


def test_what_is_called_when_the_run_is_over_is_called_where_the_caller_is(run):
    async def program() -> None:
        async with TrioThread() as thread:
            assert thread.call(trio.lowlevel.in_trio_run)
        assert not thread.call(trio.lowlevel.in_trio_run)

    run(program)
