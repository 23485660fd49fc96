"""Tests that loading a damaged file gives a model or raises ModelLoadError, and never raises another exception."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.checkpoint import open_checkpoint

# Size of the header of the tiny GGUF file. Damaged weights only change numbers, so most damage is in the header.
HEADER_BYTES = 7_300
INTERESTING = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])

# Each example writes its own files, so that the shared fixture cannot leak from one to the next.
settings_here = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(path: Path) -> None:
    message = ""
    try:
        for tensor in open_checkpoint(path).tensors():
            assert tensor.read("float32").shape == tensor.shape
            if tensor.read_blocks is not None:
                assert len(tensor.read_blocks()) == tensor.shape[0]
    except ModelLoadError as error:
        message = str(error)
    assert message.isprintable()


@pytest.mark.slow
@settings_here
@given(
    flips=st.lists(st.tuples(st.integers(0, HEADER_BYTES), INTERESTING | st.integers(0, 255)), min_size=1, max_size=4)
)
def test_gguf_with_flipped_bytes_opens_or_is_refused(
    tiny_gguf: Callable[..., Path], tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(tiny_gguf("llama", "Q4_0").read_bytes())
    for position, value in flips:
        content[position] = value
    path = tmp_path / "flipped.gguf"
    path.write_bytes(content)
    load(path)


@pytest.mark.slow
@settings_here
@given(share=st.floats(0.0, 1.0), in_header=st.booleans())
def test_truncated_gguf_is_refused(
    tiny_gguf: Callable[..., Path], tmp_path: Path, share: float, in_header: bool
) -> None:
    content = tiny_gguf("llama", "Q4_0").read_bytes()
    length = int(share * (HEADER_BYTES if in_header else len(content)))
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:length])
    if length < len(content):
        with pytest.raises(ModelLoadError):
            open_checkpoint(path)
    else:
        load(path)


@pytest.mark.slow
@settings_here
@given(flips=st.lists(st.tuples(st.integers(0, 2_700), INTERESTING | st.integers(0, 255)), min_size=1, max_size=4))
def test_safetensors_with_flipped_bytes_opens_or_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(tiny_checkpoint("qwen2"), directory)
    content = bytearray((tiny_checkpoint("qwen2") / "model.safetensors").read_bytes())
    for position, value in flips:
        content[position] = value
    (directory / "model.safetensors").write_bytes(content)
    load(directory)


@pytest.mark.slow
@settings_here
@given(
    variant=st.sampled_from(["awq-32", "gptq-4-order", "packed-4-asym", "float8-block", "fp8-scalar"]),
    flips=st.lists(st.tuples(st.integers(0, 4_000), INTERESTING | st.integers(0, 255)), max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 2_000), INTERESTING | st.integers(32, 126)), max_size=2),
)
def test_quantized_safetensors_with_flipped_bytes_opens_or_is_refused(
    tiny_checkpoint: Callable[..., Path],
    tiny_quantized: ModuleType,
    tmp_path: Path,
    variant: str,
    flips: list[tuple[int, int]],
    changes: list[tuple[int, int]],
) -> None:
    whole, directory = tmp_path / "whole" / variant, tmp_path / "flipped"
    if not whole.exists():
        tiny_quantized.write_quantized(tiny_checkpoint("llama"), whole, variant)
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    for name, damage in (("model.safetensors", flips), ("config.json", changes)):
        content = bytearray((whole / name).read_bytes())
        for position, value in damage:
            content[position % len(content)] = value
        (directory / name).write_bytes(content)
    load(directory)


@settings_here
@given(length=st.integers(0, 400_000))
def test_truncated_safetensors_is_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path, length: int) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(tiny_checkpoint("qwen2"), directory)
    content = (tiny_checkpoint("qwen2") / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[:length])
    if length < len(content):
        with pytest.raises(ModelLoadError):
            open_checkpoint(directory)
    else:
        load(directory)


@pytest.mark.slow
@settings_here
@given(
    name=st.sampled_from(["config.json", "generation_config.json"]),
    position=st.integers(0, 800),
    value=INTERESTING | st.integers(32, 126),
)
def test_configs_with_flipped_bytes_open_or_are_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str, position: int, value: int
) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        shutil.copytree(tiny_checkpoint("qwen2"), directory)
    content = bytearray((tiny_checkpoint("qwen2") / name).read_bytes())
    content[position % len(content)] = value
    (directory / name).write_bytes(content)
    load(directory)
