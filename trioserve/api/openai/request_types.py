"""The bodies that clients send: which fields there are and of which type.

What happens to fields that are not named here is decided in api/unread_fields.py.

Ranges of sampling parameters are checked in contracts/sampling.py. `None` always means "not given": clients send null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from trioserve.api.openai.form_fields import FormFields
from trioserve.api.resume_body import ResumeBody
from trioserve.api.unread_fields import UNSET_VALUES, RefusedField, check_unread, generation_fields
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import WEIGHT_GROUP

__all__ = [
    "AbortBody",
    "AbortRequestBody",
    "BroadcastWeightsBody",
    "Body",
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
    "decode_body",
    "wrong_field",
]

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""Every number that may reach a tensor or a float: JSON's integers have no end."""

CACHE_SALT_CHARACTERS_MAX = 256  # it is hashed with every block
# As many values at most: decoding does not let go of the GIL, and takes 15 ms for as many numbers. Brackets count, too,
# since empty lists in each other have no commas. So do texts: a million tokens of prose have fewer.
VALUE_MARKS = (b",", b"[", b"{")
VALUE_MARKS_MAX = 250_000
COMPLETION_TOKENS_DEFAULT = 16  # max_tokens of text completions in OpenAI's API


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(FormFields, frozen=True, kw_only=True):
    """What chat and text completions have in common: OpenAI's fields and vLLM's.

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
    # Known to others, not supported: anything but null or empty is refused (see REFUSED).
    use_beam_search: Any = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """As in vLLM it counts only together with include_usage."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raises InvalidRequest for what no type can say."""
        for field, reason in REFUSED.items():
            if getattr(self, field, None) not in UNSET_VALUES:
                raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.priority is not None and not PRIORITY_MIN <= self.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {self.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )
        check_cache_salt(self.cache_salt)

    def predicted_tokens(self) -> dict[str, object]:
        """max_tokens as n_predict says it, if it does: below 0, as many as fit."""
        if self.n_predict is None:
            return {}
        if self.n_predict == 0:
            raise InvalidRequest("n_predict is 0, allowed is 1 or more, or -1 for as many as fit", param="n_predict")
        return {"max_tokens": self.n_predict if self.n_predict > 0 else None}

    def sampling(self, defaults: SamplingParams, **given: object) -> SamplingParams:
        """The server's defaults with this body's fields and, above them, `given`. Raises InvalidRequest."""
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
            fields["clamp_max_tokens"] = False  # the client's own number is refused if it does not fit
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
    """Either prompt or messages."""

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
    """return_partial: whether the answer holds what there is of each request. min_age_seconds: only requests that came
    at least so long ago are ended, so that a new one with the same id goes on."""

    ids: list[str]
    return_partial: bool = False
    min_age_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class AbortRequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """As in SGLang, with return_partial. rid: one id. abort_all: all requests of the caller that live."""

    rid: str = ""
    abort_all: bool = False
    return_partial: bool = False


class AbortRequestsBody(msgspec.Struct, frozen=True, kw_only=True):
    """As in vLLM. request_ids: without any, all requests of the caller that live."""

    request_ids: list[str] | None = None


class ControlBody(msgspec.Struct, frozen=True, kw_only=True):
    """end_thinking: what can be asked of a request that runs."""

    end_thinking: bool | None = None


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """lora_path: a directory on the server, as peft saves it. load_inplace: it may take over the name of another one;
    requests that run keep that."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """timeout: seconds, after which requests that still use it are ended; without it they are waited for."""

    lora_name: str | None = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None


class PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    """mode: what becomes of requests that have begun: they end; or stay as they are and go on later; or give their KV
    back, and are computed again then."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


InFlight = Literal["keep", "recompute", "abort"]


class WeightsBody(msgspec.Struct, frozen=True, kw_only=True):
    """weight_version: what the weights are called; without it they get a new name. in_flight: what becomes of requests
    that have begun: they go on with the KV that they have, or compute it anew, or end. abort_all_requests: the last of
    these. flush_cache: blocks that older weights have computed, which nobody finds, are free at once."""

    weight_version: str | None = None
    in_flight: InFlight | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class WeightsOnDiskBody(WeightsBody, frozen=True, kw_only=True):
    """model_path: a directory or a file from which the model could be opened."""

    model_path: str
    load_format: str | None = None
    is_async: bool = False


class SharedWeightsBody(WeightsBody, frozen=True, kw_only=True):
    """name: of a segment of shared memory that holds what a safetensors file does."""

    name: str


class BroadcastWeightsBody(WeightsBody, frozen=True, kw_only=True):
    """names, dtypes, shapes: of the tensors, in the order in which the trainer sends them."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Int32]]
    group_name: str = WEIGHT_GROUP
    load_format: str | None = None


class WeightGroupBody(msgspec.Struct, frozen=True, kw_only=True):
    """rank_offset: the engine's rank. seconds_max: how long the others may be waited for, and each tensor."""

    master_address: str
    master_port: Int32
    rank_offset: Int32
    world_size: Int32
    group_name: str = WEIGHT_GROUP
    backend: str = "gloo"
    seconds_max: float = 60.0


class WeightGroupNameBody(msgspec.Struct, frozen=True, kw_only=True):
    group_name: str = WEIGHT_GROUP


SAMPLING_FIELDS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields that have the same name and type in a body and in SamplingParams."""

REFUSED = {
    "use_beam_search": "there is no beam search here, use n",
    "audio": "only text is produced",
    "web_search_options": "there is no web search here",
}
"""Fields whose silent loss would change the response, and what to do instead."""


def check_cache_salt(cache_salt: str | None) -> None:
    """Raises InvalidRequest."""
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

    Of a key that comes twice the last one counts, as in Python and JavaScript. Values of unknown fields are skipped.

    Args:
        raw: The JSON.
        kind: What it is decoded as. May have REFUSED_FIELDS, see check_unread.
        values_max: Bound of commas and opening brackets; None: no bound.
        ignored: Gets the names of the fields that nobody reads.

    Returns:
        The value.

    Raises:
        InvalidRequest: The body is not JSON in UTF-8, nests too deeply, holds too many values, has a field of the wrong
            type, or a field that is not supported. `param` is the path of the field, such as `messages[2].role`.
    """
    if not raw:
        raise InvalidRequest("the request has no body: send a JSON object")
    if values_max is not None and sum(map(raw.count, VALUE_MARKS)) > values_max:
        raise InvalidRequest(
            f"the body holds more than {values_max} commas and opening brackets, and so too many values"
        )
    try:
        # Strictly as text: the decoder would skip over broken bytes in fields that it does not know.
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
    """That a field has no value of its type, or is missing."""
    message = str(error)
    place = _PLACE.search(message) or re.fullmatch(r"Object missing required field `(\w+)`", message)
    return InvalidRequest(message, param=(place[1] or None) if place else None)
