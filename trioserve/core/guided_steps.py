"""What guides have to say about a step: which of its rows are masked, and which tokens come without being sampled.

A guide says what may come next, so it has to know what came before. Where the last token is not known yet, in a step
planned behind one that samples it, nothing can be said, unless whatever follows it is free: such a step is planned when
the token is there (see EngineCore.schedule_ahead).

When a guide forces tokens they are known at once, delivered with the token before them and computed by the next step,
like a prompt that catches up. Nobody samples them, so they have no logprobs: for whoever asked for these the masks let
them through one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.guide import GuidedRows, MaskMaker
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.contracts.token_masks import TokenMasks
from trioserve.core.live_request import LiveRequest
from trioserve.core.stopping import finish_reason_of

__all__ = ["GuidedSteps", "take_token"]

FORCED_TOKENS_MAX = 256  # at a time: so many are checked in about a millisecond, and the event loop waits for it


def take_token(live: LiveRequest, token_id: int) -> FinishReason | None:
    """One more token of a request, and whether it ends it. ERROR: its guide does not take the token, which is none of
    its tokens then. What is complete has ended, also where end tokens are ignored or max_tokens are reached."""
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
    """maker: None where no request has a guide."""

    def __init__(self, maker: MaskMaker | None) -> None:
        self._maker = maker
        self.forced_tokens_total = 0

    @property
    def has_masks(self) -> bool:
        return self._maker is not None

    def begin(self, chunks: list[ScheduledChunk], lives: Sequence[LiveRequest]) -> TokenMasks | None:
        """Have the masks of these chunks made, which get their rows. None: all of them are free."""
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
                assert not chunk.awaits_token, f"{live.request.id} has a guide, and awaits a token"
                chunks[index] = msgspec.structs.replace(chunk, mask_row=row)
                guided.append(GuidedRows(guide, row, chunk.draft))
                row += 1 + len(chunk.draft)
        return self._maker.begin(guided, row) if guided else None

    def end(self, plan: StepPlan) -> None:
        """The plan has come back, or was given up."""
        if plan.masks is not None:
            assert self._maker is not None
            self._maker.end(plan.masks)

    def take_forced(self, live: LiveRequest) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens that must come now are the request's, as far as it may have them. Returns them, and why they end
        it, if they do."""
        assert live.guide is not None
        if live.request.sampling.logprobs is not None:
            return (), None
        known_count = len(live.tokens)
        room = live.request.output_tokens_max - live.output_count
        reason = None
        for token_id in live.guide.forced_tokens(min(room, FORCED_TOKENS_MAX)):
            reason = take_token(live, token_id)
            if reason is not None:
                break
        forced = tuple(live.tokens[known_count:])
        self.forced_tokens_total += len(forced)
        return forced, reason
