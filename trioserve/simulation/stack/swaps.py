"""Weights that are replaced in a simulation of the stack, by books of the simulation's own: what each sequence is said
in each step, and by which weights.

The KV of a place is what the weights made of it that computed it last. The books follow each plan: what it computes,
the weights of now do, and what was found in the prefix cache must be theirs as well. So it is known which token comes
next, whatever was kept, computed anew or found, and which version it is to be stamped with.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import Delta
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.weights import INITIAL_WEIGHTS, WeightVersions
from trioserve.testing.fake_executor import FakeModel

__all__ = ["Swaps", "source_of", "stamped", "version_of"]


def source_of(number: int) -> str:
    """Where the weights of this number lie; what they say follows from that."""
    return f"/weights-{number}"


def version_of(number: int) -> str:
    return f"v{number}"


class _Written:
    """One sequence. tokens: that it has. weights: by place, those that computed what is in the cache there. sampled:
    tokens and the versions that they are of."""

    def __init__(self, request: EngineRequest) -> None:
        self.tokens = [*request.prompt_token_ids]
        self.weights: list[int] = []
        self.sampled: list[tuple[int, str]] = []


class Swaps:
    """is_on: whether weights are replaced at all; otherwise nothing is noted. number: of the weights; 0: the first."""

    def __init__(self, model: FakeModel, *, is_on: bool) -> None:
        self.is_on = is_on
        self.number = 0
        self._model = model
        self._written: dict[RequestId, _Written] = {}
        self._to_recompute: set[RequestId] = set()

    @property
    def version(self) -> str:
        return version_of(self.number) if self.number else INITIAL_WEIGHTS

    def replace(self, number: int, *, recomputes: bool = False) -> None:
        """From here on these compute. recomputes: nobody goes on with what it has."""
        self.number = number
        if recomputes:
            self._to_recompute = {*self._written}

    def note_step(self, plan: StepPlan, result: StepResult | None) -> None:
        """It was computed. None: it was abandoned, and nobody knows what stands where it wrote."""
        if not self.is_on:
            return
        for chunk, token_id in zip(plan.chunks, result.token_ids if result else [None] * len(plan.chunks), strict=True):
            written = self._written.setdefault(chunk.request.id, _Written(chunk.request))
            self._note_computed(plan, chunk, written)
            if result is not None and token_id is not None:
                drafted = result.draft_token_ids.get(chunk.request.id, ())
                self._note_sampled(chunk, written, token_id, drafted)

    def _note_computed(self, plan: StepPlan, chunk: ScheduledChunk, written: _Written) -> None:
        name = chunk.request.id
        if name in plan.admitted:
            written.weights = [self._own_weights] * chunk.start  # found, and computed by none but these
            self._to_recompute.discard(name)
        assert name not in self._to_recompute, f"{name} goes on with what other weights computed"
        end = chunk.start + chunk.count + len(chunk.draft)
        written.weights[chunk.start :] = [self._own_weights] * (end - chunk.start)

    def _note_sampled(self, chunk: ScheduledChunk, written: _Written, token_id: int, drafted: Sequence[int]) -> None:
        end = chunk.start + chunk.count
        sampled = [token_id]
        for draft, behind in zip(chunk.draft, drafted, strict=False):
            if draft != sampled[-1]:
                break
            sampled.append(behind)
        for count, token in enumerate(sampled):
            known = end + count - len(chunk.request.prompt_token_ids)
            del written.tokens[end + count :], written.sampled[known:]  # of a core that is gone, and not delivered
            expected = self._next_token(chunk.request, written, end + count)
            assert token == expected, f"{chunk.request.id}: {token} at {end + count}, and {expected} was to come"
            written.tokens.append(token)
            written.sampled.append((token, self.version))

    def _next_token(self, request: EngineRequest, written: _Written, end: int) -> int:
        digest = self._model.root(request)
        for token_id, weights in zip(written.tokens[:end], written.weights[:end], strict=True):
            digest = self._model.digest((token_id,), digest, weights=weights)
        return self._model.next_token_id(request, written.tokens[:end], digest)

    @property
    def _own_weights(self) -> int:
        return zlib.crc32(source_of(self.number).encode()) if self.number else 0

    def sampled(self, sequence_id: RequestId, begin: int, end: int) -> list[tuple[int, str]]:
        """Tokens of a response that were sampled, with their versions."""
        written = self._written.get(sequence_id)
        return [] if written is None else written.sampled[begin:end]


def stamped(delta: Delta) -> list[tuple[int, str]]:
    """The tokens of a delta, with the version that each is stamped with."""
    runs: WeightVersions = delta.weight_versions or ((INITIAL_WEIGHTS, len(delta.token_ids)),)
    versions = [version for version, count in runs for _ in range(count)]
    return list(zip(delta.token_ids, versions, strict=True))
