"""End conditions that depend on token ids. The package text finds stop strings."""

from __future__ import annotations

from trioserve.contracts.events import FinishReason
from trioserve.core.live_request import LiveRequest

__all__ = ["finish_reason_of"]


def finish_reason_of(live: LiveRequest) -> FinishReason | None:
    """Return the finish reason if the last token ends the request.

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
