"""Snapshots of requests that are in the engine."""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import IterativePhase, Phase

__all__ = ["LiveImageView", "LiveRequestView"]


class LiveRequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one request, with all of its choices.

    Attributes:
        id: Id that the caller gave to the request.
        state: "preparing" (tokenization), "waiting", "running" (at least one choice computes), "finished" (complete,
            but its reader has not left) or "held" (complete, and its blocks are held for another engine).
        phase: Phase of the most advanced choice.
        priority: A lower number runs sooner.
        age_seconds: Seconds since the request entered the engine.
        prompt_token_count: Tokens of the prompt.
        completion_token_count: Output tokens of all choices so far.
        block_count: KV blocks in use or held. A block that choices share counts once for each choice.
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
    """A snapshot of one image request, with all of its images.

    Attributes:
        id: Id that the caller gave to the request.
        state: See LiveRequestView.
        phase: Phase of the most advanced image.
        priority: A lower number runs sooner.
        age_seconds: Seconds since the request entered the engine.
        image_count: Number of images.
        steps_done: Denoising steps done, summed over images.
        step_count: All denoising steps, summed over images.
        slot_count: Latent slots in use, including the slots of preempted images.
    """

    id: str
    state: str
    phase: IterativePhase
    priority: int
    age_seconds: float
    image_count: int
    steps_done: int
    step_count: int
    slot_count: int
