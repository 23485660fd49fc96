"""Whether KV of one engine can be used by another, and how its numbers become the other's.

Block sizes may differ, since whoever carries KV counts in tokens. Formats of numbers may, too: bfloat16, float16 and
float32 are rounded to the nearest number, to the even one of two that are equally near, as the model room does it when
it reads a checkpoint. KV in 8 bits stays as it is, since rounding it once more would change responses. Everything else
has to be equal: another model's KV means nothing here.
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
    """Why their KV cannot be used here, as a sentence; None: it can."""
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
    """The same numbers in the wanted format, one behind the other; the content itself where nothing changes.

    content: contiguous, a whole number of numbers. What is too large for the wanted format becomes infinite; what is no
    number stays none.
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
    """As float32, which holds the numbers of every format exactly."""
    if dtype == "float32":
        return np.frombuffer(view, np.float32)
    if dtype == "float16":
        return np.frombuffer(view, np.float16).astype(np.float32)
    return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(singles: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """As their 16 bits, since numpy knows no bfloat16."""
    bits = singles.view(np.uint32)
    # Half of the last kept place is added, or just less where the kept part is even; the carry may reach the exponent,
    # as it should. That of a NaN may overflow, so these are written anew.
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(singles)] = _NAN_BITS
    return rounded
