"""Finds the routers that use an endpoint, and computes this router's share of its leases.

Another router counts at an endpoint if this router sees that the other router is alive, or if the endpoint reports that
the other router has recently asked it for its load. So two routers that cannot see each other still share every
endpoint that both reach. A dead router loses its share once the endpoint has not heard from it for HEARD_SECONDS. A
router that starts or returns first grants a single lease, until the other routers have had time to notice it. Leases
that the other routers granted beyond their share end by themselves. Until these leases end, the endpoint's load report
keeps the sum at its limit (see EndpointState.has_room).

Limit of this method: if an endpoint does not report its routers, routers that cannot see each other each use the whole
limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.shares import lease_share

__all__ = ["HEARD_SECONDS", "SETTLE_SECONDS", "PeerShares"]

HEARD_SECONDS = 5.0  # time of 2.5 load requests (see SIGN_OF_LIFE_SECONDS); longer than most stalls of a router
SETTLE_SECONDS = 2.0  # time of several load requests of each router, so that all routers have noticed this one


class PeerShares:
    """The other routers, as this router and the endpoints see them. Times are seconds of one monotonic clock.

    Args:
        own: name of this router. None: not known yet.
    """

    def __init__(self, own: str | None) -> None:
        self.own = own
        self._alive: dict[str, bool] = {}
        self._heard: dict[EndpointId, dict[str, float]] = {}
        self._reported_at: dict[EndpointId, float] = {}
        self._settled_at: dict[EndpointId, float] = {}
        # Cached, because each report needs the share, and it only changes when a router starts or ends.
        self._computed: dict[EndpointId, tuple[tuple[str | None, int, list[str]], int]] = {}

    def set_peers(self, names: Iterable[str]) -> None:
        """Set the names of all other routers. A new router counts as alive until it is found dead.

        Args:
            names: router names. The own name is ignored.
        """
        self._alive = {name: self._alive.get(name, True) for name in names if name != self.own}

    def note_alive(self, name: str, is_alive: bool) -> None:
        if name in self._alive:
            self._alive[name] = is_alive

    def note_report(self, endpoint: EndpointId, heard: Mapping[str, float], now: float) -> None:
        """Accept a report of an endpoint.

        Args:
            endpoint: name of the endpoint.
            heard: for each router, how many seconds ago it last asked the endpoint.
            now: time in seconds.
        """
        if now >= self._reported_at.get(endpoint, now) + HEARD_SECONDS:
            self._settled_at[endpoint] = now + SETTLE_SECONDS  # the other routers may have counted this router as dead
        self._reported_at[endpoint] = now
        moments = self._heard.setdefault(endpoint, {})
        for name in self._alive:
            if name in heard:
                moments[name] = max(moments.get(name, -math.inf), now - heard[name])

    def forget(self, endpoints: Iterable[EndpointId]) -> None:
        """Forget all endpoints except these.

        Args:
            endpoints: names of the endpoints to keep.
        """
        kept = set(endpoints)
        for table in (self._heard, self._reported_at, self._settled_at, self._computed):
            for id in [id for id in table if id not in kept]:
                del table[id]

    def routers_at(self, endpoint: EndpointId, now: float) -> list[str]:
        """Return the names of the other routers that send requests to an endpoint.

        Args:
            endpoint: name of the endpoint.
            now: time in seconds.
        """
        moments = self._heard.get(endpoint, {})
        return [
            name
            for name, is_alive in self._alive.items()
            if is_alive or (name in moments and now < moments[name] + HEARD_SECONDS)
        ]

    def share(self, endpoint: EndpointId, leases_max: int, now: float) -> int:
        """Return the number of leases that this router may grant at an endpoint now. At least 1.

        Args:
            endpoint: name of the endpoint.
            leases_max: limit of all routers together.
            now: time in seconds.
        """
        settled_at = self._settled_at.setdefault(endpoint, now + SETTLE_SECONDS)
        others = self.routers_at(endpoint, now)
        if not others:
            return leases_max
        if self.own is None or now < settled_at:
            return 1
        asked = (self.own, leases_max, others)
        known = self._computed.get(endpoint)
        if known is None or known[0] != asked:
            known = self._computed[endpoint] = (asked, lease_share(self.own, others, endpoint, leases_max))
        return known[1]
