"""A router in memory in front of endpoints whose responses a test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.scripted_endpoint import Ask, ScriptedEndpoint

__all__ = ["ScriptedEndpoints", "open_scripted_endpoints"]


class ScriptedEndpoints:
    """A router and its scripted endpoints.

    Args:
        router: the router.
        endpoints: the endpoints by id. The first letter of an id is the role: p for prefill, d for decode, b for both.
            Ids with w and v report no role.
    """

    def __init__(self, router: MemoryRouter, endpoints: dict[str, ScriptedEndpoint]) -> None:
        self.router = router
        self.endpoints = endpoints

    def __getitem__(self, id: str) -> ScriptedEndpoint:
        return self.endpoints[id]

    def client(self, **options: Any) -> MemoryClient:
        return self.router.client(**options)

    async def ask_of(self, id: str) -> Ask:
        """Return the only open request at an endpoint, after all tasks have become idle.

        Args:
            id: the endpoint.
        """
        await wait_all_tasks_blocked()
        [ask] = self.endpoints[id].open
        return ask

    def leases(self) -> dict[EndpointId, int]:
        return dict(self.router.dispatch.core.stats().leases)

    def outcomes(self) -> dict[str, int]:
        return {
            outcome.value: count for outcome, count in self.router.dispatch.core.stats().pairs_total.items() if count
        }

    async def listed(self) -> list[tuple[str, str, str | None]]:
        response = await self.client().get("/v1/requests")
        return [(each["id"], each["state"], each["endpoint"]) for each in (await response.json())["data"]]

    async def assert_all_free(self) -> None:
        await self.router.assert_all_free()
        for id, endpoint in self.endpoints.items():
            assert not endpoint.open, f"{len(endpoint.open)} requests are open at {id}"
            assert endpoint.held_count == 0, f"blocks are held at {id}"


ROLES: dict[str, EngineRole | None] = {"p": "prefill", "d": "decode", "b": "both", "w": None, "v": None}


@asynccontextmanager
async def open_scripted_endpoints(ids: str = "p d", **options: Any) -> AsyncIterator[ScriptedEndpoints]:
    """Open a router with scripted endpoints. The context begins after each endpoint has reported its role.

    Args:
        ids: endpoint ids, separated by spaces. Ids that begin with v report their load as vLLM does.
        **options: options of open_memory_router.
    """
    async with trio.open_nursery() as nursery:
        endpoints = {id: ScriptedEndpoint(nursery, role=ROLES[id[0]]) for id in ids.split()}
        for id, endpoint in endpoints.items():
            endpoint.is_vllm = id.startswith("v")
        connects = {id: endpoint.connect for id, endpoint in endpoints.items()}
        async with open_memory_router(connects, **options) as router:
            await wait_all_tasks_blocked()
            yield ScriptedEndpoints(router, endpoints)
        nursery.cancel_scope.cancel()
