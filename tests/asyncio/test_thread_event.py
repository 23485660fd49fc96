"""Those who wait in asyncio loops for what happens in another thread."""

from __future__ import annotations

import asyncio

from trioserve.asyncio.thread_event import Waiters


def test_a_loop_that_was_closed_keeps_none_of_the_others_from_being_woken():
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
