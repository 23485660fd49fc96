"""What may be seen of a request while it lives."""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import IterativePhase, Phase

__all__ = ["LiveImageView", "LiveRequestView"]


class LiveRequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one request, its choices taken together.

    id: the caller's. state: "preparing" (being tokenized), "waiting", "running" (at least one choice computes),
    "finished" (answered, and its reader still there) or "held" (answered, and its blocks are kept for another engine,
    whether or not its reader is there). phase: how far the furthest choice has come. age_seconds: since it was entered.
    Token counts: of the prompt, and of all responses so far. block_count: KV blocks in use or held, shared ones counted
    once for each choice.
    """

    id: str
    state: str
    phase: Phase
    priority: int
    age_seconds: float
    prompt_token_count: int
    completion_token_count: int
    block_count: int


class LiveImageView(msgspec.Struct, frozen=True, kw_only=True):
    """The same of a request for pictures, these taken together. phase: how far the furthest of them has come.
    steps_done of step_count: denoising steps of all pictures. slot_count: latent slots in use, those of preempted
    pictures included."""

    id: str
    state: str
    phase: IterativePhase
    priority: int
    age_seconds: float
    picture_count: int
    steps_done: int
    step_count: int
    slot_count: int
