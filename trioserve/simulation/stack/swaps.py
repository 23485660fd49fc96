"""Records of the weights that computed the KV and the tokens of each sequence, in a simulation of the stack.

The KV of a position belongs to the weights that computed it last. The records follow each plan of a step: the current
weights compute its tokens, and blocks from the prefix cache must also have KV from the current weights. So the next
token and its weight version are known, whether the KV was kept, computed again, or found in the cache.
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
    """Return the path of weights. The fake model derives its tokens from the path.

    Args:
        number: number of the weights.
    """
    return f"/weights-{number}"


def version_of(number: int) -> str:
    return f"v{number}"


class _Written:
    """Records of one sequence.

    Attributes:
        tokens: tokens of the sequence.
        weights: for each position, the weights that computed its KV.
        sampled: each sampled token with the version of the weights that sampled it.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.tokens = [*request.prompt_token_ids]
        self.weights: list[int] = []
        self.sampled: list[tuple[int, str]] = []


class Swaps:
    """Records of replaced weights.

    Args:
        model: the fake model.
        is_on: True if the plan replaces weights. False: the object records nothing.

    Attributes:
        number: number of the current weights. 0: the weights from the start.
    """

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
        """Record that the engine uses other weights from now on.

        Args:
            number: number of the weights.
            recomputes: True if all requests are computed again.
        """
        self.number = number
        if recomputes:
            self._to_recompute = {*self._written}

    def note_step(self, plan: StepPlan, result: StepResult | None) -> None:
        """Record a computed step.

        Args:
            plan: the step.
            result: its result. None: it was abandoned, so the KV that it wrote is unknown.
        """
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
            # Tokens before the chunk were found in the prefix cache, whose KV must be from the current weights.
            written.weights = [self._own_weights] * chunk.start
            self._to_recompute.discard(name)
        assert name not in self._to_recompute, f"{name} continues with KV from other weights"
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
            # A former core may have sampled tokens that were never delivered. The new core samples them again.
            del written.tokens[end + count :], written.sampled[known:]
            expected = self._next_token(chunk.request, written, end + count)
            assert token == expected, f"{chunk.request.id}: {token} at {end + count}, expected {expected}"
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
        """Return sampled tokens of a response, each with the version of its weights.

        Args:
            sequence_id: the sequence.
            begin: index of the first token.
            end: index after the last token.
        """
        written = self._written.get(sequence_id)
        return [] if written is None else written.sampled[begin:end]


def stamped(delta: Delta) -> list[tuple[int, str]]:
    """Return the tokens of a delta, each with the version of its weights.

    Args:
        delta: the delta.
    """
    runs: WeightVersions = delta.weight_versions or ((INITIAL_WEIGHTS, len(delta.token_ids)),)
    versions = [version for version, count in runs for _ in range(count)]
    return list(zip(delta.token_ids, versions, strict=True))
