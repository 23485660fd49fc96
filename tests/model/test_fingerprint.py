"""Tests of fingerprints and of the names of weights, which do not depend on the location of the files.

Two servers may resume each other's responses only if their fingerprints are equal.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trioserve.model.fingerprint import EXACT, fingerprint_of, weights_name
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import read_sample

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
