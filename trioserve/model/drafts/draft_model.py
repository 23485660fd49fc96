"""A small model that proposes what comes next, behind each step of the large one.

It is a model like any other, and is asked like any other: a chunk of each request, with the request's own sampling,
seed and position. So with a temperature both draw with the same random numbers (gumbel.py), and where the small one's
probabilities are near the large one's, so is its token, whatever is drawn. The large one then samples as if nobody had
drafted: what it samples does not depend on what was proposed, not even which random numbers it takes.

Its KV lies in blocks of the same numbers as the model's. Behind the tokens whose KV stays it writes to blocks of its
own, which are nobody's after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import DraftTask, DraftTimes, IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.token_masks import TokenMasks
from trioserve.model.samples import ComputedStep

__all__ = ["DraftModel"]

DRAFTING_SEQS_MAX = 32  # of a step; what the core lets draft in one is less


TakeTapped = Callable[[Mapping[RequestId, Any]], None]


class ProposingModel(Protocol):
    """What of a StepModel is asked here."""

    def allocate_kv(self, block_count: int) -> None: ...

    def compute(
        self, chunks: Sequence[ScheduledChunk], is_abandoned: IsAbandoned, masks: TokenMasks | None = None
    ) -> ComputedStep | None: ...

    def claim_memory(self) -> bool: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Row:
    """One request that is drafted for: what it knows, what was proposed, and where its KV goes."""

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
    """Owns the model: closing this closes that."""

    def __init__(
        self,
        model: ProposingModel,
        *,
        block_size: int,
        block_bytes: int,
        token_count_max: int,
        take_tapped: TakeTapped | None = None,
    ) -> None:
        """block_bytes: of its KV. token_count_max: proposed for a request behind a step, at most. take_tapped: of a
        head, whose row for a token reads the token behind it, and hidden states of the model."""
        self.model = model
        self.block_bytes = block_bytes
        self._take_tapped = take_tapped
        self._shift = 0 if take_tapped is None else 1
        self._block_size = block_size
        self._block_count = 0
        self._spare_per_row = -(-token_count_max // block_size)

    @property
    def spare_block_count(self) -> int:
        """Beside those that requests own."""
        return DRAFTING_SEQS_MAX * self._spare_per_row

    def allocate_kv(self, block_count: int) -> None:
        self._block_count = block_count
        self.model.allocate_kv(block_count + self.spare_block_count)

    def take_tapped(self, tapped: Mapping[RequestId, Any]) -> None:
        """What went into the model's tapped layers in the step that is just over, by request."""
        if self._take_tapped is not None:
            self._take_tapped(tapped)

    def propose(
        self, plan: StepPlan, result: StepResult, step_seconds: float, is_abandoned: IsAbandoned
    ) -> StepResult | None:
        """The result with what is proposed; None if nobody waits for it any more."""
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
            assert computed.samples is not None, "all of them sample"
            going_on = []
            for row, token_id in zip(drafting, computed.samples.token_ids, strict=True):
                row.start = len(row.tokens)
                if token_id is None:
                    continue
                row.tokens.append(token_id)
                is_last = len(row.tokens) - row.known_count == row.token_count
                if not is_last and token_id not in row.request.stop_token_ids:
                    going_on.append(row)
            drafting = going_on
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
    """The tokens of a request when the step is over. token_id, sampled: what follows its last known token, and what
    follows each draft token."""
    tokens = list(chunk.tokens)
    if token_id is not None:
        tokens.append(token_id)
        for draft_token, follower in zip(chunk.draft, sampled, strict=False):
            if draft_token != tokens[-1]:
                break
            tokens.append(follower)
    return tokens


def _plain(request: EngineRequest) -> EngineRequest:
    """The same, of which nothing is asked but tokens. Images it does not see: their rows are the other model's. Nor has
    it the request's adapter: what it proposes without is right less often."""
    sampling = request.sampling
    is_plain = not (request.given or request.adapter)
    if sampling.logprobs is None and sampling.prompt_logprobs is None and is_plain:
        return request
    plain = msgspec.structs.replace(sampling, logprobs=None, prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=plain, given=(), adapter=None)
