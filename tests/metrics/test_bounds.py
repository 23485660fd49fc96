"""Tests that the number of series on /metrics is bounded: every label has few values, and clients cannot add values."""

from __future__ import annotations

import random
from collections.abc import Iterator

import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId
from trioserve.http.counters import show_counters
from trioserve.metrics.registry import CATALOGUE, IMAGE_SERVER_PARTS, Metrics
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server

MARK = "zqx"  # Part of every text that a client sends in these tests.
PATHS = (
    *("/{}", "/v1/{}", "/v1/models/{}", "/v1/models/{}/b", "/v1/requests/{}", "/v1/files/{}", "/v1/files/{}/content"),
    *("/v1/responses/{}", "/v1/streams/{}", "/v1/batches/{}/cancel", "/metrics/{}", "/health?{}", "/ui/{}", "//{}"),
    *("/v1/chat/completions?{}", "/%2e%2e/{}", "/v1/requests/{}/hand-over", "/{}" + "/x" * 200),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "{}", "TRACE", "get")


def texts(seed: int) -> Iterator[str]:
    """Yield texts, each of which is unique to one request."""
    rng = random.Random(seed)
    while True:
        yield MARK + "".join(rng.choices("abcdefghijkmnop0123456789", k=12))


async def fire(target: MemoryServer | MemoryRouter, seed: int) -> None:
    """Send each method to each path, with unknown tenants, keys, models, ids and sessions."""
    text = texts(seed)
    for path in PATHS:
        for method in METHODS:
            client = target.client(http=random.Random(seed).choice((1, 2)))
            headers = {
                "x-tenant-id": next(text),
                "x-request-id": next(text),
                "x-session-id": next(text),
                "authorization": f"Bearer {next(text)}",
                "user-agent": next(text),
            }
            asked = {"method": method.format(next(text)), "headers": headers}
            async with client.ask(path.format(next(text)), **asked) as response:
                assert await response.head() >= 200
            client.abort()
    for body in ({"model": "{}", "prompt": "hello"}, {"prompt": "hello", "user": "{}"}, {"prompt": 7, "n": -1}):
        client = target.client(headers={"x-tenant-id": next(text)})
        filled = {name: value.format(next(text)) if isinstance(value, str) else value for name, value in body.items()}
        await client.post("/v1/completions", {**filled, "max_tokens": 2})
        client.close()


def series(page: bytes) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def scrape(client: MemoryClient) -> bytes:
    response = await client.get("/metrics")
    assert await response.head() == 200
    return await response.read()


async def check_bounded(target: MemoryServer | MemoryRouter) -> None:
    await scrape(target.client())  # The scrape itself is counted, too.
    await fire(target, seed=1)
    before = series(await scrape(target.client()))
    await fire(target, seed=2)
    page = await scrape(target.client())
    assert series(page) == before
    assert MARK not in page.decode()
    labels = [dict(labels) for name, labels in series(page) if name == "http_requests_total"]
    assert {label["method"] for label in labels} >= {"GET", "POST", "other"}
    assert {label["status"] for label in labels} <= {"2xx", "3xx", "4xx", "5xx", "left"}
    assert all(label["handler"] == "none" or label["handler"].startswith("/") for label in labels)


async def test_series_of_a_server_are_bounded_for_any_input(autojump_clock):
    async with open_memory_server(max_num_seqs=2) as server:
        show_counters(server.engine.metrics, server.server.counters)
        await check_bounded(server)


async def test_series_of_a_router_are_bounded_for_any_input(autojump_clock):
    async with (
        open_memory_server() as server,
        open_memory_router({"a": _connect(server)}) as router,
    ):
        show_counters(router.metrics, router.server.counters)
        await check_bounded(router)


def _connect(server: MemoryServer):
    async def connect() -> trio.abc.Stream:
        return server.connect()

    return connect


async def test_removed_endpoints_leave_no_series(autojump_clock):
    names = [f"pod-{number}" for number in range(8)]
    async with (
        open_memory_server() as server,
        open_memory_router(dict.fromkeys(names, _connect(server))) as router,
    ):
        for name in names:
            page = router.metrics.expose().decode()
            assert f'trioserve_router:endpoint_ejections_total{{endpoint="{name}"}}' in page
            router.fleet.drain(EndpointId(name))
            await wait_all_tasks_blocked()
            assert f'{{endpoint="{name}"}}' not in router.metrics.expose().decode()


def test_no_metric_has_label_values_that_clients_choose():
    """The number of tenants, users and keys is unbounded, so they appear in the log and in traces instead."""
    labels = {label.name for metric in CATALOGUE for label in metric.labels}
    assert not labels & {"tenant", "user", "key", "model", "request", "session", "client", "path_raw"}
    open_ended = {label.name for metric in CATALOGUE for label in metric.labels if not label.values}
    assert open_ended == {
        *("reason", "path", "status", "handler", "method"),  # The values are routes and fixed texts of the program.
        *("endpoint",),  # The values are the endpoints of the fleet.
        *("hosted_model", "outcome"),  # The operator configures the models, and the outcomes are fixed texts.
        *("rank",),  # The values are the ranks of one model, see --tensor-parallel-size.
        *("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),  # one series
        # The admin loads adapters, so clients cannot add values.
        *("adapter", "max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        *("version",),  # The admin sets the version, and only the version of the current weights is shown.
    }


def test_series_with_known_label_values_are_shown_from_the_start():
    metrics = Metrics("tiny", parts=IMAGE_SERVER_PARTS)
    shown = series(metrics.expose())
    for metric in CATALOGUE:
        for label in metric.labels:
            for value in label.values:
                assert any((label.name, value) in labels for _name, labels in shown), (metric.name, value)
