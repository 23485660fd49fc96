"""Tests of downloading clients' files: only from allowed hosts and public addresses, within limits, and cancellable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair

from trioserve.contracts.errors import InvalidRequest
from trioserve.trio_tools.media_fetcher import SECONDS_MAX, MediaFetcher, public_addresses

PUBLIC = "93.184.216.34"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n"


NOT_PUBLIC = (
    *("10.0.0.1", "100.64.0.1", "100.100.100.200", "127.255.0.1", "168.63.129.16", "172.16.0.1", "192.0.0.8"),
    *("192.0.0.9", "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.19.255.1", "198.51.100.1"),
    *("203.0.113.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "::ffff:169.254.169.254"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::c0a8:1", "64:ff9b:1::a00:1", "64:ff9b:1::808:808"),
    *("100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1"),
    *("2001:db8::1", "2002:7f00:1::", "2002:a00:1::", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1"),
    *("fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "2606:4700::1%eth0"),
)


class World:
    """A fake host: its response, its addresses, and the connections to it."""

    def __init__(self, answer: bytes, *, addresses: tuple[str, ...] = (PUBLIC,), ends: bool = True) -> None:
        self.answer, self.addresses, self.ends = answer, addresses, ends
        self.connected: list[tuple[str, int, str | None]] = []
        self.asked = b""
        self.far: trio.abc.Stream | None = None

    def fetcher(self, *domains: str, bytes_max: int = 1000) -> MediaFetcher:
        return MediaFetcher(domains, bytes_max, connect=self._connect, addresses_of=self._resolve)

    async def _resolve(self, host: str, port: int) -> list[str]:
        return list(self.addresses)

    async def _connect(self, address: str, port: int, host: str | None) -> trio.abc.Stream:
        self.connected.append((address, port, host))
        near, far = memory_stream_pair()
        self.far = far
        await far.send_all(self.answer)
        if self.ends:
            await far.send_eof()
        return near


async def check_refused(world: World, url: str, words: str, **options: Any) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        await world.fetcher("a.example", **options).fetch(url, "here")
    assert refusal.value.param == "here"


async def test_file_of_an_allowed_host_is_fetched() -> None:
    world = World(OK + b"content-length: 5\r\n\r\nhello")
    assert await world.fetcher("example").fetch("https://A.example:8443/b.png?c=d#e", "x") == b"hello"
    assert world.connected == [(PUBLIC, 8443, "a.example")]
    assert world.far is not None
    sent = await world.far.receive_some(10_000)
    assert sent.startswith(b"GET /b.png?c=d HTTP/1.1\r\n")
    assert b"a.example:8443" in sent
    assert await world.far.receive_some(1) == b"", "the connection is closed"


async def test_fetched_body_may_be_chunked_or_end_with_the_connection() -> None:
    chunked = World(OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert await chunked.fetcher("a.example").fetch("http://a.example", "x") == b"abcde"
    assert chunked.connected == [(PUBLIC, 80, None)]
    assert await World(OK + b"\r\nabc").fetcher("a.example").fetch("http://a.example/", "x") == b"abc"


@pytest.mark.parametrize(
    "url",
    [
        "https://b.example/",
        "https://xa.example/",
        "https://a.example.evil/",
        "https://a.example@evil/",
        "https://user:word@a.example/",
        "ftp://a.example/",
        "file:///etc/passwd",
        "https:///x",
        "https://a.example:99999/",
        "https://a.example/\r\nX: y",
        "https://a.example/ x",
        "https://[::1/",
        "https://127.0.0.1/",
        "https://a.example/" + "x" * 3000,
        "https://a.example/ä",
        "https://" + "b" * 64 + ".a.example/",
        "https://" + "b." * 130 + "a.example/",
        "https://b..a.example/",
        "https://.a.example/",
        "https://a.example../",
        "https://a.example:0/",
        "https://a.example:-1/",
        "https://a.example:8x/",
        "https://a.example%00.evil/",
        "https://evil%2f.a.example/",
        "https://[::1].a.example/",
        "https://a.example\\evil/",
        "https://evil\\.a.example/",
        "https://evil#.a.example/",
        "https://evil?.a.example/",
        "https://*.a.example/",
        "https://a.example\x00/",
    ],
)
async def test_invalid_urls_and_urls_of_other_hosts_are_refused(url: str) -> None:
    world = World(OK + b"\r\nabc")
    await check_refused(world, url, "^here ")
    assert world.connected == []


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",),
        ("10.1.2.3",),
        ("169.254.169.254",),
        ("192.168.0.1", PUBLIC),
        (PUBLIC, "::1"),
        ("fe80::1%eth0",),
        ("::ffff:127.0.0.1",),
        ("0.0.0.0",),
        ("224.0.0.1",),
        *((address,) for address in NOT_PUBLIC),
        (),
    ],
)
async def test_names_with_a_private_address_are_refused(addresses: tuple[str, ...]) -> None:
    world = World(OK + b"\r\nabc", addresses=addresses)
    await check_refused(world, "https://a.example/", "no public address")
    assert world.connected == []


def test_only_public_addresses_are_accepted() -> None:
    public = [PUBLIC, "2606:2800:220:1::1", "64:ff9b::808:808", "2a00:1450:4001::1", "2620:fe::fe"]
    assert public_addresses(public) == public
    assert public_addresses(["::ffff:8.8.8.8"]) != []


@pytest.mark.parametrize("error", [UnicodeError("label too long"), ValueError("embedded null"), OSError("no")])
async def test_name_that_cannot_be_resolved_is_an_invalid_request(error: Exception) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise error

    fetcher = MediaFetcher(["a.example"], 1000, addresses_of=resolve)
    with pytest.raises(InvalidRequest, match="could not be fetched"):
        await fetcher.fetch("https://a.example/", "here")


@pytest.mark.parametrize(
    "answer, words",
    [
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\n\r\n", "redirected"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answered 404"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 101, "more than 100 interim responses"),
        (OK + b"content-length: 2000\r\n\r\n", "2000 bytes, at most 1000"),
        (OK + b"\r\n" + bytes(1500), "more than 1000 bytes"),
        (OK + b"content-length: 10\r\n\r\nhello", "could not be fetched"),
        (b"SSH-2.0-x\r\n\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 200_000, "could not be fetched"),
        (b"", "could not be fetched"),
    ],
)
async def test_invalid_responses_of_a_host_are_refused(answer: bytes, words: str) -> None:
    await check_refused(World(answer), "https://a.example/", words)


async def test_fetch_from_a_silent_host_times_out(autojump_clock: Any) -> None:
    world = World(b"", ends=False)
    before = trio.current_time()
    await check_refused(world, "https://a.example/", "did not come from a.example within 10 s")
    assert trio.current_time() - before == SECONDS_MAX
    assert world.far is not None
    with pytest.raises(trio.BrokenResourceError):
        await world.far.send_all(b"x")


async def test_cancelled_caller_closes_the_connection(nursery: trio.Nursery) -> None:
    world, scope = World(b"", ends=False), trio.CancelScope()

    async def fetch() -> None:
        with scope:
            await world.fetcher("a.example").fetch("https://a.example/", "x")

    nursery.start_soon(fetch)
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert world.far is not None
    with pytest.raises(trio.BrokenResourceError):
        await world.far.send_all(b"x")


async def test_refused_connection_is_an_invalid_request() -> None:
    async def connect(address: str, port: int, host: str | None) -> trio.abc.Stream:
        raise ConnectionRefusedError("nobody listens")

    async def resolve(host: str, port: int) -> list[str]:
        return [PUBLIC]

    made: Callable[..., Awaitable[Any]] = connect
    fetcher = MediaFetcher(["a.example"], 10, connect=made, addresses_of=resolve)
    with pytest.raises(InvalidRequest, match="nobody listens"):
        await fetcher.fetch("https://a.example/", "x")
