"""Types of responses of Ollama's API, whole or as the lines of a stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import ChatToken
from trioserve.api.response import Response

Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


class OllamaLine(Response):
    """One line of a stream, or a whole response.

    Counts and durations (in nanoseconds) are in the last line only, where `done` is true. `load_duration` is always 0.
    The done_reasons "load" and "unload" mean that the request had no prompt.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatToken] | UnsetType = UNSET


class OllamaFunctionCall(Response):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Response):
    id: str
    function: OllamaFunctionCall


class OllamaSaid(Response):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    """A piece of a message, or the whole message."""

    message: OllamaSaid


class OllamaTextLine(OllamaLine, kw_only=True):
    """A piece of a text, or the whole text."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Response):
    """Properties of a model. Unknown ones are empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelCard(Response):
    """Description of a model. `size` is the size of the weights in bytes, or 0 if it is not known."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(OllamaModelCard):
    modified_at: str


class OllamaModels(Response):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModelCard):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Response):
    models: list[OllamaRunningModel]


class OllamaShown(Response):
    """Properties of a model. `template` is a Jinja template."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class OllamaVersion(Response):
    version: str


class OllamaEmbeddings(Response):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Response):
    embedding: list[float]
