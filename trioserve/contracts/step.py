"""Step plans, step results, and the executor interface that turns a plan into a result."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.ids import RequestId
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.request import EngineRequest

__all__ = [
    "DraftTask",
    "DraftTimes",
    "Executor",
    "IsAbandoned",
    "LaunchingExecutor",
    "ScheduledChunk",
    "StateSpan",
    "StepPlan",
    "StepResult",
    "never_abandoned",
]


class StateSpan(msgspec.Struct, frozen=True):
    """Consecutive tokens of a chunk, with the slots of the recurrent layers' state before and after them.

    Attributes:
        count: Number of tokens. 0 to copy the state from `reads` to `writes`.
        reads: Slot of the state before the first token. None for the first token of a sequence: the state is zeros.
        writes: Slot of the state after the last token.
    """

    count: int
    reads: int | None
    writes: int


class DraftTask(msgspec.Struct, frozen=True):
    """Work of the draft model for a decode, after the step has sampled.

    The draft model has its own KV for positions 0 .. start - 1, in the same blocks.

    Attributes:
        start: First position to compute.
        end: Position before which to stop: compute the KV of known tokens up to there, and propose nothing. None:
            compute the KV of all tokens that are known after sampling, and propose draft tokens.
        token_count: Maximum number of draft tokens to propose.
    """

    start: int
    end: int | None
    token_count: int


class DraftTimes(msgspec.Struct, frozen=True):
    """Times of a step with a draft model.

    Attributes:
        step_seconds: Time of the model itself.
        draft_seconds: Time of the draft model, which runs after it.
        pass_count: Forward passes of the draft model.
    """

    step_seconds: float
    draft_seconds: float
    pass_count: int


class ScheduledChunk(msgspec.Struct, frozen=True):
    """Computation of one request in one step: the tokens at positions start .. start + count - 1.

    A decode is a chunk with count 1 that samples. After a prefix cache hit, the first chunk has a start above 0.
    `tokens` and `block_table` are views of the core's own lists. These lists do not change until update_from_output. An
    executor must not change them.

    Attributes:
        request: The request.
        tokens: Every known token of the request: the prompt, then the output.
        start: First position.
        count: Number of known tokens to compute.
        block_table: Blocks of all positions so far, including the draft. The KV of position p is in block_table[p //
            block_size] at offset p % block_size. If every layer of the model has a sliding window, the first entries
            may be
            NO_BLOCK: no token from `start` on sees them.
        samples: True if the chunk includes the last known token, so that its last row gives the next token. False for
            pooling requests.
        draft: Draft tokens after the last known token, computed in this step at the positions after it. Empty unless
            the chunk is a decode. The step samples a token after the last known token and after each draft token, as if
            the tokens before it were right.
        awaits_token: True if the chunk's one token, at `start`, is sampled by the previous step, which was in flight
            when the plan was made. Then `tokens` ends before it. The core appends this token, and no other, when that
            step's result arrives.
        mask_row: Index of the row in the plan's masks for the next token. The rows of the draft tokens follow. None if
            every token is allowed.
        states: For models with recurrent layers: all tokens of the chunk, in consecutive spans. No other chunk of the
            plan reads or writes a slot that one of these spans writes.
        draft_task: Work of the draft model. None without such work.
    """

    request: EngineRequest
    tokens: Sequence[int]
    start: int
    count: int
    block_table: Sequence[int]
    samples: bool
    draft: tuple[int, ...] = ()
    awaits_token: bool = False
    mask_row: int | None = None
    states: tuple[StateSpan, ...] = ()
    draft_task: DraftTask | None = None

    @property
    def row_count(self) -> int:
        """Return the number of tokens to compute, known tokens and draft tokens."""
        return self.count + len(self.draft)

    @property
    def pools(self) -> bool:
        """Return True if the request is a pooling request and this is the last chunk of its prompt."""
        request = self.request
        return request.pooling is not None and self.start + self.count == len(request.prompt_token_ids)

    @property
    def row_tokens(self) -> Sequence[int]:
        """Return the tokens to compute. If the chunk awaits its token, this value is not reliable."""
        known = self.tokens[self.start : self.start + self.count]
        return [*known, *self.draft] if self.draft else known


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass.

    Attributes:
        step_index: Number of the step, counted from 0.
        chunks: Computations of the requests.
        token_count: Tokens of all chunks, including draft tokens.
        admitted: Requests that started when this plan was made.
        preempted: Requests that lost their blocks when this plan was made. A request may be in both lists: if no other
            request is left to compute, it restarts in the same plan with its own chunk.
        is_ahead: True if the plan was made while the previous step was in flight, assuming that no request ends in it.
            Such a plan preempts no request.
        masks: Token masks of the chunks with a mask_row. None if no chunk has one.
    """

    step_index: int
    chunks: tuple[ScheduledChunk, ...]
    token_count: int
    admitted: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    is_ahead: bool = False
    masks: TokenMasks | None = None


class StepResult(msgspec.Struct, frozen=True):
    """The results of a plan.

    Attributes:
        token_ids: For each chunk, in the plan's order, the token after its last known token. An entry is None if the
            chunk does not sample or failed, or if its request failed in the previous step.
        logprobs: By request, if requested.
        prompt_logprobs: By request, if requested: log probabilities of the tokens at positions start + 1 .. start +
            count that are prompt tokens.
        errors: Requests that cannot continue, each with a sentence for the client. Other requests are not affected.
        draft_token_ids: By request with a draft: the token after each draft token, if the draft is right up to there.
            The tuple is shorter than the draft if no token could be sampled at some position.
        draft_logprobs: Log probabilities of draft_token_ids, if requested.
        pooled: By request, for chunks that pool.
        proposed: By request with a draft_task: the draft tokens of the draft model.
        draft_times: None without a draft model.
    """

    token_ids: tuple[int | None, ...]
    logprobs: dict[RequestId, TokenLogprob] = {}
    prompt_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
    errors: dict[RequestId, str] = {}
    draft_token_ids: dict[RequestId, tuple[int, ...]] = {}
    draft_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
    pooled: dict[RequestId, PoolingResult] = {}
    proposed: dict[RequestId, tuple[int, ...]] = {}
    draft_times: DraftTimes | None = None


class IsAbandoned:
    """Reports to the executor whether a step was abandoned. An executor may call it at any time, in any thread.

    Args:
        request_count: Number of requests in the step.

    Attributes:
        waited_for: Array of one C int: the number of requests that still wait for the step. Native code reads this
            array without the GIL, because acquiring the GIL is slow.
        on_abandoned: Called once when the count reaches 0, to notify other ranks. None if not needed.
    """

    __slots__ = ("on_abandoned", "waited_for")

    def __init__(self, request_count: int) -> None:
        self.waited_for = array.array("i", (request_count,))
        self.on_abandoned: Callable[[], None] | None = None

    def leave(self) -> None:
        """Note that one request no longer waits for the step."""
        self.waited_for[0] -= 1
        if self.waited_for[0] == 0 and self.on_abandoned is not None:
            self.on_abandoned()

    def __call__(self) -> bool:
        return self.waited_for[0] == 0

    @property
    def address(self) -> int:
        """Return the address of waited_for. Valid while this object exists."""
        return self.waited_for.buffer_info()[0]


never_abandoned = IsAbandoned(1)


class Executor(Protocol):
    """Computes plans, one at a time, in the thread that calls it.

    Between two plans, an executor keeps little state of a request, because a request that is missing in the next plan
    may have ended. The executor keeps the last result, because the core may make the next plan before it knows that
    result. In such a plan, the executor fills in the awaited tokens. If a request failed or was abandoned in the last
    plan, the executor skips its chunk without an error.
    """

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        """Write the KV of all chunks, attend, and sample for each chunk that samples.

        Args:
            plan: The forward pass.
            is_abandoned: True once no request waits for the result. The writes of an abandoned step are never read.

        Returns:
            The results. For an abandoned plan, the executor may return None.

        Raises:
            Exception: a fault of the engine itself. A fault of one request goes into StepResult.errors.
        """
        ...


class LaunchingExecutor(Executor, Protocol):
    """An executor whose device computes asynchronously, so that a step can begin before the previous step has ended."""

    def launch(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> Callable[[], StepResult | None]:
        """Begin to execute a plan.

        Steps finish in the order in which they began. At most two steps are unfinished. If a step needs the tokens of
        the previous step, an implementation may do all work in the returned function.

        Args:
            plan: The forward pass.
            is_abandoned: See `execute`.

        Returns:
            A function that waits for the step and returns its results.
        """
        ...
