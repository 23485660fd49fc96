"""Tests all routes of all servers: which routes change state, which callers may use them, and which routes web pages
may use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from trioserve.api import routes
from trioserve.api.caller import AccessRules
from trioserve.api.images import image_routes
from trioserve.api.route_table import Route, RouteTable
from trioserve.proxy import router_app
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_router import open_memory_router
from trioserve.testing.memory_server import open_memory_image_server, open_memory_server

TABLES: dict[str, list[Route[Any]]] = {
    server: list(RouteTable[Any](operations).routes.values())
    for server, operations in {
        "engine": routes.OPERATIONS,
        "images": image_routes.OPERATIONS,
        "router": router_app.OPERATIONS,
    }.items()
}
ROUTES = [pytest.param(route, id=f"{server} {route.path}") for server, table in TABLES.items() for route in table]
SERVERS = pytest.mark.parametrize("kind", list(TABLES))

FORWARDS = frozenset({"forward_anywhere", "forward_batch", "forward_home", "forward_kept", "forward_stream"})
"""They pass a request on with its own method, so what they do at GET is what an engine's route does at GET."""
READS = frozenset(
    {
        *("greet", "list_batches", "list_endpoints", "list_files", "list_image_models", "list_image_requests"),
        *("list_input_items", "list_message_batches", "list_models", "list_peers", "list_requests", "list_running"),
        *("list_sessions", "list_tags", "read_api_version", "read_file_content", "read_health", "read_image_model"),
        *("read_image_openapi", "read_is_paused", "read_is_sleeping", "read_kept_stream", "read_load"),
        *("read_message_batch", "read_message_results", "read_metrics", "read_model", "read_openapi", "read_ready"),
        *("read_response", "read_steps", "read_stream", "read_tasks", "read_tokenizer_info", "read_version"),
        *("read_weight_version", "read_world_size", "retrieve_batch", "retrieve_file", "show_file"),
        *("show_image_page", "show_page", "stream_kv_events", "stream_load", "stream_page_events"),
    }
)
"""Handlers of GET. Add one only if a link in any web page may call it: it changes nothing."""
OF_CLIENTS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/decisions"),
        *("/v1/messages/batches", "/v1/embeddings", "/v1/responses", "/v1/responses/input_tokens", "/v1/files"),
        *("/v1/batches", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/tokenize", "/detokenize"),
        "/pooling",
        *("/v1/images/generations", "/v1/images/edits", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
        # The routes below address an object of the caller by its id.
        *("/v1/requests/abort", "/abort_request", "/abort_requests", "/v1/requests/{request}"),
        *("/v1/requests/{request}/hand-over", "/v1/responses/{response}", "/v1/responses/{response}/cancel"),
        *("/v1/files/{file}", "/v1/messages/batches/{batch}", "/v1/messages/batches/{batch}/cancel"),
        *("/v1/batches/{batch}/cancel", "/v1/streams/{stream}", "/v1/kept_streams/{stream}"),
        "/v1/sessions/{session}",
    }
)
"""Paths whose POST and DELETE are for every client. All others have to be the operator's."""

HOST = "memory"
"""By which the clients here call the server."""
PAGE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
OWN_PAGE = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize("route", ROUTES)
def test_get_only_reads_and_post_and_delete_need_an_operator_unless_clients_may_call_them(route):
    for method, operation in route.operations.items():
        name = operation.handler.__name__
        if operation.is_websocket:
            assert method == "GET"  # PageGate refuses the websockets of other sites' pages.
        elif method == "GET":
            assert name in READS | FORWARDS, f"GET {route.path} calls {name}: check that this changes nothing"
        else:
            assert method in ("POST", "DELETE")
            assert name not in READS
            assert route.operates(method) or route.path in OF_CLIENTS, (
                f"{method} {route.path}: give the route is_operators=True, unless every client may do it"
            )
            assert not (route.operates(method) and route.path in OF_CLIENTS)
            assert route.needs_key, "links of other sites reach routes that need no key"


def test_sglangs_flush_cache_accepts_only_post():
    assert [each.method for each in routes.OPERATIONS if each.path == "/flush_cache"] == ["POST"]


@asynccontextmanager
async def served(kind: str, rules: AccessRules) -> AsyncIterator[MemoryClient]:
    async with AsyncExitStack() as stack:
        if kind == "images":
            yield (await stack.enter_async_context(open_memory_image_server(access=rules))).client(http=2)
            return
        server = await stack.enter_async_context(open_memory_server(access=rules if kind == "engine" else None))
        if kind == "engine":
            yield server.client(http=2)
            return

        async def connect() -> Any:
            return server.connect()

        yield (await stack.enter_async_context(open_memory_router({"a": connect}, access=rules))).client(http=2)


def changes(kind: str) -> Iterable[tuple[Route[Any], str, str]]:
    """Yield the route, the method and a path of each operation whose method is not GET."""
    for route in TABLES[kind]:
        for method in route.operations.keys() - {"GET"}:
            path = "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))
            yield route, method, path


async def asked(
    client: MemoryClient, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Send a request, and return the status and the error code."""
    async with client.ask(path, body, method=method, headers=headers) as response:
        status = await response.head()
        await response.read()
    return status, response.headers.get("x-trioserve-reason", "")


@SERVERS
async def test_pages_of_other_sites_cannot_change_anything(autojump_clock, kind):
    async with served(kind, AccessRules(host_names=(HOST,))) as client:
        for _, method, path in changes(kind):
            for headers in (PAGE, {"origin": "null"}, {"sec-fetch-site": "same-site"}):
                async with client.ask(path, b"{}", method=method, headers=headers) as response:
                    assert await response.head() == 403, (method, path, headers)
                    assert response.headers["x-trioserve-reason"] == "other_site"
                    await response.read()


@SERVERS
async def test_a_page_with_a_rebound_dns_name_cannot_read_anything(autojump_clock, kind):
    async with served(kind, AccessRules(host_names=())) as client:
        for route in TABLES[kind]:
            path = "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))
            for method in {"GET", *route.operations}:
                async with client.ask(path, method=method, headers=OWN_PAGE) as response:
                    assert await response.head() == 403, path
                    assert response.headers["x-trioserve-reason"] == "unknown_host"
                    await response.read()


@SERVERS
async def test_callers_without_a_key_cannot_operate_the_server_but_may_use_it(autojump_clock, kind):
    async with served(kind, AccessRules(operates_without_key=False)) as client:
        for route, method, path in changes(kind):
            status, code = await asked(client, method, path)
            assert ((status, code) == (403, "operator_routes_off")) is route.operates(method), (method, path, status)
        for path in ("/debug/tasks",) if kind == "images" else ("/debug/tasks", "/v1/requests"):
            assert await asked(client, "GET", path) == (403, "operator_routes_off")
        for path in ("/v1/models", "/health"):
            assert (await asked(client, "GET", path))[0] == 200


@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_callers_without_a_key_may_abort_a_known_id_but_not_all_requests(autojump_clock, kind):
    async with served(kind, AccessRules(operates_without_key=False)) as client:
        for path, body in (("/abort_request", {"abort_all": True}), ("/abort_requests", {})):
            assert await asked(client, "POST", path, body) == (403, "operator_routes_off")
        for path, body in (
            ("/abort_request", {"rid": "x"}),
            ("/abort_requests", {"request_ids": ["x"]}),
            ("/v1/requests/abort", {"ids": ["x"]}),
        ):
            assert (await asked(client, "POST", path, body))[0] == 200


@SERVERS
async def test_operators_routes_need_json_or_no_body(autojump_clock, kind):
    async with served(kind, AccessRules()) as client:
        for route, method, path in changes(kind):
            for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
                headers = {"content-type": content_type}
                async with client.ask(path, b"{}", method=method, headers=headers) as response:
                    assert (await response.head() == 415) is route.operates(method), (path, content_type)
                    await response.read()
            async with client.ask(path, b"", method=method, headers={"content-type": "text/plain"}) as response:
                assert await response.head() not in (403, 415), path
                await response.read()


async def test_page_with_the_admins_key_may_operate_a_server_with_keys(autojump_clock):
    rules = AccessRules(host_names=(), operates_without_key=False)
    async with open_memory_server(api_keys=("a",), admin_api_key="admin", access=rules) as server:
        client = server.client(headers={"authorization": "Bearer admin"})
        assert (await asked(client, "POST", "/pause", b"", OWN_PAGE))[0] == 200
        assert (await asked(client, "POST", "/continue_generation", b"{}", PAGE))[0] == 200
        assert (await asked(server.client(), "POST", "/pause", b"", OWN_PAGE))[0] == 401


async def test_callers_without_a_key_see_no_ids_on_the_live_page(autojump_clock):
    for rules, shown in ((AccessRules(operates_without_key=False), False), (AccessRules(), True)):
        async with open_memory_server(access=rules, paused=True) as server:
            ask = {"prompt": "x", "max_tokens": 4, "stream": True}
            async with (
                server.client().ask("/v1/completions", ask, headers={"x-request-id": "mine-7"}),
                server.client().ask("/ui/events") as events,
            ):
                await events.__anext__()
                assert (b"mine-7" in events.body) is shown
