"""Tests that a delta which arrives at the moment of a keep-alive is sent exactly once."""

from __future__ import annotations

import trio

from trioserve.api.generation import KeepAlive, read_streams
from trioserve.contracts.output import Delta
from trioserve.http.limits import KEEP_ALIVE_SECONDS
from trioserve.trio_tools.deadline_keeper import DeadlineKeeper


class OneDelta:
    """A fake stream with one delta, which is ready when the event is set."""

    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.is_over = False

    def __aiter__(self):
        return self

    async def __anext__(self) -> Delta:
        if self.is_over:
            raise StopAsyncIteration
        await self.arrived.wait()
        self.is_over = True
        return Delta(index=0, text="kept", token_ids=(1,))


async def test_a_delta_at_the_moment_of_a_keep_alive_is_sent_once(autojump_clock):
    stream, taken, kept_alive = OneDelta(), [], []

    async def take(index: int, delta: Delta) -> None:
        taken.append(delta.text)
        await trio.lowlevel.checkpoint()  # An exchange also queues the bytes, and then lets another task run.

    async def keep_alive() -> None:
        kept_alive.append(trio.current_time())

    keeper = DeadlineKeeper()
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            await read_streams([stream], take, keep_alive=KeepAlive(keep_alive, keeper.set))
            nursery.cancel_scope.cancel()

        nursery.start_soon(keeper.run)
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        stream.arrived.set()
        # The reader is scheduled already, and the time limit of its wait also passes.
        autojump_clock.jump(KEEP_ALIVE_SECONDS)
    assert taken == ["kept"]
    assert kept_alive == []
