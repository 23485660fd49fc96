"""Tests that connections in memory keep Trio's contract for streams, and that their buffer is bounded."""

from __future__ import annotations

import pytest
import trio
from trio.testing import check_half_closeable_stream, wait_all_tasks_blocked

from trioserve.testing import memory_connection


async def test_memory_connection_keeps_the_contract_of_trio_streams():
    async def make():
        return memory_connection(buffer_bytes=100)

    async def make_full():
        ours, theirs = memory_connection(buffer_bytes=100)
        for end in (ours, theirs):
            end.send_nowait(bytes(101))
        return ours, theirs

    await check_half_closeable_stream(make, make_full)


async def test_memory_stream_sender_waits_for_a_slow_reader():
    ours, theirs = memory_connection(buffer_bytes=10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, b"x" * 11)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        assert await theirs.receive_some(1) == b"x"
    assert await theirs.receive_some() == b"x" * 10


async def test_other_end_of_a_closed_memory_stream_reads_the_bytes_in_flight():
    ours, theirs = memory_connection()
    ours.send_nowait(b"last words")
    ours.close()
    assert await theirs.receive_some() == b"last words"
    assert await theirs.receive_some() == b""
    with pytest.raises(trio.BrokenResourceError):
        await theirs.send_all(b"too late")


async def test_abort_of_a_memory_stream_loses_the_bytes_in_flight():
    ours, theirs = memory_connection()
    ours.send_nowait(b"lost")
    ours.abort()
    with pytest.raises(trio.BrokenResourceError):
        await theirs.receive_some()


async def test_waiting_sender_notices_that_the_other_end_is_gone():
    ours, theirs = memory_connection(buffer_bytes=1)
    async with trio.open_nursery() as nursery:

        async def send():
            with pytest.raises(trio.BrokenResourceError):
                await ours.send_all(b"xx")

        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        theirs.close()
