"""StepPlan, StepResult, and the executor interface that turns one into the other."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.ids import RequestId
from trioserve.contracts.pooling import Pooled
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.token_masks import TokenMasks

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
    """Some of a chunk's tokens, `count` of them, and where the state of layers that keep one lies before and behind
    them. reads: its slot before the first token; None: nothing came before, and the state is zeros. writes: its slot
    behind the last. With a count of 0 one is a copy of the other."""

    count: int
    reads: int | None
    writes: int


class DraftTask(msgspec.Struct, frozen=True):
    """What a draft model computes for a decode when the step has sampled.

    It has KV of its own for positions 0 .. start - 1, in the same blocks. end: it computes that of the tokens before
    this position, all of them known, and proposes nothing. None: of every token that is known then, and proposes
    token_count tokens, or fewer, that may come next.
    """

    start: int
    end: int | None
    token_count: int


class DraftTimes(msgspec.Struct, frozen=True):
    """What a step took: the model itself, and behind it the draft model, which computed pass_count times."""

    step_seconds: float
    draft_seconds: float
    pass_count: int


class ScheduledChunk(msgspec.Struct, frozen=True):
    """What one request computes in one step: the tokens at positions start .. start + count - 1.

    tokens: every known token of the request, prompt and then output. block_table: the KV blocks that hold positions 0
    .. start + count - 1; position p lies in block_table[p // block_size] at offset p % block_size. Both are views of
    the core's own lists, stable until update_from_output: read them, never change them. Where every layer of the model
    has a sliding window, the first places may be NO_BLOCK: all that nobody sees from `start` on. samples: the chunk
    reaches the last known token, so its last row gives the next token. awaits_token: its one token, at `start`, is what
    the step before it samples for this request, and was not known when the plan was made. Then `tokens` ends before it,
    and gets it, and nothing else, when that step's result is taken. A decode is a chunk with count 1 that samples; a
    prefix hit is a chunk whose start is above 0. A request that is pooled never samples. draft: tokens that may come
    after the last known one, computed in the same step at the positions behind it. Only a decode has one. A token is
    sampled after the last known token and after each draft token, as if all before it were known. The block table
    covers the draft, too. mask_row: the row of the plan's masks that says which tokens may come next; each draft token
    has one more, behind it. None: all may. states: of a model with layers that keep a state: its tokens, in spans that
    follow one another. No other chunk of the plan reads or writes a slot that one of these writes. draft_task: for the
    draft model, where there is one; None: nothing.
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
        """Tokens that it computes, known and drafted."""
        return self.count + len(self.draft)

    @property
    def pools(self) -> bool:
        """Whether its request is pooled, and this is the last chunk of the prompt."""
        request = self.request
        return request.pooling is not None and self.start + self.count == len(request.prompt_token_ids)

    @property
    def row_tokens(self) -> Sequence[int]:
        """These tokens; of one that awaits its token, nothing that can be relied on."""
        known = self.tokens[self.start : self.start + self.count]
        return [*known, *self.draft] if self.draft else known


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. step_index counts from 0. token_count: what all chunks compute, drafts included. admitted and
    preempted name requests that started, or lost their blocks, when this plan was made. One request may be in both: it
    lost its blocks, and with nothing else left to compute it starts over in the same plan, as a chunk of its own.
    is_ahead: it was made while the step before it was in flight, as if every request of that one went on; nobody is
    preempted then. masks: of the chunks that have a mask_row; None where none has."""

    step_index: int
    chunks: tuple[ScheduledChunk, ...]
    token_count: int
    admitted: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    is_ahead: bool = False
    masks: TokenMasks | None = None


class StepResult(msgspec.Struct, frozen=True):
    """The response to a plan.

    token_ids: one per chunk, in the plan's order, what follows its last known token; None for a chunk that does not
    sample, that failed, or whose request failed in the step before. logprobs: by request, for those that asked.
    prompt_logprobs: by request that asked; the entry of a chunk holds the logprobs of the tokens at positions start + 1
    .. start + count, as far as these are prompt tokens. errors: requests that cannot go on, with a sentence for the
    client; the others are not touched. draft_token_ids: by request with a draft, what follows each draft token, if the
    draft tokens up to it are right; shorter than the draft where no token could be chosen. draft_logprobs: as long, for
    those that asked. pooled: of each chunk that pools, by request. proposed: by request whose draft_task was done, what
    the draft model says may come next. draft_times: None without a draft model.
    """

    token_ids: tuple[int | None, ...]
    logprobs: dict[RequestId, TokenLogprob] = {}
    prompt_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
    errors: dict[RequestId, str] = {}
    draft_token_ids: dict[RequestId, tuple[int, ...]] = {}
    draft_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
    pooled: dict[RequestId, Pooled] = {}
    proposed: dict[RequestId, tuple[int, ...]] = {}
    draft_times: DraftTimes | None = None


class IsAbandoned:
    """Whether nobody waits for a step any more; may be asked at any time, in any thread. waited_for: one C int, how
    many of its requests are waited for. What computes without the GIL reads that: to take the GIL costs more.
    on_abandoned: called once, when that is so, for whoever has to tell somebody elsewhere."""

    __slots__ = ("on_abandoned", "waited_for")

    def __init__(self, request_count: int) -> None:
        self.waited_for = array.array("i", (request_count,))
        self.on_abandoned: Callable[[], None] | None = None

    def leave(self) -> None:
        """One of its requests is not waited for any more."""
        self.waited_for[0] -= 1
        if self.waited_for[0] == 0 and self.on_abandoned is not None:
            self.on_abandoned()

    def __call__(self) -> bool:
        return self.waited_for[0] == 0

    @property
    def address(self) -> int:
        """Of waited_for, valid as long as this object."""
        return self.waited_for.buffer_info()[0]


never_abandoned = IsAbandoned(1)


class Executor(Protocol):
    """Computes plans, one at a time, in whichever thread calls it. Keeps nothing about a request between two plans that
    it cannot do without: a request that is not in the next plan may be gone. What the last plan gave is kept for the
    next one, which may be ahead of its result: there the awaited tokens are filled in, and a request that was in the
    last plan and failed there, or was abandoned with it, is left out, without an error."""

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        """Write the KV of every chunk's tokens, attend, and sample where a chunk samples. Raises only for a fault of
        the engine itself; a fault of one request goes into StepResult.errors.

        Once is_abandoned says so, nobody waits for the result,
        and None may be returned instead of finishing. What the step has written by then is not looked at again.
        """
        ...


class LaunchingExecutor(Executor, Protocol):
    """An executor whose device computes by itself: a step can be begun while the one before it is not over."""

    def launch(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> Callable[[], StepResult | None]:
        """Begin what execute does; what comes back waits for it and gives the response. Steps are finished in the order
        in which they were begun, and at most two have not been. May leave all of it to the finishing, where a step
        needs to know what the one before it sampled."""
        ...
