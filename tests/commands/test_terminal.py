"""Tests of the summary that a start prints after loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trioserve.assemble import Loaded
from trioserve.commands.terminal import LoadingBar


def summary_of(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    facts = {
        "model_path": Path("model"),
        "device": "cpu",
        "dtype": "float32",
        "computed_by": "native kernels",
        "context_tokens_max": 2048,
        "model_context_tokens_max": 2048,
        "block_count": 64,
        "block_size": 16,
        "kv_cache_bytes": 2**30,
        "kv_dtype": "float32",
        "load_seconds": 1.5,
    }
    LoadingBar("tiny").loaded(Loaded(**{**facts, **changes}))
    return capsys.readouterr().err


def test_summary_names_the_size_of_the_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    printed = summary_of(capsys)
    assert "loaded tiny in 1.5 s, 2048 tokens of context\n" in printed
    assert "KV cache: 64 blocks of 16 tokens fit, 1024 tokens in all (1.00 GiB in float32)\n" in printed


def test_summary_of_an_encoder_says_that_it_has_no_kv_cache(capsys: pytest.CaptureFixture[str]) -> None:
    printed = summary_of(capsys, block_count=0)
    assert "no KV cache" in printed
    assert "0 blocks" not in printed


def test_summary_names_the_context_of_the_model_if_less_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert "2048 tokens of context (of the model's 8192)\n" in summary_of(capsys, model_context_tokens_max=8192)
