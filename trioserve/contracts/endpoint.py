"""Endpoints as the router sees them, and the request properties on which routing depends.

By a `KvEvent` about the blocks in an engine's prefix cache, a router finds the endpoint that has a prompt's prefix. A
stream of these events begins with a snapshot, in one or more parts. The changes since then follow in order. Changes are
numbered by hash: `sequence` is the number of the first hash of an event, and each further hash counts one more. A
snapshot contains all changes before its `sequence`, and the next change has that number. If a reader finds another
number, or a second snapshot, it has missed changes. Then the reader uses the new snapshot, or reads the stream again
from the start. A new epoch means that the engine restarted: earlier numbers and blocks are no longer valid.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import NewType

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.contracts.ids import BlockHash
from trioserve.contracts.kv_transfer import EngineRole

__all__ = [
    "BlocksRemoved",
    "BlocksStored",
    "CONTINUATION_BYTES_MAX",
    "DISAGGREGATED_PROMPT_TOKENS_MIN",
    "EndpointId",
    "EndpointLoad",
    "KvEvent",
    "LoadReported",
    "NOT_A_PAGE_HEADER",
    "PREFIX_BLOCK_TOKENS",
    "PairOutcome",
    "ResidencySnapshot",
    "RoutedRequest",
    "Stage",
]

NOT_A_PAGE_HEADER = "sec-trioserve-client"
"""Header that our routers send to their endpoints, and our commands send to servers.

Both may reach a server under any host name, so the server cannot tell them from a web page by that name. Browsers do
not let a page set a header whose name begins with "Sec-" (Fetch standard, forbidden request-header). So no page can
send this header.
"""

EndpointId = NewType("EndpointId", str)
"""The router's name of an endpoint. The operator chooses it. Unique within a router."""


CONTINUATION_BYTES_MAX = 1024 * 1024
"""Bytes of token ids kept for one stream, so that another endpoint can resume it.

Enough for about 100,000 tokens. Most streams have some thousands.
"""

DISAGGREGATED_PROMPT_TOKENS_MIN = 32
"""Fewest prompt tokens for which a router computes the prompt at another endpoint: two blocks of the usual size.

A shorter prompt is computed in the time that a transfer takes.
"""

PREFIX_BLOCK_TOKENS = 32
"""Estimated tokens of a prefix block, used for prompts whose tokens were not counted.

Small enough to match a common system prompt, large enough that a long prompt has few hashes.
"""


class Stage(enum.Enum):
    """Stage of a disaggregated request. One endpoint computes the prompt, a second endpoint computes the response."""

    PREFILL = "prefill"
    DECODE = "decode"


class PairOutcome(enum.Enum):
    """Outcome of a request that should run at two endpoints. The label of the metric `pairs_total`.

    After every outcome except PAIRED and LEFT, one endpoint serves the request alone.
    """

    PAIRED = "paired"  # The second endpoint began to respond.
    NO_ENDPOINT = "no_endpoint"  # No endpoint was available for the next stage.
    PREFILL_FAILED = "prefill_failed"
    NOT_HELD = "not_held"  # The prompt was computed, but the endpoint did not hold its KV blocks.
    FINISHED = "finished"  # The response was complete with its first token.
    HOLD_LOST = "hold_lost"  # The KV blocks were released before the second endpoint read them.
    DECODE_FAILED = "decode_failed"
    TRANSFER_FAILED = "transfer_failed"  # The second endpoint could not read the KV blocks.
    LEFT = "left"  # The request ended earlier, because the client left or the request was refused.


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request on which the choice of an endpoint may depend.

    Attributes:
        model: Name of the model that the client asked for.
        tenant: Requests of one tenant share one turn in the queue.
        priority: A lower number runs sooner.
        sequences: Number of sequences that the request runs as.
        prompt_tokens: Number of prompt tokens, counted, or estimated from the prompt's length.
        session: Conversation key that the client set. None without a session.
        pinned: The only endpoint where the request may run. None if any endpoint may serve the request.
        preferred: Endpoint that has most of the prompt's KV, probably. The request runs there if that endpoint has a
            free slot. None to let the policy choose.
        prefix: Hashes of the prompt's leading blocks of text, first block first, for estimates of cache hits. A block
            has about PREFIX_BLOCK_TOKENS tokens.
        blocks: Hashes of the prompt's leading KV blocks (contracts/ids), by block size in tokens. Includes only
            blocks that can be cache hits. A block size is missing if the policy did not need the hashes, or if they are
            unknown.
        queue_deadline: Time at which the request stops waiting in the queue. Default: never.
        can_be_disaggregated: True if one endpoint may compute the prompt and another the response.
        running_at: Endpoint where the request runs already, because a previous router process sent it there. The
            request gets a lease there even above the limit, because it already has a batch slot.
    """

    model: str
    tenant: str = ""
    priority: int = 0
    sequences: int = 1
    prompt_tokens: int = 0
    session: str | None = None
    pinned: EndpointId | None = None
    preferred: EndpointId | None = None
    prefix: tuple[BlockHash, ...] = ()
    blocks: Mapping[int, tuple[BlockHash, ...]] = msgspec.field(default_factory=dict)
    queue_deadline: float = math.inf
    can_be_disaggregated: bool = False
    running_at: EndpointId | None = None


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load that an endpoint reports about itself.

    Attributes:
        running: Running sequences.
        waiting: Waiting sequences.
        max_num_seqs: Maximum number of sequences that run at once, "seats" in JSON. None if the endpoint does not
            report it.
        kv_usage: Used fraction of the KV cache, 0 to 1.
        role: Role of the engine, if it can send KV to other engines or load it from them. Unset otherwise.
        fingerprint: Identifies all properties of the engine that determine output tokens. A response can resume at an
            endpoint with an equal fingerprint. Unset if not computed.
        weight_version: Version of the weights. Unset until the weights are replaced for the first time.
        routers: Ids of the routers that requested load reports, each with the seconds since its last request. Routers
            that send no id are not included.
        clock: Name of the endpoint's clock. The times of two reports can be compared if the clock is the same.
        told_at: Time of the report, in seconds of that clock.
        instance: Identifies the endpoint's process. A restart changes it.
        generated: Output tokens of all responses since the start. Reported by servers of other projects. Trioserve
            sends heartbeats instead.
    """

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


class ResidencySnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Part of the list of all blocks that can be found in the prefix cache.

    Attributes:
        epoch: Identifies one run of the engine. A restart changes it.
        sequence: Number of the next change.
        model: Name of the model in requests.
        block_size: Tokens in a block.
        hash_scheme: Name of the hash algorithm of blocks (contracts/ids).
        hashes: Hashes of the blocks in this part. No block is in two parts.
        left: Number of blocks in the parts that follow. 0 in the last part.
        window_tokens: Largest sliding window in tokens, if every layer has one. None otherwise. With a window, a prefix
            counts as cached if the blocks within the window of the next token are cached.
    """

    epoch: str
    sequence: int
    model: str
    block_size: int
    hash_scheme: str
    hashes: list[BlockHash]
    left: int
    window_tokens: int | None = None


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that can be found in the prefix cache from now on."""

    sequence: int
    hashes: list[BlockHash]


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """Blocks that can no longer be found in the prefix cache."""

    sequence: int
    hashes: list[BlockHash]


class LoadReported(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load of an endpoint, for a reader that asks only for the load. The endpoint sends it after changes, and at long
    intervals.
    """

    load: EndpointLoad


KvEvent = ResidencySnapshot | BlocksStored | BlocksRemoved
