"""Translates `options` and `format` of Ollama's API to sampling options. Does no I/O."""

from __future__ import annotations

import msgspec

from trioserve.api.ollama.request_types import NUM_PREDICT_MIN, OllamaAnswerBody, OllamaOptions
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.chat_messages import check_shape

__all__ = ["sampling_of", "structured_output"]

SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
OWN_NAMES = {"repetition_penalty": "options.repeat_penalty", "logprobs": "top_logprobs"}
NO_PENALTIES: dict[str, object] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ANY_SEED = -1
ALL_TOKENS = -1

# Features that this server does not have, with the values that switch them off, which are accepted.
REFUSED = {
    "mirostat": ((0,), "this server has no mirostat: leave it out, or send 0"),
    "typical_p": ((1,), "this server has no typical sampling: leave it out, or send 1"),
    "tfs_z": ((1,), "this server has no tail free sampling: leave it out, or send 1"),
}


def sampling_of(body: OllamaAnswerBody, defaults: SamplingParams) -> SamplingParams:
    """Return the server's default sampling options, overridden by the body's options.

    A num_predict that does not fit into the context beside the prompt is reduced.

    Args:
        body: The body.
        defaults: The server's defaults.

    Raises:
        InvalidRequest: An option is not supported or out of range. The error names the field.
    """
    options = body.options or OllamaOptions()
    for name, (neutral, reason) in REFUSED.items():
        if getattr(options, name) not in (None, *neutral):
            raise InvalidRequest(f"options.{name} is {getattr(options, name)}, but {reason}", param=f"options.{name}")
    given: dict[str, object] = {name: value for name in SAME_NAMES if (value := getattr(options, name)) is not None} | {
        "n": 1,
        "prompt_logprobs": None,
        "logprobs": _logprobs(body),
    }
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if options.seed not in (None, ANY_SEED):
        given["seed"] = options.seed
    if options.stop is not None:
        given["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    if options.num_predict is not None:
        given |= {"max_tokens": _tokens_max(options.num_predict), "clamp_max_tokens": True}
    if options.repeat_last_n == 0:
        given |= NO_PENALTIES
    try:
        sampling = msgspec.structs.replace(defaults, **given)
    except InvalidRequest as error:
        name = error.param or ""
        field = OWN_NAMES.get(name, f"options.{name}")
        raise InvalidRequest(str(error).replace(name, field, 1), param=field) from None
    _check_window(options, sampling)
    return sampling


def structured_output(body: OllamaAnswerBody) -> StructuredOutput | None:
    """Return the schema for the output, or None for free text.

    Args:
        body: The body.

    Raises:
        InvalidRequest: The schema is too large or nested too deep.
    """
    if not isinstance(body.format, dict):
        return StructuredOutput.json_object(param="format") if body.format else None
    check_shape(body.format, "format")
    return StructuredOutput.json(body.format, param="format", strict=False)


def _logprobs(body: OllamaAnswerBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is set, so logprobs must be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tokens_max(num_predict: int) -> int | None:
    """Return the limit for output tokens. None: as many as fit."""
    if num_predict < NUM_PREDICT_MIN:
        raise InvalidRequest(
            f"options.num_predict is {num_predict}, allowed is {NUM_PREDICT_MIN} or more; values up to 0 mean as many "
            "tokens as fit",
            param="options.num_predict",
        )
    return num_predict if num_predict > 0 else None


def _check_window(options: OllamaOptions, sampling: SamplingParams) -> None:
    window = options.repeat_last_n
    is_penalized = any(getattr(sampling, name) != value for name, value in NO_PENALTIES.items())
    if window not in (None, 0, ALL_TOKENS) and is_penalized:
        raise InvalidRequest(
            f"options.repeat_last_n is {window}, but penalties of this server always count all tokens: leave it out, "
            "send -1 for all tokens, or send 0 for no penalties",
            param="options.repeat_last_n",
        )
