"""What a policy chooses from: all endpoints that may be there for a request, without a look at each of them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, overload

import msgspec

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.ring import Ring

__all__ = ["Candidate", "Candidates", "ListedCandidates", "Rng", "looked_at"]


class Rng(Protocol):
    """Where a policy takes chance from, and the only place: a run can be repeated from its seed. See random.Random."""

    def randrange(self, stop: int, /) -> int:
        """0 <= number < stop."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint as a policy sees it. load: what it has, relative to its limit: 0 idle, 1 at the limit. It counts what
    others have there, too, as far as the endpoint tells; others: that part of it."""

    id: EndpointId
    load: float
    has_room: bool
    others: float = 0.0


class Candidates(Sequence[Candidate]):
    """A sequence of all endpoints that serve the request's model and are healthy, in the order in which they were
    added. Who goes through it looks at each of them. These need not, and all but the sequence leave out whoever has no
    room:"""

    average_load: float
    """Of all of them, those without room counted."""

    others_share: float
    """How much of the work at all of them is not this router's, as far as endpoints tell: 0 alone, 3/4 as one of four
    routers."""

    @abc.abstractmethod
    def sample(self, count: int) -> list[Candidate]:
        """So many, drawn at random; all, if there are no more. Asked again for fewer, the first of these; for more,
        these and others."""

    @abc.abstractmethod
    def named(self, ids: Iterable[EndpointId]) -> list[Candidate]:
        """Those of them."""

    @abc.abstractmethod
    def around(self, key: str) -> Iterator[Candidate]:
        """All, in an order that follows from the key and their names: the same here, there and tomorrow, and whoever
        comes or goes does not change the order of the others. Each costs O(log endpoints)."""

    @abc.abstractmethod
    def next_after(self, id: EndpointId | None) -> Candidate:
        """The next in the order in which they were added, the first after the last. Raises LookupError for nobody."""


class ListedCandidates(Candidates):
    """The same of a list of them; for policies that are asked by another one, or by a test."""

    def __init__(self, listed: Sequence[Candidate], rng: Rng) -> None:
        self._listed = listed
        self._open = [candidate for candidate in listed if candidate.has_room]
        self._rng = rng
        load = sum(candidate.load for candidate in listed)
        self.average_load = load / len(listed) if listed else 0.0
        self.others_share = sum(candidate.others for candidate in listed) / load if load else 0.0
        self._drawn: list[Candidate] = []

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._listed[index]

    def __len__(self) -> int:
        return len(self._listed)

    def sample(self, count: int) -> list[Candidate]:
        if count >= len(self._open):
            return list(self._open)
        while len(self._drawn) < count:
            left = [candidate for candidate in self._open if candidate not in self._drawn]
            self._drawn.append(left[self._rng.randrange(len(left))])
        return self._drawn[:count]

    def named(self, ids: Iterable[EndpointId]) -> list[Candidate]:
        by_id = {candidate.id: candidate for candidate in self._open}
        return [by_id[id] for id in ids if id in by_id]

    def around(self, key: str) -> Iterator[Candidate]:
        by_id = {candidate.id: candidate for candidate in self._open}
        ring = Ring()
        for id in by_id:
            ring.add(id)
        return (by_id[id] for id in ring.around(key))

    def next_after(self, id: EndpointId | None) -> Candidate:
        ids = [candidate.id for candidate in self._listed]
        begin = ids.index(id) + 1 if id in ids else 0
        for candidate in (*self._listed[begin:], *self._listed[:begin]):
            if candidate.has_room:
                return candidate
        raise LookupError("no candidate has room")


def looked_at(candidates: Sequence[Candidate], rng: Rng) -> Candidates:
    """Candidates as the router gives them, or a plain list of them."""
    return candidates if isinstance(candidates, Candidates) else ListedCandidates(candidates, rng)
