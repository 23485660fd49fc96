"""What must hold of several routers that share no state, from books of its own: who has a lease of whom where.

What a router has is written down when it tells of a lease and when the request leaves; what it may have follows from
who is alive and who knows it. The rules:

- A router gives no lease beyond its share, and while all know the same routers, the shares of an endpoint add up to its
  limit, or to one for each router where that is more. What it had given before its share became smaller, it keeps.
- Every request is served or refused, once, and in the end no lease is left and nothing is at an endpoint.
- Routers that see the same idle endpoints at the same moment do not all choose alike; but for round_robin, where each
  begins with the first and is soon elsewhere than the others.
"""

from __future__ import annotations

from collections import Counter

from trioserve.simulation.routers.world import RoutersWorld

__all__ = ["RoutersBooks"]


class RoutersBooks:
    """leases: by router and endpoint. overshoot_most: the most leases at an endpoint beyond what is promised."""

    def __init__(self, world: RoutersWorld) -> None:
        self.world = world
        self.leases: Counter[tuple[int, str]] = Counter()
        self.at_endpoint: Counter[str] = Counter()
        self.overshoot_most = 0
        self._shares: dict[tuple[int, str], int] = {}
        self._ended: set[int] = set()
        self._first_choices: list[str] = []

    def set_shares(self, endpoint: str, shares: dict[int, int]) -> None:
        """shares: of each router that is alive, all of which know each other now, as it has worked it out."""
        promised, total = max(self.world.leases_max, len(shares)), sum(shares.values())
        assert min(shares.values()) >= 1, f"a router may give nothing at {endpoint}: {shares}"
        assert total == promised, f"the shares of {endpoint} are {shares}, {total} of {promised}"
        assert max(shares.values()) - min(shares.values()) <= 1, f"the shares of {endpoint} are {shares}"
        for router, share in shares.items():
            self._shares[router, endpoint] = share

    def give(self, router: int, endpoint: str) -> None:
        """One more lease, of this router at this endpoint."""
        self.leases[router, endpoint] += 1
        self.at_endpoint[endpoint] += 1
        mine = self.leases[router, endpoint]
        share = self._shares.get((router, endpoint), self.world.leases_max)
        assert mine <= share, f"router {router} has {mine} leases at {endpoint}, its share is {share}"
        promised = max(self.world.leases_max, self.world.routers)
        if self.world.shares:
            self.overshoot_most = max(self.overshoot_most, self.at_endpoint[endpoint] - promised)
            is_fair = self.world.dies or self.at_endpoint[endpoint] <= promised
            assert is_fair, f"{self.at_endpoint[endpoint]} leases at {endpoint}, which takes {promised}"

    def take_back(self, router: int, endpoint: str) -> None:
        self.leases[router, endpoint] -= 1
        self.at_endpoint[endpoint] -= 1
        assert self.leases[router, endpoint] >= 0, f"router {router} takes a lease at {endpoint} back twice"

    def end(self, number: int) -> None:
        assert number not in self._ended, f"request {number} ends a second time"
        self._ended.add(number)

    def note_first_choice(self, endpoint: str) -> None:
        """Of a router, at the same moment as all others, while all is idle."""
        self._first_choices.append(endpoint)
        count, routers = Counter(self._first_choices).most_common(1)[0][1], self.world.routers
        if routers >= 8 and self.world.endpoints >= routers and self.world.policy != "round_robin":
            assert count <= routers / 2, f"{count} of {routers} routers choose {endpoint} at the same moment"

    def check_end(self, request_count: int) -> None:
        left = {key: count for key, count in self.leases.items() if count}
        assert not left, f"leases are left: {left}"
        assert len(self._ended) == request_count, f"{request_count} requests came, and {len(self._ended)} have ended"
