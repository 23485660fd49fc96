"""A steady and a bursting tenant: the plan of their requests, and their share of the capacity."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from trioserve.bench.report import Spread
from trioserve.bench.router.fake_endpoint import MODEL, DepthFigures
from trioserve.bench.router.settings import RouterBenchSettings
from trioserve.bench.socket_load import Asked, Planned, WireRequest

__all__ = ["TENANTS", "BurstFigures", "TenantFigures", "burst_figures", "burst_plan", "fair_shares"]

TENANTS = ("steady", "bursting")
"""The key of a request is the index of its tenant."""


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one tenant.

    Attributes:
        name: the tenant.
        asked: number of requests.
        served: number of requests with status 200.
        refused: number of other responses by status and reason.
        wait_ms: waiting time of served requests, without the service itself.
        of_fair_share: served requests, relative to the tenant's max-min fair share of all served requests. Below 1:
            other tenants got more than their share.
    """

    name: str
    asked: int
    served: int
    refused: dict[str, int]
    wait_ms: Spread | None
    of_fair_share: float


class BurstFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of bursts.

    Attributes:
        holds_back: True if the router holds requests back.
        flags: flags of the router.
        capacity_per_second: requests per second that all endpoints together can serve.
        endpoints: length of the queue inside of each endpoint.
        tenants: figures of each tenant.
    """

    holds_back: bool
    flags: list[str]
    capacity_per_second: float
    endpoints: list[DepthFigures]
    tenants: list[TenantFigures]

    @property
    def depth_max(self) -> int:
        return max(each.depth_max for each in self.endpoints)

    @property
    def depth_mean(self) -> float:
        return sum(each.depth_mean for each in self.endpoints) / len(self.endpoints)


def burst_plan(settings: RouterBenchSettings) -> list[Planned]:
    """Return random arrivals (Poisson). Equal seeds give equal arrivals.

    Args:
        settings: settings of the measurement.
    """
    chance = random.Random(settings.seed)
    requests = [
        WireRequest(
            "/v1/completions",
            {"model": MODEL, "prompt": "three or four words", "max_tokens": 4},
            headers=[("x-tenant-id", name)],
        )
        for name in TENANTS
    ]
    period = 2 * settings.burst_seconds
    steady_rate = settings.steady_share * settings.capacity_per_second
    burst_rate = (settings.burst_load - settings.steady_share) * settings.capacity_per_second
    windows = [(0, steady_rate, 0.0, settings.bursts * period)]
    for index in range(settings.bursts):
        windows.append((1, burst_rate, index * period, index * period + settings.burst_seconds))
    plan = []
    for key, rate, begin, end in windows:
        moment = begin
        while rate > 0 and (moment := moment + chance.expovariate(rate)) < end:
            plan.append(Planned(moment, key, requests[key]))
    return plan


def burst_figures(
    settings: RouterBenchSettings, asked: Sequence[Asked], endpoints: list[DepthFigures], *, holds_back: bool
) -> BurstFigures:
    by_tenant = [[each for each in asked if each.key == key] for key in range(len(TENANTS))]
    served = [sum(not each.outcome for each in mine) for mine in by_tenant]
    shares = fair_shares([len(mine) for mine in by_tenant], sum(served))
    tenants = [
        TenantFigures(
            name=name,
            asked=len(mine),
            served=count,
            refused=dict(Counter(each.outcome for each in mine if each.outcome)),
            wait_ms=Spread.from_seconds(
                [max(0.0, each.seconds - settings.service_seconds) for each in mine if not each.outcome]
            ),
            of_fair_share=count / share if share else 1.0,
        )
        for name, mine, count, share in zip(TENANTS, by_tenant, served, shares, strict=True)
    ]
    return BurstFigures(
        holds_back=holds_back,
        flags=list(settings.burst_flags(holds_back=holds_back)),
        capacity_per_second=settings.capacity_per_second,
        endpoints=endpoints,
        tenants=tenants,
    )


def fair_shares(demands: Sequence[float], capacity: float) -> list[float]:
    """Return max-min fair shares: no share exceeds its demand, and the rest is divided equally among the others.

    Args:
        demands: demand of each tenant.
        capacity: sum to divide.
    """
    shares = [0.0] * len(demands)
    left = capacity
    ordered = sorted(range(len(demands)), key=lambda index: demands[index])
    for taken, index in enumerate(ordered):
        shares[index] = min(demands[index], left / (len(demands) - taken))
        left -= shares[index]
    return shares
