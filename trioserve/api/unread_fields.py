"""Checks request fields that the body's type does not read. Fields that would change the response are refused.

Clients send fields of other servers and of newer API versions. There are three cases. A field that asks for a
different response is refused with a sentence that says what to send instead. A field that cannot change the response
is accepted silently. Every other field is ignored, and a response header lists it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams

__all__ = [
    "HARMLESS",
    "IGNORED_HEADER",
    "UNSET_VALUES",
    "RefusedField",
    "check_unread",
    "generation_fields",
    "shown_names",
]

IGNORED_HEADER: Final = "x-trioserve-ignored"
"""Response header that lists the ignored fields of the request."""

NAMES_MAX = 16  # The header lists at most this number of fields.
NAME_CHARACTERS_MAX = 128
UNSET_VALUES: tuple[object, ...] = (None, False, "", [], {})
"""Values with which a field has no effect. 0 is one of them, since it equals False."""

_NAME = re.compile(r"[A-Za-z0-9_.$\-\[\]]+")  # The pattern has the characters that a header allows without quotes.


class RefusedField(NamedTuple):
    """A field that would change the response.

    Attributes:
        reason: what is missing here, and what to send instead.
        neutral: values that have no effect, and so are accepted.
    """

    reason: str
    neutral: tuple[object, ...] = UNSET_VALUES


_DEFAULT_ON = (None, True)

# The fields are grouped by the server whose clients send them. A secondary field, such as dry_base, is in HARMLESS,
# because it has no effect without its main field.
GENERATION: dict[str, RefusedField] = {
    # llama.cpp
    "mirostat": RefusedField("there is no mirostat here, leave it out or send 0"),
    "dynatemp_range": RefusedField("the temperature is fixed here, leave it out or send 0"),
    "dry_multiplier": RefusedField("there is no DRY sampler here, leave it out or send 0"),
    "xtc_probability": RefusedField("there is no XTC sampler here, leave it out or send 0"),
    "adaptive_target": RefusedField("there is no adaptive sampler here, leave it out or send -1", (None, -1, -1.0)),
    "top_n_sigma": RefusedField("there is no top-n-sigma sampler here, leave it out or send -1", (None, -1, -1.0)),
    "typical_p": RefusedField("there is no typical sampling here, leave it out or send 1", (None, 1)),
    "tfs_z": RefusedField("there is no tail-free sampling here, leave it out or send 1", (None, 1)),
    "min_keep": RefusedField("samplers have no minimum of tokens here, leave it out or send 0"),
    "samplers": RefusedField("the order of samplers is fixed here, leave it out"),
    "repeat_last_n": RefusedField("penalties look at all tokens here, leave it out or send -1", (None, -1)),
    "n_indent": RefusedField("there is no rule about indents here, use a grammar or a regex"),
    "n_probs": RefusedField("send logprobs"),
    "n_cmpl": RefusedField("send n"),
    "t_max_predict_ms": RefusedField("send timeout, in seconds", (None, 0, -1)),
    "lora": RefusedField("name the adapter as the model"),
    "grammar_lazy": RefusedField("a grammar applies from the first token, use structured_outputs.structural_tag"),
    "reasoning_format": RefusedField(
        "reasoning is always separated, leave it out or send auto", (None, "auto", "deepseek")
    ),
    "parse_tool_calls": RefusedField("tool calls are always parsed, send tool_choice none to get none", _DEFAULT_ON),
    "response_fields": RefusedField("the whole response is sent, leave it out"),
    # SGLang
    "stop_regex": RefusedField("send stop with the texts themselves"),
    "no_stop_trim": RefusedField("send include_stop_str_in_output"),
    "lora_path": RefusedField("name the adapter as the model"),
    "custom_logit_processor": RefusedField("the server runs no code from requests, use logit_bias or a grammar"),
    "session_params": RefusedField("send the whole conversation, and X-Session-Id"),
    "return_hidden_states": RefusedField("the response has no hidden states, use /v1/embeddings for vectors"),
    "return_routed_experts": RefusedField("the response does not list the experts of a token"),
    "return_prompt_token_ids": RefusedField("send return_token_ids"),
    "return_meta_info": RefusedField("the response has usage and no other meta information"),
    "input_ids": RefusedField("send prompt with the token ids to /v1/completions"),
    "separate_reasoning": RefusedField("reasoning is always separated, leave it out", _DEFAULT_ON),
    "stream_reasoning": RefusedField("reasoning is streamed like the rest, leave it out", _DEFAULT_ON),
    "extra_key": RefusedField("send cache_salt"),
    "bootstrap_host": RefusedField("KV is handed over by kv_transfer_params"),
    "max_new_tokens": RefusedField("send max_tokens"),
    # vLLM
    "best_of": RefusedField("there is no best_of for chats, send n"),
    "logits_processors": RefusedField("the server runs no code from requests, use logit_bias or a grammar"),
    "repetition_detection": RefusedField("a repetitive response is not ended early, send repetition_penalty"),
    "structural_tag": RefusedField("send structured_outputs.structural_tag"),
    "logprob_token_ids": RefusedField("send top_logprobs for the best tokens"),
    "prompt_embeds": RefusedField("prompts are text or token ids here"),
    "return_tokens_as_token_ids": RefusedField("send return_token_ids"),
    "documents": RefusedField("put them into a message, or into chat_template_kwargs if the template reads them"),
    "mm_processor_kwargs": RefusedField("the model's own files say how images are prepared"),
    "media_io_kwargs": RefusedField("there are no options for reading images"),
    "vllm_xargs": RefusedField("there are no extensions here"),
    "guided_whitespace_pattern": RefusedField("send guided_json with x-guidance in the schema"),
    # These fields come from OpenRouter, LiteLLM, DeepSeek and other services.
    "reasoning": RefusedField("send reasoning_effort, enable_thinking or thinking_token_budget"),
    "thinking": RefusedField("send enable_thinking or thinking_token_budget"),
    "top_a": RefusedField("there is no top-a sampler here, send min_p"),
    "plugins": RefusedField("there are no plugins here"),
    "transforms": RefusedField("prompts are not transformed here, send truncate_prompt_tokens"),
    "models": RefusedField("a request has one model here, send model"),
    "fallbacks": RefusedField("a request has one model here, send model"),
    "options": RefusedField("send the options as fields of the body, or use /api/chat"),
    "extra_body": RefusedField("extra_body is an argument of OpenAI's library, put its fields into the body itself"),
    # OpenAI
    "moderation": RefusedField("there is no moderation here"),
    "web_search_options": RefusedField("there is no web search here"),
}

STRUCTURED_NAMES = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "regex",
    "ebnf",
    "grammar",
    "json_schema",
    "format",
    "output_format",
    "structural_tag",
)
"""Names of structured output in various APIs."""

# Bodies have other fields for the first three, and no field for rules of speech. Clients send the last one with its
# default, which has no effect.
_NOT_IN_BODIES = {"clamp_max_tokens", "structured", "thinking", "speech", "skip_special_tokens"}
SAMPLING_NAMES = (
    *(name for name in SamplingParams.__struct_fields__ if name not in _NOT_IN_BODIES),
    *("max_completion_tokens", "n_predict", "max_new_tokens", "repeat_penalty", "echo", "suffix", "chat_template"),
    *("chat_template_kwargs", "continue_final_message", "truncate_prompt_tokens", "thinking_token_budget"),
    *("enable_thinking", "reasoning_effort"),
)
"""Fields of /v1/chat/completions, for other APIs whose bodies lack them and must refuse them."""

HARMLESS: frozenset[str] = frozenset(
    name
    for names in (
        # These fields describe the identity and the billing of the caller.
        "user metadata safety_identifier user_profile_id workspace_id billing_policy betas access_programs",
        "fallback_credit_token inference_geo service_tier speed store provider num_retries background_options",
        # These fields are ids. This server reads X-Request-Id instead.
        "rid request_id custom_labels",
        # These fields choose the location and the lifetime of caches.
        "cache_prompt prompt_cache_options id_slot",
        "n_cache_reuse n_keep n_discard num_keep t_max_prompt_ms diagnostics data_parallel_rank",
        # These fields choose methods of computation.
        "prediction guided_decoding_backend backend_sampling draft_num_predict chat_format image",
        "generation_prompt preserved_tokens grammar_triggers spaces_between_special_tokens truncate shift",
        # These fields ask for further details in the response.
        "return_tokens return_progress timings_per_token post_sampling_probs sse_ping_interval",
        "return_cached_tokens_details",
        # These numbers have no effect unless a refused field is set.
        "length_penalty mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n",
        "dry_sequence_breakers xtc_threshold adaptive_decay penalize_newline custom_params",
        "bootstrap_port bootstrap_room",
        # These are Ollama's options for loading a model.
        "num_ctx num_batch num_gpu num_thread main_gpu low_vram f16_kv logits_all vocab_only use_mmap",
        "use_mlock numa embedding_only",
    )
    for name in names.split()
)
"""Fields that cannot change a response of this server, such as billing, cache placement and speed."""


def generation_fields(
    *, structured: str | None = None, sampling: str | None = None, **own: str
) -> Mapping[str, RefusedField]:
    """Collect the refused fields of a body that asks for text.

    An entry for a field that the body's type reads has no effect.

    Args:
        structured: what to send instead of other APIs' names for structured output. None: these names are ignored.
        sampling: what to send instead of fields of chat completions. None: these fields are ignored.
        own: further fields, each with its reason. They take precedence.
    """
    fields = dict(GENERATION)
    if structured is not None:
        fields |= dict.fromkeys(STRUCTURED_NAMES, RefusedField(structured))
    if sampling is not None:
        fields |= dict.fromkeys(SAMPLING_NAMES, RefusedField(sampling))
    return fields | {name: RefusedField(reason) for name, reason in own.items()}


def check_unread(text: str | bytes, kind: type[msgspec.Struct], place: str = "") -> tuple[str, ...]:
    """Check the fields of a JSON object that `kind` does not read. The object was decoded as `kind` before.

    Args:
        text: the JSON object.
        kind: type of the object. It may have REFUSED_FIELDS, a mapping of names to RefusedField, and NESTED_FIELDS, a
            mapping of fields to types whose own fields are checked too.
        place: path of the object within the body, ending with a dot. Empty: the body itself.

    Returns:
        Paths of the ignored fields in the order of the body, without the harmless ones.

    Raises:
        InvalidRequest: a field would change the response. The error names the field.
    """
    refused: Mapping[str, RefusedField] = getattr(kind, "REFUSED_FIELDS", {})
    nested: Mapping[str, type[msgspec.Struct]] = getattr(kind, "NESTED_FIELDS", {})
    known = kind.__struct_encode_fields__
    names: list[str] = []
    for name, raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).items():
        if name in nested and bytes(raw) != b"null":
            names += check_unread(bytes(raw), nested[name], f"{place}{name}.")
        elif name in known:
            continue
        elif name in refused:
            check_refused(f"{place}{name}", msgspec.json.decode(raw), refused[name])
        elif name not in HARMLESS:
            names.append(f"{place}{name}")
    return tuple(names)


def check_refused(param: str, value: Any, field: RefusedField) -> None:
    """Raise InvalidRequest unless the value has no effect.

    Args:
        param: path of the field.
        value: value of the field.
        field: reason and neutral values.
    """
    if value not in field.neutral:
        raise InvalidRequest(f"{param} is not supported: {field.reason}", param=param)


def shown_names(names: tuple[str, ...]) -> str:
    """Join field names for a header's value. Long names and names with odd characters are only counted.

    Args:
        names: paths of fields, which clients chose.
    """
    shown = [name for name in names if len(name) <= NAME_CHARACTERS_MAX and _NAME.fullmatch(name)][:NAMES_MAX]
    rest = len(names) - len(shown)
    return ", ".join([*shown, *([f"and {rest} more"] if rest else [])])
