"""Tests of the commands that download a model and list local models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from trioserve import cli
from trioserve.commands import models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of models on a machine without any model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models, "_of_hub", list)
    return tmp_path / "trioserve" / "models"


def test_local_model_is_not_downloaded(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cache / "smollm2" / "SmolLM2.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert cli.main(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out.strip() == str(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "llama"], "there is no model 'llama' to download"),
        (["pull", "smollm2", "--revision", "main"], "smollm2 has no revisions"),
    ],
)
def test_failed_model_download_is_reported_in_one_sentence(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) != 0
    assert said in capsys.readouterr().err


def test_models_command_lists_local_models(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    assert "not here yet" in capsys.readouterr().out
    path = cache / "smollm2" / "SmolLM2.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert cli.main(["models", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)
    assert (model["name"], model["path"], model["byte_count"]) == ("smollm2", str(path), 4)
