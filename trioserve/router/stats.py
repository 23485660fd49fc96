"""What the router counts, as a frozen value."""

from __future__ import annotations

import msgspec

from trioserve.contracts.endpoint import EndpointId, PairOutcome
from trioserve.router.endpoint_state import EndpointHealth

__all__ = ["RouterStats"]


class RouterStats(msgspec.Struct, frozen=True, kw_only=True):
    """waiting: requests in the queue, and those that are being read before. leases: sequences that have a slot, by
    endpoint. continuing: streams among those that wait, to go on elsewhere. continuations_total: that did;
    continuations_refused_total: that may not, by the reason. moving: streams that wait for room elsewhere, where they
    run, to leave an endpoint that is emptied; moves_total: that got it. pairs_total: requests that were to be
    disaggregated, by what became of that. Totals count since the start."""

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
