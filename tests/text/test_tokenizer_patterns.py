"""Tests that loading refuses tokenizer patterns that backtrack too long, and accepts all other patterns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trioserve.contracts.errors import ModelLoadError
from trioserve.text import tokenizer_directory
from trioserve.text.gguf_vocabulary import KNOWN_SPLITS
from trioserve.text.tokenizer_directory import check_patterns, check_tokenizer

FILE = Path("tokenizer.json")


def splitting(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    return tokenizer


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", r"(\p{L}+)+$"])
def test_a_pattern_that_backtracks_too_long_is_refused(pattern: str) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: its patterns .* backtrack too long"):
        check_patterns(splitting(pattern), FILE)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_patterns_of_normalizer_and_decoder_are_also_tried(part: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    setattr(tokenizer, part, {"normalizer": normalizers, "decoder": decoders}[part].Replace(Regex("(a+)+$"), "x"))
    with pytest.raises(ModelLoadError, match="backtrack too long"):
        check_patterns(tokenizer, FILE)


def test_process_that_tries_a_pattern_for_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_directory, "PROBE_SECONDS_MAX", 0.01)
    with pytest.raises(ModelLoadError, match="backtrack too long"):
        check_patterns(splitting("a*a*a*b"), FILE)


def test_ordinary_tokenizer_patterns_are_accepted() -> None:
    for pattern in (
        r" ?\p{L}+(?:['-]\p{L}+)*|\s+",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
        *sorted(KNOWN_SPLITS)[:1],
    ):
        tokenizer = splitting(f"{pattern}|x")
        tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), "x")
        check_patterns(tokenizer, FILE)


DOUBLING = normalizers.Replace("a", "aa")
TWICE = processors.TemplateProcessing(single="$A $A", pair=None, special_tokens=[])


def charsmap(*texts: str) -> bytes:
    """Return a normalization table of SentencePiece with an empty trie."""
    return (4).to_bytes(4, "little") + bytes(4) + b"".join(text.encode() + b"\0" for text in texts)


@pytest.mark.parametrize(
    "part, value",
    [
        ("normalizer", normalizers.Sequence([DOUBLING] * 7)),
        ("normalizer", normalizers.Precompiled(charsmap("a", "b" * 65))),
        ("normalizer", normalizers.Replace(Regex("."), "a" * 65)),
        ("decoder", decoders.Sequence([decoders.Replace("a", "aa")] * 30)),
        ("post_processor", processors.Sequence([TWICE] * 30)),
        ("post_processor", processors.TemplateProcessing(single=" ".join(["$A"] * 65), pair=None, special_tokens=[])),
    ],
    ids=["normalizers", "table", "regular expression", "decoders", "templates", "template"],
)
def test_a_tokenizer_that_lengthens_texts_too_much_is_refused(part: str, value: object) -> None:
    tokenizer = Tokenizer(models.BPE())
    setattr(tokenizer, part, value)
    with pytest.raises(ModelLoadError, match=f"tokenizer.json: its {part} may make a text more than 64 times"):
        check_tokenizer(tokenizer, FILE)


def test_growth_factors_of_normalizer_and_post_processor_are_multiplied() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([DOUBLING] * 5)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A $A", pair=None, special_tokens=[])
    with pytest.raises(ModelLoadError, match="its normalizer and post_processor may make a text more than 64 times"):
        check_tokenizer(tokenizer, FILE)


def test_a_word_limit_that_is_too_high_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**9))
    with pytest.raises(ModelLoadError, match="max_input_chars_per_word is 1000000000, allowed are 1000"):
        check_tokenizer(tokenizer, FILE)


def test_normalizers_and_limits_of_real_tokenizers_are_accepted() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A a", pair="a $A a $B:1 a:1", special_tokens=[("a", 0)]
    )
    check_tokenizer(tokenizer, FILE)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.Precompiled(charsmap("a", "b" * 18))]
    )
    check_tokenizer(tokenizer, FILE)


def test_patterns_of_known_families_are_accepted_without_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("a process was started"))
    for pattern in KNOWN_SPLITS:
        check_patterns(splitting(pattern), FILE)
    check_patterns(Tokenizer(models.BPE()), FILE)
