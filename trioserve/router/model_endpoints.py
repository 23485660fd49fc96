"""The endpoints of one model, filed so that a request finds a few with room without a look at all of them.

An endpoint is open until somebody finds that it has no room for a single sequence. From then on it is left out, until
anything about it changes or the moment comes from which it may have room by itself. So finding costs a bounded number
of looks for each request, and one more for each change.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence

from trioserve.contracts.endpoint import Stage
from trioserve.router.endpoint_state import EndpointHealth, EndpointState
from trioserve.router.ring import Ring

__all__ = ["Filing", "Kind", "ModelEndpoints", "kinds_for"]

LOAD_UNIT = 1 << 20  # loads are added up as whole numbers, which come out even when they are taken away again


class Kind(enum.Enum):
    """What an endpoint that is given requests may do."""

    PREFILL = "prefill"
    DECODE = "decode"
    BESIDE = "beside"  # whole requests, and it is not kept for prompts
    PROMPTS = "prompts"  # whole requests, if nobody else has room


_KINDS: dict[str | None, tuple[Kind, ...]] = {
    None: (Kind.BESIDE,),
    "prefill": (Kind.PREFILL, Kind.PROMPTS),
    "decode": (Kind.DECODE, Kind.BESIDE),
    "both": (Kind.PREFILL, Kind.DECODE, Kind.BESIDE),
}


def kinds_for(stage: Stage | None) -> tuple[Kind, ...]:
    """Who may do it, in the order in which they are asked."""
    if stage is None:
        return (Kind.BESIDE, Kind.PROMPTS)
    return (Kind.PREFILL,) if stage is Stage.PREFILL else (Kind.DECODE,)


class Filing:
    """How one endpoint is filed at present. models: where; none while it leaves. kinds: none while it is given nothing.
    counts: what it adds to the totals of each model. is_open: see above. health: None before it is filed."""

    __slots__ = ("counts", "health", "is_open", "kinds", "models")

    def __init__(self) -> None:
        self.health: EndpointHealth | None = None
        self.models: frozenset[str] = frozenset()
        self.kinds: tuple[Kind, ...] = ()
        self.counts: Sequence[int] = NOTHING
        self.is_open = False


NOTHING = (0,) * 8
# Where each count is in the tuple.
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
    return _KINDS[state.role] if state.is_given else ()


class ModelEndpoints:
    """by_number: those that serve it and do not leave, by the order of addition. open: numbers of those that may have
    room, sorted, by kind."""

    def __init__(self) -> None:
        self.by_number: dict[int, EndpointState] = {}
        self.ring = Ring()
        self.open: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self._kind_counts = dict.fromkeys(Kind, 0)
        self._totals = list(NOTHING)
        self._back_at: float | None = None  # None: not known; see first_back_at

    # --- what there is ---

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
        """Slots at those that are given requests."""
        return self._totals[FREE]

    @property
    def average_load(self) -> float:
        return self._totals[LOAD] / LOAD_UNIT / max(1, self._totals[GIVEN])

    @property
    def others_share(self) -> float:
        """Of the work there that is known of, what is others'."""
        others = self._totals[OTHERS]
        return others / (others + self._totals[IN_FLIGHT]) if others else 0.0

    @property
    def own_share(self) -> float:
        """Of the work there that is known of and the next request, what is this router's."""
        own = self._totals[IN_FLIGHT] + 1
        return own / (own + self._totals[OTHERS])

    def count_of(self, kind: Kind) -> int:
        """Those that are given requests of this kind."""
        return self._kind_counts[kind]

    @property
    def both_count(self) -> int:
        """Those that are given prompts and responses."""
        return self._totals[BOTH]

    def first_back_at(self, now: float) -> float | None:
        """When the first ejection ends, of those that have not; looked up again only after one has begun or ended."""
        if self._back_at is None or self._back_at <= now:
            ends = (state.ejected_until for state in self.by_number.values())
            self._back_at = min((end for end in ends if end > now), default=None)
        return self._back_at

    # --- filing ---

    def move(self, before: Sequence[int], after: Sequence[int]) -> None:
        """What it adds to the totals is something else now."""
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
