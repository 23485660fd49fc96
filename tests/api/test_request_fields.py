"""Tests that each request field of other servers and client libraries is read, harmless, refused, or reported.

If a new version of a library has a new field, these tests fail. Then decide in trioserve/api/unread_fields.py what
happens to the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from trioserve.api.anthropic.bodies import CountTokensBody, MessagesBody
from trioserve.api.ollama.answer import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from trioserve.api.openai.embeddings import EmbeddingsBody
from trioserve.api.openai.request_types import ChatBody, CompletionBody
from trioserve.api.responses.request_types import ResponsesBody
from trioserve.api.unread_fields import HARMLESS, check_unread, shown_names
from trioserve.contracts.errors import InvalidRequest
from trioserve.testing.fake_engine import open_fake_engine

NAMED = frozenset({"verbosity"})
"""Ignored and named in the header: no model here was trained for it, and the prompt can say the same."""

VLLM_CHAT = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
    repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
    bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag priority
    request_id logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params
    vllm_xargs repetition_detection
"""
VLLM_COMPLETION = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs prompt_embeds
    add_special_tokens response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern priority request_id logits_processors
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs repetition_detection
"""
SGLANG_CHAT = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p user tools tool_choice
    parallel_tool_calls return_hidden_states return_routed_experts return_cached_tokens_details
    return_prompt_token_ids return_meta_info reasoning_effort top_k min_p min_tokens regex ebnf repetition_penalty
    stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path
    session_params separate_reasoning stream_reasoning chat_template_kwargs rid extra_key cache_salt priority
    custom_logit_processor custom_params custom_labels bootstrap_host bootstrap_port bootstrap_room
    data_parallel_rank input_ids
"""
SGLANG_COMPLETION = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user return_hidden_states top_k min_p min_tokens json_schema regex ebnf
    repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path
    session_params response_format custom_params custom_logit_processor rid extra_key cache_salt priority
    bootstrap_host bootstrap_port bootstrap_room data_parallel_rank custom_labels
"""
LLAMA_CPP = """
    stream cache_prompt return_tokens return_progress timings_per_token n_predict max_tokens n_indent n_keep
    n_discard n_cmpl n_cache_reuse t_max_prompt_ms t_max_predict_ms response_fields top_k top_p min_p top_n_sigma
    xtc_probability xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n
    repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs min_keep
    post_sampling_probs backend_sampling lora json_schema grammar grammar_lazy grammar_triggers preserved_tokens
    logit_bias ignore_eos stop samplers id_slot chat_format reasoning_format generation_prompt parse_tool_calls
    chat_template_kwargs add_generation_prompt parallel_tool_calls sse_ping_interval
"""


CHAT_ONLY = {"chat_template_kwargs", "add_generation_prompt", "parallel_tool_calls"}


def typed_fields(module: str, name: str) -> list[str]:
    """Return the fields of a TypedDict and of its base classes."""
    kind = getattr(__import__(module, fromlist=[name]), name)
    return sorted(set().union(*(getattr(base, "__annotations__", {}) for base in [kind, *kind.__orig_bases__])))


def model_fields(name: str) -> list[str]:
    return sorted(getattr(__import__("ollama._types", fromlist=[name]), name).model_fields)


SOURCES: list[tuple[str, type[msgspec.Struct], Iterable[str]]] = [
    ("vLLM's chats", ChatBody, VLLM_CHAT.split()),
    ("vLLM's completions", CompletionBody, VLLM_COMPLETION.split()),
    ("SGLang's chats", ChatBody, SGLANG_CHAT.split()),
    ("SGLang's completions", CompletionBody, SGLANG_COMPLETION.split()),
    ("llama.cpp's chats", ChatBody, LLAMA_CPP.split()),
    ("llama.cpp's completions", CompletionBody, set(LLAMA_CPP.split()) - CHAT_ONLY),
]
LIBRARIES: list[tuple[type[msgspec.Struct], str, str]] = [
    (ChatBody, "openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
    (CompletionBody, "openai.types.completion_create_params", "CompletionCreateParamsBase"),
    (ResponsesBody, "openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    (EmbeddingsBody, "openai.types.embedding_create_params", "EmbeddingCreateParams"),
    (MessagesBody, "anthropic.types.message_create_params", "MessageCreateParamsBase"),
    (CountTokensBody, "anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
    (MessagesBody, "anthropic.types.beta.message_create_params", "MessageCreateParamsBase"),
    (CountTokensBody, "anthropic.types.beta.message_count_tokens_params", "MessageCountTokensParams"),
]
OLLAMA: list[tuple[type[msgspec.Struct], str]] = [
    (OllamaChatBody, "ChatRequest"),
    (OllamaGenerateBody, "GenerateRequest"),
    (OllamaEmbedBody, "EmbedRequest"),
    (OllamaEmbeddingsBody, "EmbeddingsRequest"),
    (OllamaOptions, "Options"),
]


def undecided(kind: type[msgspec.Struct], names: Iterable[str]) -> list[str]:
    refused: Any = getattr(kind, "REFUSED_FIELDS", {})
    known = kind.__struct_encode_fields__
    return [name for name in names if not (name in known or name in HARMLESS or name in refused or name in NAMED)]


@pytest.mark.parametrize(("kind", "names"), [source[1:] for source in SOURCES], ids=[source[0] for source in SOURCES])
def test_each_request_field_of_other_servers_is_supported_or_refused_explicitly(
    kind: type[msgspec.Struct], names: list[str]
) -> None:
    assert undecided(kind, names) == []


@pytest.mark.parametrize(("kind", "module", "name"), LIBRARIES)
def test_each_request_field_of_a_client_library_is_supported_or_refused_explicitly(
    kind: type[msgspec.Struct], module: str, name: str
) -> None:
    fields = typed_fields(module, name)
    assert len(fields) >= 4
    assert undecided(kind, fields) == []


@pytest.mark.parametrize(("kind", "name"), OLLAMA)
def test_each_request_field_of_ollamas_library_is_supported_or_refused_explicitly(
    kind: type[msgspec.Struct], name: str
) -> None:
    assert undecided(kind, model_fields(name)) == []


def test_no_field_is_both_harmless_and_refused() -> None:
    for kind in (ChatBody, MessagesBody, ResponsesBody, OllamaChatBody):
        assert not HARMLESS & set(kind.REFUSED_FIELDS)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
PATTERN = r'\{"ok": ?(true|false)\}'
STRUCTURED: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "a+b"}, "a+b"),
    "ebnf": ({"ebnf": 'root ::= "q" [0-9]'}, "q[0-9]"),
    "grammar": ({"grammar": 'root ::= "q" [0-9]'}, "q[0-9]"),
    "json_schema": ({"json_schema": SCHEMA}, PATTERN),
    "json_schema as a text": ({"json_schema": json.dumps(SCHEMA)}, PATTERN),
    "format": ({"format": SCHEMA}, PATTERN),
    "format json": ({"format": "json"}, r"\{.*"),
    "response_format.schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, PATTERN),
    "json_schema with schema": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, PATTERN),
    "response_format.value": ({"response_format": {"type": "json_object", "value": SCHEMA}}, PATTERN),
    "type json": ({"response_format": {"type": "json", "value": SCHEMA}}, PATTERN),
    "type regex": ({"response_format": {"type": "regex", "value": "a+b"}}, "a+b"),
    "type grammar": ({"response_format": {"type": "grammar", "grammar": 'root ::= "q" [0-9]'}}, "q[0-9]"),
}


@pytest.mark.parametrize(("fields", "pattern"), STRUCTURED.values(), ids=STRUCTURED.keys())
async def test_structured_output_works_under_the_names_of_other_servers(
    make_api: Any, fields: dict[str, Any], pattern: str
) -> None:
    async with open_fake_engine() as engine:
        api = make_api()
        api.engine = engine
        chat = (await api.chat(**fields, max_tokens=60, temperature=0)).json()
        assert re.fullmatch(pattern, chat["choices"][0]["message"]["content"])
        text = (await api.complete(**fields, max_tokens=60, temperature=0)).json()
        assert re.fullmatch(pattern, text["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
        ({"format": "json", "guided_json": {}}, "format"),
        ({"response_format": {"type": "json_object", "shema": {}}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"options": {"num_predict": 3}}, "options"),
        ({"extra_body": {"top_k": 1}}, "extra_body"),
        ({"web_search_options": {"user_location": None}}, "web_search_options"),
        ({"moderation": {"input": True}}, "moderation"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"n_predict": 0}, "n_predict"),
    ],
)
async def test_a_field_that_would_change_the_response_is_refused(
    make_api: Any, fields: dict[str, Any], param: str
) -> None:
    api = make_api()
    exchange = await api.chat(**fields)
    assert (exchange.status, exchange.json()["error"]["param"]) == (400, param)
    assert not api.engine.streams


@pytest.mark.parametrize("kind", [MessagesBody, ResponsesBody])
@pytest.mark.parametrize("name", ["regex", "response_format", "json_schema", "logit_bias", "stop", "n_predict"])
def test_apis_without_a_field_of_chat_completions_refuse_it(kind: Any, name: str) -> None:
    if name in kind.__struct_fields__:
        return
    with pytest.raises(InvalidRequest) as caught:
        check_unread(json.dumps({name: 3 if name == "n_predict" else "x"}), kind)
    assert caught.value.param == name


NEUTRAL = {
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "separate_reasoning": True,
    "lora": [],
    "grammar": "",
    "user": "somebody",
    "store": False,
    "metadata": {"a": "b"},
    "length_penalty": 1.0,
}


async def test_neutral_values_and_harmless_fields_are_accepted_silently(make_api: Any) -> None:
    exchange = await make_api().chat(**NEUTRAL)
    assert exchange.status == 200
    assert "x-trioserve-ignored" not in exchange.response_headers


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_listed_in_the_head_and_counted(make_api: Any, stream: bool) -> None:
    api = make_api()
    exchange = await api.chat(verbosity="low", brandnew=[1, {"a": 2}], stream=stream)
    assert exchange.status == 200
    assert exchange.response_headers["x-trioserve-ignored"] == "verbosity, brandnew"
    assert b'trioserve:ignored_request_fields_total{model_name="letters"} 2.0' in api.engine.metrics.expose()


async def test_ignored_fields_are_listed_in_the_head_of_a_refusal(make_api: Any) -> None:
    exchange = await make_api().chat(brandnew=1, temperature=-1)
    assert exchange.status == 400
    assert exchange.response_headers["x-trioserve-ignored"] == "brandnew"


def test_the_header_lists_only_few_short_and_plain_names() -> None:
    names = ("a\r\nb: c", "x" * 129, "é", *(f"n{index}" for index in range(20)))
    shown = shown_names(names)
    assert shown == ", ".join(f"n{index}" for index in range(16)) + ", and 7 more"
    assert shown_names(("\n",)) == "and 1 more"


def test_ollamas_options_are_checked_too() -> None:
    text = json.dumps({"model": "m", "options": {"num_ctx": 8, "brandnew": 1}, "other": 2})
    assert check_unread(text, OllamaChatBody) == ("options.brandnew", "other")
    with pytest.raises(InvalidRequest) as caught:
        check_unread(json.dumps({"options": {"dry_multiplier": 0.5}}), OllamaChatBody)
    assert caught.value.param == "options.dry_multiplier"


async def test_n_predict_and_repeat_penalty_have_llama_cpps_meaning(make_api: Any) -> None:
    api = make_api()
    await api.chat(n_predict=3, repeat_penalty=1.5)
    await api.complete(n_predict=4)
    await api.complete(n_predict=-1)
    first, second, third = (stream.sampling for stream in api.engine.streams)
    assert (first.max_tokens, first.repetition_penalty) == (3, 1.5)
    assert (second.max_tokens, third.max_tokens) == (4, None)
