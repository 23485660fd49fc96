"""Finds endpoints for one request, a few at a time. See model_endpoints for open endpoints."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.candidates import Candidate, Candidates, Rng
from trioserve.router.endpoint_state import EndpointState
from trioserve.router.model_endpoints import Kind, ModelEndpoints, kinds_of

__all__ = ["Search"]

MISSES_MAX = 64  # bound on endpoints with free slots that do not fit the request: too few slots, or it failed there


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
        self._seen: set[int] = set()  # numbers of the endpoints that were drawn or do not fit
        self._is_exhausted = False

    # --- the whole sequence ---

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
            # PROMPTS is tried when no other endpoint has a free slot. Then prefill endpoints are added to the others.
            if (kinds := kinds_of(states[number])) and (self._kind in kinds or self._kind is Kind.PROMPTS)
        ]

    # --- a few of them ---

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

    # --- internal ---

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
        """Return whether the endpoint fits. Close the endpoint if it has no free slot for any request."""
        if state.has_room(self._sequences, self._now):
            return self._fits(state)
        if self._sequences == 1 or not state.has_room(1, self._now):
            self._close(state, self._now)
        return False

    def _candidate(self, state: EndpointState, has_room: bool) -> Candidate:
        load, others = state.load_at(self._now)
        return Candidate(id=state.id, load=load, has_room=has_room, others=others)
