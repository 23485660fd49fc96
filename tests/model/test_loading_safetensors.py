from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.names import TRANSFORMERS, outside_name, tensor_shapes


@pytest.fixture
def copied(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint that the test may damage."""

    def copy(kind: str, **options: Any) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(kind, **options), tmp_path / kind))

    return copy


def check_refused(path: Path, *said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"cannot load {path}: ")
    assert "\n" not in message
    for part in said:
        assert part in message


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_tensors_of_all_families_equal_those_of_transformers(
    tiny_checkpoints: Any, tiny_checkpoint: Callable[..., Path], tensors_of: Any
) -> None:
    import transformers

    for kind in tiny_checkpoints.KINDS:
        checkpoint = open_checkpoint(tiny_checkpoint(kind))
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(kind))
        theirs = dict(model.named_parameters())
        ours = tensors_of(checkpoint)
        outside = {name: outside_name(name, checkpoint.config.family, TRANSFORMERS) for name in ours}
        assert set(outside.values()) == set(theirs), kind
        assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == tensor_shapes(checkpoint.config)
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[outside[name]]), (kind, name)
        assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in ours.values())


def test_files_of_a_divided_checkpoint_give_the_same_tensors_as_one_file(
    tiny_checkpoint: Callable[..., Path], tensors_of: Any
) -> None:
    whole = tensors_of(open_checkpoint(tiny_checkpoint("qwen3")))
    sharded = open_checkpoint(tiny_checkpoint("qwen3", sharded=True))
    assert len(sharded.files) > 1
    parts = tensors_of(sharded)
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_stored_dtype_of_a_tensor_is_kept_and_reported(tiny_checkpoint: Callable[..., Path], dtype: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", dtype=dtype))
    assert checkpoint.config.dtype_name == dtype
    assert {tensor.dtype for tensor in checkpoint.tensors()} == {dtype}


def test_opening_a_checkpoint_does_not_import_torch(
    tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    program = (
        "import sys, pathlib\n"
        "from trioserve.model.loading.checkpoint import open_checkpoint\n"
        "for path in sys.argv[1:]:\n"
        "    assert open_checkpoint(pathlib.Path(path)).config.layer_count == 2\n"
        "print('torch' in sys.modules, 'gguf' in sys.modules)\n"
    )
    response = subprocess.run(
        [sys.executable, "-c", program, str(tiny_checkpoint("llama")), str(tiny_gguf("llama"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert response.stdout.split() == ["False", "False"]


def test_duplicate_tied_matrix_and_rotary_frequencies_are_ignored(copied: Callable[..., Path]) -> None:
    directory = copied("llama-tied")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_tensors(directory, add)
    checkpoint = open_checkpoint(directory)
    assert {tensor.name for tensor in checkpoint.tensors()} == set(tensor_shapes(checkpoint.config))


def test_single_safetensors_file_may_have_any_name(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert open_checkpoint(directory).files == (directory / "weights.safetensors",)


def test_error_names_the_missing_tensor_of_a_safetensors_checkpoint(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    change_tensors(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    check_refused(directory, "the weights lack model.layers.1.mlp.up_proj.weight", "fetch it again")


def test_error_names_the_unknown_tensor_of_a_safetensors_checkpoint(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    change_tensors(directory, lambda tensors: tensors.update({"model.layers.0.router.weight": torch.ones(4)}))
    check_refused(directory, "the weights hold model.layers.0.router.weight", "does not use")


def test_more_layers_than_the_config_has_are_refused(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    check_refused(directory, "and 6 more tensors")


def test_error_of_a_wrong_tensor_shape_has_the_expected_shape(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    check_refused(
        directory, "model.layers.0.mlp.gate_proj.weight has shape [96, 64], but the config asks for [128, 64]"
    )


def test_unsupported_stored_dtype_is_refused(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    change_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    check_refused(directory, "stores I8; supported are BF16, F16, F32")


def test_error_names_the_missing_file_of_a_divided_checkpoint(copied: Callable[..., Path]) -> None:
    directory = copied("llama", sharded=True)
    shard = sorted(directory.glob("*.safetensors"))[-1]
    shard.unlink()
    check_refused(directory, f"of which 1 are missing, {shard.name} first")


def change_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda index: index.pop("weight_map"), "has no weight_map"),
        (lambda index: index.update(weight_map=[]), "must be an object"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "../elsewhere.safetensors"}), "no plain file"),
        (lambda index: index["weight_map"].update({"model.norm.weight": 7}), "no plain file name"),
        (
            lambda index: index["weight_map"].update({"invented": index["weight_map"]["model.norm.weight"]}),
            "says that invented is in",
        ),
    ],
)
def test_wrong_safetensors_index_is_refused(
    copied: Callable[..., Path], change: Callable[[dict[str, Any]], object], said: str
) -> None:
    directory = copied("llama", sharded=True)
    change_index(directory, change)
    check_refused(directory, said)


def test_control_characters_of_a_name_do_not_reach_the_message(copied: Callable[..., Path]) -> None:
    directory = copied("llama", sharded=True)
    change_index(directory, lambda index: index["weight_map"].update({"\n\x1b[31m\ud800" * 999: "/"}))
    check_refused(directory, "says that ??[31m?")


def test_shards_without_an_index_are_refused(copied: Callable[..., Path]) -> None:
    directory = copied("llama", sharded=True)
    (directory / "model.safetensors.index.json").unlink()
    check_refused(directory, "but no model.safetensors.index.json")


def test_truncated_safetensors_file_is_refused(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    check_refused(directory, "model.safetensors is damaged or incomplete")


@pytest.mark.parametrize(
    "entry, said",
    [
        ({"data_offsets": [0, 252]}, "with [64] values lies at bytes"),
        ({"data_offsets": [256, 0]}, "with [64] values lies at bytes"),
        ({"data_offsets": [2**62, 2**62 + 256]}, "with [64] values lies at bytes"),
        ({"data_offsets": [-256, 0]}, ">= 0"),
        ({"shape": [-64]}, ">= 0"),
        ({"shape": [10**30]}, "`int`"),
        ({"shape": None}, "array"),
        ({"dtype": 7}, "str"),
        ({"shape": [1] * 9}, "has 9 dimensions, allowed are 8"),
        ({"shape": [2**62] * 100_000}, "has 100000 dimensions"),
        ({"shape": [1] * 2**19}, "commas, allowed are"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(
    copied: Callable[..., Path], entry: dict[str, object], said: str
) -> None:
    directory = copied("llama")
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    check_refused(directory, "model.safetensors is damaged or incomplete", said)


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"model_type":' * 100_000 + "1" + "}" * 100_000, "config.json is not valid JSON"),
        ('{"a":[' + "0," * 2**20 + "0]}", "commas and opening brackets, at most"),
        ('{"model_type": "llama", "hidden_size": ' + "[" * 800 + "]" * 800 + "}", "hidden_size in config.json is [[["),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 400 + "}", "hidden_size in config.json is 999"),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "config.json is not valid JSON"),
    ],
)
def test_config_with_excessive_sizes_is_refused(copied: Callable[..., Path], content: str, said: str) -> None:
    directory = copied("llama")
    (directory / "config.json").write_text(content)
    check_refused(directory, said)


def test_a_missing_or_broken_config_is_refused(copied: Callable[..., Path]) -> None:
    directory = copied("llama")
    (directory / "config.json").write_text("{")
    check_refused(directory, "config.json is not valid JSON")
    (directory / "config.json").unlink()
    check_refused(directory, "no config.json")


def test_path_without_a_model_is_refused_with_the_allowed_kinds(tmp_path: Path) -> None:
    check_refused(tmp_path / "nothing", "no such file or directory")
    check_refused(tmp_path / ("x" * 5000), "too long")
    check_refused(tmp_path, "the directory has no weights; needed are")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    check_refused(tmp_path, "only in pytorch_model.bin", "safetensors are needed")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    check_refused(tmp_path, "2 GGUF files (a.gguf, b.gguf): name one of them")
    check_refused(tmp_path / "pytorch_model.bin", "a model is a .gguf file or a directory")


def test_decoder_saved_without_its_head_is_read(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Models that were trained to compute vectors are saved without a head."""
    from safetensors.numpy import load_file, save_file

    whole = tiny_checkpoint("llama-tied")
    for path in whole.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(whole / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found = {tensor.name: tensor.read("float32") for tensor in open_checkpoint(tmp_path).tensors()}
    for tensor in open_checkpoint(whole).tensors():
        assert (found[tensor.name] == tensor.read("float32")).all()
