"""Tests that after a replacement of its weights, a running engine computes the same bits as an engine that was opened
with the new weights.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from trioserve import open_engine
from trioserve.contracts.errors import InvalidRequest, WeightsLost
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import SharedWeights
from trioserve.engine.engine import Engine
from trioserve.model import weight_replacement
from trioserve.model.weight_replacement import SEGMENTS, StoredWeights
from trioserve.model.weights import fill_slots
from trioserve.rollouts import publish_weights

pytestmark = pytest.mark.slow

PROMPTS = ([3, 5, 8, 13, 21, 34, 55, 89, 144, 233], [7] * 40, [9])
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory": 0.02, "max_model_len": 256, "threads": 1}
KINDS = [
    "llama",
    "llama-tied",
    "llama-biased-64",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3-part",
    "mixtral",
    "gpt-oss",
    "deepseek-v3",
    "lfm2",
    "mamba2",
    "jamba",
    "nemotron-h-moe",
]

Said = list[tuple[tuple[int, ...], list[TokenLogprob]]]


def changed(directory: Path, target: Path, *, dtype: torch.dtype | None = None, seed: int = 7) -> Path:
    """A copy of the checkpoint with other weights, as from training."""
    shutil.copytree(directory, target)
    draw = torch.Generator().manual_seed(seed)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            other = tensor.float() + 0.02 * torch.randn(tensor.shape, generator=draw)
            tensors[name] = other.to(dtype or tensor.dtype).contiguous()
        save_file(tensors, path)
    return target


async def said(engine: Engine) -> Said:
    answers: Said = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        async with engine.generate(prompt, SAMPLING) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                logprobs += delta.logprobs or ()
        answers.append((tuple(tokens), logprobs))
    return answers


async def said_when_opened(path: Path, **options: Any) -> Said:
    async with open_engine(str(path), **{**OPTIONS, **options}) as engine:
        return await said(engine)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
async def test_replaced_weights_give_the_results_of_an_engine_opened_with_them(
    kind: str, kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old = tiny_checkpoint(kind)
    new = changed(old, tmp_path / "new")
    options = {"cpu_kernels": kernels, "dtype": "float32"}
    expected = await said_when_opened(new, **options)
    async with open_engine(str(old), **OPTIONS, **options) as engine:
        before, fingerprint = await said(engine), engine.model.fingerprint
        assert before != expected
        assert engine.weight_version == "default"
        assert await engine.update_weights(new, version="step 1") == "step 1"
        assert engine.weight_version == "step 1"
        assert await said(engine) == expected
        assert engine.model.fingerprint not in (None, fingerprint)
        second = await engine.update_weights(str(old))
        assert second not in ("step 1", "default")
        assert await said(engine) == before


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_new_weights_are_converted_to_the_engines_dtype(
    dtype: str, stored: torch.dtype, kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old = tiny_checkpoint("llama", dtype="bfloat16")
    new = changed(old, tmp_path / "new", dtype=stored)
    options = {"dtype": dtype, "cpu_kernels": kernels}
    async with open_engine(str(old), **OPTIONS, **options) as engine:
        await engine.update_weights(new)
        assert await said(engine) == await said_when_opened(new, **options)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_replacement_keeps_the_served_context_length(
    ranks: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The served context length decides which of longrope's factors are used."""
    old = tmp_path / "old"
    shutil.copytree(tiny_checkpoint("phi3-longrope"), old)
    config = json.loads((old / "config.json").read_text(encoding="utf-8"))
    config["original_max_position_embeddings"] = 64
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    (old / "config.json").write_text(json.dumps(config), encoding="utf-8")
    new = changed(old, tmp_path / "new")
    options = {**OPTIONS, "max_model_len": 64, "dtype": "float32", "tensor_parallel_size": ranks, "threads": ranks}
    async with open_engine(str(new), **options) as engine:
        expected = await said(engine)
    async with open_engine(str(old), **options) as engine:
        await engine.update_weights(new)
        assert await said(engine) == expected


async def test_model_from_a_gguf_file_accepts_plain_weights(
    tiny_checkpoints: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    gguf = tmp_path / "model.gguf"
    tiny_checkpoints.write_gguf(tiny_checkpoint("llama-tied"), gguf, quant_type="Q8_0")
    new = changed(tiny_checkpoint("llama-tied"), tmp_path / "new")
    async with open_engine(str(gguf), **OPTIONS, dtype="float32") as engine:
        before = await said(engine)
        await engine.update_weights(new)
        assert await said(engine) != before
        after = [tokens for tokens, _ in await said(engine)]
    assert after == [tokens for tokens, _ in await said_when_opened(new, dtype="float32")]
    async with open_engine(str(gguf), **OPTIONS, quantization="file") as engine:
        with pytest.raises(InvalidRequest, match="blocks of a quantized file"):
            await engine.update_weights(new)
        assert engine.ready


@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_weights_quantized_at_loading_are_quantized_when_replaced(
    quantization: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    new = changed(tiny_checkpoint("llama"), tmp_path / "new")
    async with open_engine(str(tiny_checkpoint("llama")), **OPTIONS, quantization=quantization) as engine:
        await engine.update_weights(new)
        assert await said(engine) == await said_when_opened(new, quantization=quantization)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_another(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "one is missing": (without("model.layers.1.mlp.up_proj.weight"), "mlp.up_proj"),
    "one has another shape": (with_another("model.norm.weight", torch.zeros(65)), "norm"),
    "one is too many": (with_another("model.layers.0.mlp.other.weight", torch.zeros(3)), "other"),
    "one has another type": (with_another("model.norm.weight", torch.zeros(64, dtype=torch.int8)), "I8"),
}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("case", BAD)
async def test_wrong_directory_of_new_weights_changes_nothing(
    case: str, kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    change, named = BAD[case]
    old = tiny_checkpoint("llama")
    bad = changed(old, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    change(tensors)
    save_file(tensors, bad / "model.safetensors")
    async with open_engine(str(old), **OPTIONS, cpu_kernels=kernels) as engine:
        before = await said(engine)
        with pytest.raises(InvalidRequest, match=named) as refusal:
            await engine.update_weights(bad)
        assert refusal.value.param == "model_path"
        assert engine.weight_version == "default"
        assert await said(engine) == before
        for path in (tiny_checkpoint("qwen3"), tmp_path / "nowhere", tiny_checkpoint("llama3-rope")):
            with pytest.raises(InvalidRequest):
                await engine.update_weights(path)
        assert await said(engine) == before


async def test_weight_file_that_ends_during_replacement_stops_the_engine(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_checkpoint("llama")
    new, bad = changed(old, tmp_path / "new"), changed(old, tmp_path / "bad")

    def cut(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        with (bad / "model.safetensors").open("r+b") as file:
            file.truncate(file.seek(0, 2) // 2)
        fill_slots(*args, **options)

    async with open_engine(str(old), **OPTIONS, dtype="float32") as engine:
        monkeypatch.setattr(weight_replacement, "fill_slots", cut)
        with pytest.raises(WeightsLost, match="shorter"):
            await engine.update_weights(bad, version="bad")
        assert engine.has_half_weights
        assert not engine.ready
        with trio.move_on_after(0.1) as scope:
            await said(engine)
        assert scope.cancelled_caught
        await engine.update_weights(new, version="new")
        assert engine.ready
        assert await said(engine) == await said_when_opened(new, dtype="float32")


def rewrite(path: Path) -> None:
    """Write the tensors with another dtype, so that all of them lie elsewhere in the file."""
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)


ELSEWISE: dict[str, Callable[[Path], object]] = {
    "saved in another type": rewrite,
    "touched": lambda path: os.utime(path, ns=(0, 0)),
    "replaced": lambda path: shutil.copy(path, path.with_suffix(".new")).rename(path),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("how", ELSEWISE)
async def test_weight_file_that_changes_during_an_update_leaves_the_old_weights(
    how: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset of each tensor was read from a header that no longer exists."""
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    replace = StoredWeights.replace

    def replace_others(self: StoredWeights) -> None:
        ELSEWISE[how](new / "model.safetensors")
        replace(self)

    monkeypatch.setattr(StoredWeights, "replace", replace_others)
    async with open_engine(str(old), **OPTIONS, dtype="float32") as engine:
        before = await said(engine)
        with pytest.raises(InvalidRequest, match="after the update began") as refusal:
            await engine.update_weights(new)
        assert refusal.value.param == "model_path"
        assert engine.weight_version == "default"
        assert engine.ready
        assert await said(engine) == before


async def test_shared_memory_freed_too_early_changes_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    replace = StoredWeights.replace

    def replace_nothing(self: StoredWeights) -> None:
        published.close()
        replace(self)

    monkeypatch.setattr(StoredWeights, "replace", replace_nothing)
    async with open_engine(str(old), **OPTIONS, dtype="float32") as engine:
        published = publish_weights(load_file(new / "model.safetensors"))
        with published, pytest.raises(InvalidRequest, match="removed") as refusal:
            await engine.update_weights(SharedWeights(published.name))
        assert refusal.value.param == "name"
        assert engine.ready


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_weight_file_changed_during_replacement_leaves_half_of_the_weights(
    kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")

    def fill_and_rewrite(*args: Any, **options: Any) -> None:
        fill_slots(*args, **options)
        monkeypatch.undo()
        rewrite(new / "model.safetensors")

    async with open_engine(str(old), **OPTIONS, dtype="float32", cpu_kernels=kernels) as engine:
        monkeypatch.setattr(weight_replacement, "fill_slots", fill_and_rewrite)
        with pytest.raises(WeightsLost, match="overwritten"):
            await engine.update_weights(new)
        assert engine.has_half_weights
        await engine.update_weights(new, version="new")
        assert await said(engine) == await said_when_opened(new, dtype="float32", cpu_kernels=kernels)


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_recomputed_stream_continues_as_with_the_new_model(
    kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old = tiny_checkpoint("llama")
    new = changed(old, tmp_path / "new")
    options = {"dtype": "float32", "cpu_kernels": kernels}
    prompt: list[int] = [*PROMPTS[0]]
    tokens: list[int] = []
    versions: list[tuple[str, int]] = []
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    async with open_engine(str(old), **OPTIONS, **options) as engine:
        async with engine.generate(prompt, sampling) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                versions += delta.weight_versions or [("default", len(delta.token_ids))]
                if len(tokens) >= 20 and engine.weight_version == "default":
                    await engine.update_weights(new, version="new", in_flight="recompute")
        count = sum(count for version, count in versions if version == "default")
        assert 20 <= count < 60
        assert sum(count for version, count in versions if version == "new") == 60 - count
    rest = SamplingParams(max_tokens=60 - count, temperature=0.0, ignore_eos=True)
    async with (
        open_engine(str(new), **OPTIONS, **options) as engine,
        engine.generate([*prompt, *tokens[:count]], rest) as stream,
    ):
        assert [token async for delta in stream for token in delta.token_ids] == tokens[count:]


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_weights_are_replaced_from_shared_memory(
    kernels: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old = tiny_checkpoint("llama-tied")
    options = {"dtype": "float32", "cpu_kernels": kernels}
    async with open_engine(str(old), **OPTIONS, **options) as engine:
        first, second = (changed(old, tmp_path / str(seed), seed=seed) for seed in (1, 2))
        tensors = load_file(first / "model.safetensors")
        # A state_dict of a model with tied weights contains both names.
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        with publish_weights(tensors) as published:
            await engine.update_weights(SharedWeights(published.name), version="first")
            assert await said(engine) == await said_when_opened(first, **options)
            tensors = load_file(second / "model.safetensors")
            with pytest.raises(ValueError, match="publish them again"):
                published.write(tensors)
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
            published.write(tensors)
            await engine.update_weights(SharedWeights(published.name), version="second")
            after = await said(engine)
            assert after == await said_when_opened(second, **options)
        del tensors["model.norm.weight"]
        with publish_weights(tensors) as lacking, pytest.raises(InvalidRequest, match="norm"):
            await engine.update_weights(SharedWeights(lacking.name))
        for name in (published.name, "no such segment", "../etc/passwd", ""):
            with pytest.raises(InvalidRequest):
                await engine.update_weights(SharedWeights(name))
        assert await said(engine) == after


def test_shared_memory_without_free_space_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment has its size before it has memory. A process that writes beyond the free memory would get SIGBUS."""

    def no_room(descriptor: int, offset: int, byte_count: int) -> None:
        assert os.fstat(descriptor).st_size == byte_count > offset == 0
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    name = f"trioserve-test-{os.getpid()}"
    with pytest.raises(OSError, match="is too small for weights of") as refusal:
        publish_weights({"w": torch.zeros(64)}, name)
    assert refusal.value.errno == errno.ENOSPC
    assert not (SEGMENTS / name).exists()
    monkeypatch.undo()
    with publish_weights({"w": torch.zeros(1000)}, name):
        status = (SEGMENTS / name).stat()
        assert status.st_blocks * 512 >= status.st_size > 4000


async def test_process_without_an_engine_fills_the_shared_memory(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    new = changed(tiny_checkpoint("llama"), tmp_path / "new", dtype=torch.bfloat16)
    trainer = (
        "import sys\n"
        "from safetensors.torch import load_file\n"
        "from trioserve.rollouts import publish_weights\n"
        "assert not {'trio', 'msgspec'} & sys.modules.keys()\n"
        "with publish_weights(load_file(sys.argv[1])) as published:\n"
        "    print(published.name, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    async with open_engine(str(tiny_checkpoint("llama")), **OPTIONS, dtype="float32") as engine:
        async with trio.open_nursery() as nursery:
            with trio.fail_after(60):
                command = [sys.executable, "-c", trainer, str(new / "model.safetensors")]
                start = functools.partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                process = await nursery.start(start)
                name = (await process.stdout.receive_some()).decode().strip()
                await engine.update_weights(SharedWeights(name))
                await process.stdin.aclose()
        assert await said(engine) == await said_when_opened(new, dtype="float32")
        with pytest.raises(InvalidRequest, match="no segment"):
            await engine.update_weights(SharedWeights(name))
