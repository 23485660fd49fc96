"""Tests that the command `random-checkpoint` writes a model that can be served, or writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from trioserve.assemble import open_engine
from trioserve.cli import main
from trioserve.commands import random_checkpoint as random_checkpoint_command
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.layer_config import ExpertsConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.real_shapes import SHAPES

_TINY = SHAPES["tiny"]
_LAYER = msgspec.structs.replace(
    _TINY.layers[0],
    attention=msgspec.structs.replace(_TINY.heads, qk_norm="row", kv_head_count=4),
    mlp=ExpertsConfig(expert_count=4, experts_per_token=2, intermediate_size=32, normalizes=False),
)
TINY_MIXTURE = msgspec.structs.replace(_TINY, family="olmoe", layers=(_LAYER,) * 2)


async def test_random_checkpoint_directory_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "new" / "tiny"
    assert main(["random-checkpoint", "tiny", str(directory), "--seed", "5"]) == 0
    assert f"trioserve serve {directory}" in capsys.readouterr().out
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"]
    async with open_engine(str(directory), kv_cache_memory=0.02, max_model_len=512) as engine:
        async with engine.generate("héllo", SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)) as stream:
            deltas = [delta async for delta in stream]
        assert stream.prompt_token_ids == tuple("héllo".encode())
        token_ids = [token for delta in deltas for token in delta.token_ids]
        assert len(token_ids) == 20
        text = "".join(delta.text for delta in deltas)
        named = [f" t{token}" for token in token_ids if 256 <= token < 319]
        assert named
        assert all(name in text for name in named)


@pytest.mark.parametrize("matrix_type", ["bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-mixture"])
async def test_random_gguf_file_can_be_served(
    shape: str, matrix_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "model.gguf"
    monkeypatch.setitem(SHAPES, "tiny-mixture", TINY_MIXTURE)
    command = ["random-checkpoint", shape, str(file), "--type", matrix_type]
    assert main(command) == 0
    assert f"trioserve serve {file}" in capsys.readouterr().out
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    checkpoint = open_checkpoint(file)
    ends = {"eos_token_ids": (SHAPES[shape].vocab_size - 1,)}
    in_singles = {"norm_eps": float(np.float32(SHAPES[shape].norm_eps))}
    assert checkpoint.config == msgspec.structs.replace(SHAPES[shape], **ends, **in_singles)
    assert {tensor.block_type for tensor in checkpoint.tensors() if "q_proj" in tensor.name} == {
        {"bf16": None}.get(matrix_type, matrix_type.upper())
    }
    async with (
        open_engine(str(file), kv_cache_memory=0.02, max_model_len=512) as engine,
        engine.generate("héllo", SamplingParams(max_tokens=5, ignore_eos=True)) as stream,
    ):
        assert stream.prompt_token_ids == tuple("héllo".encode())
        assert sum([len(delta.token_ids) async for delta in stream]) == 5
    assert main(command) == 1
    assert f"{file} is there already: name a new file, or remove it" in capsys.readouterr().err
    assert main(["random-checkpoint", "tiny", str(tmp_path / "folder"), "--type", "bf16"]) == 1
    assert "name a file that ends in .gguf" in capsys.readouterr().err


def test_random_checkpoint_is_written_only_into_an_empty_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "there"
    directory.mkdir()
    assert main(["random-checkpoint", "tiny", str(directory)]) == 0
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert main(["random-checkpoint", "tiny", str(directory), "--seed", "1"]) == 1
    assert "is there already and not empty: name a new directory, or remove it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    file = next(iter(before))
    assert main(["random-checkpoint", "tiny", str(file)]) == 1
    assert main(["random-checkpoint", "tiny", str(file / "below")]) == 1
    assert f"cannot write {file / 'below'}" in capsys.readouterr().err
    assert main(["random-checkpoint", "tiny", str(tmp_path / "new"), "--seed", "-1"]) == 1
    assert "--seed is -1; it must be at least 0" in capsys.readouterr().err


def test_too_little_disk_space_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**9))
    assert main(["random-checkpoint", "llama-3.1-8b", str(tmp_path / "new")]) == 1
    assert "the checkpoint takes 16.1 GB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", (KeyboardInterrupt(), OSError(28, "No space left on device")))
def test_failed_write_of_a_checkpoint_leaves_no_files(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights = random_checkpoint_command.write_weights

    def write_some(config, directory, *, seed, progress):
        def report(done: int, total: int) -> None:
            if done > total // 2:
                raise error
            progress(done, total)

        write_weights(config, directory, seed=seed, progress=report)

    monkeypatch.setattr(random_checkpoint_command, "write_weights", write_some)
    assert main(["random-checkpoint", "tiny", str(tmp_path / "new")]) == (
        130 if type(error) is KeyboardInterrupt else 1
    )
    assert list(tmp_path.iterdir()) == []
