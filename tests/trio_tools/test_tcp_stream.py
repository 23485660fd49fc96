"""Tests that TcpStream keeps the contract of Trio's streams, and reports how many bytes the kernel accepted."""

from __future__ import annotations

import socket

import pytest
import trio
from trio.testing import check_half_closeable_stream

from trioserve.trio_tools.tcp_stream import TcpStream


async def connected() -> tuple[TcpStream, trio.SocketStream]:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with listener:
        theirs = await trio.open_tcp_stream(*listener.socket.getsockname())
        return TcpStream(await listener.accept()), theirs


async def test_tcp_stream_keeps_the_contract_of_trio_streams():
    async def make():
        ours, theirs = await connected()
        return ours, TcpStream(theirs)

    async def make_full():
        ours, theirs = await make()
        for end in (ours, theirs):
            while end.try_send(bytes(65536)):
                pass
        return ours, theirs

    await check_half_closeable_stream(make, make_full)


async def test_tcp_stream_owns_the_socket_that_it_was_created_from():
    ours, theirs = await connected()
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    await ours.aclose()
    assert await theirs.receive_some() == b""
    await theirs.aclose()


async def test_try_send_counts_only_bytes_that_the_kernel_accepts():
    ours, theirs = await connected()
    taken = 0
    while count := ours.try_send(bytes(65536)):
        taken += count
    got = 0
    while got < taken:
        got += len(await theirs.receive_some(65536))
    assert ours.try_send(b"more") == 4
    await theirs.aclose()
    with pytest.raises(trio.BrokenResourceError):
        while True:
            ours.try_send(b"nobody")
            await trio.lowlevel.checkpoint()
    await ours.aclose()
    with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
        ours.try_send(b"closed")
