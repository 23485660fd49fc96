"""The endpoints of one model, indexed so that a request finds free slots without looking at all endpoints.

An endpoint is open until a search finds that it has no free slot. Then searches skip the endpoint until its state
changes, or until the time at which it may have a free slot again. So a search looks at a bounded number of endpoints
for each request, and at one further endpoint for each state change.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence

from trioserve.contracts.endpoint import Stage
from trioserve.router.endpoint_state import EndpointHealth, EndpointState
from trioserve.router.ring import Ring

__all__ = ["Filing", "Kind", "ModelEndpoints", "kinds_for"]

LOAD_UNIT = 1 << 20  # loads are summed as integers, so that subtracting them leaves no rounding error


class Kind(enum.Enum):
    """A kind of work that an endpoint does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BESIDE = "beside"  # whole requests, at an endpoint that is not a prefill endpoint
    PROMPTS = "prompts"  # whole requests at a prefill endpoint, if no other endpoint has a free slot


_KINDS: dict[str | None, tuple[Kind, ...]] = {
    None: (Kind.BESIDE,),
    "prefill": (Kind.PREFILL, Kind.PROMPTS),
    "decode": (Kind.DECODE, Kind.BESIDE),
    "both": (Kind.PREFILL, Kind.DECODE, Kind.BESIDE),
}


def kinds_for(stage: Stage | None) -> tuple[Kind, ...]:
    """Return the kinds of work that a stage may be, in the order in which they are tried.

    Args:
        stage: stage of a request. None: the whole request.
    """
    if stage is None:
        return (Kind.BESIDE, Kind.PROMPTS)
    return (Kind.PREFILL,) if stage is Stage.PREFILL else (Kind.DECODE,)


class Filing:
    """The index entry of one endpoint.

    Attributes:
        health: health at the last update. None: not indexed yet.
        models: models under which the endpoint is indexed. Empty while it drains.
        kinds: kinds of work. Empty while the endpoint gets no requests.
        counts: the endpoint's contribution to the totals of each of its models.
        is_open: True if searches look at the endpoint, see the module's docstring.
    """

    __slots__ = ("counts", "health", "is_open", "kinds", "models")

    def __init__(self) -> None:
        self.health: EndpointHealth | None = None
        self.models: frozenset[str] = frozenset()
        self.kinds: tuple[Kind, ...] = ()
        self.counts: Sequence[int] = NOTHING
        self.is_open = False


NOTHING = (0,) * 8
# Positions in the tuple of counts.
SERVING, UNEJECTED, GIVEN, BOTH, IN_FLIGHT, FREE, LOAD, OTHERS = range(8)


def counts_of(state: EndpointState, kinds: tuple[Kind, ...]) -> tuple[int, ...]:
    is_unejected, in_flight = state.health is not EndpointHealth.EJECTED, state.in_flight
    if not kinds:
        return (1, is_unejected, 0, 0, in_flight, 0, 0, 0)
    own_max = state.leases_own_max
    own, together = in_flight * LOAD_UNIT // own_max, (in_flight + state.others) * LOAD_UNIT // state.leases_max
    free = max(0, own_max - state.claims)
    return (1, is_unejected, 1, len(kinds) == 3, in_flight, free, max(own, together), state.others)


def kinds_of(state: EndpointState) -> tuple[Kind, ...]:
    return _KINDS[state.role] if state.accepts_requests else ()


class ModelEndpoints:
    """The endpoints of one model.

    Attributes:
        by_number: endpoints that serve the model and are not draining, by order of addition.
        ring: their ids on a hash ring.
        open: sorted numbers of the endpoints that may have a free slot, for each kind of work.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, EndpointState] = {}
        self.ring = Ring()
        self.open: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self._kind_counts = dict.fromkeys(Kind, 0)
        self._totals = list(NOTHING)
        self._back_at: float | None = None  # None: not known; see first_back_at

    # --- totals ---

    @property
    def serving_count(self) -> int:
        return self._totals[SERVING]

    @property
    def unejected_count(self) -> int:
        return self._totals[UNEJECTED]

    @property
    def given_count(self) -> int:
        return self._totals[GIVEN]

    @property
    def in_flight(self) -> int:
        return self._totals[IN_FLIGHT]

    @property
    def free_count(self) -> int:
        """Number of free slots at endpoints that get requests."""
        return self._totals[FREE]

    @property
    def average_load(self) -> float:
        return self._totals[LOAD] / LOAD_UNIT / max(1, self._totals[GIVEN])

    @property
    def others_share(self) -> float:
        """Share of the known work at these endpoints that other routers cause, from 0 to 1."""
        others = self._totals[OTHERS]
        return others / (others + self._totals[IN_FLIGHT]) if others else 0.0

    @property
    def own_share(self) -> float:
        """Share of the work at these endpoints that this router causes, counting one further request of this router.
        From 0 to 1.
        """
        own = self._totals[IN_FLIGHT] + 1
        return own / (own + self._totals[OTHERS])

    def count_of(self, kind: Kind) -> int:
        """Return the number of endpoints that get work of a kind.

        Args:
            kind: the kind.
        """
        return self._kind_counts[kind]

    @property
    def both_count(self) -> int:
        """Number of endpoints that do prefill and decode."""
        return self._totals[BOTH]

    def first_back_at(self, now: float) -> float | None:
        """Return the time at which the first of the current ejections ends. Cached until an ejection begins or ends.

        Args:
            now: time in seconds.

        Returns:
            The time in seconds, or None if no endpoint is ejected.
        """
        if self._back_at is None or self._back_at <= now:
            ends = (state.ejected_until for state in self.by_number.values())
            self._back_at = min((end for end in ends if end > now), default=None)
        return self._back_at

    # --- the index ---

    def move(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Update the totals after the counts of one endpoint changed.

        Args:
            before: its old counts.
            after: its new counts.
        """
        totals = self._totals
        if before[UNEJECTED] != after[UNEJECTED]:
            self._back_at = None
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                totals[index] += new - old

    def join(self, state: EndpointState) -> None:
        self.by_number[state.number] = state
        self.ring.add(state.id)

    def leave(self, state: EndpointState) -> None:
        del self.by_number[state.number]
        self.ring.remove(state.id)

    def note_kinds(self, before: tuple[Kind, ...], after: tuple[Kind, ...]) -> None:
        for kind in before:
            self._kind_counts[kind] -= 1
        for kind in after:
            self._kind_counts[kind] += 1

    def set_open(self, number: int, kinds: tuple[Kind, ...]) -> None:
        for kind in kinds:
            bisect.insort(self.open[kind], number)

    def set_closed(self, number: int, kinds: tuple[Kind, ...]) -> None:
        for kind in kinds:
            numbers = self.open[kind]
            index = bisect.bisect_left(numbers, number)
            assert numbers[index] == number
            del numbers[index]
