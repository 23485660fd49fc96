"""A fake model that computes from a plan as a rank receives it. It knows only the tokens that came with the plan.

It uses everything from the message that a real model uses, so that missing or wrong content gives other tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

__all__ = ["LookingModel", "WireExecutor"]


class LookingModel(FakeModel):
    """A model whose penalties depend on tokens, and where every sampling parameter changes the output."""

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        sampling = request.sampling
        looked_at: Sequence[int] = ()
        if sampling.repetition_penalty != 1.0:
            looked_at = tokens
        elif sampling.presence_penalty or sampling.frequency_penalty:
            looked_at = tokens[len(request.prompt_token_ids) :]
        numbers = [
            float(sampling.temperature),
            float(sampling.top_p),
            float(sampling.top_k),
            float(sampling.min_p),
            float(sampling.presence_penalty),
            float(sampling.frequency_penalty),
            float(sampling.repetition_penalty),
            *(float(number) for entry in sorted((sampling.logit_bias or {}).items()) for number in entry),
        ]
        asked = zlib.crc32(repr((numbers, list(looked_at))).encode())
        return super().next_token_id(request, tokens, digest ^ asked)


class WireExecutor(FakeExecutor):
    """An executor that trusts the content of its slots. It does not know the tokens before a chunk."""

    def _check_plan(self, plan: StepPlan, chunks: Iterable[ScheduledChunk]) -> None:
        assert plan.step_index == self.plans, f"step {plan.step_index} comes after {self.plans} steps"
        assert plan.chunks, "an empty step"
        assert plan.token_count == sum(chunk.row_count for chunk in plan.chunks)
        for chunk in chunks:
            end = chunk.start + chunk.row_count
            block_count = -(-end // self.block_size)
            assert len(chunk.block_table) == block_count, f"{chunk.request.id}: {len(chunk.block_table)} blocks"
            assert len(chunk.row_tokens) == chunk.row_count, f"{chunk.request.id}: tokens are missing"

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        digests: list[int] = []
        for position in range(chunk.start + chunk.row_count):
            found = self._slots[self._slot(chunk, position)]
            assert found is not None, f"{chunk.request.id}: position {position} was never written"
            digests.append(found[0])
        return digests

    def _prompt_logprobs(self, chunk: ScheduledChunk, digests: list[int], top_count: int) -> tuple[TokenLogprob, ...]:
        prompt = chunk.request.prompt_token_ids
        return tuple(
            self.model.logprob(prompt[position], digests[position - 1], top_count)
            for position in range(chunk.start + 1, min(chunk.start + chunk.count, len(prompt) - 1) + 1)
        )
