"""What an engine answers: tokens are ready, a request finished and why, what became of an abort."""

from __future__ import annotations

import enum

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.pooling import Pooled

__all__ = [
    "AbortOutcome",
    "AbortResult",
    "EngineEvent",
    "FinishReason",
    "HandOverOutcome",
    "IterativePhase",
    "Phase",
    "PooledReady",
    "PromptLogprobs",
    "RequestFinished",
    "TokenLogprob",
    "TokensReady",
]


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token, a stop token or a stop string; or its prompt is pooled
    LENGTH = "length"  # output_tokens_max, or the model's context is full
    ABORT = "abort"  # the client left, or somebody aborted it by id
    DEADLINE = "deadline"
    ERROR = "error"
    HANDED_OVER = "handed_over"  # another engine goes on with it


class HandOverOutcome(enum.Enum):
    """What became of asking for a request to be given away to another engine."""

    HANDED_OVER = "handed_over"
    NOT_POSSIBLE = "not_possible"  # it does not run, or nobody could go on with it
    UNKNOWN = "unknown"


class Phase(enum.Enum):
    """How far a request had come; the label of abort counters."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class IterativePhase(enum.Enum):
    """How far a request had come that takes a known number of steps."""

    QUEUED = "queued"
    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of one token, before temperature and filters, and of the most probable, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokensReady(msgspec.Struct, frozen=True):
    """New output tokens of one request, in order. logprobs is None or as long as token_ids."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of prompt tokens, in order and without gaps; the first prompt token has none (None)."""

    request_id: RequestId
    logprobs: tuple[TokenLogprob | None, ...]


class PooledReady(msgspec.Struct, frozen=True):
    """What a request that is pooled gives, once. Its end comes next."""

    request_id: RequestId
    pooled: Pooled


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a request. Its blocks are free when this is returned, or a connector holds them; or, where the
    next step had been planned ahead and has it once more, they are when that one has come back.

    phase: where it was when it ended. stop_token_id: the end or stop token that ended it; it is the last of its tokens.
    cached_token_count: prompt tokens that came from the prefix cache when it first ran. kv_transfer: how another engine
    gets at the blocks that a connector holds of it.
    """

    request_id: RequestId
    reason: FinishReason
    phase: Phase | IterativePhase
    stop_token_id: int | None = None
    cached_token_count: int = 0
    message: str | None = None
    kv_transfer: KVTransferParams | None = None


EngineEvent = TokensReady | PromptLogprobs | PooledReady | RequestFinished


class AbortOutcome(enum.Enum):
    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    UNKNOWN = "unknown"


class AbortResult(msgspec.Struct, frozen=True):
    """What one id's abort did. `finished` is set when its blocks are free already; otherwise a step in flight still
    reads them, and the update of the last one that does returns the RequestFinished."""

    outcome: AbortOutcome
    finished: RequestFinished | None = None
