"""A step that was launched and may still run, the tokens that the next step needs from it, and its result.

The scheduler may plan a step before the previous step has ended. Such a plan does not contain the tokens that the
previous step samples. The executor adds these tokens in the compute thread, right before it computes the planned step.
The event loop is not involved, because it may not yet have seen the previous step's result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import cast, overload

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.ids import RequestId
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.weights import AdapterId
from trioserve.model.step_model import NOT_FINITE, ComputedStep, prompt_followers

__all__ = ["BegunStep", "ComputableStep", "fill_awaited_tokens"]


class BegunStep:
    """A step that was begun. The first call of `result` computes the result or waits for it. Later calls return the
    stored result.

    Args:
        plan: chunks of the step.
        finish: computes the step or waits for its end. It is called once.
        chosen_rows: for a launched step, the row of each request's sampled token in a tensor on the device. None: a
            step that needs these tokens must wait for the result.
    """

    __slots__ = ("_finish", "_result", "chosen_rows", "plan")

    def __init__(
        self,
        plan: StepPlan,
        finish: Callable[[], StepResult | None],
        chosen_rows: Mapping[RequestId, int] | None = None,
    ) -> None:
        self.plan = plan
        self.chosen_rows = chosen_rows
        self._finish: Callable[[], StepResult | None] | None = finish
        self._result: StepResult | None = None

    def result(self) -> StepResult | None:
        """Return the result of the step, or None if the step was abandoned.

        Wait if another thread computes the step, otherwise compute the step here.
        """
        # `finish` refers to the previous step, which must be freed.
        finish, self._finish = self._finish, None
        if finish is not None:
            self._result = finish()
        return self._result

    def sampled_tokens(self) -> dict[RequestId, int]:
        """Wait for the step, and return the token that it sampled for each request."""
        result = self.result()
        if result is None:
            return {}
        return {
            chunk.request.id: token_id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is not None
        }

    def failed_requests(self) -> set[RequestId]:
        """Wait for the step, and return the requests without a result. They failed, or the step was abandoned."""
        result = self.result()
        if result is None:
            return {chunk.request.id for chunk in self.plan.chunks}
        return set(result.errors) | {
            chunk.request.id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is None and chunk.samples
        }


def fill_awaited_tokens(plan: StepPlan, before: BegunStep) -> list[tuple[int, ScheduledChunk]]:
    """Wait for the previous step, and add its sampled tokens to a plan that was made before that step ended.

    Requests that have no result in the previous step are skipped. They failed, or the previous step was abandoned, so
    their results are no longer needed.

    Args:
        plan: plan that lacks tokens of the previous step.
        before: previous step.

    Returns:
        Chunks that can be computed, each with its index in the plan.
    """
    sampled, failed = before.sampled_tokens(), before.failed_requests()
    filled: list[tuple[int, ScheduledChunk]] = []
    for place, chunk in enumerate(plan.chunks):
        request_id = chunk.request.id
        if request_id in failed:
            continue
        if chunk.awaits_token:
            tokens = _TokensAndOne(chunk.tokens, chunk.start, sampled[request_id])
            chunk = ScheduledChunk(
                chunk.request,
                tokens,
                chunk.start,
                1,
                chunk.block_table,
                True,
                mask_row=chunk.mask_row,
                states=chunk.states,
            )
        filled.append((place, chunk))
    return filled


class _TokensAndOne(Sequence[int]):
    """The first `count` tokens of a list, and one more token.

    The list may grow while this object is used. It is not copied, because the list is long and most steps read only its
    last tokens.
    """

    __slots__ = ("_count", "_last", "_tokens")

    def __init__(self, tokens: Sequence[int], count: int, last: int) -> None:
        self._tokens = tokens
        self._count = count
        self._last = last

    def __len__(self) -> int:
        return self._count + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            begin, end, stride = index.indices(self._count + 1)
            if stride != 1:
                return [self[place] for place in range(begin, end, stride)]
            known = self._tokens[begin : min(end, self._count)]
            return [*known, self._last] if begin <= self._count < end else known
        # Indexing a range also supports negative indexes, and raises IndexError for an index out of bounds.
        place = range(self._count + 1)[index]
        return self._last if place == self._count else self._tokens[place]


class ComputableStep:
    """Chunks of a plan that can be computed, and the conversion of their results into a StepResult.

    Args:
        chunks: chunks with their indexes in the plan. An invalid chunk is omitted, and its request gets an error.
    """

    def __init__(
        self,
        plan: StepPlan,
        chunks: Iterable[tuple[int, ScheduledChunk]],
        vocab_size: int,
        has_adapter: Callable[[AdapterId], bool],
    ) -> None:
        self._plan = plan
        self._errors: dict[RequestId, str] = {}
        self._indexes: list[int] = []  # For each chunk in self.chunks, its index in the plan.
        self.chunks: list[ScheduledChunk] = []
        for index, chunk in chunks:
            # A chunk that awaits a token needs no check. The model has sampled the token, and all other tokens were
            # checked in an earlier step.
            fault = None if plan.chunks[index].awaits_token else _fault(chunk, vocab_size)
            if chunk.request.adapter is not None and not has_adapter(chunk.request.adapter.id):
                fault = "the adapter of this request is no longer loaded here"
            if fault is None:
                self.chunks.append(chunk)
                self._indexes.append(index)
            else:
                self._errors[chunk.request.id] = fault

    def result(self, computed: ComputedStep, missing: Collection[RequestId] = ()) -> StepResult:
        """Return the results of the plan.

        Args:
            computed: results of self.chunks.
            missing: requests whose chunks are ignored.
        """
        chunks = self.chunks
        errors = {request_id: error for request_id, error in self._errors.items() if request_id not in missing}
        token_ids: list[int | None] = [None] * len(self._plan.chunks)
        logprobs: dict[RequestId, TokenLogprob] = {}
        prompt_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
        draft_token_ids: dict[RequestId, tuple[int, ...]] = {}
        draft_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
        for place, entries in computed.prompt_logprobs.items():
            request_id = chunks[place].request.id
            if entries is None:
                errors[request_id] = NOT_FINITE
            else:
                prompt_logprobs[request_id] = entries
        pooled: dict[RequestId, PoolingResult] = {}
        for place, vector in computed.pooled.items():
            request_id = chunks[place].request.id
            if vector is None:
                errors[request_id] = NOT_FINITE
            else:
                pooled[request_id] = vector
        next_row = 0
        for place, chunk in enumerate(chunks):
            if not chunk.samples:
                continue
            row, next_row = next_row, next_row + 1 + len(chunk.draft)
            request_id, samples = chunk.request.id, computed.samples
            assert samples is not None, "no samples for chunks that sample"
            if request_id in errors or request_id in missing:
                continue
            token_ids[self._indexes[place]] = samples.token_ids[row]
            if row in samples.errors:
                errors[request_id] = samples.errors[row]
            if row in samples.logprobs:
                logprobs[request_id] = samples.logprobs[row]
            if chunk.draft:
                # A row after a draft token may have no sampled token because of an error. If the draft token is
                # accepted, a later step reports the error.
                after = tuple(takewhile(lambda token: token is not None, samples.token_ids[row + 1 : next_row]))
                draft_token_ids[request_id] = cast(tuple[int, ...], after)
                if row in samples.logprobs:
                    rows = range(row + 1, row + 1 + len(after))
                    draft_logprobs[request_id] = tuple(samples.logprobs[row] for row in rows)
        return StepResult(tuple(token_ids), logprobs, prompt_logprobs, errors, draft_token_ids, draft_logprobs, pooled)


def _fault(chunk: ScheduledChunk, vocab_size: int) -> str | None:
    """Return the reason why a chunk cannot be computed, as a sentence for the client. None if it can be computed."""
    tokens = chunk.row_tokens
    if chunk.request.sampling.prompt_logprobs is not None:
        tokens = [*tokens, *prompt_followers(chunk)]
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            return f"the prompt has token id {token}, but the model's vocabulary has ids 0 to {vocab_size - 1}"
    for token in chunk.request.sampling.logit_bias or ():
        if token >= vocab_size:
            return f"logit_bias names token id {token}, but the model's vocabulary has ids 0 to {vocab_size - 1}"
    return None
