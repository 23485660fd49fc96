"""End conditions that can be seen in token ids. Stop strings are seen in the text, elsewhere."""

from __future__ import annotations

from trioserve.contracts.events import FinishReason
from trioserve.core.live_request import LiveRequest

__all__ = ["finish_reason_of"]


def finish_reason_of(live: LiveRequest) -> FinishReason | None:
    """Whether the last token of `live` ends it. An end token counts after min_tokens others."""
    request = live.request
    tokens = live.tokens
    output_count = len(tokens) - len(request.prompt_token_ids)
    if tokens[-1] in request.stop_token_ids and output_count > request.sampling.min_tokens:
        return FinishReason.STOP
    if output_count >= request.output_tokens_max:
        return FinishReason.LENGTH
    return None
