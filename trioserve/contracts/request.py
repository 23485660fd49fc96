"""Request to an engine core: one sequence to continue or to pool, and how long the prefix cache prefers its blocks.

`KVTransferParams` are the JSON fields by which client, router and engines agree on a transfer of KV blocks.
"""

from __future__ import annotations

import math

import msgspec

from trioserve.contracts.arguments import to_float
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.guide import Guide
from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import GivenRows
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import AdapterRef

__all__ = [
    "DEFAULT_RETENTION",
    "EngineRequest",
    "KVTransferParams",
    "PRIORITY_MAX",
    "PRIORITY_MIN",
    "RETENTION_IDLE_SECONDS_MAX",
    "RETENTION_WEIGHT_MAX",
    "Retention",
]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Value of `kv_transfer_params` in requests and responses, compatible with vLLM's NIXL connector.

    Unknown fields are ignored. A request to the prefill engine sets do_remote_decode. The response of that engine sets
    do_remote_prefill and the remaining fields. The router or client copies this response into the request to the decode
    engine.

    Attributes:
        do_remote_prefill: True if another engine holds the blocks of the prompt.
        do_remote_decode: True to compute the prompt and hold its blocks for another engine.
        remote_engine_id: Id of the engine that holds the blocks. The id changes with each start of that engine.
        remote_request_id: Id of the request in that engine.
        remote_block_ids: Indices of the blocks in that engine, in order. 2147483647 stands for a block that a sliding
            window no longer needs. A list for each cache group if there are groups.
        remote_host: Host where that engine's connector listens.
        remote_port: Port where that engine's connector listens.
        remote_block_size: Tokens in a block of that engine.
        remote_num_tokens: Number of tokens whose KV is in the blocks.
        tp_size: Machines that share that engine's attention heads.
        traceparent: Trace of the request in that engine (W3C Trace Context), so that the transfer joins the trace.
        remote_signature: Proof that an engine of the same group set host, port, engine and request. See
            connectors/stream/signature.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: tuple[int | tuple[int, ...], ...] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_size: int | None = None
    remote_num_tokens: int | None = None
    tp_size: int = 1
    traceparent: str | None = None
    remote_signature: str | None = None


RETENTION_WEIGHT_MAX = 4.0  # A session may be preferred to others, but no session may displace all others for long.
RETENTION_IDLE_SECONDS_MAX = 3600.0  # An agent that was silent for an hour rarely comes back.


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Preference for the cached blocks of one session, while the session waits for its next turn.

    It is a preference and no pin: under pressure, every cached block is evicted.

    Attributes:
        weight: 0 to RETENTION_WEIGHT_MAX. Value of the session's blocks relative to other sessions. 0 for no
            preference: the blocks are evicted by recency, like blocks without a session.
        idle_seconds: Above 0, at most RETENTION_IDLE_SECONDS_MAX. The preference ends this many seconds after the last
            turn or hint.
        tenant: Name of the tenant whose share of the pool limits the retained blocks. None is a tenant, too.

    Raises:
        InvalidRequest: a value has a wrong type or is out of range. The message names the field.
    """

    weight: float = 1.0
    idle_seconds: float = 300.0
    tenant: str | None = None

    def __post_init__(self) -> None:
        for name, low, limit in (
            ("weight", "at least 0", RETENTION_WEIGHT_MAX),
            ("idle_seconds", "above 0", RETENTION_IDLE_SECONDS_MAX),
        ):
            value = to_float(name, getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)
            is_low = value < 0 or (value == 0 and name == "idle_seconds")
            if is_low or not (math.isfinite(value) and value <= limit):
                raise InvalidRequest(f"{name} is {value}, allowed is {low} and at most {limit:g}", param=name)


DEFAULT_RETENTION = Retention()
"""Retention of a session that a request opens by its id."""


PRIORITY_MIN = -100  # Priorities have a limited range, because each priority in use has its own queue.
PRIORITY_MAX = 100


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. A request with n choices is n sequences.

    Attributes:
        id: Id that the engine gave to the sequence.
        prompt_token_ids: At least one token.
        sampling: Sampling parameters.
        output_tokens_max: At least 1, or 0 for pooling. Prompt and output must fit the model's context.
        stop_token_ids: All tokens that end the sequence. The model's end tokens are included, unless the request
            ignores them.
        seed: 0 <= seed < 2**64. Seed and position determine the randomness of each token, regardless of other requests.
        priority: PRIORITY_MIN to PRIORITY_MAX. A lower number runs sooner.
        cache_salt: Requests share cached prefix blocks only if their salts are equal. The salt depends on the content
            of the adapter (adapter_salt).
        kv_transfer: Parameters of a KV transfer, for the connector. None without a transfer.
        guide: Guide that restrains the tokens of this sequence. None without a grammar.
        resumed_output: First output tokens of a resumed response. Computed like the prompt, counted as output.
            There are fewer than output_tokens_max, and none is an end token. The guide has already accepted
            them.
        pooling: Parameters of a pooling request. Its last prompt chunk returns a vector or scores instead of a token,
            and then the sequence ends. sampling and seed have no effect. None for a request that samples tokens.
        given: Prompt rows with given embeddings, ordered by position, without overlap. Requests share blocks only if
            these rows are equal too. Connectors do not see a request with given rows.
        adapter: Adapter whose weights are added to the model's weights. None for the model alone.
        session: Id of the session whose turn this is. The prefix cache prefers to keep the session's blocks between
            two turns. None for a request without a session.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_tokens_max: int
    stop_token_ids: frozenset[int]
    seed: int
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer: KVTransferParams | None = None
    guide: Guide | None = None
    resumed_output: tuple[int, ...] = ()
    pooling: Pooling | None = None
    given: tuple[GivenRows, ...] = ()
    adapter: AdapterRef | None = None
    session: str | None = None

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that are known before the first step: the prompt and the known output."""
        return self.prompt_token_ids + self.resumed_output if self.resumed_output else self.prompt_token_ids
