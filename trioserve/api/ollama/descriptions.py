"""What each path of Ollama's API does and may answer: for the API's own description."""

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
        description="Fields, and their meanings, are those of Ollama's API. Options that are not named here are "
        "ignored or refused; those of loading a model are ignored. Without messages nothing is computed.",
        body=OllamaChatBody,
        ranges=OLLAMA_RANGES,
        response=response_types.OllamaChatLine,
        line=response_types.OllamaChatLine,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    ("POST", "/api/generate"): DescribedOperation(
        summary="Answer a prompt, or go on with a text, in Ollama's shape",
        description="As above for everything that is the same.",
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
        summary="List the models that are loaded, in Ollama's shape: all of them",
        response=response_types.OllamaRunning,
        error=response_types.OllamaError,
    ),
    ("POST", "/api/show"): DescribedOperation(
        summary="Say what a model is and can do, in Ollama's shape",
        body=OllamaShowBody,
        response=response_types.OllamaShown,
        errors=(*READS_BODY, 404),
        error=response_types.OllamaError,
    ),
    ("GET", "/api/version"): DescribedOperation(
        summary="Which version of Ollama's API this is",
        response=response_types.OllamaVersion,
        error=response_types.OllamaError,
    ),
}
