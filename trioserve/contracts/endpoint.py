"""Anything that can serve a request, near or far, as the router sees it, and what it is told of a request."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import NewType

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.kv_transfer import EngineRole

__all__ = [
    "CONTINUATION_BYTES_MAX",
    "DISAGGREGATED_PROMPT_TOKENS_MIN",
    "NOT_A_PAGE_HEADER",
    "PREFIX_BLOCK_TOKENS",
    "EndpointId",
    "EndpointLoad",
    "Stage",
    "PairOutcome",
    "RoutedRequest",
]

NOT_A_PAGE_HEADER = "sec-trioserve-client"
"""Sent by our routers to their endpoints, and by our commands: both may know a server by any name. No browser lets a
page set a header whose name begins with "Sec-" (Fetch standard, forbidden request-header), so no page can send it."""

EndpointId = NewType("EndpointId", str)
"""The router's name of an endpoint, chosen by the operator; unique among those that it knows."""


CONTINUATION_BYTES_MAX = 1024 * 1024
"""Kept of one stream so that it can go on elsewhere: the ids of about 100,000 tokens. Most have some thousands."""

DISAGGREGATED_PROMPT_TOKENS_MIN = 32
"""Of a prompt that a router has computed elsewhere: two blocks of the usual size. Less is computed in the time in which
it would be fetched."""

PREFIX_BLOCK_TOKENS = 32
"""In a block of a prompt whose tokens nobody has counted: short enough for a common system prompt, and few names for a
long prompt."""


class Stage(enum.Enum):
    """A part of a request whose prompt is computed at one endpoint and whose response is made at another."""

    PREFILL = "prefill"
    DECODE = "decode"


class PairOutcome(enum.Enum):
    """What became of a request that was to be served by two endpoints; the label of `pairs_total`. All but the first
    and the last went on whole, at one endpoint."""

    PAIRED = "paired"  # the second endpoint began to answer
    NO_ENDPOINT = "no_endpoint"  # none was there any more for the part that was next
    PREFILL_FAILED = "prefill_failed"
    NOT_HELD = "not_held"  # the prompt is computed, but its blocks are not kept for anybody
    FINISHED = "finished"  # the response was over with its first token
    HOLD_LOST = "hold_lost"  # the blocks were kept, and are not any more
    DECODE_FAILED = "decode_failed"
    TRANSFER_FAILED = "transfer_failed"  # the second endpoint could not get at the blocks
    LEFT = "left"  # it ended before: its client left, or it was refused


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice of an endpoint may depend on.

    model: the name that the client asked for. tenant: who shares one turn with all others of that name.
    priority: a lower number is sooner. sequences: how many it runs as. prompt_tokens: counted, or estimated from its
    length. session: the client's key of a conversation. pinned: the one endpoint it may run at.
    prefix: names of the prompt's leading blocks of bytes, from the first: for guesses. A block has PREFIX_BLOCK_TOKENS,
    as far as one can guess.
    blocks: by block size in tokens, the names of the prompt's leading blocks as an engine with such blocks has them
    (see contracts/block_hash), as many as can be a hit; a size that is not there was not asked for, or nobody knows.
    queue_deadline: the moment from which waiting in the queue is over for it.
    can_be_disaggregated: its prompt may be computed at one endpoint and its response at another, if there are such two.
    running_at: the endpoint where it runs already, sent there by a router that is gone: it has its lease there whatever
    the limit says, since it has its slot.
    """

    model: str
    tenant: str = ""
    priority: int = 0
    sequences: int = 1
    prompt_tokens: int = 0
    session: str | None = None
    pinned: EndpointId | None = None
    prefix: tuple[BlockHash, ...] = ()
    blocks: Mapping[int, tuple[BlockHash, ...]] = msgspec.field(default_factory=dict)
    queue_deadline: float = math.inf
    can_be_disaggregated: bool = False
    running_at: EndpointId | None = None


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint reports of itself. running, waiting: sequences. max_num_seqs: how many may run there, "seats" in
    JSON; None if it does not say. kv_usage: 0 to 1. role: what it is meant for, if it can give KV to other engines or
    take it; otherwise it is left out. fingerprint: names all that decides about the tokens of its responses; those of
    one endpoint go on at another with the same one. Left out where nobody has looked. weight_version: of its weights,
    once they were replaced. routers: those that say who they
    are when they ask, and how many seconds ago each did so. clock, told_at: when it looked, in seconds of a clock of
    its own that goes by this name; two reports by one clock tell how much time lies between them, and nothing else.
    instance: names the process, from its start to its end. generated: tokens of all responses since it began; other
    servers report it, ours send beats instead."""

    running: int
    waiting: int
    max_num_seqs: int | None = msgspec.field(default=None, name="seats")
    kv_usage: float = 0.0
    role: EngineRole | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    routers: dict[str, float] | UnsetType = UNSET
    clock: str | UnsetType = UNSET
    told_at: float | UnsetType = UNSET
    instance: str | UnsetType = UNSET
    generated: float | UnsetType = UNSET
