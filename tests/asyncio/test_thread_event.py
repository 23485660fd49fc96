"""Tests of asyncio tasks that wait for an event of another thread."""

from __future__ import annotations

import asyncio

from trioserve.asyncio.trio_thread import Waiters


def test_closed_loop_does_not_keep_other_loops_from_waking():
    waiters = Waiters()
    loops = [asyncio.new_event_loop() for _ in range(6)]

    async def add() -> asyncio.Future[None]:
        return waiters.add()

    futures = [loop.run_until_complete(add()) for loop in loops]
    for loop in loops[::2]:
        loop.close()
    assert not waiters.wake()
    for loop, future in list(zip(loops, futures, strict=True))[1::2]:
        loop.run_until_complete(asyncio.wait_for(future, 10))
        loop.close()
    assert waiters.wake()
