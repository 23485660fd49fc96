"""Tests that the name of weights distinguishes models of equal shapes, and does not depend on the files' location."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trioserve.model.fingerprint import weights_name
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import read_sample


def changed(directory: Path, tensor: str, copy: Path) -> Path:
    """A copy of a checkpoint in which one number of one tensor differs."""
    shutil.copytree(directory, copy)
    path = copy / "model.safetensors"
    tensors = {name: np.array(values) for name, values in load_file(path).items()}
    tensors[tensor].reshape(-1)[-1] += 1
    save_file(tensors, path)
    return copy


def test_copied_weights_have_an_equal_name_and_fine_tuned_weights_another(tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("llama")
    name = weights_name(open_checkpoint(directory))
    assert name.startswith("llama-")
    assert name == weights_name(open_checkpoint(shutil.copytree(directory, tmp_path / "copy")))
    child = changed(directory, "model.layers.0.self_attn.v_proj.weight", tmp_path / "child")
    assert name != weights_name(open_checkpoint(child))


def test_quantized_weights_have_another_name(tiny_checkpoint, tiny_gguf):
    plain, quantized = tiny_gguf("llama"), tiny_gguf("llama", quant_type="Q8_0")
    assert weights_name(open_checkpoint(plain)) != weights_name(open_checkpoint(quantized))
    assert weights_name(open_checkpoint(quantized)) == weights_name(open_checkpoint(quantized))


@pytest.mark.parametrize("matrix", ("mlp.down_proj", "self_attn.q_proj"))
def test_model_with_one_trained_matrix_has_another_name(matrix, tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("qwen2-sliding")
    copy = shutil.copytree(directory, tmp_path / "child")
    tensors = {name: np.array(values) for name, values in load_file(copy / "model.safetensors").items()}
    tensors[f"model.layers.1.{matrix}.weight"] *= 1.001
    save_file(tensors, copy / "model.safetensors")
    assert weights_name(open_checkpoint(directory)) != weights_name(open_checkpoint(copy))


def test_sample_for_the_weights_name_covers_the_whole_tensor(tmp_path):
    path = tmp_path / "tensor"
    content = np.arange(
        512 + 15 * 6_000, dtype="<u4"
    ).tobytes()  # Every piece of the sample begins with a whole number.
    path.write_bytes(b"head" + content)
    sample = read_sample(path, 4, len(content))
    numbers = np.frombuffer(sample, "<u4")
    assert numbers[0] == 0
    assert numbers[-1] == 511 + 15 * 6_000
    assert np.diff(numbers).max() < 6_000
    assert len(sample) < len(content) / 4
    assert read_sample(path, 4, 1000) == content[:1000]


@pytest.mark.parametrize(
    "tensor", ["vision_model.encoder.layers.1.mlp.fc1.weight", "connector.modality_projection.proj.weight"]
)
def test_image_encoder_changes_the_weights_name(tensor, tiny_vision, tmp_path):
    directory = tmp_path / "model"
    tiny_vision.write_checkpoint(directory, "smolvlm")
    name = weights_name(open_checkpoint(directory))
    child = changed(directory, f"model.{tensor}", tmp_path / "child")
    assert name != weights_name(open_checkpoint(child))
    wanting = tmp_path / "wanting"
    shutil.copytree(directory, wanting)
    path = wanting / "processor_config.json"
    before = path.read_text()
    path.write_text(before.replace('"do_image_splitting": true', '"do_image_splitting": false'))
    assert path.read_text() != before
    assert name != weights_name(open_checkpoint(wanting))
