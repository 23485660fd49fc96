"""Request bodies for disaggregated serving, in which one endpoint computes the prompt and another the response.

The endpoint of the response gets the client's own body with the kv_transfer_params that the prefill endpoint returned.
"""

from __future__ import annotations

import msgspec

from trioserve.api.openai.prompt_fields import AS_FITS
from trioserve.api.openai.request_types import COMPLETION_TOKENS_DEFAULT, Int32, decode_body
from trioserve.contracts.errors import InvalidRequest
from trioserve.proxy.routed_body import TRANSFER_PARAMS, RoutedBody, rewritten
from trioserve.proxy.routed_prompt import CHAT_PATH, COMPLETIONS_PATH

__all__ = ["can_be_disaggregated", "prefill_body"]

# All keys are present, because some servers check whether a key exists.
ASKED_OF_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class _DisaggregatedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that decide whether a request can be disaggregated, in addition to those of RoutedBody."""

    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    best_of: Int32 | None = None
    echo: bool | None = None
    prompt_logprobs: Int32 | None = None
    truncate_prompt_tokens: Int32 | None = None


def can_be_disaggregated(path: str, raw: bytes, body: RoutedBody) -> bool:
    """Return True if prompt and response can be computed at two endpoints.

    Only the KV of the prompt moves between the endpoints. So the request must have one prompt and one response of more
    than one token, and must not ask for data about the prompt.

    Args:
        path: Path of the request.
        raw: Body of the request.
        body: Fields that the router has read from `raw`.
    """
    if path not in (CHAT_PATH, COMPLETIONS_PATH) or (body.n or 1) != 1 or body.prompt_count != 1:
        return False
    if bytes(body.resume):  # a response that is resumed is not split again
        return False
    try:
        fields = decode_body(raw, _DisaggregatedBody)
    except InvalidRequest:
        return False  # the endpoint reports the error to the client
    tokens_max = fields.max_tokens
    if path == CHAT_PATH:
        tokens_max = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    elif tokens_max is None:
        tokens_max = COMPLETION_TOKENS_DEFAULT
    # With a response of one token, more of the prompt would fit than with the full response.
    is_cut_to_fit = fields.truncate_prompt_tokens == AS_FITS
    asks_for_prompt = fields.echo or fields.prompt_logprobs is not None or is_cut_to_fit
    return (tokens_max is None or tokens_max > 1) and (fields.best_of or 1) == 1 and not asks_for_prompt


def prefill_body(path: str, raw: bytes, fields: dict[str, object], *, stream: bool) -> bytes:
    """Make the body that asks an endpoint to compute the prompt: the client's body, limited to one token.

    Args:
        path: Path of the request.
        raw: Body of the client.
        fields: New values by field name.
        stream: Whether the prefill response is streamed.
    """
    fields = {**fields, "stream": stream, "max_tokens": 1, TRANSFER_PARAMS: ASKED_OF_PREFILL}
    if path == CHAT_PATH:
        fields["max_completion_tokens"] = 1
    if (decode_body(raw, _DisaggregatedBody).min_tokens or 0) > 1:
        fields["min_tokens"] = 1
    return rewritten(raw, fields, without=("stream_options", "return_partial"))
