"""Anything that can serve a request, near or far, as the router sees it, and what it is told of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NewType

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.kv_transfer import EngineRole

__all__ = ["PREFIX_BLOCK_TOKENS", "EndpointId", "EndpointLoad", "RoutedRequest"]

EndpointId = NewType("EndpointId", str)
"""The router's name of an endpoint, chosen by the operator; unique among those that it knows."""


PREFIX_BLOCK_TOKENS = 32
"""In a block of a prompt whose tokens nobody has counted: short enough for a common system prompt, and few names for a
long prompt."""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice of an endpoint may depend on.

    model: the name that the client asked for. tenant: who shares one turn with all others of that name.
    priority: a lower number is sooner. sequences: how many seats it takes. prompt_tokens: counted, or guessed from its
    length. session: the client's key of a conversation. pinned: the one endpoint it may run at.
    prefix: names of the prompt's leading blocks of bytes, from the first: for guesses. A block has PREFIX_BLOCK_TOKENS,
    as far as one can guess.
    blocks: by block size in tokens, the names of the prompt's leading blocks as an engine with such blocks has them
    (see contracts/block_hash), as many as can be a hit; a size that is not there was not asked for, or nobody knows.
    queue_deadline: the moment from which waiting in line is over for it.
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


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint reports of itself. running, waiting: sequences. seats: how many may run there; None if it does
    not say. kv_usage: 0 to 1. role: what it is meant for, if it can give KV to other engines or take it; otherwise it
    is left out."""

    running: int
    waiting: int
    seats: int | None = None
    kv_usage: float = 0.0
    role: EngineRole | UnsetType = UNSET
