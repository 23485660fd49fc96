"""Patterns of tokenizers that go back without end are refused when a model is loaded, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from trioserve.contracts.errors import ModelLoadError
from trioserve.text import tokenizer_patterns
from trioserve.text.gguf_vocabulary import KNOWN_SPLITS
from trioserve.text.tokenizer_patterns import check_patterns

FILE = Path("tokenizer.json")


def splitting(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    return tokenizer


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", r"(\p{L}+)+$"])
def test_a_pattern_that_goes_back_without_end_is_refused(pattern: str) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: its patterns .* go back without end"):
        check_patterns(splitting(pattern), FILE)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_patterns_of_other_parts_are_tried_too(part: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    setattr(tokenizer, part, {"normalizer": normalizers, "decoder": decoders}[part].Replace(Regex("(a+)+$"), "x"))
    with pytest.raises(ModelLoadError, match="go back without end"):
        check_patterns(tokenizer, FILE)


def test_a_process_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_patterns, "PROBE_SECONDS_MAX", 0.01)
    with pytest.raises(ModelLoadError, match="go back without end"):
        check_patterns(splitting("a*a*a*b"), FILE)


def test_ordinary_patterns_are_read() -> None:
    for pattern in (
        r" ?\p{L}+(?:['-]\p{L}+)*|\s+",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
        *sorted(KNOWN_SPLITS)[:1],
    ):
        tokenizer = splitting(f"{pattern}|x")
        tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), "x")
        check_patterns(tokenizer, FILE)


def test_patterns_of_known_families_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("a process was started"))
    for pattern in KNOWN_SPLITS:
        check_patterns(splitting(pattern), FILE)
    check_patterns(Tokenizer(models.BPE()), FILE)
