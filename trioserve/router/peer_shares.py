"""Which routers take requests to an endpoint, and so how many of its leases this one may give.

A router counts for an endpoint if it is alive as far as this one can see, or if the endpoint has heard from it of late
and says so. So two routers that cannot see each other still share every endpoint that both of them reach, and one that
has died leaves its share to the others when the endpoint has not heard from it for HEARD_SECONDS. One that comes (back)
gives a single lease at first, until the others have had time to hear of it; what they gave beyond their share by then
ends by itself, and meanwhile the endpoint's own report keeps the sum at its limit (see EndpointState.has_room).

What is not kept: an endpoint that does not tell whom it has heard, before routers that cannot see each other. There
each of them takes the whole limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.shares import lease_share

__all__ = ["HEARD_SECONDS", "SETTLE_SECONDS", "PeerShares"]

HEARD_SECONDS = 5.0  # two questions and a half, see SIGN_OF_LIFE_SECONDS, and longer than most stalls of a router
SETTLE_SECONDS = 2.0  # of several questions each, so that every router has heard of this one


class PeerShares:
    """own: this router's name; None as long as nobody has told it. Times are seconds of one monotonic clock."""

    def __init__(self, own: str | None) -> None:
        self.own = own
        self._alive: dict[str, bool] = {}
        self._heard: dict[EndpointId, dict[str, float]] = {}
        self._reported_at: dict[EndpointId, float] = {}
        self._settled_at: dict[EndpointId, float] = {}
        # Asked for with each report, and the same until a router comes or goes.
        self._worked_out: dict[EndpointId, tuple[tuple[str | None, int, list[str]], int]] = {}

    def set_peers(self, names: Iterable[str]) -> None:
        """These are all routers but this one. One that is new counts as alive until it is found not to be."""
        self._alive = {name: self._alive.get(name, True) for name in names if name != self.own}

    def note_alive(self, name: str, is_alive: bool) -> None:
        if name in self._alive:
            self._alive[name] = is_alive

    def note_report(self, endpoint: EndpointId, heard: Mapping[str, float], now: float) -> None:
        """The endpoint has answered. heard: how many seconds ago each router last asked it."""
        if now >= self._reported_at.get(endpoint, now) + HEARD_SECONDS:
            self._settled_at[endpoint] = now + SETTLE_SECONDS  # the others may have taken this router for gone
        self._reported_at[endpoint] = now
        moments = self._heard.setdefault(endpoint, {})
        for name in self._alive:
            if name in heard:
                moments[name] = max(moments.get(name, -math.inf), now - heard[name])

    def forget(self, endpoints: Iterable[EndpointId]) -> None:
        """All but these are gone."""
        kept = set(endpoints)
        for table in (self._heard, self._reported_at, self._settled_at, self._worked_out):
            for id in [id for id in table if id not in kept]:
                del table[id]

    def routers_at(self, endpoint: EndpointId, now: float) -> list[str]:
        """The others that take requests there."""
        moments = self._heard.get(endpoint, {})
        return [
            name
            for name, is_alive in self._alive.items()
            if is_alive or (name in moments and now < moments[name] + HEARD_SECONDS)
        ]

    def share(self, endpoint: EndpointId, leases_max: int, now: float) -> int:
        """The leases that this router may give there now; at least 1. leases_max: of all routers."""
        settled_at = self._settled_at.setdefault(endpoint, now + SETTLE_SECONDS)
        others = self.routers_at(endpoint, now)
        if not others:
            return leases_max
        if self.own is None or now < settled_at:
            return 1
        asked = (self.own, leases_max, others)
        known = self._worked_out.get(endpoint)
        if known is None or known[0] != asked:
            known = self._worked_out[endpoint] = (asked, lease_share(self.own, others, endpoint, leases_max))
        return known[1]
