"""Check that an engine can use the KV of another engine, and convert its dtype.

Block sizes may differ, because connectors count in tokens. The dtypes bfloat16, float16 and float32 may differ, too.
Values are rounded to the nearest value, and ties to the even value, as the model package does for checkpoints. KV in 8
bits is never converted, because a second rounding would change responses. All other fields of the layout must be equal.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trioserve.contracts.kv_transfer import KVLayout

__all__ = ["convert", "objection_to"]

CONVERTED = ("float32", "bfloat16", "float16")
KEPT = ("int8", "fp8")
_NAN_BITS = 0x7FC0


def objection_to(theirs: KVLayout, ours: KVLayout) -> str | None:
    """Check that this engine can use KV of another engine.

    Args:
        theirs: KV layout of the other engine.
        ours: KV layout of this engine.

    Returns:
        A sentence that says why this engine cannot use the KV, or None if it can.
    """
    if theirs.model != ours.model:
        return f'its KV is of the model "{theirs.model[:200]}", and this engine has "{ours.model[:200]}"'
    for name, what in (
        ("layer_count", "layers"),
        ("part_count", "parts for keys, values or latents"),
        ("kv_head_count", "KV heads"),
        ("head_dim", "numbers in a head"),
    ):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            return f"its KV has {there} {what}, and this engine's {here}"
    for side, layout in (("its KV", theirs), ("this engine's", ours)):
        if layout.dtype not in (*CONVERTED, *KEPT):
            return f'the numbers of {side} are "{layout.dtype[:50]}", and known are {", ".join((*CONVERTED, *KEPT))}'
    if theirs.dtype != ours.dtype and (theirs.dtype in KEPT or ours.dtype in KEPT):
        return (
            f"its KV is kept as {theirs.dtype}, and this engine's as {ours.dtype}: KV in 8 bits is for engines with "
            "the same --kv-cache-dtype alone"
        )
    if theirs.block_size < 1:
        return f"its blocks have {theirs.block_size} tokens"
    return None


def convert(content: memoryview | bytearray | bytes, dtype: str, wanted: str) -> memoryview:
    """Convert KV to another dtype.

    Args:
        content: Contiguous values in `dtype`.
        dtype: Dtype of the content.
        wanted: Dtype of the result.

    Returns:
        Contiguous values in `wanted`: a view of the content if the dtypes are equal, else a copy. Values that are too
        large for the dtype become infinite, and NaN stays NaN.
    """
    view = memoryview(content).cast("B")
    if dtype == wanted:
        return view
    singles = _singles(view, dtype)
    if wanted == "float32":
        result: npt.NDArray[Any] = singles
    elif wanted == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            result = singles.astype(np.float16)
    else:
        result = _to_bfloat16(singles)
    return memoryview(cast(Any, result)).cast("B")


def _singles(view: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """Return the values as float32, which represents each of the dtypes exactly."""
    if dtype == "float32":
        return np.frombuffer(view, np.float32)
    if dtype == "float16":
        return np.frombuffer(view, np.float16).astype(np.float32)
    return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(singles: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return bfloat16 values as uint16 bits, because numpy has no bfloat16."""
    bits = singles.view(np.uint32)
    # Round to the nearest value: add half of the lowest bit that is kept, or slightly less if that bit is 0, and drop
    # the lower bits. A carry into the exponent is correct. The sum of a NaN may overflow, so NaNs are set afterwards.
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(singles)] = _NAN_BITS
    return rounded
