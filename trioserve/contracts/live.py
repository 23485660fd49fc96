"""What may be seen of a request while it lives."""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import Phase

__all__ = ["LiveRequestView"]


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
