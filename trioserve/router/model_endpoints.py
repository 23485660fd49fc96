"""The endpoints of one model, indexed so that a request finds free slots without looking at all endpoints.

An endpoint is open until a search finds that it has no free slot. Then searches skip the endpoint until its state
changes, or until the time at which it may have a free slot again. So a search looks at a bounded number of endpoints
for each request, and at one further endpoint for each state change.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.router.candidates import Candidate, Candidates, Ring, Rng
from trioserve.router.endpoint_state import EndpointHealth, EndpointState

__all__ = ["Filing", "Kind", "ModelEndpoints", "Search", "KINDS_OF_STAGE"]

LOAD_UNIT = 1 << 20  # Loads are summed as integers in this unit, so that subtracting a load leaves no rounding error.


class Kind(enum.Enum):
    """Kinds of work that an endpoint does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BESIDE = "beside"  # Whole requests run at an endpoint that is not a prefill endpoint.
    PROMPTS = "prompts"  # Whole requests run at a prefill endpoint, if no other endpoint has a free slot.


_KINDS: dict[str | None, tuple[Kind, ...]] = {
    None: (Kind.BESIDE,),
    "prefill": (Kind.PREFILL, Kind.PROMPTS),
    "decode": (Kind.DECODE, Kind.BESIDE),
    "both": (Kind.PREFILL, Kind.DECODE, Kind.BESIDE),
}


KINDS_OF_STAGE: dict[Stage | None, tuple[Kind, ...]] = {
    None: (Kind.BESIDE, Kind.PROMPTS),
    Stage.PREFILL: (Kind.PREFILL,),
    Stage.DECODE: (Kind.DECODE,),
}
"""The kinds of work that a stage may be, in the order in which they are tried. None: the whole request."""


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
# The names are the indices in a tuple of counts.
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
        ring: hash ring with the ids of these endpoints.
        open: sorted numbers of the endpoints that may have a free slot, for each kind of work.
        totals: sums of the endpoints' counts, by the index of each count.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, EndpointState] = {}
        self.ring = Ring()
        self.open: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self._kind_counts = dict.fromkeys(Kind, 0)
        self.totals = list(NOTHING)
        self._back_at: float | None = None  # The cached value of first_back_at. None if it has to be computed again.

    # --- methods for the totals ---

    @property
    def serving_count(self) -> int:
        return self.totals[SERVING]

    @property
    def unejected_count(self) -> int:
        return self.totals[UNEJECTED]

    @property
    def given_count(self) -> int:
        return self.totals[GIVEN]

    @property
    def in_flight(self) -> int:
        return self.totals[IN_FLIGHT]

    @property
    def free_count(self) -> int:
        """Number of free slots at endpoints that get requests."""
        return self.totals[FREE]

    @property
    def average_load(self) -> float:
        return self.totals[LOAD] / LOAD_UNIT / max(1, self.totals[GIVEN])

    @property
    def others_share(self) -> float:
        """Fraction of the reported work at these endpoints that other routers cause, from 0 to 1."""
        others = self.totals[OTHERS]
        return others / (others + self.totals[IN_FLIGHT]) if others else 0.0

    @property
    def own_share(self) -> float:
        """Fraction of the work at these endpoints that this router causes, from 0 to 1. One further request of this
        router is included.
        """
        own = self.totals[IN_FLIGHT] + 1
        return own / (own + self.totals[OTHERS])

    def count_of(self, kind: Kind) -> int:
        """Return the number of endpoints that get work of a kind.

        Args:
            kind: the kind of work.
        """
        return self._kind_counts[kind]

    @property
    def both_count(self) -> int:
        """Number of endpoints that do prefill and decode."""
        return self.totals[BOTH]

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

    # --- methods for the index ---

    def move(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Update the totals after the counts of one endpoint changed.

        Args:
            before: its old counts.
            after: its new counts.
        """
        totals = self.totals
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


# A search stops after this many endpoints with free slots that do not fit the request. Either they have too few slots,
# or the request failed there.
MISSES_MAX = 64


class Search(Candidates):
    """The candidates of one kind for one request.

    Args:
        model: endpoints of the request's model.
        by_id: all endpoints.
        kind: kind of work.
        sequences: number of sequences that need a slot.
        fits: returns whether the request may be sent to an endpoint, regardless of free slots.
        now: time in seconds.
        rng: source of randomness.
        close: called for an endpoint that has no free slot for any request.
    """

    def __init__(
        self,
        model: ModelEndpoints,
        by_id: Mapping[EndpointId, EndpointState],
        kind: Kind,
        *,
        sequences: int,
        fits: Callable[[EndpointState], bool],
        now: float,
        rng: Rng,
        close: Callable[[EndpointState, float], None],
    ) -> None:
        self._model = model
        self._by_id = by_id
        self._kind = kind
        self._sequences = sequences
        self._fits = fits
        self._now = now
        self._rng = rng
        self._close = close
        self._open = model.open[kind]
        self._drawn: list[Candidate] = []
        self._seen: set[int] = set()  # The set has the numbers of the endpoints that were drawn or do not fit.
        self._is_exhausted = False

    # --- methods that look at every endpoint ---

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._all[index]

    def __len__(self) -> int:
        return self._model.given_count if self._kind is Kind.PROMPTS else self._model.count_of(self._kind)

    @functools.cached_property
    def _all(self) -> list[Candidate]:
        states = self._model.by_number
        return [
            self._candidate(states[number], self._is_fit(states[number]))
            for number in sorted(states)
            # PROMPTS is tried if no other endpoint has a free slot. In that case, prefill endpoints are added to the
            # others.
            if (kinds := kinds_of(states[number])) and (self._kind in kinds or self._kind is Kind.PROMPTS)
        ]

    # --- methods that look at a few endpoints ---

    @property
    def average_load(self) -> float:  # type: ignore[override]
        return self._model.average_load

    @property
    def others_share(self) -> float:  # type: ignore[override]
        return self._model.others_share

    def sample(self, count: int) -> list[Candidate]:
        if len(self._drawn) < count and not self._is_exhausted:
            if len(self._open) <= count:
                self._draw_all()
            else:
                self._draw(count)
        return self._drawn if len(self._drawn) <= count else self._drawn[:count]

    def named(self, ids: Iterable[EndpointId]) -> list[Candidate]:
        found = []
        for id in ids:
            state = self._by_id.get(id)
            if state is not None and state.number in self._model.by_number and self._is_there(state):
                found.append(self._candidate(state, True))
        return found

    def around(self, key: str) -> Iterator[Candidate]:
        left = MISSES_MAX
        for id in self._model.ring.around(key):
            state = self._by_id[id]
            if self._is_there(state):
                yield self._candidate(state, True)
            else:
                left -= 1
                if not left:
                    return

    def next_after(self, id: EndpointId | None) -> Candidate:
        last = -1 if id is None or id not in self._by_id else self._by_id[id].number
        for _ in range(MISSES_MAX):
            if not self._open:
                break
            index = bisect.bisect_right(self._open, last)
            number = self._open[index if index < len(self._open) else 0]
            state = self._model.by_number[number]
            if self._is_fit_or_closed(state):
                return self._candidate(state, True)
            last = number
        for candidate in self.sample(1):
            return candidate
        raise LookupError("no endpoint has room")

    # --- private methods ---

    def _draw_all(self) -> None:
        states = self._model.by_number
        for number in list(self._open):
            if number not in self._seen and self._is_fit_or_closed(states[number]):
                self._drawn.append(self._candidate(states[number], True))
        self._is_exhausted = True

    def _draw(self, count: int) -> None:
        vain = 0
        while len(self._drawn) < count:
            if len(self._open) > 2 * len(self._seen):
                number = self._open[self._rng.randrange(len(self._open))]
                if number in self._seen:
                    continue
            else:
                left = [number for number in self._open if number not in self._seen]
                if not left:
                    self._is_exhausted = True
                    return
                number = left[self._rng.randrange(len(left))]
            state, open_count = self._model.by_number[number], len(self._open)
            if self._is_fit_or_closed(state):
                self._seen.add(number)
                self._drawn.append(self._candidate(state, True))
            elif len(self._open) == open_count:
                self._seen.add(number)
                vain += 1
                if vain > MISSES_MAX:
                    self._is_exhausted = True
                    return

    def _is_there(self, state: EndpointState) -> bool:
        kinds = kinds_of(state)
        return (self._kind in kinds or (self._kind is Kind.PROMPTS and bool(kinds))) and self._is_fit(state)

    def _is_fit(self, state: EndpointState) -> bool:
        return self._fits(state) and state.has_room(self._sequences, self._now)

    def _is_fit_or_closed(self, state: EndpointState) -> bool:
        """Return whether the endpoint can run the request. An endpoint without a free slot is also marked as closed."""
        if state.has_room(self._sequences, self._now):
            return self._fits(state)
        if self._sequences == 1 or not state.has_room(1, self._now):
            self._close(state, self._now)
        return False

    def _candidate(self, state: EndpointState, has_room: bool) -> Candidate:
        load, others = state.load_at(self._now)
        return Candidate(id=state.id, load=load, has_room=has_room, others=others)
