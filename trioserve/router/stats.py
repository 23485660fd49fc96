"""The router's counters as an immutable value."""

from __future__ import annotations

import msgspec

from trioserve.contracts.endpoint import EndpointId, PairOutcome
from trioserve.router.endpoint_state import EndpointHealth

__all__ = ["RouterStats"]


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the router's counters. Totals count since the start of the router.

    Attributes:
        waiting: requests in the queue, and requests whose body is being read before they enter.
        waiting_prompt_tokens: prompt tokens of the requests in the queue.
        leases: sequences that have a slot, by endpoint.
        health: health of each endpoint.
        admissions_total: leases that were granted.
        retries_total: requests that waited again after an endpoint failed them before their first token.
        rejections_total: refused requests, by reason.
        continuing: streams that wait to resume at another endpoint. They are included in `waiting`.
        continuations_total: streams that got a lease to resume with.
        continuations_refused_total: streams that were not allowed to resume, by reason.
        moving: streams that run at an endpoint that is being emptied, and wait for a slot at another endpoint.
        moves_total: streams that got a lease to move to.
        pairs_total: requests that should have been disaggregated, by outcome.
    """

    waiting: int
    waiting_prompt_tokens: int
    leases: dict[EndpointId, int]
    health: dict[EndpointId, EndpointHealth]
    admissions_total: int
    retries_total: int
    rejections_total: dict[str, int]
    continuing: int
    continuations_total: int
    continuations_refused_total: dict[str, int]
    moving: int
    moves_total: int
    pairs_total: dict[PairOutcome, int]
