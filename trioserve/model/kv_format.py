"""Number format of the KV cache: the model's dtype, or 8 bits with a scale for each token and head."""

from __future__ import annotations

from typing import Literal

from trioserve.model.model_config import Dtype
from trioserve.model.number_formats import VALUE_BYTES
from trioserve.model.settings import ModelSettings

__all__ = ["KV_SCALE_BYTES", "KvFormat", "head_bytes", "head_width", "kv_format_of"]

KvFormat = Literal["plain", "int8", "fp8"]
"""plain is the model's dtype. int8 and fp8 (e4m3) store a bfloat16 scale after the numbers of each head.

The scale follows from these numbers alone, so the rounding of a token does not depend on its step or its block.
"""

KV_SCALE_BYTES = 2


def kv_format_of(settings: ModelSettings) -> KvFormat:
    return "plain" if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype


def head_width(head_dim: int, kv_format: KvFormat) -> int:
    """Return the number of elements that one head of one token takes: numbers, or bytes for 8-bit formats.

    Args:
        head_dim: numbers of one head.
        kv_format: number format of the KV cache.
    """
    return head_dim if kv_format == "plain" else head_dim + KV_SCALE_BYTES


def head_bytes(head_dim: int, dtype: Dtype, kv_format: KvFormat) -> int:
    return head_width(head_dim, kv_format) * (VALUE_BYTES[dtype] if kv_format == "plain" else 1)
