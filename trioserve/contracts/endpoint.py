"""Anything that can serve a request, near or far, as the router sees it, and what it is told of a request."""

from __future__ import annotations

import math
from typing import NewType

import msgspec

from trioserve.contracts.block_hash import BlockHash

__all__ = ["EndpointId", "EndpointLoad", "RoutedRequest"]

EndpointId = NewType("EndpointId", str)
"""The router's name of an endpoint, chosen by the operator; unique among those that it knows."""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice of an endpoint may depend on.

    model: the name that the client asked for. tenant: who shares one turn with all others of that name.
    priority: a lower number is sooner. sequences: how many seats it takes. prompt_tokens: counted, or guessed from its
    length. session: the client's key of a conversation. pinned: the one endpoint it may run at.
    prefix: names of the prompt's leading blocks, from the first; what a block is, router and endpoints agree on.
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
    queue_deadline: float = math.inf


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint reports of itself. running, waiting: sequences. seats: how many may run there; None if it does
    not say. kv_usage: 0 to 1."""

    running: int
    waiting: int
    seats: int | None = None
    kv_usage: float = 0.0
