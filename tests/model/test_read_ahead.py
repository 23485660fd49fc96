"""Tests which files are read ahead, and that files that cannot be read cause no message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trioserve.model.loading import default_model
from trioserve.model.loading.default_model import start_reading_ahead, weight_files


def check(directory: Path, files: tuple[str, ...], expected: tuple[str, ...]) -> None:
    for name in files:
        (directory / name).write_bytes(bytes(10_000))
    assert [path.name for path in weight_files(directory)] == list(expected)


@pytest.mark.parametrize(
    "files, expected",
    (
        (("config.json", "model.safetensors"), ("model.safetensors",)),
        (("b.safetensors", "a.safetensors", "a.gguf"), ("a.safetensors", "b.safetensors")),
        (("model.safetensors", "adapter.safetensors"), ("model.safetensors",)),
        (("a.gguf", "config.json"), ("a.gguf",)),
        (("config.json", "a.bin"), ()),
    ),
    ids=("one", "several", "one of several", "gguf", "none"),
)
def test_weight_files_of_a_directory_are_read_ahead(
    tmp_path: Path, files: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    check(tmp_path, files, expected)


def test_gguf_file_is_its_own_weight_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "a.bin"):
        (tmp_path / name).write_bytes(b"")
    assert weight_files(tmp_path / "a.gguf") == [tmp_path / "a.gguf"]
    assert weight_files(tmp_path / "a.bin") == weight_files(tmp_path / "absent") == []


def test_read_ahead_thread_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    thread = start_reading_ahead(str(tmp_path))
    assert thread is not None
    thread.join()


def test_model_name_that_is_no_path_has_no_files_to_read_ahead(tmp_path: Path) -> None:
    assert start_reading_ahead("org/name") is None
    assert start_reading_ahead(str(tmp_path)) is None


def test_files_above_half_of_the_memory_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(5001))
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    assert start_reading_ahead(str(tmp_path)) is None


def test_missing_file_to_read_ahead_is_ignored_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(10))
    monkeypatch.setattr(default_model, "weight_files", lambda path: [tmp_path / "a.safetensors", tmp_path])
    thread = start_reading_ahead(str(tmp_path))
    assert thread is not None
    thread.join()
