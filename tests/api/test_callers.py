"""Tests the rights of an API key at servers and routers: its tenant, its priority, and the cached blocks that
it hits.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules, ApiKeys, CallerKind
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.http.exchange import Headers
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_router import open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server

KEYS = ("alice-key", "bob-key")
ADMIN = "admin-key"
GATEWAY = "gateway-key"
PATH = "/v1/completions"
SECRET = "Patient 4711, born 1980-02-03, has been diagnosed with illness Q."


class Front:
    """A server, or a router with its servers.

    Args:
        connect: makes a client of the server or the router.
        servers: the engines' servers, by name.
    """

    def __init__(self, connect: Callable[..., MemoryClient], servers: dict[str, MemoryServer]) -> None:
        self._connect = connect
        self.servers = servers

    def client(self, key: str | None = None, **headers: str) -> MemoryClient:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["authorization"] = f"Bearer {key}"
        return self._connect(headers=named)

    async def status(self, key: str | None, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        async with self.client(key, **headers).ask(path, body, method="GET" if body is None else "POST") as response:
            status = await response.head()
            return status, await response.read()

    async def cached_tokens(self, key: str | None, prompt: str, headers: Mapping[str, str] = {}, **body: Any) -> int:
        status, said = await self.status(key, PATH, {"prompt": prompt, "max_tokens": 1, **body}, **headers)
        assert status == 200, said
        return json.loads(said)["usage"]["prompt_tokens_details"]["cached_tokens"]


@asynccontextmanager
async def open_front(
    kind: str,
    *,
    keys: tuple[str, ...] = KEYS,
    admin: str | None = ADMIN,
    endpoint: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    ids: str = "a",
    **rules: Any,
) -> AsyncIterator[Front]:
    """Open a server or a router.

    Args:
        kind: "server" or "router".
        endpoint: options of the engines.
        router: options of the router.
    """
    access = AccessRules(**{"gateway_api_keys": (GATEWAY,) if keys else (), **rules})
    given: dict[str, Any] = {"api_keys": keys, "admin_api_key": admin if keys else None, "access": access}
    async with AsyncExitStack() as stack:
        if kind == "server":
            server = await stack.enter_async_context(open_memory_server(**given, **(endpoint or {})))
            yield Front(server.client, {"a": server})
            return
        servers = {id: await stack.enter_async_context(open_memory_server(**(endpoint or {}))) for id in ids}

        def opener(id: str) -> Callable[[], Any]:
            async def connect() -> trio.abc.Stream:
                return servers[id].connect()

            return connect

        endpoints = {id: opener(id) for id in ids}
        made = await stack.enter_async_context(open_memory_router(endpoints, **given, **(router or {})))
        yield Front(made.client, servers)


BOTH = pytest.mark.parametrize("kind", ["server", "router"])


async def order_of_ends(
    kind: str, evil_headers: Callable[[int], dict[str, str]], evil_body: Mapping[str, Any], **options: Any
) -> list[str]:
    """Return the order in which requests end. Alice sends sixteen requests, then Bob sends two. One request runs at a
    time.
    """
    ended: list[str] = []
    async with open_front(
        kind,
        endpoint={"max_num_seqs": 1, "max_queued_requests": 40, "step_seconds": 0.1},
        router={"leases_max": 1},
        **options,
    ) as front:

        async def ask(name: str, body: Mapping[str, Any], headers: dict[str, str]) -> None:
            key = None if options.get("keys") == () else f"{name}-key"
            sent = {"prompt": "x", "max_tokens": 2, "ignore_eos": True, **body}
            status, said = await front.status(key, PATH, sent, **headers)
            assert status == 200, said
            ended.append(name)

        async with trio.open_nursery() as nursery:
            for index in range(16):
                nursery.start_soon(ask, "alice", evil_body, evil_headers(index))
                await wait_all_tasks_blocked()
            for _ in range(2):
                nursery.start_soon(ask, "bob", {}, {})
                await wait_all_tasks_blocked()
    return ended


@BOTH
async def test_a_key_gains_no_turn_by_sending_other_tenant_names(kind, autojump_clock):
    ended = await order_of_ends(kind, lambda index: {"x_tenant_id": f"tenant-{index}"}, {})
    assert ended == await order_of_ends(kind, lambda _: {}, {})
    # Bob's request ends after alice's requests that already had a lease, and after one turn of alice.
    assert ended.index("bob") < 8


@BOTH
async def test_tenant_header_sets_the_tenant_if_the_server_has_no_keys(kind, autojump_clock):
    ended = await order_of_ends(kind, lambda _: {"x_tenant_id": "alice"}, {}, keys=())
    assert ended.index("bob") < 8


@BOTH
async def test_a_key_cannot_use_a_lower_priority_number_than_the_operator_allows(kind, autojump_clock):
    async with open_front(kind) as front:
        status, said = await front.status(KEYS[0], PATH, {"prompt": "x", "max_tokens": 1, "priority": -1})
        assert status == 400
        error = json.loads(said)["error"]
        assert error["param"] == "priority"
        assert "priority is -1" in error["message"]
        assert "is 0 (lower is sooner)" in error["message"]
        for key, priority in ((KEYS[0], 0), (KEYS[0], 5), (ADMIN, -100), (GATEWAY, -100)):
            status, said = await front.status(key, PATH, {"prompt": "x", "max_tokens": 1, "priority": priority})
            assert status == 200, (key, said)


@BOTH
@pytest.mark.parametrize(("keys", "key"), [(KEYS, KEYS[0]), ((), None)])
async def test_the_operator_sets_the_lowest_priority_number(kind, keys, key, autojump_clock):
    async with open_front(kind, keys=keys, priority_min=-3) as front:
        for priority, expected in ((-4, 400), (-3, 200)):
            body = {"prompt": "x", "max_tokens": 1, "priority": priority}
            assert (await front.status(key, PATH, body))[0] == expected


@BOTH
async def test_any_priority_is_allowed_at_a_server_without_keys(kind, autojump_clock):
    async with open_front(kind, keys=()) as front:
        assert (await front.status(None, PATH, {"prompt": "x", "max_tokens": 1, "priority": -100}))[0] == 200


@BOTH
async def test_a_key_does_not_hit_cached_prompts_of_another_key(kind, autojump_clock):
    async with open_front(kind) as front:
        alice, bob = KEYS
        assert await front.cached_tokens(alice, SECRET) == 0
        assert await front.cached_tokens(alice, SECRET) > 0
        assert await front.cached_tokens(bob, SECRET) == 0
        assert await front.cached_tokens(ADMIN, SECRET) == 0


@BOTH
async def test_the_request_salt_is_combined_with_the_salt_of_its_key(kind, autojump_clock):
    async with open_front(kind) as front:
        alice, bob = KEYS
        assert await front.cached_tokens(alice, SECRET, cache_salt="s") == 0
        assert await front.cached_tokens(alice, SECRET) == 0
        assert await front.cached_tokens(bob, SECRET, cache_salt="s") == 0
        assert await front.cached_tokens(alice, SECRET, cache_salt="s") > 0
        for salt in ("", "s" * 257):
            body = {"prompt": SECRET, "max_tokens": 1, "cache_salt": salt}
            status, said = await front.status(alice, PATH, body)
            assert (status, json.loads(said)["error"]["param"]) == (400, "cache_salt")


@BOTH
async def test_tenants_of_a_gateway_do_not_share_cached_prompts(kind, autojump_clock):
    async with open_front(kind) as front:
        assert await front.cached_tokens(GATEWAY, SECRET, {"x_tenant_id": "a"}) == 0
        assert await front.cached_tokens(GATEWAY, SECRET, {"x_tenant_id": "b"}) == 0
        assert await front.cached_tokens(GATEWAY, SECRET, {"x_tenant_id": "a"}) > 0


@BOTH
@pytest.mark.parametrize("options", [{"shares_prefix_cache": True}, {"keys": ()}])
async def test_cached_prompts_are_shared_by_option_or_without_keys(kind, options, autojump_clock):
    async with open_front(kind, **options) as front:
        alice, bob = (None, None) if options.get("keys") == () else KEYS
        assert await front.cached_tokens(alice, SECRET) == 0
        assert await front.cached_tokens(bob, SECRET) > 0
        assert await front.cached_tokens(bob, SECRET, cache_salt="s") == 0


async def test_a_router_sends_endpoints_tenant_names_that_reveal_no_key(autojump_clock):
    seen: list[str] = []
    async with open_front("router") as front:
        dispatch = front.servers["a"].engine.dispatch
        enter = dispatch.core.enter

        def watched(request: Any, now: float) -> Any:
            seen.append(request.tenant)
            return enter(request, now)

        dispatch.core.enter = watched  # type: ignore[method-assign]
        for key, headers in (
            (KEYS[0], {}),
            (KEYS[0], {"x_tenant_id": "invented"}),
            (KEYS[1], {}),
            (GATEWAY, {"x_tenant_id": "blue"}),
            (GATEWAY, {"x_tenant_id": "red"}),
            (ADMIN, {"x_tenant_id": "green"}),
        ):
            await front.cached_tokens(key, "x", headers)
    assert seen[0] == seen[1]
    assert len(set(seen)) == 5
    assert seen[-1] == "green"
    keys = ApiKeys(KEYS, admin_key=ADMIN)
    assert not {keys.caller(Headers([("authorization", f"Bearer {key}")])).owner for key in KEYS} & set(seen)


@BOTH
async def test_metrics_can_be_restricted_to_the_admin(kind, autojump_clock):
    async with open_front(kind, metrics_need_key=True) as front:
        for key, expected in ((None, 401), (KEYS[0], 403), (GATEWAY, 403), (ADMIN, 200)):
            assert (await front.status(key, "/metrics"))[0] == expected, key
        for path in ("/health", "/ready", "/version"):
            assert (await front.status(None, path))[0] == 200
    async with open_front(kind) as front:
        assert (await front.status(None, "/metrics"))[0] == 200


async def test_load_can_be_restricted_to_callers_with_a_key(autojump_clock):
    async with open_front("server", load_needs_key=True) as front:
        for key, expected in ((None, 401), ("wrong", 401), (KEYS[0], 200), (ADMIN, 200)):
            assert (await front.status(key, "/load"))[0] == expected, key
    async with open_front("server") as front:
        assert (await front.status(None, "/load"))[0] == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rules": AccessRules(metrics_need_key=True), "keys": KEYS}, "--admin-api-key"),
        ({"rules": AccessRules(load_needs_key=True)}, "--api-key"),
        ({"admin_key": ADMIN}, "API key"),
        ({"rules": AccessRules(gateway_api_keys=("two words",))}, "printable"),
    ],
)
def test_rule_that_needs_a_missing_key_fails_at_the_server_start(options, named):
    with pytest.raises(StartupError, match=named):
        ApiKeys(**options)


def test_a_key_of_two_kinds_has_the_more_trusted_kind():
    keys = ApiKeys(("same", "other"), rules=AccessRules(gateway_api_keys=("same",)))
    assert keys.caller(Headers([("authorization", "Bearer same")])).kind is CallerKind.GATEWAY
    assert keys.caller(Headers([("authorization", "Bearer other")])).kind is CallerKind.ORDINARY


def test_cache_salt_of_an_api_key_hides_the_key_and_is_equal_on_every_server():
    salts = set()
    for own in (None, "s", "\udc00"):
        one, other = (
            ApiKeys(KEYS).caller(Headers([("authorization", "Bearer alice-key")])).cache_salt(own, "ignored")
            for _ in range(2)
        )
        assert one == other
        assert one is not None
        assert len(one) == 32
        salts.add(one)
    assert len(salts) == 3
    with pytest.raises(InvalidRequest):
        ApiKeys(KEYS).caller(Headers([("authorization", "Bearer alice-key")])).cache_salt("", None)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_request_without_a_model_is_refused_by_option(make_api: Any, path: str) -> None:
    api = make_api(access=AccessRules(model_is_required=True))
    await api.check_refused(path, {"prompt": "a"}, param="model")
    assert (await api.context("POST", path, {"prompt": "a", "model": "letters"})).status == 200
    assert (await make_api().context("POST", path, {"prompt": "a"})).status == 200
