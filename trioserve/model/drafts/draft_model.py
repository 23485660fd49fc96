"""Draft tokens from a smaller model, proposed after each step of the target model.

The draft model is an ordinary StepModel. It computes a chunk of each request, with the request's sampling parameters,
seed and positions. Therefore, both models sample with equal random numbers: if their probabilities are close, they pick
the same token, even at temperatures above 0. The target model samples as if there were no draft tokens. So draft tokens
change neither the target model's output nor the random numbers that it uses.

For known tokens, the draft model's KV is in blocks with the same indexes as the target model's blocks. The KV of draft
tokens is written to spare blocks, whose content is dropped after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import DraftTask, DraftTimes, IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.model.step_model import ComputedStep

__all__ = ["DraftModel", "spare_block_count"]

DRAFTING_SEQS_MAX = 32  # Largest number of sequences with draft tokens in one step. The core schedules fewer.


def spare_block_count(token_count_max: int, block_size: int) -> int:
    """Return the number of blocks for the KV of the draft tokens of one step.

    Args:
        token_count_max: largest number of draft tokens of a request in one step.
        block_size: tokens of one block.
    """
    return DRAFTING_SEQS_MAX * -(-token_count_max // block_size)


TakeTapped = Callable[[Mapping[RequestId, Any]], None]


class ProposingModel(Protocol):
    """The part of StepModel that DraftModel uses."""

    def allocate_kv(self, block_count: int) -> None: ...

    def compute(
        self, chunks: Sequence[ScheduledChunk], is_abandoned: IsAbandoned, masks: TokenMasks | None = None
    ) -> ComputedStep | None: ...

    def claim_memory(self) -> bool: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Row:
    """A request for which draft tokens are proposed, and the block table of its KV.

    Attributes:
        request: the request without options that only concern the target model.
        known_count: number of tokens of the prompt and the output so far.
        start: first position that the draft model has not computed yet.
        token_count: largest number of draft tokens.
        tokens: known tokens, then draft tokens.
        table: block indexes of the draft model's KV.
    """

    request: EngineRequest
    known_count: int
    start: int
    token_count: int
    tokens: list[int]
    table: list[int]

    @property
    def chunk(self) -> ScheduledChunk:
        count = len(self.tokens) - self.start
        return ScheduledChunk(self.request, self.tokens, self.start, count, self.table, samples=True)


class DraftModel:
    """Proposes draft tokens with a draft model. `close` also closes the draft model.

    Args:
        model: draft model, or a head that reads hidden states of the target model.
        block_size: tokens of one block.
        block_bytes: bytes of one block of the draft model's KV.
        token_count_max: largest number of draft tokens of a request in one step.
        pass_hidden_states: passes the target's hidden states to a head, whose row for a token also reads the next
            token. None for an ordinary draft model.
    """

    def __init__(
        self,
        model: ProposingModel,
        *,
        block_size: int,
        block_bytes: int,
        token_count_max: int,
        pass_hidden_states: TakeTapped | None = None,
    ) -> None:
        self.model = model
        self.block_bytes = block_bytes
        self._take_tapped = pass_hidden_states
        self._shift = 0 if pass_hidden_states is None else 1
        self._block_size = block_size
        self._block_count = 0
        self._spare_per_row = -(-token_count_max // block_size)
        # Blocks for the KV of draft tokens, in addition to the blocks that requests own.
        self.spare_block_count = spare_block_count(token_count_max, block_size)

    def allocate_kv(self, block_count: int) -> None:
        self._block_count = block_count
        self.model.allocate_kv(block_count + self.spare_block_count)

    def pass_hidden_states(self, tapped: Mapping[RequestId, Any]) -> None:
        """Pass the hidden states of the step that just ended to the head. Do nothing for an ordinary draft model.

        Args:
            tapped: for each request, the inputs of the tapped layers, float [rows, layers * hidden_size].
        """
        if self._take_tapped is not None:
            self._take_tapped(tapped)

    def propose(
        self, plan: StepPlan, result: StepResult, step_seconds: float, is_abandoned: IsAbandoned
    ) -> StepResult | None:
        """Propose draft tokens for the requests of a step that the target model has computed.

        Args:
            plan: the step. A chunk's `draft_task` defines the rows to compute and the number of draft tokens.
            result: result of the target model.
            step_seconds: duration of the target model's step.
            is_abandoned: returns True if the result of the step is no longer needed.

        Returns:
            The result with draft tokens and times, or None if the step was abandoned.
        """
        started_at = time.perf_counter()
        catching_up: list[ScheduledChunk] = []
        rows: list[_Row] = []
        for chunk, token_id in zip(plan.chunks, result.token_ids, strict=True):
            task, request_id = chunk.draft_task, chunk.request.id
            if task is None or request_id in result.errors or (chunk.samples and token_id is None):
                continue
            tokens = _known(chunk, token_id, result.draft_token_ids.get(request_id, ()))
            if task.token_count > 0 and len(rows) < DRAFTING_SEQS_MAX:
                rows.append(self._row(chunk, task, tokens, len(rows)))
            elif task.token_count == 0:
                start = task.start + self._shift
                end = len(tokens) if task.end is None else task.end + self._shift
                catching_up.append(
                    ScheduledChunk(_plain(chunk.request), tokens, start, end - start, chunk.block_table, samples=False)
                )
        proposed: dict[RequestId, tuple[int, ...]] = {chunk.request.id: () for chunk in catching_up}
        pass_count = 0
        drafting = rows
        while drafting or (catching_up and pass_count == 0):
            chunks = [row.chunk for row in drafting]
            computed = self.model.compute([*chunks, *catching_up] if pass_count == 0 else chunks, is_abandoned)
            if computed is None:
                return None
            pass_count += 1
            if not drafting:
                break
            assert computed.samples is not None, "all drafting chunks sample"
            continuing = []
            for row, token_id in zip(drafting, computed.samples.token_ids, strict=True):
                row.start = len(row.tokens)
                if token_id is None:
                    continue
                row.tokens.append(token_id)
                is_last = len(row.tokens) - row.known_count == row.token_count
                if not is_last and token_id not in row.request.stop_token_ids:
                    continuing.append(row)
            drafting = continuing
        proposed |= {row.request.id: tuple(row.tokens[row.known_count :]) for row in rows}
        times = DraftTimes(step_seconds, time.perf_counter() - started_at, pass_count)
        return msgspec.structs.replace(result, proposed=proposed, draft_times=times)

    def close(self) -> None:
        self.model.close()

    def _row(self, chunk: ScheduledChunk, task: DraftTask, tokens: list[int], index: int) -> _Row:
        first = self._block_count + index * self._spare_per_row
        kept = -(-(len(tokens) - 1) // self._block_size)
        table = [*chunk.block_table[:kept], *range(first, first + self._spare_per_row)]
        return _Row(_plain(chunk.request), len(tokens), task.start + self._shift, task.token_count, tokens, table)


def _known(chunk: ScheduledChunk, token_id: int | None, sampled: Sequence[int]) -> list[int]:
    """Return the known tokens of a request after the step.

    Args:
        chunk: the request's chunk of the step.
        token_id: token that the target model sampled after the last known token, or None.
        sampled: tokens that the target model sampled after each draft token. Tokens that it sampled after a rejected
            draft token are dropped.
    """
    tokens = list(chunk.tokens)
    if token_id is not None:
        tokens.append(token_id)
        for draft_token, follower in zip(chunk.draft, sampled, strict=False):
            if draft_token != tokens[-1]:
                break
            tokens.append(follower)
    return tokens


def _plain(request: EngineRequest) -> EngineRequest:
    """Return the request without log-probabilities, images and adapter.

    Embeddings of images have the hidden size of the target model, so the draft model cannot use them. The draft model
    has no adapters. Therefore, the target model accepts fewer draft tokens for requests that use an adapter.
    """
    sampling = request.sampling
    is_plain = not (request.given or request.adapter)
    if sampling.logprobs is None and sampling.prompt_logprobs is None and is_plain:
        return request
    plain = msgspec.structs.replace(sampling, logprobs=None, prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=plain, given=(), adapter=None)
