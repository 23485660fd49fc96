"""Tests that loading a model file with a wrong number gives a model or one clear error, and takes little memory."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.adapter_directory import read_adapter
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.loading.safetensors import tensors_in_file

WRONG = (0, -1, 10**9, 10**12, 1.5, True, None, "8")
HEADER_WRONG = (0, 10**9, 10**12, 2**63, 2**64 - 1)
BYTES_MAX = 4 * 2**20  # The tiny files have 0.4 MB, and the digest of an adapter reads all of them.


def changed(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value. In each copy, one number is replaced by a number of WRONG."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in changed(inner))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:3]):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed(inner))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from WRONG


def check(opened: Callable[[], object], what: object) -> None:
    """Open files that may be refused, within bounds of memory."""
    message = ""
    tracemalloc.start()
    try:
        opened()
    except ModelLoadError as error:
        message = str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert message.isprintable(), what
    assert len(message) < 700, what
    assert peak_bytes < BYTES_MAX, (what, peak_bytes)


def check_json(path: Path, opened: Callable[[], object]) -> None:
    whole = path.read_bytes()
    opened()
    for value in changed(json.loads(whole)):
        path.write_text(json.dumps(value))
        check(opened, value)
    path.write_bytes(whole)


def check_safetensors(path: Path, opened: Callable[[], object]) -> None:
    """Change each number of the header's first tensors, and the length before the header."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, rest = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name in list(tensors)[:2]:
        for entry in changed(tensors[name]):
            text = json.dumps({**header, name: entry}).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
            check(opened, entry)
    for number in HEADER_WRONG:
        path.write_bytes(struct.pack("<Q", number) + whole[8:])
        check(opened, number)
    path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "ModernBertModel"])
def test_wrong_numbers_in_files_of_an_encoder(kind: str, tiny_encoders: ModuleType, tmp_path: Path) -> None:
    tiny_encoders.write_encoder(tmp_path, kind)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    (tmp_path / "modules.json").write_text(
        '[{"idx": 0, "path": "", "type": "a.Transformer"}, {"idx": 1, "path": "1_Pooling", "type": "a.Pooling"}]'
    )
    (tmp_path / "1_Pooling").mkdir()
    pooling = '{"word_embedding_dimension": 32, "pooling_mode_cls_token": true}'
    (tmp_path / "1_Pooling" / "config.json").write_text(pooling)
    for name in ("config.json", "sentence_bert_config.json", "modules.json", "1_Pooling/config.json"):
        check_json(tmp_path / name, lambda: opened_encoder(tmp_path))
    check_safetensors(tmp_path / "model.safetensors", lambda: opened_encoder(tmp_path))


@pytest.mark.parametrize("kind", ["smolvlm", pytest.param("idefics3", marks=pytest.mark.slow)])
def test_wrong_numbers_in_files_of_a_model_that_reads_images(
    kind: str, tiny_vision: ModuleType, tmp_path: Path
) -> None:
    tiny_vision.write_checkpoint(tmp_path, kind)
    names = [name for name in ("preprocessor_config.json", "processor_config.json") if (tmp_path / name).is_file()]
    assert names
    for name in ("config.json", "generation_config.json", *names):
        check_json(tmp_path / name, lambda: open_checkpoint(tmp_path))


def test_wrong_numbers_in_files_of_an_adapter(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    import torch

    config = open_checkpoint(tiny_checkpoint("llama")).config
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {f"{prefix}A.weight": torch.ones(4, 64), f"{prefix}B.weight": torch.ones(64, 4)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"q_proj": 2.0},
        "lora_dropout": 0.1,
        "qalora_group_size": 16,
        "layers_to_transform": [0],
        "target_modules": ["q_proj"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    read = lambda: read_adapter(tmp_path, config, dtype="float32", rank_max=64)  # noqa: E731
    check_json(tmp_path / "adapter_config.json", read)
    check_safetensors(tmp_path / "adapter_model.safetensors", read)


def test_wrong_numbers_in_headers_of_a_checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = shutil.copytree(tiny_checkpoint("llama", sharded=True), tmp_path / "model")
    for file in sorted(path.glob("*.safetensors"))[:1]:
        check_safetensors(file, lambda: open_checkpoint(path))
    check_json(path / "model.safetensors.index.json", lambda: open_checkpoint(path))
    check_json(path / "generation_config.json", lambda: open_checkpoint(path))


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"a": entry, "b": {**entry, "shape": [0], "data_offsets": [2, 2]}, "c": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ModelLoadError, match=r"the tensors 'a' and 'c' in a\.safetensors share bytes"):
        tensors_in_file(path, ["F32"])


def test_tiles_with_too_many_patches_are_refused(tiny_vision: ModuleType, tmp_path: Path) -> None:
    tiny_vision.write_checkpoint(tmp_path)
    path = tmp_path / "processor_config.json"
    described = json.loads(path.read_text())
    described["image_processor"]["max_image_size"]["longest_edge"] = 1024
    path.write_text(json.dumps(described))
    with pytest.raises(ModelLoadError, match="have 65536 patches of 4 pixels, allowed are 16384"):
        open_checkpoint(tmp_path)


def test_config_with_fewer_layers_than_the_weights_is_refused(tiny_vision: ModuleType, tmp_path: Path) -> None:
    tiny_vision.write_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    described["vision_config"]["num_hidden_layers"] -= 1
    path.write_text(json.dumps(described))
    with pytest.raises(
        ModelLoadError, match=r"vision_model\.encoder\.layers\.\d.*which the vision_config does not have"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("step", [499, pytest.param(13, marks=pytest.mark.slow)])
def test_gguf_header_with_wrong_numbers_is_read_or_refused_within_memory_bounds(
    tiny_gguf: Callable[..., Path], tmp_path: Path, step: int
) -> None:
    whole = tiny_gguf("llama", "Q4_0").read_bytes()
    path = tmp_path / "changed.gguf"
    for position in (*range(4, 40), *range(40, 7_300, step)):
        for number in HEADER_WRONG:
            for format in ("<I", "<Q"):
                content = struct.pack(format, number & (2 ** (8 * struct.calcsize(format)) - 1))
                path.write_bytes(whole[:position] + content + whole[position + len(content) :])
                check(lambda: open_checkpoint(path), (position, number, format))
