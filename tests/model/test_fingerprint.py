"""Tests of fingerprints. Two servers may resume each other's responses only if their fingerprints are equal."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.model.fingerprint import EXACT, fingerprint_of

SAME: dict[str, Any] = {
    "weights": "llama-00",
    "arithmetic": "native kernels, avx2, bfloat16",
    "dtype": "bfloat16",
    "batch_invariant": True,
    "tokenizer": "00",
    "others": ((2,), {"temperature": 0.6, "top_p": 0.9}),
}


def test_equal_settings_give_equal_fingerprints() -> None:
    others = ((2,), {"top_p": 0.9, "temperature": 0.6})
    assert fingerprint_of(**SAME) == fingerprint_of(**{**SAME, "others": others})


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "llama-01"},
        {"arithmetic": "native kernels, avx512, bfloat16"},
        {"batch_invariant": False},
        {"tokenizer": "01"},
        {"others": ((3,), {})},
    ],
)
def test_everything_that_decides_tokens_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint_of(**{**SAME, **change}).removesuffix(EXACT) != fingerprint_of(**SAME).removesuffix(EXACT)


@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "is_exact"),
    [("bfloat16", False, False), ("bfloat16", True, True), ("float32", False, True)],
)
def test_fingerprint_says_if_equal_tokens_are_guaranteed(dtype: Any, batch_invariant: bool, is_exact: bool) -> None:
    name = fingerprint_of(**{**SAME, "dtype": dtype, "batch_invariant": batch_invariant})
    assert name.endswith(EXACT) == is_exact
