"""Finds the routers that use an endpoint, and divides the endpoint's leases between them.

Routers share no state. Each router computes its share from the names of the living routers. Routers that know the same
names compute shares that add up to the limit.

Another router counts at an endpoint if this router sees that the other router is alive, or if the endpoint reports that
the other router has recently asked it for its load. So two routers that cannot see each other still share every
endpoint that both reach. A dead router loses its share once the endpoint has not heard from it for HEARD_SECONDS. A
router that starts or returns first grants a single lease, until the other routers have had time to notice it. Leases
that the other routers granted beyond their share end by themselves. Until these leases end, the endpoint's load report
keeps the sum at its limit (see EndpointState.has_room).

This method has a limitation. If an endpoint does not report its routers, routers that cannot see each other each use
the whole limit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

from trioserve.contracts.endpoint import EndpointId

__all__ = ["HEARD_SECONDS", "SETTLE_SECONDS", "PeerShares", "lease_share", "rendezvous_score"]


def lease_share(own: str, peers: Iterable[str], endpoint: EndpointId, leases_max: int) -> int:
    """Return the number of leases that a router may grant at an endpoint.

    All routers get an equal number of leases. If leases remain, the routers that rank first in rendezvous hashing for
    this endpoint get one more lease each (Thaler and Ravishankar, 1998). So the remainders are spread evenly over many
    endpoints. The shares add up to `leases_max`. If there are more routers than leases, each router still has one
    lease, because a router without a lease would keep its clients waiting forever. So an endpoint gets at most
    max(leases_max, routers) sequences if all routers know the same names. If the endpoint has fewer slots, the
    remaining sequences wait inside the endpoint. If a router ends, no other share becomes smaller.

    Args:
        own: name of the router.
        peers: names of the other living routers. `own` may be among them.
        endpoint: name of the endpoint.
        leases_max: limit of all routers together, at least 1.

    Returns:
        The number of leases, at least 1.

    Raises:
        ValueError: `leases_max` is below 1.
    """
    if leases_max < 1:
        raise ValueError(f"leases_max is {leases_max}, it must be at least 1")
    routers = {own, *peers}
    equal, left = divmod(leases_max, len(routers))
    if equal == 0:
        return 1
    mine = (rendezvous_score(endpoint, own), own)
    before = sum((rendezvous_score(endpoint, other), other) > mine for other in routers if other != own)
    return equal + (before < left)


def rendezvous_score(key: str, name: str) -> int:
    """Return the rendezvous score of a name for a key. The name with the highest score owns the key.

    Args:
        key: the key, for example an endpoint.
        name: the name, for example a router.

    Returns:
        64 bits that look random and are the same in every process.
    """
    text = f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# HEARD_SECONDS covers 2.5 load requests (see SIGN_OF_LIFE_SECONDS), and is longer than most stalls of a router.
HEARD_SECONDS = 5.0
# In SETTLE_SECONDS, each router sends several load requests, so all other routers have noticed it.
SETTLE_SECONDS = 2.0


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
        # The share is cached, because each report needs it, and it changes only when a router starts or ends.
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
            self._settled_at[endpoint] = now + SETTLE_SECONDS  # The other routers may have counted this router as dead.
        self._reported_at[endpoint] = now
        moments = self._heard.setdefault(endpoint, {})
        for name in self._alive:
            if name in heard:
                moments[name] = max(moments.get(name, -math.inf), now - heard[name])

    def forget(self, endpoints: Iterable[EndpointId]) -> None:
        """Forget all endpoints except the given endpoints.

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
