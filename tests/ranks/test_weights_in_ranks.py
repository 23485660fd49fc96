"""Tests of replacing the weights of a running model in ranks.

Either all ranks take their shards, or none does. A rank that fails while it writes ends the group.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.torch import load_file, save_file

import trioserve
from tests.model.test_weights_in_place import BAD, PROMPTS, changed, said
from tests.model.test_weights_sent import of, sender
from trioserve import SamplingParams
from trioserve.contracts.errors import EngineFault, InvalidRequest, WeightsLost
from trioserve.contracts.events import FinishReason
from trioserve.contracts.weights import SharedWeights
from trioserve.ranks.group import RankGroup
from trioserve.ranks.messages import CheckWeights, ConfirmWeights, PutWeights, WriteWeights
from trioserve.rollouts import publish_weights

pytestmark = pytest.mark.slow

SECONDS_MAX = 120.0
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def opened(path: Path, shape: tuple[int, int] = (2, 1), **options: Any) -> AsyncIterator[Any]:
    """Open an engine.

    Args:
        shape: ranks of each stage, and number of stages.
    """
    with trio.fail_after(SECONDS_MAX):
        async with trioserve.open_engine(
            str(path),
            tensor_parallel_size=shape[0],
            pipeline_parallel_size=shape[1],
            kv_cache_memory=0.01,
            max_model_len=256,
            threads=2,
            **{"dtype": "float32", **options},
        ) as engine:
            yield engine


async def generated_when_opened(path: Path, shape: tuple[int, int] = (2, 1), **options: Any) -> Any:
    async with opened(path, shape, **options) as engine:
        return await said(engine)


def before_order(patch: pytest.MonkeyPatch, order: Any, do: Callable[[RankGroup], object]) -> None:
    """Call a function before an order of this type is sent."""
    ask = RankGroup.ask

    async def asked(self: RankGroup, make: Callable[[int], Any], **options: Any) -> Any:
        if isinstance(make(0), order):
            do(self)
        return await ask(self, make, **options)

    patch.setattr(RankGroup, "ask", asked)


def cut_short(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("llama", (2, 1), {}),
        ("llama-tied", (1, 2), {}),
        ("llama-biased-64", (2, 2), {}),
        ("qwen3-moe", (2, 1), {"enable_expert_parallel": True}),
        ("llama", (2, 1), {"dtype": "bfloat16", "cpu_kernels": "torch"}),
        ("llama", (2, 1), {"quantization": "int8", "dtype": "bfloat16"}),
    ],
    ids=str,
)
async def test_replaced_weights_give_the_same_output_as_loaded_weights(
    kind: str, shape: tuple[int, int], options: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    old = tiny_model(kind)
    new = changed(old, tmp_path / "new")
    expected = await generated_when_opened(new, shape, **options)
    async with opened(old, shape, **options) as engine:
        before = await said(engine)
        assert before != expected
        assert await engine.update_weights(new, version="step 1") == "step 1"
        assert engine.weight_version == "step 1"
        assert await said(engine) == expected
        await engine.update_weights(old)
        assert await said(engine) == before


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
async def test_each_rank_reads_its_shards_from_shared_memory(
    shape: tuple[int, int], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    old = tiny_model("llama-tied")
    new = changed(old, tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    tensors["lm_head.weight"] = tensors[
        "model.embed_tokens.weight"
    ]  # A state_dict of tied weights contains both names.
    async with opened(old, shape) as engine:
        with publish_weights(tensors) as published:
            await engine.update_weights(SharedWeights(published.name), version="shared")
        after = await said(engine)
        with pytest.raises(InvalidRequest, match="no segment") as refusal:
            await engine.update_weights(SharedWeights(published.name))
        assert refusal.value.param == "name"
        del tensors["model.norm.weight"]
        with publish_weights(tensors) as lacking, pytest.raises(InvalidRequest, match="norm"):
            await engine.update_weights(SharedWeights(lacking.name))
        assert engine.weight_version == "shared"
        assert await said(engine) == after
    assert after == await generated_when_opened(new, shape)


@pytest.mark.parametrize(("kind", "shape"), [("llama", (2, 1)), ("llama-tied", (2, 2))])
async def test_tensors_of_a_trainer_reach_all_ranks(
    kind: str, shape: tuple[int, int], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    old = tiny_model(kind)
    new = changed(old, tmp_path / "new")
    async with opened(old, shape) as engine:
        before = await said(engine)
        with pytest.raises(InvalidRequest, match="no group"):
            await engine.update_weights(of(new))
        async with sender(new, engine):
            described = of(new)
            shapes = ((3, 5), *described.shapes[1:])
            for wrong, param in (
                ({"dtypes": ["int8", *described.dtypes[1:]]}, "dtypes"),
                ({"shapes": shapes}, "names"),
            ):
                with pytest.raises(InvalidRequest) as refusal:
                    await engine.update_weights(of(new, **wrong))
                assert refusal.value.param == param
            assert await said(engine) == before
            await engine.update_weights(of(new), version="sent")
        assert engine.weight_version == "sent"
        after = await said(engine)
    assert after == await generated_when_opened(new, shape)


async def test_trainer_that_dies_leaves_equal_tensors_in_all_ranks(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes nothing until an update is complete, as in one process."""
    old = tiny_model("llama")
    new = changed(old, tmp_path / "new")
    async with opened(old) as engine:
        before = await said(engine)
        async with sender(new, engine, count=1, seconds_max=20.0) as trainer:
            before_order(monkeypatch, PutWeights, lambda _group: trainer.kill())
            with pytest.raises(WeightsLost, match="sends nothing"):
                await engine.update_weights(of(new))
        assert engine.has_half_weights
        assert not engine.ready
        await engine.update_weights(old, version="again")
        assert engine.ready
        assert await said(engine) == before


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
async def test_invalid_weight_directory_changes_nothing(
    shape: tuple[int, int], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    old = tiny_model("llama")
    async with opened(old, shape) as engine:
        before = await said(engine)
        for case, (change, named) in BAD.items():
            bad = changed(old, tmp_path / case)
            tensors = load_file(bad / "model.safetensors")
            change(tensors)
            save_file(tensors, bad / "model.safetensors")
            with pytest.raises(InvalidRequest, match=named) as refusal:
                await engine.update_weights(bad)
            assert "rank" not in str(refusal.value)  # The message is the same as without ranks.
            assert refusal.value.param == "model_path"
        for path in (tiny_model("qwen3"), tmp_path / "nowhere"):
            with pytest.raises(InvalidRequest):
                await engine.update_weights(path)
        assert engine.weight_version == "default"
        assert await said(engine) == before


async def test_weights_stay_if_their_files_change_after_the_check(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_model("llama")
    new = changed(old, tmp_path / "new")
    before_order(monkeypatch, ConfirmWeights, lambda _group: os.utime(new / "model.safetensors", ns=(0, 0)))
    async with opened(old) as engine:
        before = await said(engine)
        with pytest.raises(InvalidRequest, match="overwritten after the update began") as refusal:
            await engine.update_weights(new)
        assert refusal.value.param == "model_path"
        assert engine.ready
        assert await said(engine) == before


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
async def test_in_flight_option_of_a_weight_update_decides_about_running_requests(
    in_flight: Any, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    old = tiny_model("llama")
    new = changed(old, tmp_path / "new")
    prompt: list[int] = [*PROMPTS[0]]
    tokens: list[int] = []
    versions: list[tuple[str, int]] = []
    async with opened(old) as engine:
        async with engine.generate(prompt, LONG) as stream:
            async for delta in stream:
                end = delta.finish_reason, delta.stop_reason
                tokens += delta.token_ids
                versions += delta.weight_versions or [("default", len(delta.token_ids))]
                if len(tokens) >= 20 and engine.weight_version == "default":
                    await engine.update_weights(new, version="new", in_flight=in_flight)
        count = sum(count for version, count in versions if version == "default")
        assert 20 <= count < 60
        if in_flight == "abort":
            assert end == (FinishReason.ABORT, "weights_replaced")
            return
        assert sum(count for version, count in versions if version == "new") == 60 - count
        assert engine.stats().blocks_used == 0
    if in_flight == "recompute":
        rest = SamplingParams(max_tokens=60 - count, temperature=0.0, ignore_eos=True)
        async with opened(new) as engine, engine.generate([*prompt, *tokens[:count]], rest) as stream:
            assert [token async for delta in stream for token in delta.token_ids] == tokens[count:]


@pytest.mark.parametrize("way", ["killed while it checks", "killed while it writes", "cut short"])
async def test_stream_resumes_after_a_rank_ends_during_an_update(
    way: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of the next group have the weights of the start."""
    old = tiny_model("llama")
    new, newer = changed(old, tmp_path / "new"), changed(old, tmp_path / "newer", seed=8)
    sampling = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)

    def harm(group: RankGroup) -> None:
        if way == "cut short":
            cut_short(new)
        else:
            os.kill(group.pids[1], signal.SIGKILL)

    async with opened(old) as engine:
        async with engine.generate(PROMPTS[0], sampling) as stream:
            expected = [token async for delta in stream for token in delta.token_ids]
        tokens: list[int] = []
        async with engine.generate(PROMPTS[0], sampling) as stream:
            async for delta in stream:
                if len(tokens) < 10 <= len(tokens) + len(delta.token_ids):
                    with monkeypatch.context() as patch:
                        before_order(patch, CheckWeights if way == "killed while it checks" else WriteWeights, harm)
                        with pytest.raises(WeightsLost, match="the engine ended meanwhile"):
                            await engine.update_weights(new, version="new")
                tokens += delta.token_ids
                assert not delta.weight_versions
        assert tokens == expected
        assert engine.weight_version == "default"
        assert not engine.has_half_weights
        assert engine.stats().blocks_used == 0
        await engine.update_weights(newer, version="newer")
        async with engine.generate(PROMPTS[0], sampling) as stream:
            assert [token async for delta in stream for token in delta.token_ids] != expected


async def test_error_of_a_weight_update_names_the_failed_rank_and_file(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_model("llama")
    new = changed(old, tmp_path / "new")
    before_order(monkeypatch, WriteWeights, lambda _group: cut_short(new))
    with pytest.raises(EngineFault, match=r"rank \d \(process \d+\) failed at work: WeightsLost: .*overwritten"):
        async with opened(old, engine_restarts=0) as engine:
            with pytest.raises(WeightsLost, match="the engine ended meanwhile"):
                await engine.update_weights(new)
            await trio.sleep_forever()
