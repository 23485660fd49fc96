"""Tests of connections from ranks on other machines. Clients without the key are rejected."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.contracts.errors import StartupError
from trioserve.ranks import link
from trioserve.ranks.host import free_port
from trioserve.ranks.link import HANDSHAKE_SECONDS_MAX, HANDSHAKES_MAX, connect_rank, wait_for_ranks
from trioserve.ranks.messages import framed

KEY = "a key that nobody guesses"


@contextmanager
def closing(connections: dict[int, socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for connection in connections.values():
            connection.close()


async def connected(port: int, rank: int, key: str = KEY, host: str = "127.0.0.1") -> socket.socket:
    """Connect a rank as soon as its server listens."""
    while True:
        try:
            return await connect_rank(host, port, rank, key)
        except OSError:
            await trio.lowlevel.checkpoint()


async def test_each_remote_rank_gets_a_connection() -> None:
    port, theirs = free_port(), dict[int, socket.socket]()
    awaited: list[list[int]] = []

    async def come(rank: int) -> None:
        theirs[rank] = await connected(port, rank)

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            for rank in (3, 2):
                nursery.start_soon(come, rank)
            ours = await wait_for_ranks("127.0.0.1", port, (2, 3), KEY, on_wait=awaited.append)
        with closing(ours):
            assert sorted(ours) == [2, 3]
            assert (awaited[0], awaited[-1], len(awaited)) == ([2, 3], [], 3)
            for rank, connection in ours.items():
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                silent_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                idle, interval, tries = (
                    connection.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert (
                    max(silent_ms / 1000, idle + interval * tries) <= 12
                )  # docs/guides/ranks.md documents this limit.
                connection.sendall(b"an order")
                assert theirs[rank].recv(100) == b"an order"


async def test_server_listens_at_all_addresses_for_an_unknown_name() -> None:
    port, theirs = free_port(), dict[int, socket.socket]()

    async def come() -> None:
        theirs[1] = await connected(port, 1, host="127.0.0.2")

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come)
            ours = await wait_for_ranks("engine-0.invalid", port, (1,), KEY, on_wait=lambda awaited: None)
        with closing(ours):
            assert list(ours) == [1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_server_listens_only_at_a_given_address(host: str) -> None:
    port, theirs = free_port(), dict[int, socket.socket]()

    async def come() -> None:
        with pytest.raises(OSError, match=r"127\.0\.0\.2"):
            await connect_rank("127.0.0.2", port, 1, KEY)
        theirs[1] = await connected(port, 1)

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            ours = await wait_for_ranks(
                host, port, (1,), KEY, on_wait=lambda awaited: nursery.start_soon(come) if awaited else None
            )
        with closing(ours):
            assert list(ours) == [1]


async def test_listening_at_an_address_of_another_machine_is_refused_at_once() -> None:
    with pytest.raises(StartupError, match=r"--master-addr 192\.0\.2\.1.* an address of this machine"):
        await wait_for_ranks("192.0.2.1", free_port(), (1,), KEY, on_wait=lambda awaited: None)


async def check_refused(match: str, *, rank: int = 1, key: str = KEY) -> None:
    """Check that a server that waits for rank 1 refuses a rank, and then accepts the right one."""
    port = free_port()
    theirs: dict[int, socket.socket] = {}

    async def come() -> None:
        with pytest.raises(StartupError, match=match):
            await connected(port, rank, key)
        theirs[1] = await connected(port, 1)

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come)
            ours = await wait_for_ranks("127.0.0.1", port, (1,), KEY, on_wait=lambda awaited: None)
        with closing(ours):
            assert list(ours) == [1]


async def test_a_rank_with_another_key_is_refused_and_others_are_not_disturbed() -> None:
    await check_refused("its key is not the server's", key="another")


async def test_connection_of_an_unexpected_rank_is_refused() -> None:
    await check_refused("rank 7 is not expected", rank=7)


def test_server_of_another_version_is_refused() -> None:
    asked = link.challenge()
    old = link.Challenge(asked.nonce, "0.0.1")
    with pytest.raises(StartupError, match="all machines need the same version"):
        link.answered(old, 1, KEY)


def test_server_without_the_key_is_not_trusted() -> None:
    asked = link.challenge()
    hello = link.answered(asked, 1, KEY)
    assert link.is_server(asked, hello, link.verdict(asked, hello, KEY), KEY)
    assert not link.is_server(asked, hello, link.Verdict(b"x" * 32), KEY)
    # A server that sends the rank's own proof back does not know the key.
    assert not link.is_server(asked, hello, link.Verdict(hello.proof), KEY)


def test_proof_of_an_earlier_handshake_is_refused() -> None:
    earlier = link.answered(link.challenge(), 1, KEY)
    assert link.verdict(link.challenge(), earlier, KEY).refused is not None


async def test_silent_and_invalid_clients_are_disconnected(mock_clock: trio.testing.MockClock) -> None:
    port = free_port()
    theirs: dict[int, socket.socket] = {}

    async def come() -> None:
        while True:
            try:
                silent = await trio.open_tcp_stream("127.0.0.1", port)
                break
            except OSError:
                await trio.lowlevel.checkpoint()
        babbling = await trio.open_tcp_stream("127.0.0.1", port)
        await babbling.send_all(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises((trio.BrokenResourceError, EOFError)):
            while await babbling.receive_some():
                pass
            raise EOFError
        assert await silent.receive_some()  # the challenge: the time limit has begun
        mock_clock.jump(HANDSHAKE_SECONDS_MAX)
        while await silent.receive_some():
            pass
        await babbling.aclose()
        await silent.aclose()
        theirs[1] = await connected(port, 1)

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come)
            ours = await wait_for_ranks("127.0.0.1", port, (1,), KEY, on_wait=lambda awaited: None)
        with closing(ours):
            assert list(ours) == [1]


async def test_start_raises_an_error_if_the_port_of_ranks_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartupError, match="--master-port"):
        await wait_for_ranks("127.0.0.1", taken.getsockname()[1], (1,), KEY, on_wait=lambda awaited: None)


def greeting(rank: object = 1, nonce: object = b"x" * 32, proof: object = b"y" * 32) -> bytes:
    return framed(msgspec.msgpack.encode({"type": "Hello", "rank": rank, "nonce": nonce, "proof": proof}))


HOSTILE = {
    "a rank beyond 63 bits": greeting(2**63),
    "the largest rank": greeting(2**64 - 1),
    "a negative rank": greeting(-(2**63)),
    "a rank that is text": greeting("one"),
    "a rank that is none": greeting(None),
    "no nonce": greeting(nonce=b""),
    "a long nonce": greeting(nonce=b"x" * 3000),
    "a proof that is a list": greeting(proof=[1, 2]),
    "a long proof": greeting(proof=b"y" * 3000),
    "a huge frame": struct.pack("<I", 2**32 - 1),
    "an empty frame": struct.pack("<I", 0),
    "a frame that does not come": struct.pack("<I", 4000) + b"x",
    "no MessagePack": framed(b"\xc1" * 50),
    "deep nesting": framed(b"\x91" * 4000),
    "deep nesting in an unknown field": framed(b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 4000),
    "a list of four thousand million": framed(b"\xdd\xff\xff\xff\xff"),
    "another type": framed(msgspec.msgpack.encode({"type": "Verdict", "proof": b"z" * 32})),
    "nothing": b"",
}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE.keys())
async def test_bytes_of_an_unknown_client_do_not_end_the_wait_for_ranks(sent: bytes, ends: bool) -> None:
    port, theirs = free_port(), dict[int, socket.socket]()

    async def come() -> None:
        stranger = await opened(port)
        with suppress(trio.BrokenResourceError):
            await stranger.send_all(sent)
            if ends:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if ends:
            await stranger.aclose()
        theirs[1] = await connected(port, 1)
        await stranger.aclose()

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come)
            ours = await wait_for_ranks("127.0.0.1", port, (1,), KEY, on_wait=lambda awaited: None)
        with closing(ours):
            assert list(ours) == [1]


async def opened(port: int) -> trio.SocketStream:
    while True:
        try:
            return await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            await trio.lowlevel.checkpoint()


async def test_silent_unknown_clients_do_not_block_ranks() -> None:
    port, theirs = free_port(), dict[int, socket.socket]()

    async def come() -> None:
        strangers = [await opened(port) for _ in range(2 * HANDSHAKES_MAX)]
        theirs[1] = await connected(port, 1)
        for stranger in strangers:
            await stranger.aclose()

    with closing(theirs):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come)
            ours = await wait_for_ranks("127.0.0.1", port, (1,), KEY, on_wait=lambda awaited: None)
        with closing(ours):
            assert list(ours) == [1]


@pytest.mark.parametrize("rank", [-1, 2**31, 2**63, 2**64 - 1, -(2**63)])
def test_connection_with_a_rank_number_out_of_range_is_refused(rank: int) -> None:
    hello = link.Hello(rank, b"x" * 32, b"y" * 32)
    given = link.verdict(link.challenge(), hello, KEY)
    assert given.refused is not None
    assert f"its rank is {rank}" in given.refused


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=8)), max_size=4),
    rank=st.integers(-(2**63), 2**64 - 1),
    length=st.floats(0, 1),
)
def test_random_bytes_of_an_unknown_client_do_not_end_the_wait_for_ranks(changes, rank: int, length: float) -> None:
    content = bytearray(greeting(rank))
    for where, new in changes:
        start = int(where * len(content))
        content[start : start + len(new)] = new
    trio.run(test_bytes_of_an_unknown_client_do_not_end_the_wait_for_ranks, bytes(content[: int(length * 200)]), True)
