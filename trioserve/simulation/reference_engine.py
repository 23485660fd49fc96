"""The reference engine, which computes one request at a time without blocks, batches or a cache.

It lets the model choose every token, even a token that a grammar forces.

The reference engine follows the rules of contracts.request and contracts.sampling, and shares no code with the core.

`Swaps` records the weights that computed the KV and the tokens of each sequence. The KV of a position belongs to the
weights that computed it last. The records follow each plan of a step: the current weights compute its tokens, and
blocks from the prefix cache must also have KV from the current weights. So the next token and its weight version are
known, whether the KV was kept, computed again, or found in the cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.ids import BlockHash, RequestId
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.weights import INITIAL_WEIGHTS, WeightVersions
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.fake_executor import FakeModel

__all__ = ["ReferenceEngine", "ReferenceResponse", "Swaps", "poor_hash", "source_of", "stamped", "version_of"]


class ReferenceResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The complete response to one request.

    Attributes:
        token_ids: the tokens.
        reason: reason for the end of the response.
        stop_token_id: the stop token that ended the response. None if `reason` is not STOP.
        logprobs: log probabilities of the tokens. None: they were not requested.
        prompt_logprobs: log probabilities of the prompt tokens, beginning with None for the first token. None: they
            were not requested.
        pooled: vector or score of a pooled request. None: the request generates text.
    """

    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    pooled: PoolingResult | None = None


class ReferenceEngine:
    def __init__(self, model: FakeModel) -> None:
        self.model = model

    def response(self, request: EngineRequest) -> ReferenceResponse:
        """Return the response that an engine must give to a request, unless the request is aborted or fails."""
        model, sampling = self.model, request.sampling
        digest = model.prefix_digest(request, request.prompt_token_ids)
        known = list(request.prompt_token_ids)
        if request.pooling is not None:
            asked = None if sampling.prompt_logprobs is None else self._prompt_logprobs(request)
            pooled = model.pooled(request.pooling, digest)
            return ReferenceResponse(token_ids=(), reason=FinishReason.STOP, prompt_logprobs=asked, pooled=pooled)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        stop_token_id = None
        moves = self._guide_of(request)
        state, reason = 0, FinishReason.LENGTH
        for output_count in range(request.output_tokens_max):
            is_allowed = None if moves is None else moves[state].__contains__
            token_id = model.chosen_token_id(request, known, digest, is_allowed)
            assert token_id is not None, f"{request.id}: no token is allowed in state {state}"
            token_ids.append(token_id)
            logprobs.append(model.logprob(token_id, digest, sampling.logprobs or 0))
            # `output_count` tokens came before this token. Before `min_tokens` tokens, no stop token ends the response.
            if token_id in request.stop_token_ids and output_count >= sampling.min_tokens:
                stop_token_id, reason = token_id, FinishReason.STOP
                break
            if moves is not None:
                state = moves[state][token_id]
                if not moves[state]:
                    reason = FinishReason.STOP
                    break
            known.append(token_id)
            digest = model.digest((token_id,), digest)
        return ReferenceResponse(
            token_ids=tuple(token_ids),
            reason=reason,
            stop_token_id=stop_token_id,
            logprobs=None if sampling.logprobs is None else tuple(logprobs),
            prompt_logprobs=None if sampling.prompt_logprobs is None else self._prompt_logprobs(request),
        )

    def _guide_of(self, request: EngineRequest) -> list[dict[int, int]] | None:
        """Return the automaton of a request's guide. The guide itself has state, so only the core may use it."""
        if request.guide is None:
            return None
        assert isinstance(request.guide, AutomatonGuide)
        return [dict(moves) for moves in request.guide.automaton]

    def _prompt_logprobs(self, request: EngineRequest) -> tuple[TokenLogprob | None, ...]:
        prompt = request.prompt_token_ids
        top_count = request.sampling.prompt_logprobs or 0
        entries: list[TokenLogprob | None] = [None]
        for position in range(1, len(prompt)):
            entries.append(
                self.model.logprob(prompt[position], self.model.prefix_digest(request, prompt[:position]), top_count)
            )
        return tuple(entries)


def poor_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return one of three hashes, so that the hashes of different blocks often collide.

    Args:
        parent: hash of the previous block.
        token_ids: tokens of the block.
    """
    return BlockHash(bytes([(parent[-1] + sum(token_ids)) % 3]))


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
            sequence_id: id of the choice in the core.
            begin: index of the first token.
            end: index after the last token.
        """
        written = self._written.get(sequence_id)
        return [] if written is None else written.sampled[begin:end]


def stamped(delta: Delta) -> list[tuple[int, str]]:
    """Return the tokens of a delta, each with the version of its weights."""
    runs: WeightVersions = delta.weight_versions or ((INITIAL_WEIGHTS, len(delta.token_ids)),)
    versions = [version for version, count in runs for _ in range(count)]
    return list(zip(delta.token_ids, versions, strict=True))
