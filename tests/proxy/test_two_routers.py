"""Tests two routers in front of the same endpoints. One router dies and its clients resume at the other router, or a
client leaves.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId
from trioserve.proxy.peers import retries
from trioserve.proxy.peers.kept_stream import ClientLeftNotice, ClientLeftNotices, Found, KeptStream
from trioserve.testing.memory_client import ConnectionLost
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server

PATH = "/v1/completions"
TEXT = "Hello, all of you, and good morning!"


class Setup:
    """Endpoints and routers.

    Attributes:
        servers: Endpoints by id.
        routers: Living routers by name.
    """

    def __init__(self, nursery: trio.Nursery, servers: dict[str, MemoryServer]) -> None:
        self.servers = servers
        self.routers: dict[str, MemoryRouter] = {}
        self._nursery = nursery
        self._lives: dict[str, tuple[trio.CancelScope, trio.Event]] = {}

    async def open_router(self, name: str, **options: Any) -> None:
        async def run(task_status: trio.TaskStatus[None]) -> None:
            scope, over = self._lives[name] = trio.CancelScope(), trio.Event()
            connects = {id: self._opener(server) for id, server in self.servers.items()}
            try:
                with scope:
                    async with open_memory_router(connects, **{"has_peers": True, **options}) as self.routers[name]:
                        task_status.started()
                        await trio.sleep_forever()
            finally:
                over.set()

        await self._nursery.start(run)

    async def kill(self, name: str) -> None:
        """End a router at once, without any notice to other servers."""
        del self.routers[name]
        scope, over = self._lives.pop(name)
        scope.cancel()
        await over.wait()
        await wait_all_tasks_blocked()

    def ask(self, router: str, *, id: str = "mine", last: str | None = None, headers: Any = None, **fields: Any):
        body = {"model": "fake", "prompt": "hello", "max_tokens": 100, "stream": True, **fields}
        content_of = {"x-request-id": id, **({} if last is None else {"last-event-id": last}), **(headers or {})}
        return self.routers[router].client().ask(PATH, body, headers=content_of)

    async def step(self, count: int) -> None:
        await wait_all_tasks_blocked()
        for server in self.servers.values():
            await server.engine.step(count)
        await wait_all_tasks_blocked()

    def resume(self) -> None:
        for server in self.servers.values():
            server.engine.resume()

    @property
    def live_count(self) -> int:
        """Number of requests at all endpoints."""
        return sum(len(server.engine.live_requests()) for server in self.servers.values())

    @property
    def blocks_used(self) -> int:
        return sum(server.engine.stats().blocks_used for server in self.servers.values())

    async def assert_all_free(self) -> None:
        for router in self.routers.values():
            await router.assert_all_free()
        for server in self.servers.values():
            await server.assert_all_free()

    @staticmethod
    def _opener(server: MemoryServer):
        async def connect():
            return server.connect()

        return connect


@asynccontextmanager
async def opened(ids: str = "ab", *, engine: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        servers = {
            id: await stack.enter_async_context(
                open_memory_server(**{"response": TEXT, "paused": True, **(engine or {})})
            )
            for id in ids
        }
        nursery = await stack.enter_async_context(trio.open_nursery())
        setup = Setup(nursery, servers)
        for name in ("one", "two"):
            await setup.open_router(name, **options)
        yield setup
        await setup.assert_all_free()
        nursery.cancel_scope.cancel()


async def text_of(response) -> str:
    return "".join([event["choices"][0]["text"] async for event in response if event["choices"]])


async def test_client_of_a_dead_router_that_received_no_event_gets_the_same_stream(autojump_clock):
    async with opened() as setup:
        async with setup.ask("one") as first:
            await setup.step(4)
            await setup.kill("one")
            with pytest.raises(ConnectionLost):
                await first.read()
        assert setup.live_count == 1
        async with setup.ask("two", last="") as second:
            await second.head()
            assert setup.live_count == 1
            assert sum(setup.routers["two"].dispatch.core.stats().leases.values()) == 1
            setup.resume()
            assert await text_of(second) == TEXT


async def test_a_client_that_leaves_stops_its_stream_at_once(autojump_clock):
    async with opened() as setup:
        async with setup.ask("one") as response:
            await setup.step(4)
            await response.head()
            assert setup.blocks_used > 0
        await wait_all_tasks_blocked()
        assert setup.blocks_used == 0
        assert setup.live_count == 0
        await setup.assert_all_free()


async def test_a_client_that_leaves_before_the_head_stops_its_stream_at_once(autojump_clock):
    async with opened() as setup:
        async with setup.ask("one"):
            await wait_all_tasks_blocked()
            assert setup.live_count == 1
        await wait_all_tasks_blocked()
        assert setup.live_count == 0


async def test_an_aborted_request_stops_its_stream_at_once(autojump_clock):
    async with opened() as setup, setup.ask("one") as response:
        await setup.step(4)
        await response.head()
        async with setup.routers["one"].client().ask("/v1/requests/mine", method="DELETE") as aborted:
            assert await aborted.head() == 200
        await wait_all_tasks_blocked()
        assert setup.blocks_used == 0
        await response.read()


async def test_streams_of_a_draining_router_can_resume_at_the_other_router(autojump_clock):
    async with opened() as setup:
        async with setup.ask("one") as first:
            await setup.step(4)
            await first.head()
            setup.routers["one"].drain()
            setup.routers["one"].dispatch.abort_all("the router is leaving")
            await first.read()
            assert b"draining" in first.body
        assert setup.live_count == 1
        async with setup.ask("two", last="") as second:
            await second.head()
            setup.resume()
            assert await text_of(second) == TEXT


async def test_stream_ends_if_no_client_requests_it_again(autojump_clock):
    async with opened() as setup:
        async with setup.ask("one") as response:
            await setup.step(4)
            await response.head()
            await setup.kill("one")
        await trio.sleep(6)
        await wait_all_tasks_blocked()
        assert setup.live_count == setup.blocks_used == 0


@pytest.mark.parametrize("other", [{"id": "yours"}, {"prompt": "other"}, {"headers": {"x-tenant-id": "t"}}])
async def test_another_request_never_gets_the_stream_of_a_dead_router(autojump_clock, other):
    async with opened() as setup:
        async with setup.ask("one") as first:
            await setup.step(4)
            await first.head()
            await setup.kill("one")
        async with setup.ask("two", last="", **other) as second:
            await wait_all_tasks_blocked()
            assert setup.live_count == 2
            setup.resume()
            assert await text_of(second) == TEXT
        await trio.sleep(6)


async def test_callers_with_other_keys_never_get_the_stream_of_a_dead_router(autojump_clock):
    keys = {"api_keys": ("one", "two"), "endpoint_api_key": None}
    async with opened(**keys) as setup:
        async with setup.ask("one", headers={"authorization": "Bearer one"}) as first:
            await setup.step(4)
            await first.head()
            await setup.kill("one")
        async with setup.ask("two", last="", headers={"authorization": "Bearer two"}):
            await wait_all_tasks_blocked()
            assert setup.live_count == 2
        async with setup.ask("two", last="", headers={"authorization": "Bearer one"}) as third:
            await third.head()
            setup.resume()
            assert await text_of(third) == TEXT
        await trio.sleep(6)


async def test_repeated_request_takes_over_the_stream_of_a_running_router(autojump_clock):
    async with opened() as setup, setup.ask("one") as first:
        await setup.step(4)
        await first.head()
        async with setup.ask("two", last="") as second:
            await second.head()
            await first.read()
            assert b"stream_taken_over" in first.body
            assert setup.live_count == 1
            setup.resume()
            assert await text_of(second) == TEXT


async def test_repeated_id_is_a_new_request(autojump_clock):
    async with opened() as setup, setup.ask("one") as first, setup.ask("two") as second:
        await setup.step(4)
        assert setup.live_count == 2
        setup.resume()
        assert await text_of(first) == await text_of(second) == TEXT


async def test_retry_of_a_client_library_finds_an_unread_stream(autojump_clock):
    retry = {"x-stainless-retry-count": "1"}
    async with opened() as setup:
        async with setup.ask("one") as first:
            await setup.step(4)
            await first.head()
            async with setup.ask("two", headers=retry):
                await wait_all_tasks_blocked()
                assert setup.live_count == 2  # There are two streams, because a client still reads the first stream.
            await wait_all_tasks_blocked()
            await setup.kill("one")
        async with setup.ask("two", headers=retry) as second:
            await second.head()
            assert setup.live_count == 1
            setup.resume()
            assert await text_of(second) == TEXT


async def test_concurrent_searches_for_streams_are_limited(open_pair, autojump_clock, monkeypatch):
    monkeypatch.setattr(retries, "SEARCHES_MAX", 2)
    async with open_pair("w1 w2", has_peers=True) as pair, AsyncExitStack() as asked:
        for endpoint in pair.endpoints.values():
            endpoint.is_silent = True
        body = {"model": "fake", "prompt": "hello", "stream": True}

        def open_count() -> int:
            return sum(len(endpoint.open) for endpoint in pair.endpoints.values())

        for number in range(4):
            headers = {"x-request-id": f"r{number}", "x-stainless-retry-count": "1"}
            await asked.enter_async_context(pair.client().ask(PATH, body, headers=headers))
        await wait_all_tasks_blocked()
        assert open_count() == 2  # Two streams were not searched, so they have begun.
        again = {"x-request-id": "r4", "last-event-id": ""}
        await asked.enter_async_context(pair.client().ask(PATH, body, headers=again))
        await trio.sleep(1.5)
        assert open_count() == 4
        await trio.sleep(1)
        assert open_count() == 5  # This search ran after the other searches had ended.
    await pair.assert_all_free()


async def test_stream_of_a_dead_router_that_a_client_resumes_may_exceed_the_lease_limit(autojump_clock):
    async with opened("a", leases_max=1) as setup, setup.ask("two", id="other") as other:
        await setup.step(1)
        async with setup.ask("one") as first:
            await setup.step(4)
            await first.head()
            await setup.kill("one")
        async with setup.ask("two", last="") as second:
            assert await second.head() == 200
            assert setup.live_count == 2
            setup.resume()
            assert await text_of(second) == await text_of(other) == TEXT


async def test_client_that_has_the_whole_stream_gets_no_content():
    async with opened() as setup, setup.ask("two", last=".") as response:
        assert await response.head() == 204
        assert setup.live_count == 0


async def test_invalid_last_event_id_is_refused():
    async with opened() as setup, setup.ask("two", last="12") as response:
        assert await response.head() == 400
        assert "Last-Event-ID" in (await response.json())["error"]["message"]


async def test_stream_with_too_many_choices_has_no_ids_and_refuses_a_position():
    engine = {"max_num_seqs": 160, "block_count": 2000, "max_num_batched_tokens": 2000, "max_queued_requests": 200}
    prompts = {"prompt": ["x", "y"], "max_tokens": 1}
    async with opened(engine=engine, sequences_max=200) as setup:
        setup.resume()
        async with setup.ask("one", id="few", n=64, **prompts) as few, setup.ask("one", n=65, **prompts) as many:
            await few.read()
            await many.read()
        assert few.body.count(b"\nid: ") > 128
        assert b"\nid: " not in many.body
        assert many.body.endswith(b"data: [DONE]\n\n")
        async with setup.ask("two", last="", n=65, **prompts) as again:
            assert await again.head() == 400
            message = (await again.json())["error"]["message"]
        assert "the stream has 130 choices" in message


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
APIS = {
    "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": 100}),
    "two choices": ("/v1/completions", {"prompt": "hello", "n": 2, "max_tokens": 100}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 100}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
}


def asked(setup, router, api, *, id="mine", last=None, **fields):
    path, body = APIS[api]
    headers = {"x-request-id": id, **({} if last is None else {"last-event-id": last})}
    body = {"model": "fake", "stream": True, "temperature": 0, **body, **fields}
    return setup.routers[router].client().ask(path, body, headers=headers)


def content_of(raw: bytes) -> tuple[dict[int, str], list[str]]:
    """Return the text and the finish reason of each choice, from the events of a response.

    Tests compare these instead of the events, because the grouping of events depends on timing.
    """
    texts: dict[int, str] = {}
    ends: list[object] = []
    for line in raw.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        delta = event.get("delta")
        texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else (delta or {}).get("text", ""))
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                ends.append((choice["index"], choice["finish_reason"]))
        if event.get("usage"):
            usage = event["usage"]
            ends.append(usage.get("completion_tokens") or usage["output_tokens"])
        if str(event.get("type")).endswith((".done", "_start", "_stop", ".created", ".completed", ".added")):
            ends.append(event["type"])
    ends += re.findall(rb"data: \[DONE\]", raw)
    return texts, sorted(map(str, ends))  # The order of choices depends on timing too.


def last_id(raw: bytes) -> str:
    """Return the id of the last complete event."""
    whole = raw[: raw.rfind(b"\n\n") + 2]
    return (re.findall(rb"^id: ?(.*)$", whole, re.MULTILINE) or [b""])[-1].decode()


async def undisturbed(api):
    async with opened("a", engine={"paused": False}) as setup, asked(setup, "one", api) as response:
        return content_of(await response.read())


async def read_for_a_while(response) -> None:
    with trio.move_on_after(0.01):
        await response.read()


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
@pytest.mark.parametrize("api", APIS)
async def test_client_of_a_dead_router_gets_each_event_once(autojump_clock, api, steps):
    expected = await undisturbed(api)
    async with opened() as setup:
        async with asked(setup, "one", api) as first:
            await setup.step(steps)
            await read_for_a_while(first)
            await setup.kill("one")
        async with asked(setup, "two", api, last=last_id(first.body)) as second:
            assert await second.head() == 200
            assert setup.live_count == 1
            assert sum(setup.routers["two"].dispatch.core.stats().leases.values()) > 0
            setup.resume()
            await second.read()
        assert content_of(first.body + second.body) == expected


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize("api", ["completions", "two choices", "chat", "messages", "responses"])
async def test_stream_that_is_no_longer_kept_is_computed_again(autojump_clock, api, steps):
    expected = await undisturbed(api)
    async with opened() as setup:
        async with asked(setup, "one", api) as first:
            await setup.step(steps)
            await read_for_a_while(first)
            await setup.kill("one")
        await trio.sleep(6)
        assert setup.live_count == 0
        setup.resume()
        async with asked(setup, "two", api, last=last_id(first.body)) as second:
            await second.read()
        assert content_of(first.body + second.body) == expected


async def test_router_recomputes_a_resumed_stream_only_after_its_known_tokens(autojump_clock):
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True}
    async with opened() as setup:
        resume = {"token_ids": [list(b"known")], "finished": [False], "seed": 3}
        setup.resume()
        async with setup.ask("one", id="whole", **body, resume=resume) as whole:
            await whole.read()
        expected = content_of(whole.body)
    async with opened() as setup:
        async with setup.ask("one", **body, resume=resume) as first:
            await setup.step(5)
            await read_for_a_while(first)
            await setup.kill("one")
        await trio.sleep(6)
        setup.resume()
        async with setup.ask("two", last=last_id(first.body), **body, resume=resume) as second:
            await second.read()
        assert content_of(first.body + second.body) == expected


async def test_different_text_is_never_sent_as_the_rest(autojump_clock):
    async with opened() as setup:
        async with asked(setup, "one", "chat") as first:
            await setup.step(7)
            await read_for_a_while(first)
            await setup.kill("one")
        await trio.sleep(6)
        known = last_id(first.body)
        other = known[:-1] + ("0" if known[-1] != "0" else "1")
        setup.resume()
        async with asked(setup, "two", "chat", last=other) as second:
            assert await second.head() == 409
            assert (await second.json())["error"]["code"] == "resume_mismatch"
        await wait_all_tasks_blocked()
        assert setup.live_count == 0


async def test_both_routers_choose_the_same_seed_if_the_request_has_none(autojump_clock):
    async def seed_of(router, id, **fields):
        async with asked(setup, router, "chat", id=id, temperature=1, **fields) as response:
            await response.read()
            return json.loads(response.headers["x-trioserve-resume"])["seed"]

    async with opened(engine={"paused": False}) as setup:
        seed = await seed_of("one", "a")
        assert await seed_of("two", "a") == seed
        assert await seed_of("one", "b") != seed
        assert await seed_of("one", "c", seed=7) == 7


async def test_stream_resumes_if_the_second_router_loses_the_endpoint_too(autojump_clock):
    """The second router reads the stream from its first event. So it can resume the stream at another endpoint."""
    expected = await undisturbed("chat")
    async with opened() as setup:
        async with asked(setup, "one", "chat") as first:
            await setup.step(7)
            await read_for_a_while(first)
            await setup.kill("one")
        async with asked(setup, "two", "chat", last=last_id(first.body)) as second:
            await setup.step(2)
            await read_for_a_while(second)
            [home] = [server for server in setup.servers.values() if server.engine.live_requests()]
            await home.hang_up()
            await wait_all_tasks_blocked()
            setup.resume()
            await second.read()
        assert content_of(first.body + second.body) == expected
        await trio.sleep(6)


async def test_clients_of_a_single_router_get_no_ids(autojump_clock):
    async with opened("a", has_peers=False, engine={"paused": False}) as setup, asked(setup, "one", "chat") as response:
        assert b"id: " not in await response.read()


def test_notice_that_ends_an_unused_found_stream_has_its_reader_number():
    said: list[ClientLeftNotice] = []

    class Heard(ClientLeftNotices):
        def has_kept(self, id: EndpointId) -> bool:
            return True

        def send(self, notice: ClientLeftNotice) -> None:
            said.append(notice)

    def request(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(end=lambda: None)

    found = SimpleNamespace(has_ended=False, header={"x-trioserve-kept": "5;reader=3"}.get)
    admission: Any = SimpleNamespace(has_token=False, end_reason=None)
    where, elsewhere = (SimpleNamespace(id=EndpointId(id), request=request) for id in "ab")
    stream = KeptStream("name", Heard(), known=None, found=Found(where.id, request(), found), choice_count=1)
    stream.note_admitted(admission, on_recomputed=lambda events, resume: None)
    stream.request(elsewhere, "POST", "/", [], b"")
    assert [(notice.name, notice.reader) for notice in said] == [("name", 3)]
