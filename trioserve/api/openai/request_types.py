"""Types of request bodies: the fields, and the type of each.

trioserve/api/unread_fields.py decides about fields that are not named here. trioserve/contracts/sampling.py checks the
ranges of sampling parameters. `None` always means "not given", since clients send null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec

from trioserve.api.openai.structured_fields import StructuredFields
from trioserve.api.session_fields import CacheRetention, check_cache_key, retention_seconds
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.unread_fields import UNSET_VALUES, RefusedField, check_unread, generation_fields
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN, KVTransferParams
from trioserve.contracts.sampling import SAMPLING_RANGES, THINKING_TOKENS_MAX, Range, SamplingParams
from trioserve.contracts.weights import WEIGHT_GROUP
from trioserve.http.exchange import Headers

__all__ = [
    "GENERATION_RANGES",
    "AbortBody",
    "AbortRequestBody",
    "Body",
    "BroadcastWeightsBody",
    "ChatBody",
    "CompletionBody",
    "ControlBody",
    "DetokenizeBody",
    "GenerationBody",
    "InFlight",
    "Int32",
    "LoadAdapterBody",
    "PauseBody",
    "SharedWeightsBody",
    "StreamOptions",
    "TokenizeBody",
    "UnloadAdapterBody",
    "WeightGroupBody",
    "WeightGroupNameBody",
    "WeightsBody",
    "WeightsOnDiskBody",
    "check_cache_salt",
    "deadlines_of",
    "decode_body",
    "wrong_field",
]

HEADERS = {
    Deadline.QUEUE: "X-Queue-Timeout",
    Deadline.FIRST_TOKEN: "X-TTFT-Timeout",
    Deadline.TOTAL: "X-Request-Timeout",
}
# The names are precomputed, because reading the value of an enum is slow.
_NAMES = tuple((deadline.value, header, header.lower()) for deadline, header in HEADERS.items())


class HasDeadlines(Protocol):
    """A body that may have deadlines, in seconds."""

    @property
    def queue_timeout(self) -> float | None: ...
    @property
    def ttft_timeout(self) -> float | None: ...
    @property
    def timeout(self) -> float | None: ...


def deadlines_of(body: HasDeadlines, headers: Headers) -> Deadlines:
    """Read the deadlines of a request.

    Args:
        body: body of the request.
        headers: header fields of the request.

    Raises:
        InvalidRequest: a value is not valid. The error names the field or the header.
    """
    values: dict[str, float | None] = {}
    for name, header, header_lower in _NAMES:
        value: float | None = getattr(body, name)
        if value is None and (text := headers.get(header_lower)) is not None:
            value = _seconds(text, header)
        if value is not None:
            values[name] = value
    return Deadlines(**values) if values else NO_DEADLINES


def _seconds(text: str, header: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{header} is {text[:40]!r}, allowed is a number of seconds", param=header) from None


Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""Type of every number that may reach a tensor or a float, since JSON's integers are unbounded."""

CACHE_SALT_CHARACTERS_MAX = 256  # The length is limited, because the salt is hashed with every block.
# The number of JSON values is limited, because decoding holds the GIL, and takes 15 ms for this number. It is estimated
# by counting commas and opening brackets. Nested empty lists have brackets and no commas. Commas inside texts count,
# too, but even a million tokens of prose have fewer.
VALUE_MARKS = (b",", b"[", b"{")
VALUE_MARKS_MAX = 250_000
COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's API has this default of max_tokens for text completions.

GENERATION_RANGES = SAMPLING_RANGES | {
    "max_completion_tokens": SAMPLING_RANGES["max_tokens"],
    "top_logprobs": SAMPLING_RANGES["logprobs"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
    "thinking_token_budget": Range(0, THINKING_TOKENS_MAX),
    "thinking_budget": Range(0, THINKING_TOKENS_MAX),
    "max_reasoning_tokens": Range(0, THINKING_TOKENS_MAX),
}
"""Allowed numbers in the bodies of chat and text completions, by field."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(StructuredFields, frozen=True, kw_only=True):
    """Fields that chat and text completions share, from OpenAI's and vLLM's APIs.

    n_predict and repeat_penalty are llama.cpp's names of max_tokens and repetition_penalty.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields()

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    n_predict: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[Int32, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int32 | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None
    allowed_token_ids: list[Int32] | None = None
    bad_words: list[str] | None = None
    kv_transfer_params: KVTransferParams | None = None
    truncate_prompt_tokens: Int32 | None = None
    resume: ResumeBody | None = None
    return_partial: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    # Other servers know these fields, but this server does not support them. Any value except null or empty is refused
    # (see REFUSED).
    use_beam_search: Any = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """True if every event has usage. As in vLLM, this needs include_usage too."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Check rules that types cannot express.

        Raises:
            InvalidRequest: a rule is broken. The error names the field.
        """
        for field, reason in REFUSED.items():
            if getattr(self, field, None) not in UNSET_VALUES:
                raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.priority is not None and not PRIORITY_MIN <= self.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {self.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )
        if self.cache_salt is not None:
            check_cache_salt(self.cache_salt)
        if self.prompt_cache_key is not None:
            check_cache_key(self.prompt_cache_key)

    @property
    def session_key(self) -> str | None:
        """Name of the session, see NamesSession."""
        return self.prompt_cache_key

    @property
    def retention_seconds(self) -> float | None:
        """See NamesSession."""
        retention = self.prompt_cache_retention
        return None if retention is None else retention_seconds(retention)

    def predicted_tokens(self) -> dict[str, object]:
        """Translate n_predict to max_tokens. A negative number means as many tokens as fit.

        Returns:
            The field max_tokens, or no field if n_predict is not set.

        Raises:
            InvalidRequest: n_predict is 0.
        """
        if self.n_predict is None:
            return {}
        if self.n_predict == 0:
            raise InvalidRequest("n_predict is 0, allowed is 1 or more, or -1 for as many as fit", param="n_predict")
        return {"max_tokens": self.n_predict if self.n_predict > 0 else None}

    def sampling(self, defaults: SamplingParams, **given: object) -> SamplingParams:
        """Make the sampling parameters.

        Args:
            defaults: the server's defaults, which fields of the body replace.
            given: values that replace the defaults and the fields of the body.

        Raises:
            InvalidRequest: a value is not valid. The error names the field.
        """
        fields = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            if self.repetition_penalty not in (None, self.repeat_penalty):
                raise InvalidRequest(
                    "repeat_penalty is another name of repetition_penalty, and both are set: send one",
                    param="repeat_penalty",
                )
            fields["repetition_penalty"] = self.repeat_penalty
        if self.seed is not None:
            if self.seed.bit_length() > 64:
                raise InvalidRequest("seed has more than 64 bits", param="seed")
            fields["seed"] = self.seed
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            fields["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(self.allowed_token_ids)
        if self.bad_words is not None:
            fields["bad_words"] = tuple(self.bad_words)
        fields |= given
        if fields.get("max_tokens") is not None:
            # A number that the client itself sent is refused if it does not fit into the context.
            fields["clamp_max_tokens"] = False
        return msgspec.structs.replace(defaults, **fields)


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int32 | None = None
    thinking_budget: Int32 | None = None
    max_reasoning_tokens: Int32 | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: str | list[str | Int32 | list[Int32]]
    max_tokens: Int32 | None = COMPLETION_TOKENS_DEFAULT
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /tokenize, with either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[Int32]


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/requests/abort.

    Attributes:
        ids: ids of the requests.
        return_partial: true: the response has the partial result of each request.
        min_age_seconds: only requests that arrived at least this long ago are aborted. It protects a new request with a
            reused id.
    """

    ids: list[str]
    return_partial: bool = False
    min_age_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class AbortRequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of SGLang's /abort_request, with return_partial added.

    Attributes:
        rid: id of one request.
        abort_all: true: abort all running requests of the caller.
        return_partial: true: the response has the partial result of each request.
    """

    rid: str = ""
    abort_all: bool = False
    return_partial: bool = False


class AbortRequestsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of vLLM's /abort_requests.

    Attributes:
        request_ids: ids of the requests. null: all running requests of the caller.
    """

    request_ids: list[str] | None = None


class ControlBody(msgspec.Struct, frozen=True, kw_only=True):
    """Change to a running request.

    Attributes:
        end_thinking: true: end the reasoning.
    """

    end_thinking: bool | None = None


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/load_lora_adapter.

    Attributes:
        lora_name: name under which requests use the adapter.
        lora_path: directory on the server, as peft saves it.
        load_inplace: true: the adapter may replace another one of this name. Running requests keep the old adapter.
    """

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/unload_lora_adapter.

    Attributes:
        lora_name: name of the adapter.
        timeout: seconds after which requests that still use the adapter are ended. null: the server waits for them.
    """

    lora_name: str | None = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of SGLang's /pause_generation.

    Attributes:
        mode: how to treat running requests. "abort": end them. "in_place": keep their KV, and continue later.
            "retract": free their KV, and recompute it later.
    """

    mode: Literal["abort", "in_place", "retract"] = "abort"


InFlight = Literal["keep", "recompute", "abort"]


class WeightsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all requests for a weight update share.

    Attributes:
        weight_version: name of the new weights. null: the server makes a new name.
        in_flight: how to treat running requests. "keep": continue with their KV. "recompute": recompute their KV.
            "abort": end them.
        abort_all_requests: true: the same as in_flight "abort".
        flush_cache: true: free blocks of older weights at once. New requests never hit them in any case.
    """

    weight_version: str | None = None
    in_flight: InFlight | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class WeightsOnDiskBody(WeightsBody, frozen=True, kw_only=True):
    """Body of /update_weights_from_disk.

    Attributes:
        model_path: directory or file from which the model could be opened.
    """

    model_path: str
    load_format: str | None = None
    is_async: bool = False


class SharedWeightsBody(WeightsBody, frozen=True, kw_only=True):
    """Body of /update_weights_from_shared_memory.

    Attributes:
        name: segment of shared memory with the content of a safetensors file.
    """

    name: str


class BroadcastWeightsBody(WeightsBody, frozen=True, kw_only=True):
    """Body of /update_weights_from_distributed.

    Attributes:
        names: names of the tensors, in the order in which the trainer sends them.
        dtypes: data type of each tensor.
        shapes: shape of each tensor.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Int32]]
    group_name: str = WEIGHT_GROUP
    load_format: str | None = None


class WeightGroupBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /init_weights_update_group.

    Attributes:
        rank_offset: rank of the engine in the group.
        seconds_max: time limit for all members to join, and for each tensor.
    """

    master_address: str
    master_port: Int32
    rank_offset: Int32
    world_size: Int32
    group_name: str = WEIGHT_GROUP
    backend: str = "gloo"
    seconds_max: float = 60.0


class WeightGroupNameBody(msgspec.Struct, frozen=True, kw_only=True):
    group_name: str = WEIGHT_GROUP


CONVERTED = frozenset({"seed", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"})
SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.__struct_fields__ and name not in CONVERTED
)
"""Fields that have the same name and type in a body and in SamplingParams. CONVERTED have only the same name."""

REFUSED = {
    "use_beam_search": "there is no beam search here, use n",
    "audio": "the server produces only text",
    "web_search_options": "there is no web search here",
}
"""Fields that would change the response if they were ignored, with the text of their refusal."""


def check_cache_salt(cache_salt: str | None) -> None:
    """Check the length of a cache salt.

    Args:
        cache_salt: salt in the request. None: the request has no salt.

    Raises:
        InvalidRequest: the salt is empty or too long.
    """
    if cache_salt is not None and not 1 <= len(cache_salt) <= CACHE_SALT_CHARACTERS_MAX:
        raise InvalidRequest(
            f"cache_salt has {len(cache_salt)} characters, allowed are 1 to {CACHE_SALT_CHARACTERS_MAX}",
            param="cache_salt",
        )


Body = TypeVar("Body", bound=msgspec.Struct)

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode_body(
    raw: bytes, kind: type[Body], *, values_max: int | None = VALUE_MARKS_MAX, ignored: list[str] | None = None
) -> Body:
    """Decode a request's JSON.

    If a key occurs twice, its last value counts, as in Python and JavaScript. Values of unknown fields are skipped.

    Args:
        raw: JSON of the body.
        kind: type of the result. It may have REFUSED_FIELDS, see check_unread.
        values_max: limit for the number of commas and opening brackets. None: no limit.
        ignored: receives the names of ignored fields. None: they are not needed.

    Raises:
        InvalidRequest: the body is not JSON in UTF-8, nests too deeply, has too many values, has a field of the wrong
            type, or has a refused field. `param` is the path of the field, such as `messages[2].role`.
    """
    if not raw:
        raise InvalidRequest("the request has no body: send a JSON object")
    if values_max is not None and sum(map(raw.count, VALUE_MARKS)) > values_max:
        raise InvalidRequest(f"the body has too many values: more than {values_max} commas and opening brackets")
    try:
        # The text is decoded strictly first, because msgspec skips invalid bytes in unknown fields.
        text = raw.decode("utf-8")
        body = msgspec.json.decode(text, type=kind)
        if ignored is not None or hasattr(kind, "REFUSED_FIELDS"):
            names = check_unread(text, kind)
            if ignored is not None:
                ignored += names
        return body
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is wrong") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def wrong_field(error: msgspec.ValidationError) -> InvalidRequest:
    """Make the error for a missing field, or for a value of the wrong type.

    Args:
        error: error of the decoder.
    """
    message = str(error)
    place = _PLACE.search(message) or re.fullmatch(r"Object missing required field `(\w+)`", message)
    return InvalidRequest(message, param=(place[1] or None) if place else None)
