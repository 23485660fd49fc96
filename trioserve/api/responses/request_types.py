"""Request bodies of the Responses API: OpenAI's fields, and vLLM's fields for the engine.

`None` means "not given", as in all APIs. api/unread_fields.py decides what happens to fields that are not listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from trioserve.api.openai.request_types import Int32, check_cache_salt
from trioserve.api.session_fields import CacheRetention, check_cache_key
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.unread_fields import UNSET_VALUES, RefusedField, generation_fields
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN, KVTransferParams
from trioserve.contracts.sampling import SAMPLING_RANGES, SamplingParams

__all__ = [
    "RESPONSES_REFUSED",
    "CreateEvent",
    "InputTokensBody",
    "ReasoningOptions",
    "ResponsesBody",
    "TextFormat",
    "TextOptions",
]

# OpenAI's API has the next three limits.
METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARACTERS_MAX = 64
METADATA_VALUE_CHARACTERS_MAX = 512
NAME_CHARACTERS_MAX = 512  # The limit applies to fields that the response repeats and that the engine ignores.

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the output text.

    Attributes:
        type: Kind of format.
        name: Name of the schema. For json_schema only.
        description: Description of the schema. For json_schema only.
        schema: The schema. For json_schema only.
        strict: True if the schema is enforced strictly.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None  # The field generate_summary is the old name of `summary`.

    @property
    def wants_summary(self) -> bool:
        return (self.summary or self.generate_summary) is not None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class PromptBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that determine the prompt, for requests that generate or only count tokens."""

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields(
        structured="send text.format",
        sampling="the Responses API does not have it, see /v1/chat/completions",
        max_tokens="send max_output_tokens",
        max_completion_tokens="send max_output_tokens",
        reasoning_effort="send reasoning.effort",
        messages="send input",
        best_of="a response has one choice",
    )

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None

    def check(self) -> None:
        """Check rules that the types of the fields cannot express.

        Raises:
            InvalidRequest: A rule is broken.
        """
        for field, reason in RESPONSES_REFUSED.items():
            if getattr(self, field, None) not in UNSET_VALUES:
                raise InvalidRequest(f"{field} is not supported: {reason}", param=field)


class InputTokensBody(PromptBody, frozen=True, kw_only=True):
    pass


class ResponsesBody(PromptBody, frozen=True, kw_only=True):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Int32 | None = None
    max_tool_calls: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int32 | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    service_tier: str | None = None
    # OpenAI's API has this field only on websockets. Routers send a message of a websocket as a request.
    generate: bool | None = None
    # These are options of the engine, as in the other APIs.
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[Int32, float] | None = None
    thinking_token_budget: Int32 | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None
    resume: ResumeBody | None = None
    return_partial: bool | None = None
    moderation: Any = None

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        return None

    @property
    def stores(self) -> bool:
        """True if the response is stored. As in OpenAI's API, `store` is on by default."""
        return self.store is not False

    @property
    def generates(self) -> bool:
        """True unless the response only prepares the prompt, for a later response."""
        return self.generate is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Check rules that the types of the fields cannot express.

        Raises:
            InvalidRequest: A rule is broken.
        """
        PromptBody.check(self)
        self._check_numbers()
        self._check_metadata()
        if self.background and not self.stores:
            raise InvalidRequest(
                "background is true and store is false: a background response is read later, so it must be stored",
                param="store",
            )
        for entry in self.include or ():
            if entry not in INCLUDABLE:
                raise InvalidRequest(
                    f"include has {entry[:64]!r}, allowed are: {', '.join(sorted(INCLUDABLE))}", param="include"
                )
        for field in ("user", "safety_identifier", "service_tier"):
            value = getattr(self, field)
            if value is not None and len(value) > NAME_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"{field} has {len(value)} characters, allowed are up to {NAME_CHARACTERS_MAX}", param=field
                )
        check_cache_salt(self.cache_salt)
        if self.prompt_cache_key is not None:
            check_cache_key(self.prompt_cache_key)

    def _check_numbers(self) -> None:
        for field in ("max_output_tokens", "max_tool_calls"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidRequest(f"{field} is {value}, allowed is 1 or more", param=field)
        if self.thinking_token_budget is not None and self.thinking_token_budget < 0:
            raise InvalidRequest(
                f"thinking_token_budget is {self.thinking_token_budget}, allowed is 0 or more",
                param="thinking_token_budget",
            )
        allowed = SAMPLING_RANGES["logprobs"]
        if self.top_logprobs is not None and not allowed.holds(self.top_logprobs):
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}, allowed is {allowed}", param="top_logprobs")
        if self.seed is not None and self.seed.bit_length() > 64:
            raise InvalidRequest("seed has more than 64 bits", param="seed")
        if self.priority is not None and not PRIORITY_MIN <= self.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {self.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > METADATA_PAIRS_MAX:
            raise InvalidRequest(
                f"metadata has {len(metadata)} pairs, allowed are up to {METADATA_PAIRS_MAX}", param="metadata"
            )
        for key, value in metadata.items():
            if len(key) > METADATA_KEY_CHARACTERS_MAX or len(value) > METADATA_VALUE_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"metadata has a key of {len(key)} characters with a value of {len(value)}, allowed are up to "
                    f"{METADATA_KEY_CHARACTERS_MAX} and {METADATA_VALUE_CHARACTERS_MAX}",
                    param="metadata",
                )

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Return the server's default sampling options, overridden by this body's fields.

        Args:
            defaults: The server's defaults.

        Raises:
            InvalidRequest: An option is out of range.
        """
        fields: dict[str, Any] = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            fields |= {"max_tokens": self.max_output_tokens, "clamp_max_tokens": False}
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.wants_logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return msgspec.structs.replace(defaults, **fields)


class CreateEvent(ResponsesBody, frozen=True, kw_only=True):
    """A message that creates a response on a websocket: the fields of a body, and those of the message.

    Attributes:
        type: Kind of the message.
        stream_id: Lane of the response. It was checked before.
    """

    type: Literal["response.create"]
    stream_id: str | None = None

    def check(self) -> None:
        """Check rules that the types of the fields cannot express.

        Raises:
            InvalidRequest: A rule is broken.
        """
        ResponsesBody.check(self)
        if self.background:
            raise InvalidRequest(
                "background is true, but a response on a websocket ends with its connection: leave background out, or "
                "send POST /v1/responses",
                param="background",
            )
        if self.resume is not None:
            raise InvalidRequest(
                "resume is set, but a response on a websocket cannot resume an earlier one: leave resume out, or "
                "send POST /v1/responses",
                param="resume",
            )


SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in ResponsesBody.__struct_fields__ and name != "stop"
)
"""Fields that have the same name and type in a body and in SamplingParams."""

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        # These values are accepted and ignored: reasoning is never encrypted, and the tools of the other values do not
        # exist here.
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)

RESPONSES_REFUSED = {
    "conversation": "this server has no conversations, continue with previous_response_id",
    "prompt": "this server has no prompt templates, send instructions and input",
    "context_management": "this server never shortens a context, shorten the input",
    "moderation": "this server has no moderation",
}
"""Refused fields, and what to do instead. Ignoring them would change the response."""
