"""Which bodies may have their prompt computed at one endpoint and their response made at another; what goes to the
first.

The second one gets the client's own body, with the kv_transfer_params that the first one has answered.
"""

from __future__ import annotations

import msgspec

from trioserve.api.openai.prompt_fields import AS_FITS
from trioserve.api.openai.request_types import COMPLETION_TOKENS_DEFAULT, Int32, decode_body
from trioserve.contracts.errors import InvalidRequest
from trioserve.proxy.routed_body import TRANSFER_PARAMS, RoutedBody, rewritten
from trioserve.proxy.routed_prompt import CHAT_PATH, COMPLETIONS_PATH

__all__ = ["can_be_disaggregated", "prefill_body"]

# All of them, since some servers look whether a field is there.
ASKED_OF_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _DisaggregatedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide it, beside those of RoutedBody."""

    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    best_of: Int32 | None = None
    echo: bool | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None


def can_be_disaggregated(path: str, raw: bytes, body: RoutedBody) -> bool:
    """One prompt with one response of more than a token, and nothing asked about the prompt itself: its KV is all that
    goes from one endpoint to the other."""
    if path not in (CHAT_PATH, COMPLETIONS_PATH) or (body.n or 1) != 1 or body.prompt_count != 1:
        return False
    if bytes(body.resume):  # what was begun elsewhere goes on whole
        return False
    try:
        fields = decode_body(raw, _DisaggregatedBody)
    except InvalidRequest:
        return False  # whichever endpoint gets it will say so
    tokens_max = fields.max_tokens
    if path == CHAT_PATH:
        tokens_max = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    elif tokens_max is None:
        tokens_max = COMPLETION_TOKENS_DEFAULT
    # How much of a prompt fits beside a response of one token is more than fits beside the real one.
    is_cut_to_fit = fields.truncate_prompt_tokens == AS_FITS
    asks_for_prompt = fields.echo or fields.prompt_logprobs is not None or is_cut_to_fit
    return (tokens_max is None or tokens_max > 1) and (fields.best_of or 1) == 1 and not asks_for_prompt


def prefill_body(path: str, raw: bytes, fields: dict[str, object], *, stream: bool) -> bytes:
    """What is sent to compute the prompt: the same body, for one token. fields: in place of its own."""
    fields = {**fields, "stream": stream, "max_tokens": 1, TRANSFER_PARAMS: ASKED_OF_PREFILL}
    if path == CHAT_PATH:
        fields["max_completion_tokens"] = 1
    if (decode_body(raw, _DisaggregatedBody).min_tokens or 0) > 1:
        fields["min_tokens"] = 1
    return rewritten(raw, fields, without=("stream_options", "return_partial"))
