"""Guides in a step: which rows of logits get a token mask, and which tokens the grammar forces.

A guide decides which tokens may come next, so it must know all earlier tokens. If a step is planned while the previous
step still samples the last token, the guide does not know this token. Such a step is planned ahead only if the grammar
allows every token next. Otherwise the step is planned after the token is sampled (see EngineCore.schedule_ahead).

A forced token is the only token that the grammar allows. Forced tokens are delivered together with the token before
them, and the next step computes them like a prompt. They are not sampled, so they have no logprobs. If the request
needs logprobs, forced tokens are instead sampled one by one with masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.guide import GuidedRows, MaskMaker, TokenMasks
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.core.request_state import LiveRequest

__all__ = ["finish_reason_of", "GuidedSteps", "append_token"]


def finish_reason_of(live: LiveRequest) -> FinishReason | None:
    """Return the finish reason if the last token ends the request. Stop strings are found by the package text, not
    here.

    Args:
        live: a request with at least one output token. An end token counts only after min_tokens other tokens.
    """
    request = live.request
    tokens = live.tokens
    output_count = len(tokens) - len(request.prompt_token_ids)
    if tokens[-1] in request.stop_token_ids and output_count > request.sampling.min_tokens:
        return FinishReason.STOP
    if output_count >= request.output_tokens_max:
        return FinishReason.LENGTH
    return None


# Limit per step, because checking this many tokens blocks the event loop for about a millisecond.
FORCED_TOKENS_MAX = 256


def append_token(live: LiveRequest, token_id: int) -> FinishReason | None:
    """Append one token to a request.

    A request ends when its grammar is complete, even if end tokens are ignored or max_tokens is not reached.

    Args:
        live: the request.
        token_id: a token that was sampled or forced.

    Returns:
        The finish reason if the token ends the request. The finish reason is ERROR if the guide rejects the token, and
        then the token is not appended.
    """
    live.tokens.append(token_id)
    reason = finish_reason_of(live)
    guide = live.guide
    if guide is None or reason is FinishReason.STOP:
        return reason
    if not guide.accept(token_id):
        live.tokens.pop()
        return FinishReason.ERROR
    return FinishReason.STOP if guide.is_over else reason


class GuidedSteps:
    """Starts and ends the computation of token masks for steps.

    Args:
        maker: creates the masks. If it is None, no request has a guide.
    """

    def __init__(self, maker: MaskMaker | None) -> None:
        self._maker = maker
        self.forced_tokens_total = 0

    @property
    def has_masks(self) -> bool:
        return self._maker is not None

    def begin(self, chunks: list[ScheduledChunk], lives: Sequence[LiveRequest]) -> TokenMasks | None:
        """Start to create the masks of a step.

        Args:
            chunks: chunks of the step. A chunk that needs a mask is replaced by a copy with its mask_row.
            lives: the request of each chunk.

        Returns:
            The masks. None if no chunk needs a mask.
        """
        if self._maker is None:
            return None
        guided: list[GuidedRows] = []
        row = 0
        for index, live in enumerate(lives):
            guide = live.guide
            if guide is None:
                continue
            chunk = chunks[index]
            if chunk.samples and guide.wants_mask(chunk.draft):
                assert not chunk.awaits_token, f"{live.request.id} needs a mask, but awaits a token"
                chunks[index] = msgspec.structs.replace(chunk, mask_row=row)
                guided.append(GuidedRows(guide, row, chunk.draft))
                row += 1 + len(chunk.draft)
        return self._maker.begin(guided, row) if guided else None

    def end(self, plan: StepPlan) -> None:
        """Return the masks of a plan to the maker.

        Args:
            plan: a plan with masks, after its step has returned or was dropped.
        """
        assert self._maker is not None
        assert plan.masks is not None
        self._maker.end(plan.masks)

    def append_forced(self, live: LiveRequest) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append the forced tokens, up to max_tokens.

        Args:
            live: a request with a guide.

        Returns:
            The new tokens, and the finish reason if they end the request.
        """
        assert live.guide is not None
        if live.request.sampling.logprobs is not None:
            return (), None
        known_count = len(live.tokens)
        room = live.request.output_tokens_max - live.output_count
        reason = None
        for token_id in live.guide.forced_tokens(min(room, FORCED_TOKENS_MAX)):
            reason = append_token(live, token_id)
            if reason is not None:
                break
        forced = tuple(live.tokens[known_count:])
        self.forced_tokens_total += len(forced)
        return forced, reason
