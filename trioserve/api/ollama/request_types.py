"""The bodies of Ollama's API: which fields there are and of which type.

What happens to fields that are not named here is decided in api/unread_fields.py. Options that say how a model is
loaded are harmless: it is loaded already. `None` means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.api.openai.request_types import Int32
from trioserve.api.resume_body import ResumeBody
from trioserve.api.unread_fields import RefusedField, generation_fields
from trioserve.contracts.pooling import DIMENSIONS_MAX
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = [
    "OLLAMA_RANGES",
    "OllamaAnswerBody",
    "OllamaChatBody",
    "OllamaEmbedBody",
    "OllamaEmbeddingsBody",
    "OllamaGenerateBody",
    "OllamaMessage",
    "OllamaOptions",
    "OllamaShowBody",
]

NUM_PREDICT_MIN = -2  # -1 and -2: as many as fit, and so is 0

OLLAMA_RANGES = {
    **{
        f"OllamaOptions.{name}": SAMPLING_RANGES[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
    },
    "OllamaOptions.repeat_penalty": SAMPLING_RANGES["repetition_penalty"],
    "OllamaOptions.num_predict": Range(NUM_PREDICT_MIN, None),
    "top_logprobs": SAMPLING_RANGES["logprobs"],
}
"""Of the numbers in a body, by field, or by type and field."""

NO_PICTURES = "a language model makes no images, see /v1/images/generations"
Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Effort = Literal["low", "medium", "high", "max"]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Those from repeat_last_n on are refused where they ask for what there is not."""

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


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """model: the first that is served, if it is not given; with or without ":latest". keep_alive: taken, and nothing
    follows from it: the model stays loaded. priority and all behind it are this server's own fields, the same as in
    chat completions."""

    model: str | None = None
    keep_alive: float | str | None = None
    options: OllamaOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None


class OllamaAnswerBody(_Body, frozen=True, kw_only=True):
    """What a chat and a text have in common. stream: true, if it is not given. format: "json", or a JSON schema.
    think: whether the model is to think aloud, or how much."""

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields(
        structured="send format",
        width=NO_PICTURES,
        height=NO_PICTURES,
        steps=NO_PICTURES,
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
    """raw: the prompt goes to the model as it is. context and template: refused. images: base64."""

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
    """tool_name, tool_call_id: of a result, whose it is; without both, that of the first call that has none yet.
    images: base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaAnswerBody, frozen=True, kw_only=True):
    """Without messages nothing is computed: the response says that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class _PooledBody(_Body, frozen=True, kw_only=True):
    """truncate: an input that is too long is cut at its end, if this is not given, too."""

    truncate: bool | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return None if self.truncate is False else -1  # to as many as the model takes

    @property
    def truncation_side(self) -> Literal["left", "right"] | None:
        return "right"


class OllamaEmbedBody(_PooledBody, frozen=True, kw_only=True):
    input: str | list[str]
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None


class OllamaEmbeddingsBody(_PooledBody, frozen=True, kw_only=True):
    """The older form: one text."""

    prompt: str


class OllamaShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """name: the older name of model."""

    model: str | None = None
    name: str | None = None
