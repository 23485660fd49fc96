"""Tests of an engine whose model is divided into stages of one or several ranks.

The output and the effect of aborts must be the same as with one process.
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

import trioserve
from trioserve import SamplingParams, StructuredOutput
from trioserve.contracts.errors import EngineFault, StartupError
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore

pytestmark = pytest.mark.slow

SECONDS_MAX = 120.0
PROMPTS = ["Once upon a time", "One, two, three", "The sea"]
LONG = "The sea is large and the ships on it are small, and each of them has a name, and each of them has a way. "
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, seed=6, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True
    ),
    "logprobs": SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=3, ignore_eos=True),
    "regex": SamplingParams(
        temperature=0.9, seed=9, max_tokens=24, structured=StructuredOutput.regex("(ab|cd)+x?[0-9]{6}")
    ),
    "prompt logprobs": SamplingParams(temperature=0.8, seed=8, max_tokens=4, prompt_logprobs=2, ignore_eos=True),
}


@asynccontextmanager
async def opened(path: Path, stages: int, ranks: int = 1, **options: Any) -> AsyncIterator[Any]:
    with trio.fail_after(SECONDS_MAX):
        async with trioserve.open_engine(
            str(path),
            pipeline_parallel_size=stages,
            tensor_parallel_size=ranks,
            **{"dtype": "float32", "kv_cache_memory": 0.01, "threads": 1, **options},
        ) as engine:
            yield engine


async def generate(engine: Any, prompt: str, sampling: SamplingParams) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async with engine.generate(prompt, sampling) as stream:
        async for delta in stream:
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs or ()]
        logprobs += [entry.logprob for entry in stream.prompt_logprobs or () if entry is not None]
    return tokens, logprobs


async def generate_all(engine: Any) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    found: dict[tuple[str, str], tuple[list[int], list[float]]] = {}

    async def ask(prompt: str, name: str) -> None:
        found[prompt, name] = await generate(engine, prompt, SAMPLINGS[name])

    async with trio.open_nursery() as nursery:
        for prompt in (*PROMPTS, LONG):
            for name in SAMPLINGS:
                nursery.start_soon(ask, prompt, name)
    return found


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("llama", (2, 2), {}),
        ("llama-tied", (2, 1), {}),
        ("qwen3-moe", (2, 1), {}),
        ("lfm2", (2, 1), {}),
        ("falcon-h1", (2, 1), {}),
        ("llama-tied", (2, 1), {"cpu_kernels": "torch"}),
        ("qwen3-moe", (2, 2), {"cpu_kernels": "torch"}),
        ("qwen3-moe", (2, 2), {"enable_expert_parallel": True}),
        ("llama", (2, 1), {"overlap_steps": True}),
        ("falcon-h1", (2, 1), {"overlap_steps": True}),
    ],
)
async def test_stages_generate_the_same_output_as_one_process(
    kind: str, shape: tuple[int, int], options: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model(kind)
    # The small token limit lets steps contain parts of prompts together with decodes.
    options = {"block_size": 4, "max_num_batched_tokens": 64, **options}
    whole = {name: value for name, value in options.items() if name not in ("enable_expert_parallel", "overlap_steps")}
    async with opened(path, 1, **whole) as engine:
        expected = await generate_all(engine)
    async with opened(path, *shape, **options) as engine:
        found = await generate_all(engine)
        again = await generate_all(engine)  # The second run hits the prefix cache.
        stats = engine.stats()
        assert stats.blocks_used == 0
        assert stats.prefix_hit_tokens_total > 0
    for asked, (tokens, logprobs) in expected.items():
        for other_tokens, other_logprobs in (found[asked], again[asked]):
            assert other_tokens == tokens
            assert other_logprobs == pytest.approx(logprobs, abs=1e-4)


async def test_two_stages_compute_two_steps_at_a_time(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[set[str], set[str]]] = []
    schedule_ahead = EngineCore.schedule_ahead

    def noted(core: EngineCore, now: float) -> StepPlan | None:
        in_flight = {chunk.request.id for chunk in core.flights.last.chunks}
        plan = schedule_ahead(core, now)
        if plan is not None:
            planned.append((in_flight, {chunk.request.id for chunk in plan.chunks}))
        return plan

    monkeypatch.setattr(EngineCore, "schedule_ahead", noted)
    async with opened(tiny_model("llama"), 2, overlap_steps=True) as engine:
        await generate_all(engine)
    assert len(planned) > 20
    assert not any(in_flight & behind for in_flight, behind in planned)
    assert max(min(len(in_flight), len(behind)) for in_flight, behind in planned) >= 5


@pytest.mark.parametrize("overlap_steps", [False, True])
async def test_preempted_sequences_generate_the_same_tokens(
    overlap_steps: bool, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model("llama")
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    found = []
    for stages in (1, 2):
        small = {"kv_cache_memory": 2**17 / 2**30, "block_size": 4, "max_model_len": 100}
        async with opened(path, stages, overlap_steps=overlap_steps and stages == 2, **small) as engine:
            tokens: dict[str, list[int]] = {}

            async def ask(prompt: str, engine: Any = engine, tokens: Any = tokens) -> None:
                tokens[prompt], _ = await generate(engine, prompt, long)

            async with trio.open_nursery() as nursery:
                for index in range(8):
                    nursery.start_soon(ask, f"{index} {PROMPTS[index % 3]}")
            assert engine.stats().preemptions_total > 0
            found.append(tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize(("shape", "overlap_steps"), [((2, 1), False), ((2, 2), False), ((2, 1), True)])
async def test_client_that_leaves_an_engine_in_stages_frees_its_blocks(
    shape: tuple[int, int], overlap_steps: bool, tiny_model: Callable[[str], Path]
) -> None:
    async with opened(tiny_model("llama"), *shape, enable_prefix_caching=False, overlap_steps=overlap_steps) as engine:
        expected = await generate(engine, PROMPTS[0], SAMPLINGS["sampled"])
        free = engine.stats().blocks_free
        for leaves_at in range(10):
            with trio.CancelScope() as scope:
                async with engine.generate(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True)) as stream:
                    if leaves_at % 3 == 0:
                        scope.cancel()  # The request is cancelled in the queue or in prefill.
                    async for _delta in stream:
                        scope.cancel()
            if leaves_at % 2:
                assert await generate(engine, PROMPTS[0], SAMPLINGS["sampled"]) == expected
        await generate(engine, "x", SamplingParams(max_tokens=1))
        assert engine.stats().blocks_free == free
        assert await generate(engine, PROMPTS[0], SAMPLINGS["sampled"]) == expected


async def signal_in_a_stream(engine: Any, pid: int, number: int) -> None:
    async with engine.generate(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)) as stream:
        async for _delta in stream:
            os.kill(pid, number)
            await trio.sleep_forever()


@pytest.mark.parametrize("killed", [0, 1])
async def test_a_stage_that_is_killed_is_named(
    killed: int, tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    with pytest.raises(EngineFault, match=rf"rank {killed} \(process \d+\) was killed by SIGKILL"):
        async with opened(tiny_model("llama"), 2, engine_restarts=0) as engine:
            await signal_in_a_stream(engine, sorted(rank_pids())[killed], signal.SIGKILL)


async def test_stream_resumes_after_a_stage_is_killed(
    tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    async with opened(tiny_model("llama-tied"), 2) as engine:
        expected, _ = await generate(engine, PROMPTS[0], sampling)
        tokens: list[int] = []
        async with engine.generate(PROMPTS[0], sampling) as stream:
            async for delta in stream:
                if len(tokens) < 10 <= len(tokens) + len(delta.token_ids):
                    os.kill(rank_pids()[1], signal.SIGKILL)
                tokens += delta.token_ids
        assert tokens == expected
        assert len(rank_pids()) == 2
        assert engine.stats().blocks_used == 0


async def test_a_stage_that_hangs_is_named(
    tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    with pytest.raises(EngineFault, match=r"rank 0 \(process \d+\) has not answered"):
        async with opened(tiny_model("llama"), 2, engine_restarts=0, step_timeout=2.0) as engine:
            await signal_in_a_stream(engine, sorted(rank_pids())[0], signal.SIGSTOP)


async def test_more_stages_than_a_model_has_layers_are_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(StartupError, match="60 stages cannot share"):
        async with opened(tiny_model("llama"), 60):
            pass


@pytest.mark.parametrize(("first", "second"), [((2, 1), (1, 1)), ((1, 1), (2, 2))])
async def test_engines_with_different_stages_exchange_kv(
    first: tuple[int, int], second: tuple[int, int], tiny_model: Callable[[str], Path]
) -> None:
    path, transfer = tiny_model("llama"), {"kv_transfer_config": {"kv_connector": "loopback"}}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    async with opened(path, *first, **transfer) as prefill, opened(path, *second, **transfer) as decode:
        one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        async with prefill.generate(LONG, one_token, kv_transfer=KVTransferParams(do_remote_decode=True)) as stream:
            params = [delta async for delta in stream][-1].kv_transfer
            tokens: list[int] = []
            async with decode.generate(LONG, greedy, kv_transfer=params) as resumed:
                async for delta in resumed:
                    tokens += delta.token_ids
            assert decode.stats().loaded_tokens_total == params.remote_num_tokens - 1
        assert tokens == (await generate(prefill, LONG, greedy))[0]
