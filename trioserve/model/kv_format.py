"""In what the KV cache keeps its numbers: in the model's dtype, or in 8 bits with a scale for each token and head."""

from __future__ import annotations

from typing import Literal

from trioserve.model.model_config import Dtype
from trioserve.model.number_formats import VALUE_BYTES
from trioserve.model.settings import ModelSettings

__all__ = ["KV_SCALE_BYTES", "KvFormat", "head_bytes", "head_width", "kv_format_of"]

KvFormat = Literal["plain", "int8", "fp8"]
"""plain: the model's dtype. int8, fp8 (e4m3): behind a head's numbers lies their scale, a bfloat16. It follows from
these numbers alone, so what a token is rounded to does not depend on the step in which it is computed, or on its
block."""

KV_SCALE_BYTES = 2


def kv_format_of(settings: ModelSettings) -> KvFormat:
    return "plain" if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype


def head_width(head_dim: int, kv_format: KvFormat) -> int:
    """Elements of one head of one token: numbers, or bytes."""
    return head_dim if kv_format == "plain" else head_dim + KV_SCALE_BYTES


def head_bytes(head_dim: int, dtype: Dtype, kv_format: KvFormat) -> int:
    return head_width(head_dim, kv_format) * (VALUE_BYTES[dtype] if kv_format == "plain" else 1)
