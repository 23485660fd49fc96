"""Tests of an engine that sleeps: it frees memory, and its output is the same after the sleep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import trioserve
from trioserve import InvalidRequest, SamplingParams

pytestmark = pytest.mark.slow

SECONDS_MAX = 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
MEMORY_SCRIPT = Path(__file__).parent / "sleep_memory.py"


async def generate(engine: Any, prompt: str) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async with engine.generate(prompt, GREEDY) as stream:
        async for delta in stream:
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs or ()]
    return tokens, logprobs


@pytest.mark.parametrize(("level", "kernels"), [(1, "auto"), (2, "auto"), (1, "torch"), (2, "torch")])
async def test_output_after_a_sleep_equals_the_output_before(
    level: int, kernels: Any, tiny_model: Callable[[str], Path]
) -> None:
    found: list[tuple[list[int], list[float]]] = []

    async def ask(engine: Any) -> None:
        found.append(await generate(engine, "The sea"))

    with trio.fail_after(SECONDS_MAX):
        async with trioserve.open_engine(
            str(tiny_model("llama")), dtype="float32", kv_cache_memory=0.01, cpu_kernels=kernels, batch_invariant=True
        ) as engine:
            expected = await generate(engine, "The sea")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine)
                async with engine.generate("Once upon a time", GREEDY) as stream:
                    await anext(stream)
                    await engine.sleep(level, "keep")
                    assert engine.is_sleeping
                    await engine.wake_up()
                    assert engine.stats().blocks_cached == 0
                    assert sum([len(delta.token_ids) async for delta in stream]) > 0
                    assert stream.completion_token_count == 24
            assert found == [expected]
            assert await generate(engine, "The sea") == expected


async def test_a_model_in_ranks_sleeps_at_level_2(
    tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    with trio.fail_after(SECONDS_MAX):
        async with trioserve.open_engine(
            str(tiny_model("llama")), tensor_parallel_size=2, dtype="float32", kv_cache_memory=0.01, threads=2
        ) as engine:
            expected = await generate(engine, "The sea")
            with pytest.raises(InvalidRequest, match="a model in ranks cannot release its KV cache alone"):
                await engine.sleep(1)
            assert engine.ready
            children = set(rank_pids())
            assert len(children) >= 2
            await engine.sleep(2)
            assert not children & set(rank_pids())
            await engine.wake_up()
            assert await generate(engine, "The sea") == expected


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc to measure resident memory")
def test_sleeping_engine_frees_memory(tmp_path: Path) -> None:
    """Memory is measured in a separate process, because the test process allocates memory for other tests."""
    ran = subprocess.run(
        [sys.executable, str(MEMORY_SCRIPT), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    mebibytes = dict(zip(("open", "level 1", "awake", "level 2", "again"), map(float, ran.stdout.split()), strict=True))
    cache, weights = 128, 130
    assert mebibytes["open"] - mebibytes["level 1"] > 0.9 * cache, mebibytes
    assert mebibytes["awake"] > mebibytes["open"] - 0.1 * cache, mebibytes
    assert mebibytes["open"] - mebibytes["level 2"] > 0.9 * (cache + weights), mebibytes
    assert mebibytes["again"] > mebibytes["open"] - 0.1 * (cache + weights), mebibytes
