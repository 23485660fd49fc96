"""Tests that the router uses the content of an endpoint's cache exactly as long as the event stream describes it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from trioserve.contracts.endpoint import BlocksRemoved, BlocksStored, EndpointId, ResidencySnapshot
from trioserve.contracts.ids import HASH_SCHEME
from trioserve.proxy.pushed_reports import (
    RESIDENCY_RETRY_SECONDS_MAX,
    RETRY_SECONDS_MIN,
    STALE_SECONDS,
    watch_residency,
)
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.router.policies import KvAware
from trioserve.testing.memory_client import MemoryEnd, memory_connection

A = EndpointId("a")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
ALIVE = b": keep-alive\n\n"


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def snapshot(text: str, *, sequence: int = 0, left: int = 0, **fields: object) -> bytes:
    described = {"epoch": "e", "model": "m", "block_size": 1, "hash_scheme": HASH_SCHEME, **fields}
    return event(ResidencySnapshot(sequence=sequence, left=left, hashes=names(text), **described))


def stored(sequence: int, text: str) -> bytes:
    return event(BlocksStored(sequence=sequence, hashes=names(text)))


def removed(sequence: int, text: str) -> bytes:
    return event(BlocksRemoved(sequence=sequence, hashes=names(text)))


class Endpoint:
    """Endpoint that sends the items of a script on each connection: event bytes, seconds of silence, or a raw response.

    Without a script, connections fail.

    Attributes:
        connected_at: Times of the connections.
    """

    def __init__(self, *scripts: Sequence[bytes | float]) -> None:
        self.scripts = list(scripts)
        self.connected_at: list[float] = []
        self.policy = KvAware(random.Random(0))
        self.nursery: trio.Nursery

    async def connect(self) -> MemoryEnd:
        self.connected_at.append(trio.current_time())
        if not self.scripts:
            raise ConnectionRefusedError(111, "Connection refused")
        near, far = memory_connection()
        self.nursery.start_soon(self.play, far, self.scripts.pop(0))
        return near

    async def play(self, stream: MemoryEnd, script: Sequence[bytes | float]) -> None:
        try:
            await stream.receive_some()
            for move in script:
                if isinstance(move, float):
                    await trio.sleep(move)
                elif move.startswith((b"data", b":")):
                    await stream.send_all(b"%x\r\n%b\r\n" % (len(move), move))
                else:
                    await stream.send_all(move)
                    if move is END or b"content-length" in move:
                        await stream.aclose()
                        return
            await trio.sleep_forever()
        except trio.BrokenResourceError:
            pass

    def known(self) -> str | None:
        """Return the blocks that the policy knows, as letters."""
        residency = self.policy._resident._by_endpoint.get(A)
        return None if residency is None else b"".join(sorted(residency.hashes)).decode()


@asynccontextmanager
async def watched(*scripts: Sequence[bytes | float]) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(*scripts)
    remote = RemoteEndpoint(A, EndpointAddress(scheme="http", host="a", port=80), open_stream=endpoint.connect)
    async with trio.open_nursery() as endpoint.nursery:
        scope = trio.CancelScope()

        async def watch() -> None:
            with scope:
                await watch_residency(remote, endpoint.policy)

        endpoint.nursery.start_soon(watch)
        await trio.sleep(0.01)
        yield endpoint
        scope.cancel()
        await trio.sleep(0.01)
        assert endpoint.known() is None, "the connection is closed"
        endpoint.nursery.cancel_scope.cancel()


# --- valid streams ---


async def test_router_uses_a_snapshot_and_its_changes(autojump_clock):
    moves = [HEAD, snapshot("abc", sequence=7), stored(7, "de"), removed(9, "ad"), stored(11, "a")]
    async with watched(moves) as endpoint:
        assert endpoint.known() == "abce"


async def test_incomplete_snapshot_is_not_used(autojump_clock):
    moves = [HEAD, snapshot("ab", left=1), 1.0, snapshot("c", left=0)]
    async with watched(moves) as endpoint:
        assert endpoint.known() is None
        await trio.sleep(1)
        assert endpoint.known() == "abc"


async def test_new_snapshot_replaces_the_known_content(autojump_clock):
    moves = [HEAD, snapshot("ab"), 1.0, snapshot("xy", sequence=50, left=1), 1.0, snapshot("z", sequence=50)]
    async with watched([*moves, stored(50, "w")]) as endpoint:
        assert endpoint.known() == "ab"
        await trio.sleep(1)
        assert endpoint.known() is None
        await trio.sleep(1)
        assert endpoint.known() == "wxyz"


async def test_events_may_arrive_in_pieces_that_end_anywhere(autojump_clock):
    whole = snapshot("ab") + ALIVE + stored(0, "c")
    pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (whole[:9], whole[9:150], whole[150:])]
    async with watched([HEAD, *pieces]) as endpoint:
        assert endpoint.known() == "abc"


# --- invalid or silent streams ---


@pytest.mark.parametrize(
    "moves",
    [
        [HEAD, snapshot("a"), stored(1, "b")],
        [HEAD, snapshot("a", sequence=5), stored(5, "bc"), removed(6, "b")],
        [HEAD, stored(0, "b")],
        [HEAD, snapshot("a", left=1), stored(0, "b")],
        [HEAD, snapshot("a", hash_scheme="sha256")],
        [HEAD, snapshot("a", block_size=0)],
        [HEAD, snapshot("a"), b"data: {}\n\n"],
        [HEAD, snapshot("a"), b"data: " + b"x" * 70_000 + b"\n\n"],
        [HEAD, snapshot("a"), END],
        [HEAD, snapshot("a"), b"no chunk\r\n"],
        [b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{'data': 'mine'}"],
        [b"no HTTP\r\n\r\n"],
    ],
)
async def test_invalid_stream_of_cache_events_is_closed_and_opened_again(moves, autojump_clock):
    async with watched(moves, [HEAD, snapshot("z"), ALIVE]) as endpoint:
        assert endpoint.known() is None
        await trio.sleep(2 * RETRY_SECONDS_MIN)
        assert endpoint.known() == "z"
        assert len(endpoint.connected_at) == 2


async def test_too_long_cache_event_ends_the_stream(autojump_clock):
    endless = [b"data: " + b"x" * 60_000] * 20
    async with watched([HEAD, snapshot("a"), *endless], [HEAD, snapshot("z")]) as endpoint:
        await trio.sleep(2 * RETRY_SECONDS_MIN)
        assert endpoint.known() == "z"


async def test_cache_content_becomes_unknown_after_a_silence(autojump_clock):
    async with watched([HEAD, snapshot("a")], [HEAD, snapshot("b")]) as endpoint:
        await trio.sleep(STALE_SECONDS - 0.1)
        assert endpoint.known() == "a"
        await trio.sleep(0.2)
        assert endpoint.known() is None
        await trio.sleep(RETRY_SECONDS_MIN)
        assert endpoint.known() == "b"


async def test_empty_events_keep_the_cache_content_known(autojump_clock):
    async with watched([HEAD, snapshot("a"), *[5.0, ALIVE] * 4, 5.0]) as endpoint:
        await trio.sleep(24)
        assert endpoint.known() == "a"
        assert len(endpoint.connected_at) == 1


async def test_event_stream_without_a_response_head_times_out(autojump_clock):
    async with watched([], [HEAD, snapshot("b")]) as endpoint:
        await trio.sleep(STALE_SECONDS + 2 * RETRY_SECONDS_MIN)
        assert endpoint.known() == "b"


async def test_unreachable_endpoint_is_asked_with_growing_intervals(autojump_clock):
    async with watched() as endpoint:
        await trio.sleep(100)
        pauses = [late - early for early, late in zip(endpoint.connected_at, endpoint.connected_at[1:], strict=False)]
        assert pauses == sorted(pauses)
        assert pauses[0] == pytest.approx(2 * RETRY_SECONDS_MIN)
        assert pauses[-1] == pytest.approx(RESIDENCY_RETRY_SECONDS_MAX)
        endpoint.scripts = [[HEAD, snapshot("a")]]
        await trio.sleep(RESIDENCY_RETRY_SECONDS_MAX)
        assert endpoint.known() == "a"
