"""How many of an endpoint's leases each of several routers may give, so that together they keep its limit.

Routers share no state. Each works it out for itself from the names of those that are alive, and all that have the same
names come to the same result. Who is alive is for others to find out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from trioserve.contracts.endpoint import EndpointId

__all__ = ["lease_share", "rendezvous_score"]


def lease_share(own: str, peers: Iterable[str], endpoint: EndpointId, leases_max: int) -> int:
    """The leases that the router `own` may give at an endpoint which takes `leases_max` sequences of all routers.

    peers: names of the others that are alive; whether `own` is among them makes no difference. At least 1.

    Each gets an equal part. What is left over goes one by one to those that come first for this endpoint by rendezvous
    hashing (Thaler and Ravishankar, 1998), so over many endpoints it evens out. The shares add up to `leases_max`.
    Only where there are more routers than leases each has one, and they add up to the number of routers: a router
    without any would keep its clients waiting for ever. So while all know the same routers, an endpoint has at most
    max(leases_max, routers) sequences; an endpoint that has fewer seats than that lets the others wait inside.
    When a router goes, no share of the others becomes smaller.
    Raises ValueError for a limit below 1.
    """
    if leases_max < 1:
        raise ValueError(f"an endpoint takes {leases_max} sequences, it must be at least 1")
    routers = {own, *peers}
    equal, left = divmod(leases_max, len(routers))
    if equal == 0:
        return 1
    mine = (rendezvous_score(endpoint, own), own)
    before = sum((rendezvous_score(endpoint, other), other) > mine for other in routers if other != own)
    return equal + (before < left)


def rendezvous_score(key: str, name: str) -> int:
    """Of `name` for `key`: the highest score has it. The same in every process; 64 bits, as if drawn at random."""
    text = f"{len(key)}:{key}{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
