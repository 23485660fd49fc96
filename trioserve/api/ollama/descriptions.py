"""Descriptions of the operations of Ollama's API, for the OpenAPI document."""

from __future__ import annotations

from trioserve.api.described_operation import GENERATES, READS_BODY, DescribedOperation
from trioserve.api.ollama import response_types
from trioserve.api.ollama.request_types import (
    OLLAMA_RANGES,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
)

__all__ = ["OPERATIONS"]

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/api/chat"): DescribedOperation(
        summary="Answer a chat, in Ollama's shape",
        description="Fields have the meaning of Ollama's API. Options that are not listed here are ignored or refused. "
        "Options for loading a model are ignored. Without messages, the model computes nothing.",
        body=OllamaChatBody,
        ranges=OLLAMA_RANGES,
        response=response_types.OllamaChatLine,
        line=response_types.OllamaChatLine,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    ("POST", "/api/generate"): DescribedOperation(
        summary="Answer a prompt, or continue a text, in Ollama's shape",
        description="Common fields work as in /api/chat.",
        body=OllamaGenerateBody,
        ranges=OLLAMA_RANGES,
        response=response_types.OllamaTextLine,
        line=response_types.OllamaTextLine,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    ("POST", "/api/embed"): DescribedOperation(
        summary="Make vectors of texts, in Ollama's shape",
        body=OllamaEmbedBody,
        response=response_types.OllamaEmbeddings,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    ("POST", "/api/embeddings"): DescribedOperation(
        summary="Make a vector of one text, in Ollama's older shape",
        body=OllamaEmbeddingsBody,
        response=response_types.OllamaEmbedding,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    ("GET", "/api/tags"): DescribedOperation(
        summary="List the models, in Ollama's shape",
        response=response_types.OllamaModels,
        error=response_types.OllamaError,
    ),
    ("GET", "/api/ps"): DescribedOperation(
        summary="List the loaded models, in Ollama's shape. All models are always loaded",
        response=response_types.OllamaRunning,
        error=response_types.OllamaError,
    ),
    ("POST", "/api/show"): DescribedOperation(
        summary="Describe a model and its capabilities, in Ollama's shape",
        body=OllamaShowBody,
        response=response_types.OllamaShown,
        errors=(*READS_BODY, 404),
        error=response_types.OllamaError,
    ),
    ("GET", "/api/version"): DescribedOperation(
        summary="Return the version of Ollama's API",
        response=response_types.OllamaVersion,
        error=response_types.OllamaError,
    ),
}
