"""Architecture name to class."""

from __future__ import annotations

from trioserve.model.families.llama import LlamaModel
from trioserve.model.families.qwen import Qwen3Model
from trioserve.model.model_config import Architecture

__all__ = ["MODEL_TYPES"]

MODEL_TYPES: dict[Architecture, type[LlamaModel]] = {
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": Qwen3Model,
}
