"""Fixtures of a router core with a manual clock, and shortcuts that add endpoints and requests."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.core import RouterCore
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket
from trioserve.testing.memory_router import SEED


class Router:
    """Router core with its clock. This class records the calls of `on_change` and `on_move`, in order."""

    def __init__(self, *, policy: str = "least_loaded", seed: int = SEED, **settings: object) -> None:
        self.changed: list[Ticket] = []
        self.gone: list[str] = []
        self.to_move: list[Ticket] = []
        self.now = 100.0
        self.core = RouterCore(
            RouterSettings(**{"slow_start_seconds": 0, **settings}),  # type: ignore[arg-type]
            POLICIES[policy],
            on_change=self.changed.append,
            rng=random.Random(seed),
            on_gone=self.gone.append,
            on_move=self.to_move.append,
        )

    def endpoint(
        self,
        id: str,
        *,
        leases_max: int | None = None,
        models: str = "m",
        well: bool = True,
        role: EngineRole | None = None,
    ) -> EndpointId:
        endpoint = EndpointId(id)
        self.core.add_endpoint(endpoint, models.split(), self.now, leases_max=leases_max, role=role)
        if well:
            self.core.note_health(endpoint, True, self.now)
        return endpoint

    def enter(self, **fields: object) -> Ticket:
        pinned = fields.pop("pinned", None)
        request = RoutedRequest(model="m", pinned=None if pinned is None else EndpointId(str(pinned)))
        return self.core.enter(type(request)(**{**_fields(request), **fields}), self.now)

    def sent(self, **fields: object) -> Ticket:
        """Return a ticket with a lease whose request was sent to its endpoint."""
        ticket = self.enter(**fields)
        self.core.sent(ticket)
        return ticket

    def leave(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            self.core.leave(ticket, self.now)

    def after(self, seconds: float) -> None:
        """Advance the clock, and call `tick` at each time that `next_tick` returned."""
        end = self.now + seconds
        while (moment := self.core.next_tick(self.now)) <= end:
            self.now = max(self.now, moment)
            self.core.tick(self.now)
        self.now = end


def _fields(request: RoutedRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@pytest.fixture
def make_router() -> Callable[..., Router]:
    return Router
