"""What there is of a request that was cut off: what its reader was given, choice by choice, and how it goes on."""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import AbortOutcome, FinishReason, TokenLogprob
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions

__all__ = ["CutOff", "Partial", "PartialChoice"]


class PartialChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What the deltas of one choice hold, taken together, those that are still to be read included.

    logprobs: None where they were not asked for, or not kept. weight_versions: see Delta. finish_reason: STOP and
    LENGTH where it was complete; None: its request has failed.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    weight_versions: WeightVersions
    finish_reason: FinishReason | None


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    """choices: in the order of their indices; each has no tokens where the request waited in the queue. resume: with it
    the same request goes on behind all of them."""

    choices: tuple[PartialChoice, ...]
    resume: Resume


class CutOff(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an id. partials: one for each request that bears it and whose reader has not left, in the order
    in which they came; of one that is pooled there is none."""

    outcome: AbortOutcome
    partials: tuple[Partial, ...] = ()
