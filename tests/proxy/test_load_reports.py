"""Tests how the router combines an endpoint's load reports with the router's own counts of requests."""

from __future__ import annotations

import json

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.testing.memory_client import MemoryEnd, memory_connection
from trioserve.testing.memory_router import open_memory_router

CHAT = "/v1/completions"


class Endpoint:
    """Endpoint that answers health checks and the first load request. The test answers all other requests."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.requests: list[MemoryEnd] = []
        self.asked_for_load: list[MemoryEnd] = []

    async def connect(self) -> trio.abc.Stream:
        client, end = memory_connection()
        self._nursery.start_soon(self._serve, end)
        return client

    async def _serve(self, end: MemoryEnd) -> None:
        while data := await end.receive_some(65536):
            if data.startswith(b"POST"):
                self.requests.append(end)
            elif data.startswith(b"GET /load"):
                self.asked_for_load.append(end)
                if len(self.asked_for_load) == 1:
                    self.tell_load(running=0)
            else:
                respond(end, {})

    def tell_load(self, *, running: int) -> None:
        respond(self.asked_for_load[-1], {"running": running, "waiting": 0, "seats": 1})


def respond(end: MemoryEnd, content: object) -> None:
    body = json.dumps(content).encode()
    end.send_nowait(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def test_response_that_arrives_with_a_load_report_frees_its_slot_only_once(nursery, autojump_clock):
    """The endpoint sends the load report after the end of the request, but the router reads the report first."""
    endpoint = Endpoint(nursery)
    watch = WatchSettings(health_seconds=100, load_seconds=1)
    async with open_memory_router({"a": endpoint.connect}, models={"fake": "fake"}, watch=watch) as router:
        state = router.dispatch.core.endpoints[EndpointId("a")]
        body = {"model": "fake", "prompt": "hello"}
        async with router.client().ask(CHAT, body) as first, router.client().ask(CHAT, body):
            await trio.sleep(1.5)
            assert (len(endpoint.requests), len(endpoint.asked_for_load)) == (2, 2)
            endpoint.tell_load(running=1)
            respond(endpoint.requests[0], {})
            await first.read()
            await wait_all_tasks_blocked()
            assert state.in_flight == 1
            assert state.waiting_depth(trio.current_time(), more=1) == 1  # The second request has the only lease.
