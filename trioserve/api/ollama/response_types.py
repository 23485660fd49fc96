"""Types of everything that Ollama's API sends, for the OpenAPI document and for tests that check responses."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import Response

__all__ = [
    "OllamaChatLine",
    "OllamaEmbedding",
    "OllamaEmbeddings",
    "OllamaError",
    "OllamaModels",
    "OllamaRunning",
    "OllamaShown",
    "OllamaTextLine",
    "OllamaVersion",
]


class OllamaError(Response, kw_only=True):
    """An error response. Also the last line of a stream that failed."""

    error: str


class OllamaTokenLogprob(Response, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob, kw_only=True):
    top_logprobs: list[OllamaTokenLogprob]


class _Line(Response, kw_only=True):
    """One line of a stream, or a whole response.

    Counts and durations (in nanoseconds) are in the last line only, where `done` is true. `load_duration` is always 0.
    The done_reason "load" means that the request had no prompt.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET


class OllamaFunctionCall(Response, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Response, kw_only=True):
    id: str
    function: OllamaFunctionCall


class OllamaSaid(Response, kw_only=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatLine(_Line, kw_only=True):
    """A piece of a message, or the whole message."""

    message: OllamaSaid


class OllamaTextLine(_Line, kw_only=True):
    """A piece of a text, or the whole text."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Response, kw_only=True):
    """Properties of a model. Unknown ones are empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Model(Response, kw_only=True):
    """Description of a model. `size` is the size of the weights in bytes, or 0 if it is not known."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(_Model, kw_only=True):
    modified_at: str


class OllamaModels(Response, kw_only=True):
    models: list[OllamaModel]


class OllamaRunningModel(_Model, kw_only=True):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Response, kw_only=True):
    models: list[OllamaRunningModel]


class OllamaShown(Response, kw_only=True):
    """Properties of a model. `template` is a Jinja template."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "embedding"]]
    modified_at: str


class OllamaVersion(Response, kw_only=True):
    version: str


class OllamaEmbeddings(Response, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Response, kw_only=True):
    embedding: list[float]
