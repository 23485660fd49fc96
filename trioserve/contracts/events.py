"""Events that an engine core returns: new tokens, the end of a request and its reason, the outcome of an abort."""

from __future__ import annotations

import enum

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.request import KVTransferParams

__all__ = [
    "AbortOutcome",
    "AbortResult",
    "EngineEvent",
    "FinishReason",
    "HandOverOutcome",
    "IterativePhase",
    "Phase",
    "PoolingReady",
    "PromptLogprobs",
    "RequestFinished",
    "TokenLogprob",
    "TokensReady",
]


class FinishReason(enum.Enum):
    """Why a request ended."""

    # An end token, a stop token or a stop string ended the request. A complete pooling request has this reason too.
    STOP = "stop"
    LENGTH = "length"  # The request reached output_tokens_max, or the model's context is full.
    ABORT = "abort"  # The client left, or the request was aborted by its id.
    DEADLINE = "deadline"
    ERROR = "error"
    HANDED_OVER = "handed_over"  # Another engine resumes the request.


class HandOverOutcome(enum.Enum):
    """Outcome of moving a request to another engine."""

    HANDED_OVER = "handed_over"
    NOT_POSSIBLE = "not_possible"  # The request is not running, or no other engine could resume the request.
    UNKNOWN = "unknown"


class Phase(enum.Enum):
    """Progress of a request. The label of abort counters."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class IterativePhase(enum.Enum):
    """Progress of a request that takes a known number of steps."""

    QUEUED = "queued"
    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log probability of one token, and log probabilities of the most probable tokens at the same position.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of the token's probability, before temperature and filters.
        top: The most probable tokens with their log probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokensReady(msgspec.Struct, frozen=True):
    """New output tokens of one request.

    Attributes:
        request_id: The sequence.
        token_ids: The tokens, in order.
        logprobs: One entry for each token. None if not requested.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of prompt tokens, in order and without gaps.

    Attributes:
        request_id: The sequence.
        logprobs: One entry for each token. The entry of the first prompt token is None.
    """

    request_id: RequestId
    logprobs: tuple[TokenLogprob | None, ...]


class PoolingReady(msgspec.Struct, frozen=True):
    """The result of a pooling request. The core sends it once, before RequestFinished."""

    request_id: RequestId
    pooled: PoolingResult


class RequestFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a request.

    The request's blocks are free when this event is returned, with two exceptions. First, a connector may hold the
    blocks. Second, a step that was planned ahead may still contain the request: then the blocks are free after that
    step.

    Attributes:
        request_id: The sequence.
        reason: Why the request ended.
        phase: Progress of the request when it ended.
        stop_token_id: The end token or stop token that ended the request, which is also the request's last token. None
            if no such token ended the request.
        cached_token_count: Prompt tokens found in the prefix cache when the request first ran.
        message: Explanation for the client. None if there is nothing to explain.
        kv_transfer: Parameters with which another engine reads the blocks that a connector holds. None if no blocks are
            held.
    """

    request_id: RequestId
    reason: FinishReason
    phase: Phase | IterativePhase
    stop_token_id: int | None = None
    cached_token_count: int = 0
    message: str | None = None
    kv_transfer: KVTransferParams | None = None


EngineEvent = TokensReady | PromptLogprobs | PoolingReady | RequestFinished


class AbortOutcome(enum.Enum):
    """Outcome of aborting an id."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    UNKNOWN = "unknown"


class AbortResult(msgspec.Struct, frozen=True):
    """Effect of aborting one sequence.

    Attributes:
        outcome: Outcome for this id.
        finished: The RequestFinished event of the sequence, if the sequence's blocks are free already. Otherwise None:
            a step in flight still reads the blocks, and the core returns RequestFinished after the last such step.
    """

    outcome: AbortOutcome
    finished: RequestFinished | None = None
