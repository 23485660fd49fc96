"""Tests routers that share endpoints. Each router gets its share of the leases, even if routers die, return or are
unreachable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import StartupError
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.peers.peer_watch import LOST_LATELY_SECONDS, PEERS_MAX, PeerList, parse_peers
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server

LIMIT = 8
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": True}
NAMES = ("one", "two")
LOST_SECONDS = 5 + 3 * 1.7 + 1  # The documented time is the time without reports of the endpoint, plus three checks.


class Setup:
    """One endpoint with a limit of LIMIT sequences, and routers by name.

    Attributes:
        is_parted: True if routers cannot reach each other.
    """

    def __init__(self, nursery: trio.Nursery, server: MemoryServer) -> None:
        self.server = server
        self.routers: dict[str, MemoryRouter] = {}
        self.is_parted = False
        self._nursery = nursery
        self._scopes: dict[str, trio.CancelScope] = {}

    async def open_router(self, name: str, **options: Any) -> None:
        async def run(task_status: trio.TaskStatus[None]) -> None:
            async def connect():
                return self.server.connect()

            with trio.CancelScope() as scope:
                self._scopes[name] = scope
                async with open_memory_router(
                    {"e": connect},
                    peers={other: self._opener(other) for other in NAMES},
                    watch=WatchSettings(health_seconds=1.0, load_seconds=0.25),
                    leases_max=LIMIT,
                    **{"own_name": name, **options},
                ) as self.routers[name]:
                    task_status.started()
                    await trio.sleep_forever()

        await self._nursery.start(run)

    async def kill(self, name: str) -> None:
        del self.routers[name]
        self._scopes.pop(name).cancel()
        await wait_all_tasks_blocked()

    async def ask(self, name: str, count: int) -> None:
        """Open streams, and keep them open."""
        for index in range(count):
            self._nursery.start_soon(self._ask, self.routers[name], f"{name}-{index}-{trio.current_time()}")
        await trio.sleep(0.1)

    async def _ask(self, router: MemoryRouter, id: str) -> None:
        async with router.client().ask("/v1/completions", BODY, headers={"x-request-id": id}):
            await trio.sleep_forever()

    def share(self, name: str) -> int | None:
        return self.routers[name].dispatch.core.endpoints["e"].lease_share

    def leases(self, name: str) -> int:
        return self.routers[name].dispatch.core.endpoints["e"].claims

    def _opener(self, name: str):
        async def connect():
            if self.is_parted or name not in self.routers:
                raise ConnectionRefusedError(111, "Connection refused")
            return self.routers[name].connect()

        return connect


@asynccontextmanager
async def opened(*names: str, **options: Any) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(open_memory_server(paused=True, block_count=1024))
        nursery = await stack.enter_async_context(trio.open_nursery())
        setup = Setup(nursery, server)
        for name in names or NAMES:
            await setup.open_router(name, **options)
        yield setup
        nursery.cancel_scope.cancel()


async def test_two_routers_learn_of_each_other_and_share_the_lease_limit(autojump_clock):
    async with opened() as setup:
        assert setup.share("one") == setup.share("two") == 1  # The endpoint has not reported the routers yet.
        await trio.sleep(3)
        assert setup.share("one") + setup.share("two") == LIMIT
        await setup.ask("one", LIMIT)
        await setup.ask("two", LIMIT)
        assert setup.leases("one") + setup.leases("two") == LIMIT


async def test_other_routers_get_the_share_of_a_dead_router_in_time(autojump_clock):
    async with opened() as setup:
        await trio.sleep(3)
        await setup.ask("one", LIMIT)
        await setup.kill("two")
        await trio.sleep(2.5)
        assert setup.leases("one") == LIMIT // 2  # The share stays the same, because the router may only be slow.
        await trio.sleep(LOST_SECONDS - 2.5)
        assert setup.share("one") == setup.leases("one") == LIMIT


async def test_returning_router_takes_its_share_without_exceeding_the_limit(autojump_clock):
    async with opened("one") as setup:
        await trio.sleep(LOST_SECONDS)
        await setup.ask("one", LIMIT)
        assert setup.leases("one") == LIMIT
        await setup.open_router("two")
        await setup.ask("two", LIMIT)
        for _ in range(40):
            await trio.sleep(0.25)
            assert setup.leases("one") + setup.leases("two") <= LIMIT
        assert setup.share("one") + setup.share("two") == LIMIT
        setup.server.engine.resume()  # The requests of the first router end.
        await trio.sleep(1)
        assert setup.leases("two") == 0  # All other requests end too.
        setup.server.engine.pause()
        await setup.ask("one", LIMIT)
        await setup.ask("two", LIMIT)
        assert setup.leases("one") == setup.leases("two") == LIMIT // 2


async def test_routers_that_cannot_reach_each_other_still_share_the_limit(autojump_clock):
    async with opened() as setup:
        await trio.sleep(3)
        setup.is_parted = True
        await setup.ask("one", LIMIT)
        await setup.ask("two", LIMIT)
        for _ in range(30):
            await trio.sleep(1)
            assert setup.leases("one") + setup.leases("two") == LIMIT
            assert setup.share("one") + setup.share("two") == LIMIT


async def test_operators_can_list_the_other_routers(autojump_clock):
    async with opened() as setup:
        await trio.sleep(3)
        async with setup.routers["one"].client().ask("/peers") as response:
            [peer] = (await response.json())["data"]
        assert peer == {"name": "two", "object": "router", "url": "http://two", "well": True}
        await setup.kill("two")
        await trio.sleep(LOST_SECONDS)
        async with setup.routers["one"].client().ask("/peers") as response:
            assert (await response.json())["data"][0]["well"] is False


async def test_stream_of_a_dead_router_is_found_without_a_retry_header(autojump_clock):
    headers = {"x-request-id": "mine"}
    async with opened() as setup:
        await trio.sleep(3)
        async with setup.routers["two"].client().ask("/v1/completions", BODY, headers=headers) as first:
            await setup.server.engine.step(3)
            await first.head()
            await setup.kill("two")
        await trio.sleep(2)
        assert len(setup.server.engine.live_requests()) == 1
        async with setup.routers["one"].client().ask("/v1/completions", BODY, headers=headers) as second:
            with trio.fail_after(5):  # A new request would wait for a step, and exceed this time.
                await second.head()
            assert len(setup.server.engine.live_requests()) == 1


async def is_taken_for_a_retry(setup: Setup) -> bool:
    """Send the same request to another router without a retry header. Return True if the second request gets the
    existing stream.

    The first router drains, which leaves its stream unread, and still answers checks.
    """
    headers, draining = {"x-request-id": "mine"}, setup.routers["two"]
    async with draining.client().ask("/v1/completions", BODY, headers=headers) as first:
        await setup.server.engine.step(3)
        await first.head()
        draining.drain()
        draining.dispatch.abort_all("the router is leaving")
        await first.read()
        async with setup.routers["one"].client().ask("/v1/completions", BODY, headers=headers):
            await wait_all_tasks_blocked()
            assert len(setup.server.engine.live_requests()) == 1
            return setup.server.app.router_streams.taken_over_total == 1


async def test_repeated_id_is_a_new_request_while_no_router_is_lost(autojump_clock):
    async with opened() as setup:
        await trio.sleep(3)
        assert not await is_taken_for_a_retry(setup)


async def test_streams_are_not_searched_long_after_a_router_was_lost(autojump_clock):
    async with opened() as setup:
        await trio.sleep(3)
        await setup.kill("two")
        await trio.sleep(LOST_SECONDS)
        assert setup.routers["one"].peer_watch.is_lost_lately()
        await setup.open_router("two")
        await trio.sleep(LOST_LATELY_SECONDS)
        assert not await is_taken_for_a_retry(setup)


async def test_streams_are_searched_after_one_failed_check_of_a_router(autojump_clock):
    async with opened() as setup:
        await trio.sleep(3)
        assert not setup.routers["one"].peer_watch.is_lost_lately()
        await setup.kill("two")
        # In this time, one check fails. Three checks must fail before the router's share is distributed.
        await trio.sleep(0.7)
        assert setup.routers["one"].peer_watch.is_lost_lately()
        assert setup.routers["one"].peer_watch.well_count == 1


async def test_router_recognizes_itself_among_the_peers(autojump_clock):
    async with opened("one", own_name=None) as setup:
        await trio.sleep(3)
        assert setup.routers["one"].peer_watch.own_name == "one"
        async with setup.routers["one"].client().ask("/peers") as response:
            assert [peer["name"] for peer in (await response.json())["data"]] == ["two"]


def test_peers_can_come_from_urls_files_and_dns(tmp_path: Path):
    path = tmp_path / "routers.toml"
    path.write_text('[[endpoints]]\nurl = "http://10.0.0.1:8000"\nid = "c"\n')
    specs, sources = parse_peers(["a=http://10.0.0.3:8000", "http://10.0.0.4:8000", f"file:{path}", "dns:routers:8000"])
    assert [spec.endpoint_id for spec in specs] == ["a", "http://10.0.0.4:8000"]
    assert [source.name for source in sources] == [f"file:{path}", "dns:routers"]


@pytest.mark.parametrize("text", ["a", "a=b", "dns:x:y", "file:/nowhere/at/all", "ftp://x"])
def test_invalid_address_of_a_peer_router_is_refused(text):
    with pytest.raises(StartupError):
        parse_peers([text])


def test_peers_are_limited_and_have_unique_names():
    peers = PeerList()
    specs, _ = parse_peers([f"r{index}=http://10.0.0.1:{8000 + index}" for index in range(PEERS_MAX)])
    peers.set_all(specs, source="x")
    with pytest.raises(StartupError, match=f"at most {PEERS_MAX}"):
        peers.set_all(specs[:1], source="y")
    with pytest.raises(StartupError, match="two routers"):
        peers.set_all([specs[0], specs[0]], source="x")
    assert len(peers.peers) == PEERS_MAX


async def test_router_still_requests_the_load_of_an_endpoint_that_pushes_its_load(autojump_clock):
    async with opened() as setup:
        await trio.sleep(20)
        async with setup.server.client().ask("/load", headers={"x-trioserve-router": "three"}) as response:
            heard = (await response.json())["routers"]
        assert heard.keys() == {"one", "two", "three"}
        assert max(heard.values()) < 2.5


async def test_router_that_only_receives_pushed_loads_does_not_count_as_alive(autojump_clock):
    headers = {"x-trioserve-router": "three"}
    async with opened("one") as setup, setup.server.client().ask("/kv_events?load=only", headers=headers) as told:
        await told.head()
        await trio.sleep(10)
        async with setup.server.client().ask("/load", headers={"x-trioserve-router": "one"}) as response:
            assert (await response.json())["routers"].keys() == {"one"}
