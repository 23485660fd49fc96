"""Tests of spelling suggestions: a misspelled name gives the intended name, and an unrelated word gives none."""

from __future__ import annotations

import pytest

from trioserve.contracts.arguments import closest_name

KNOWN = ("--max-model-len", "--max-num-seqs", "--port", "--host", "TRIOSERVE_API_KEY", "block_size")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--max-model-length", "--max-model-len"),
        ("--max_num_seq", "--max-num-seqs"),
        ("prot", "--port"),
        ("TRIOSERVE_APIKEY", "TRIOSERVE_API_KEY"),
        ("block-sise", "block_size"),
        ("--colour", None),
        ("", None),
    ],
)
def test_suggestion_for_a_misspelled_name_is_the_intended_name(written: str, meant: str | None):
    assert closest_name(written, KNOWN) == meant
