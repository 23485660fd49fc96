"""Bodies of requests of Ollama's API: fields and their types.

`None` means "not given". api/unread_fields.py decides what happens to fields that are not listed here. Options for
loading a model are ignored, because the model is loaded already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.api.openai.request_types import Int32
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.unread_fields import RefusedField, generation_fields
from trioserve.contracts.pooling import DIMENSIONS_MAX
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = [
    "OLLAMA_RANGES",
    "SAMPLING_OPTIONS",
    "OllamaAnswerBody",
    "OllamaChatBody",
    "OllamaEmbedBody",
    "OllamaEmbeddingsBody",
    "OllamaGenerateBody",
    "OllamaMessage",
    "OllamaOptions",
    "OllamaShowBody",
]

NUM_PREDICT_MIN = -2  # The values -2, -1 and 0 mean as many tokens as fit into the context.

NO_IMAGES = "a language model cannot generate images, see /v1/images/generations"
Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Effort = Literal["low", "medium", "high", "max"]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options.

    `repeat_last_n` and the fields after it are refused if they ask for a feature that this server does not have.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields()

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: Int32 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Int32 | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: Int32 | None = None


SAMPLING_OPTIONS = tuple(name for name in OllamaOptions.__struct_fields__ if name in SAMPLING_RANGES)
"""Numbers that have the same name in SamplingParams."""

OLLAMA_RANGES = {
    **{f"OllamaOptions.{name}": SAMPLING_RANGES[name] for name in SAMPLING_OPTIONS},
    "OllamaOptions.repeat_penalty": SAMPLING_RANGES["repetition_penalty"],
    "OllamaOptions.num_predict": Range(NUM_PREDICT_MIN, None),
    "top_logprobs": SAMPLING_RANGES["logprobs"],
}
"""Allowed ranges of numbers, by field, or by type and field."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all bodies.

    `priority` and the fields after it are this server's own, with the same meaning as in chat completions.

    Attributes:
        model: Name of the model, with or without ":latest". Default: the first model that is served.
        keep_alive: Read by a router that loads models on demand. Otherwise ignored: the model stays loaded.
    """

    model: str | None = None
    keep_alive: float | str | None = None
    options: OllamaOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None


class OllamaAnswerBody(_Body, frozen=True, kw_only=True):
    """Fields of chat and text requests.

    Attributes:
        stream: True if the response is streamed. Default: true.
        format: "json", or a JSON schema.
        think: Reasoning on or off, or an effort level.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields(
        structured="send format",
        width=NO_IMAGES,
        height=NO_IMAGES,
        steps=NO_IMAGES,
    )
    NESTED_FIELDS: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"options": OllamaOptions}

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    resume: ResumeBody | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class OllamaGenerateBody(OllamaAnswerBody, frozen=True, kw_only=True):
    """Body of a request for text.

    Attributes:
        raw: True if the prompt goes to the model without a template.
        context: Refused.
        template: Refused.
        images: Images as base64.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[Int32] | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaCalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A chat message.

    Attributes:
        tool_name: For a tool result: name of the function.
        tool_call_id: For a tool result: id of the call. Without name and id, the result belongs to the first call
            without a result.
        images: Images as base64.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaAnswerBody, frozen=True, kw_only=True):
    """Body of a chat request.

    Without messages, the model computes nothing, and the response says that the model is loaded.
    """

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class _PoolingBody(_Body, frozen=True, kw_only=True):
    """Fields of embedding requests.

    Attributes:
        truncate: True if the end of a long input is removed. Default: true.
    """

    truncate: bool | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return None if self.truncate is False else -1  # The value -1 truncates the input to the model's limit.

    @property
    def truncation_side(self) -> Literal["left", "right"] | None:
        return "right"


class OllamaEmbedBody(_PoolingBody, frozen=True, kw_only=True):
    input: str | list[str]
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None


class OllamaEmbeddingsBody(_PoolingBody, frozen=True, kw_only=True):
    """Body of the older kind of embedding request, with one text."""

    prompt: str


class OllamaShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request for a model's properties. `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
