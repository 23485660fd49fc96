"""Tests that weights are filled correctly, as a whole or in parts, through Python or by the library's own reading. Each
number must reach its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model import weights
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve_kernels.native import Loading, NoNativeKernels, load_library

PROMPT = [5, 6, 7, 8, 250, 31, 12]
SEVERAL_PARTS = 64 * 32  # numbers per part, for matrices of some thousand numbers


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


def read_whole(path: Path) -> Any:
    checkpoint = open_checkpoint(path)

    def tensors() -> Iterator[StoredTensor]:
        return (tensor._replace(rows=None) for tensor in checkpoint.tensors())

    return SimpleNamespace(
        config=checkpoint.config,
        weight_bytes=checkpoint.weight_bytes,
        tensors=tensors,
        vision=None,
        audio=None,
        encoder=None,
    )


def logprobs_of(step_driver: ModuleType, checkpoint: Any, settings: ModelSettings) -> Any:
    runner = ModelRunner.load(checkpoint, settings)
    try:
        runner.allocate_kv(8)
        driver = step_driver.StepDriver(runner)
        driver.add("a", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=20))
        return driver.step({"a": len(PROMPT)}).prompt_logprobs["a"]
    finally:
        runner.close()


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("options", ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}), ids=str)
@pytest.mark.parametrize("kind", ("llama", "llama-tied", "llama-biased-64", "qwen2-moe", "deepseek-v3", "gemma3"))
def test_weight_filled_in_parts_equals_the_whole_tensor(
    kind: str,
    options: dict[str, Any],
    threads: int,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, settings = tiny_checkpoint(kind), ModelSettings(block_size=4, device="cpu", threads=threads, **options)
    expected = logprobs_of(step_driver, read_whole(path), settings)
    monkeypatch.setattr(weights, "PART_VALUES", SEVERAL_PARTS)
    assert logprobs_of(step_driver, open_checkpoint(path), settings) == expected


@pytest.mark.parametrize("quantization", ("auto", "none", "int8"))
@pytest.mark.parametrize("storage", ("Q4_0", "Q6_K", "F32"))
def test_weight_filled_in_parts_from_a_gguf_file_equals_the_whole_tensor(
    storage: str,
    quantization: Any,
    tiny_gguf: Callable[..., Path],
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, settings = tiny_gguf("llama", storage), ModelSettings(block_size=4, device="cpu", quantization=quantization)
    expected = logprobs_of(step_driver, read_whole(path), settings)
    monkeypatch.setattr(weights, "PART_VALUES", SEVERAL_PARTS)
    assert logprobs_of(step_driver, open_checkpoint(path), settings) == expected


def test_native_library_reads_tensors_that_need_no_conversion(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    for kept, dtype in ((True, checkpoint.config.dtype_name), (False, "bfloat16")):
        given: list[int] = []
        monkeypatch.setattr(
            weights,
            "Loading",
            lambda library, paths, rows, to=given: to.append(len(rows)) or Loading(library, paths, rows),
        )
        ModelRunner.load(checkpoint, ModelSettings(device="cpu", dtype=dtype)).close()
        matrices = sum(len(tensor.shape) == 2 for tensor in checkpoint.tensors())
        assert given == ([matrices] if kept else [])


@pytest.mark.parametrize("threads", (1, 2))
def test_weight_file_that_has_become_shorter_is_reported(
    threads: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    whole = tiny_checkpoint("llama")
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model.safetensors: the file has become shorter"):
        ModelRunner.load(checkpoint, ModelSettings(device="cpu", threads=threads))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model.safetensors: No such file"):
        ModelRunner.load(checkpoint, ModelSettings(device="cpu", threads=threads))
