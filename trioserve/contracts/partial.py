"""Partial results: the output that a stopped request has delivered, choice by choice, and the state to resume it."""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import AbortOutcome, FinishReason, TokenLogprob
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions

__all__ = ["AbortResult", "Partial", "PartialChoice"]


class PartialChoice(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of one choice joined, including deltas that the reader has not read yet.

    Attributes:
        token_ids: Output tokens.
        logprobs: One entry for each token. None if they were not requested, or not kept.
        weight_versions: See Delta.
        finish_reason: STOP or LENGTH for a complete choice. None if the request failed.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    weight_versions: WeightVersions
    finish_reason: FinishReason | None


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    """Partial result of one request.

    Attributes:
        choices: Ordered by index. Empty choices if the request was still in the queue.
        resume: State to resume all choices with the same request.
    """

    choices: tuple[PartialChoice, ...]
    resume: Resume


class AbortResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of stopping all requests with one id.

    Attributes:
        outcome: Outcome for the id.
        partials: One partial result for each request with this id whose reader has not left, in order of arrival.
            Pooling requests have no partial result.
    """

    outcome: AbortOutcome
    partials: tuple[Partial, ...] = ()
