"""Divides the leases of an endpoint between routers, so that together they keep its limit.

Routers share no state. Each router computes its share from the names of the living routers. Routers that know the same
names compute shares that add up to the limit. This module does not find out which routers are alive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from trioserve.contracts.endpoint import EndpointId

__all__ = ["lease_share", "rendezvous_score"]


def lease_share(own: str, peers: Iterable[str], endpoint: EndpointId, leases_max: int) -> int:
    """Return the number of leases that a router may grant at an endpoint.

    All routers get an equal part. Each lease of the remainder goes to one of the routers that rank first in rendezvous
    hashing for this endpoint (Thaler and Ravishankar, 1998). So the remainders are spread evenly over many endpoints.
    The shares add up to `leases_max`. If there are more routers than leases, each router still has one lease, because a
    router without a lease would keep its clients waiting for ever. So an endpoint gets at most max(leases_max, routers)
    sequences if all routers know the same names. If the endpoint has fewer slots, the remaining sequences wait inside
    the endpoint. If a router ends, no other share becomes smaller.

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
