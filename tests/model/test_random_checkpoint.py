"""Tests that transformers reads our checkpoints with random weights, and computes equal numbers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trioserve.model import random_checkpoint
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from, read_json_object
from trioserve.model.model_config import ModelConfig
from trioserve.model.random_checkpoint import checkpoint_bytes, write_config, write_weights
from trioserve.model.real_shapes import SHAPES

TINY = SHAPES["tiny"]
TINY_QWEN3 = msgspec.structs.replace(
    TINY,
    family="qwen3",
    tie_word_embeddings=True,
    layers=tuple(
        msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, qk_norm="head"))
        for layer in TINY.layers
    ),
)


def write(config: ModelConfig, directory: Path, *, seed: int = 0) -> list[tuple[int, int]]:
    directory.mkdir(exist_ok=True)
    reported: list[tuple[int, int]] = []
    write_config(config, directory, eos_token_id=config.vocab_size - 1)
    write_weights(config, directory, seed=seed, progress=lambda *done: reported.append(done))
    return reported


def weights(directory: Path) -> dict[str, list[int]]:
    return {
        tensor.name: tensor.read("bfloat16").reshape(-1).tolist() for tensor in open_checkpoint(directory).tensors()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_config_of_a_shape_is_read_by_us_and_by_transformers(shape: str, tmp_path: Path) -> None:
    config = SHAPES[shape]
    write_config(config, tmp_path, eos_token_id=3)
    read = model_config_from(read_json_object(tmp_path / "config.json"), {}, dtype_name="bfloat16")
    assert read == msgspec.structs.replace(config, eos_token_ids=(3,))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.num_hidden_layers == config.layer_count
    assert theirs.head_dim == config.heads.head_dim
    rotary = config.heads.rotary
    assert rotary is not None
    assert theirs.rope_parameters["rope_theta"] == rotary.theta
    if rotary.scaling is not None:
        assert theirs.rope_parameters["factor"] == rotary.scaling.factor
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    assert sum(parameter.numel() for parameter in model.parameters()) * 2 == checkpoint_bytes(config)


@pytest.mark.parametrize("config", (TINY, TINY_QWEN3), ids=("llama", "qwen3"))
@pytest.mark.parametrize("shard_bytes_max", (5 * 10**9, 50_000), ids=("one file", "shards"))
def test_greedy_tokens_of_a_random_checkpoint_equal_those_of_transformers(
    config: ModelConfig,
    shard_bytes_max: int,
    step_driver: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES_MAX", shard_bytes_max)
    reported = write(config, tmp_path)
    assert reported[-1] == (checkpoint_bytes(config),) * 2
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == (tmp_path / "model.safetensors.index.json").is_file() == (shard_bytes_max == 50_000)
    prompts = {str(index): [(7 * place + index) % 300 for place in range(20 + index)] for index in range(6)}
    driver = step_driver.StepDriver(step_driver.load_runner(tmp_path, cpu_kernels="torch"))
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.generate(list(prompts), 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    responses = set()
    for name, prompt in prompts.items():
        theirs = list(prompt)
        with torch.inference_mode():
            for _ in range(4):
                theirs.append(int(model(torch.tensor([theirs])).logits[0, -1].argmax()))
        assert driver.tokens[name] == theirs
        responses.add(tuple(theirs[-4:]))
    assert len(responses) > 3


def test_seed_of_a_random_checkpoint_gives_equal_weights_for_any_file_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_checkpoint, "PIECE_VALUES", 1_000)
    write(TINY, tmp_path / "a")
    write(TINY, tmp_path / "other", seed=1)
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES_MAX", 50_000)
    pieces = len(write(TINY, tmp_path / "b"))
    assert pieces > checkpoint_bytes(TINY) // 2_000
    a, b, other = (weights(tmp_path / name) for name in ("a", "b", "other"))
    assert a == b
    assert a["embed.weight"] != other["embed.weight"]
    assert a["layers.0.q_proj.weight"] != a["layers.1.q_proj.weight"]
    assert a["embed.weight"][:1_000] != a["embed.weight"][1_000:2_000]
    assert a["norm.weight"] == [0x3F80] * TINY.hidden_size


def test_random_weights_have_the_documented_standard_deviation(tmp_path: Path) -> None:
    write(TINY, tmp_path)
    (embedding,) = (tensor for tensor in open_checkpoint(tmp_path).tensors() if tensor.name == "embed.weight")
    values = (embedding.read("bfloat16").astype(np.uint32) << 16).view(np.float32)
    assert abs(values.mean()) < 0.001
    assert values.std() == pytest.approx(0.02, rel=0.05)
