"""The reference engine, which computes one request at a time without blocks, batches or a cache.

It lets the model choose every token, even a token that a grammar forces.

The reference engine follows the rules of contracts.request and contracts.sampling, and shares no code with the core.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.ids import BlockHash
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.request import EngineRequest
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.fake_executor import FakeModel

__all__ = ["ReferenceEngine", "ReferenceResponse", "poor_hash"]


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
        """Return the response that an engine must give to a request, unless the request is aborted or fails.

        Args:
            request: the request.
        """
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
