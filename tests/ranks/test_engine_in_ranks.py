"""Tests of an engine whose model is in ranks: it generates the same output as one process, and survives lost ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import save_file

import trioserve
from trioserve import SamplingParams
from trioserve.contracts.errors import EngineFault, StartupError
from trioserve.contracts.structured_output import SchemaKind, StructuredOutput

pytestmark = pytest.mark.slow

SECONDS_MAX = 120.0
PROMPTS = ["Once upon a time", "One, two, three", "The sea"]


@asynccontextmanager
async def opened(path: Path, ranks: int, **options: Any) -> AsyncIterator[Any]:
    with trio.fail_after(SECONDS_MAX):
        async with trioserve.open_engine(
            str(path),
            tensor_parallel_size=ranks,
            dtype="float32",
            kv_cache_memory=0.01,
            threads=2,
            **options,
        ) as engine:
            yield engine


async def generate(engine: Any, prompt: str, sampling: SamplingParams) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    async with engine.generate(prompt, sampling) as stream:
        async for delta in stream:
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs or ()]
    return tokens, logprobs


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, seed=6, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, ignore_eos=True
    ),
    "logprobs": SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=3, ignore_eos=True),
    "regex": SamplingParams(
        temperature=0.9,
        seed=8,
        max_tokens=24,
        structured=StructuredOutput(kind=SchemaKind.REGEX, source="[a-z ]{12,60}"),
    ),
    "bias": SamplingParams(temperature=0.0, max_tokens=24, logit_bias={40: 5.0}, min_tokens=10),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
async def test_ranks_generate_the_same_output_as_one_process(kind: str, tiny_model: Callable[[str], Path]) -> None:
    expected: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for ranks in (1, 2):
        async with opened(tiny_model(kind), ranks) as engine:
            found: dict[tuple[str, str], tuple[list[int], list[float]]] = {}

            async def ask(prompt: str, name: str, engine: Any = engine, found: Any = found) -> None:
                found[prompt, name] = await generate(engine, prompt, SAMPLINGS[name])

            async with trio.open_nursery() as nursery:
                for prompt in PROMPTS:
                    for name in SAMPLINGS:
                        nursery.start_soon(ask, prompt, name)
        expected = expected or found
        for asked, (tokens, logprobs) in expected.items():
            assert found[asked][0] == tokens
            assert found[asked][1] == pytest.approx(logprobs, abs=1e-4)


async def test_draft_tokens_of_one_rank_are_verified_by_all_ranks(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("llama")
    sampling = SAMPLINGS["greedy"]
    async with opened(path, 1) as engine:
        expected, _ = await generate(engine, PROMPTS[0], sampling)
    async with opened(path, 2, speculative_model=str(path), speculative_tokens=3) as engine:
        assert await generate(engine, PROMPTS[0], sampling) == (expected, [])
        assert engine.stats().accepted_tokens_total > 5


def write_adapter(path: Path, model: Path) -> None:
    """Write an adapter in the format of peft, with every matrix."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(3)
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.3
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    modules = [name.split(".")[1] for name in shapes]
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


async def test_an_adapter_is_divided_with_the_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_model("llama")
    write_adapter(tmp_path / "adapter", path)
    found = []
    for ranks in (1, 2):
        async with opened(path, ranks, lora_modules=(f"own={tmp_path / 'adapter'}",)) as engine:
            tokens: list[int] = []
            async with engine.generate(PROMPTS[0], SAMPLINGS["greedy"], adapter="own") as stream:
                async for delta in stream:
                    tokens += delta.token_ids
            plain, _ = await generate(engine, PROMPTS[0], SAMPLINGS["greedy"])
            assert tokens != plain
            found.append((tokens, plain))
            await engine.unload_adapter("own")
    assert found[0] == found[1]


async def test_stream_resumes_after_a_rank_is_killed(
    tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    async with opened(tiny_model("llama"), 2) as engine:
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


async def test_engine_fault_without_restarts_names_the_lost_rank(
    tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    with pytest.raises(EngineFault, match=r"rank \d \(process \d+\) was killed by SIGKILL"):
        async with opened(tiny_model("llama"), 2, engine_restarts=0):
            os.kill(rank_pids()[0], signal.SIGKILL)
            await trio.sleep_forever()


async def test_step_seconds_of_each_rank_are_a_metric(tiny_model: Callable[[str], Path]) -> None:
    async with opened(tiny_model("llama"), 2) as engine:
        await generate(engine, PROMPTS[0], SAMPLINGS["greedy"])
        page = engine.metrics.expose().decode()
    for rank in ("0", "1"):
        steps, together = (
            float(next(line for line in page.splitlines() if name in line and f'rank="{rank}"' in line).split()[-1])
            for name in ("trioserve:rank_step_seconds_total{", "trioserve:rank_together_seconds_total{")
        )
        assert steps > together > 0


async def test_client_that_leaves_an_engine_in_ranks_frees_its_blocks(tiny_model: Callable[[str], Path]) -> None:
    async with opened(tiny_model("llama"), 2, enable_prefix_caching=False) as engine:
        free = engine.stats().blocks_free
        for _ in range(10):
            with trio.CancelScope() as scope:
                async with engine.generate(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True)) as stream:
                    async for _delta in stream:
                        scope.cancel()
        await generate(engine, "x", SamplingParams(max_tokens=1))
        assert engine.stats().blocks_free == free


async def test_more_ranks_than_shards_are_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(StartupError, match="rank"):
        async with opened(tiny_model("llama"), 60):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("options", [{"ranks": 2}, {"ranks": 1, "pipeline_parallel_size": 2}], ids=["parts", "stages"])
async def test_ranks_on_cuda_without_a_gpu_end_with_one_sentence(
    tiny_model: Callable[[str], Path], options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        StartupError, match=r"^device is cuda, but torch cannot use a GPU here: .*; or use device cpu or auto$"
    ):
        async with opened(tiny_model("llama"), device="cuda", **options):
            pass
    assert "Traceback" not in capfd.readouterr().err
