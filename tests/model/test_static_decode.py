"""Tests that decode steps of fixed shape give the results of other steps, for any padding, arrivals and ends.

Tests run on the CPU, where plain kernels act as fused kernels. Reads and writes are those of a device, and only the
recording is missing. tests/kernels/triton tests the recording.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trioserve.bench.inside.adapter_bench import random_adapter
from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import GivenRows
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.number_formats import Dtype, Values
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import static_decode
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step.static_decode import PROMPT_CHUNKS_MAX, StaticDecode, prompt_row_sizes, row_sizes
from trioserve.model.torch_step.static_inputs import StaticInputs, StaticRows, StepSize
from trioserve_kernels import reference_fused
from trioserve_kernels.paged import SPLIT_TOKENS

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
)


@pytest.fixture
def static_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make runners use fused kernels, and collect the number of decodes of each step of fixed shape without prompts."""
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
    sizes: list[int] = []
    fill = StaticInputs.fill

    def noted(self: StaticInputs, rows: StaticRows, size: StepSize, awaited: Any) -> int:
        if rows.count and not size.chunks:
            sizes.append(rows.count)
        return fill(self, rows, size, awaited)

    monkeypatch.setattr(StaticInputs, "fill", noted)
    return sizes


@pytest.fixture
def mixed_sizes(static_sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect used and available rows of each step of fixed shape with prompts."""
    sizes: list[tuple[int, int]] = []
    fill = StaticInputs.fill

    def noted(self: StaticInputs, rows: StaticRows, size: StepSize, awaited: Any) -> int:
        if rows.count and size.chunks:
            sizes.append((rows.count, size.rows))
        return fill(self, rows, size, awaited)

    monkeypatch.setattr(StaticInputs, "fill", noted)
    return sizes


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(5, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def add(driver: Any, count: int) -> list[str]:
    names = [f"r{index}" for index in range(count)]
    for index, name in enumerate(names):
        driver.add(name, prompt_of(1 + 5 * index, index), SAMPLINGS[index % len(SAMPLINGS)], seed=index)
    return names


def conversation(driver: Any) -> dict[str, list[int]]:
    """Run prompts, then decodes of 1 to 9 rows. One request is preempted and returns in other blocks, another one ends
    in a middle row, and the order of the rows changes.
    """
    names = add(driver, 9)
    driver.generate(names[:1], 3)
    driver.generate(names[:2], 2)
    driver.generate(names, 6)  # longer than a block of four tokens
    driver.forget(names[4])
    driver.generate([*names[:4], *names[5:]], 2)
    driver.generate(names, 3)
    driver.generate([names[7], *names[:3]], 4)
    return driver.tokens


@pytest.mark.parametrize(
    "kind",
    (
        "llama",
        "mistral",
        "qwen2-sliding",
        "qwen3",
        "gemma3n",
        "gemma4",
        "gemma4-inputs",
        "gemma4-moe",
        "hunyuan-dense",
        "mimo-v2-flash",
        "qwen2-moe",
        "gpt-oss",
        "glm4-moe",
        "deepseek-v2",
        "minicpm3",
        "lfm2",
        "granite-hybrid-moe",
        "falcon-h1",
        "mamba2",
        "zamba2-adapted",
        "minimax",
        "jamba",
        "nemotron-h-moe",
        "qwen3-next",
        "llama4",
    ),
)
def test_steps_of_fixed_shape_give_the_responses_of_other_steps(
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps use float32, where only the order of sums differs. The cache is full of NaN."""
    path = tiny_checkpoint(kind)
    got = conversation(step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels="torch")))
    assert set(static_sizes) == {1, 2, 4, 8, 9}
    del static_sizes[:]
    monkeypatch.undo()
    wanted = conversation(step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels="torch"), seed=1))
    assert not static_sizes
    assert got == wanted


def test_padding_rows_write_only_into_the_spare_block(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, static_sizes: list[int]
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch", block_count=40)
    driver = step_driver.StepDriver(runner)
    names = add(driver, 5)
    for written, steps in ((55, {name: driver.left(name) for name in names}), (5, dict.fromkeys(names, 1))):
        for pages in runner.storage.pages:
            pages[40] = float("nan")
        before = [pages.clone() for pages in runner.storage.pages]
        driver.step(steps)
        for old, new in zip(before, runner.storage.pages, strict=True):
            changed = (old.view(torch.int32) != new.view(torch.int32)).flatten(2).any(-1)
            assert changed[:40].sum() == written
            assert changed[40].sum() == 1  # The padding rows share one slot of the spare block.
            assert changed.shape[0] == 41
    assert static_sizes == [5]


@pytest.mark.parametrize(
    "changes",
    (
        {"logprobs": 3},
        {"logit_bias": {7: 9.0, 11: -100.0}},
        {"min_tokens": 5},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.7},
    ),
    ids=lambda changes: next(iter(changes)),
)
def test_rows_that_need_more_than_a_token_use_steps_of_fixed_shape(
    changes: dict[str, Any],
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step has a plain row and two rows with further options. One of the two is preempted and changes its row."""

    def said() -> tuple[dict[str, list[int]], list[Any]]:
        driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch"))
        driver.add("plain", [5], SAMPLINGS[0])
        driver.add("more", [5, 6, 5], SamplingParams(temperature=0.0, **changes), stop_token_ids=range(0, 320, 2))
        driver.add("drawn", [5, 6, 9], SamplingParams(temperature=2.0, **changes), seed=3)
        logprobs = []
        names = ["plain", "more", "drawn"]
        for step in range(9):
            if step == 4:
                driver.forget("more")
                names = ["drawn", "more", "plain"]
            result = driver.step({name: driver.left(name) for name in names})
            assert not result.errors
            logprobs.append(result.logprobs)
        return driver.tokens, logprobs

    tokens, logprobs = said()
    assert static_sizes == [3] * 7  # not the prompts, and not the return of the preempted request
    monkeypatch.undo()
    wanted_tokens, wanted_logprobs = said()
    assert tokens == wanted_tokens
    for got, wanted in zip(logprobs, wanted_logprobs, strict=True):
        assert got.keys() == wanted.keys()
        for name, entry in got.items():
            assert entry.logprob == pytest.approx(wanted[name].logprob, abs=1e-5)
            assert [token for token, _ in entry.top] == [token for token, _ in wanted[name].top]


def test_prompt_logprobs_use_no_step_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, static_sizes: list[int]
) -> None:
    driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch"))
    driver.add("a", [5, 6], SamplingParams(temperature=0.0, prompt_logprobs=0))
    driver.step({"a": 2})
    driver.step({"a": 1})
    assert static_sizes == []


@pytest.mark.parametrize("kind", ("llama", "qwen2-sliding", "gemma3n", "qwen3-moe", "deepseek-v2"))
def test_prompts_beside_decodes_use_steps_of_fixed_shape(
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    mixed_sizes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use prompts in pieces and whole, rows that sample nothing, drafts, penalties and logprobs."""

    def said() -> tuple[dict[str, list[int]], list[Any]]:
        driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint(kind), cpu_kernels="torch"))
        for index, length in enumerate((5, 90, 40, 3, 150)):
            sampling = (
                SamplingParams(temperature=0.0, logprobs=1),
                SamplingParams(temperature=1.0, repetition_penalty=1.3),
                SamplingParams(temperature=0.0, logit_bias={9: 2.0}),
            )[index % 3]
            driver.add(f"r{index}", prompt_of(length, index), sampling, seed=index)
        logprobs = []
        for counts, drafts in (
            ({"r0": 5, "r1": 40}, {}),
            ({"r1": 1, "r0": 1, "r3": 2}, {}),
            ({"r0": 1, "r2": 40, "r1": 49, "r3": 1}, {}),
            ({"r4": 100, "r2": 1, "r0": 1}, {"r2": (7, 9), "r0": (5,)}),
            ({"r3": 1, "r4": 50, "r1": 1}, {}),
            ({"r4": 1, "r3": 1, "r1": 1}, {}),
        ):
            result = driver.step(counts, drafts)
            assert not result.errors
            logprobs.append({name: entry.logprob for name, entry in result.logprobs.items()})
        return driver.tokens, logprobs

    tokens, logprobs = said()
    assert mixed_sizes == [(45, 64), (4, 64), (91, 128), (105, 128), (52, 64)]
    monkeypatch.undo()
    wanted_tokens, wanted_logprobs = said()
    assert tokens == wanted_tokens
    for got, wanted in zip(logprobs, wanted_logprobs, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)


def test_positions_after_an_image_are_those_of_other_steps(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    mixed_sizes: list[tuple[int, int]],
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).numpy()
    given = (GivenRows(3, 6, bytes(16), values, (2, 3)),)

    def said(given: tuple[GivenRows, ...]) -> list[float]:
        driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("qwen2.5-vl"), cpu_kernels="torch"))
        for name in ("a", "b"):
            driver.add(name, prompt_of(40, 1), SamplingParams(temperature=0.0, logprobs=1), given=given)
        found = []
        for counts, drafts in (
            ({"a": 20}, {}),
            ({"a": 20, "b": 9}, {}),
            ({"a": 1, "b": 31}, {}),
            ({"a": 1, "b": 1}, {"b": (7, 9)}),
            ({"a": 1, "b": 1}, {}),
        ):
            result = driver.step(counts, drafts)
            found += [entry.logprob for entry in result.logprobs.values()]
            found += [entry.logprob for entries in result.draft_logprobs.values() for entry in entries]
        return found

    logprobs = said(given)
    assert (mixed_sizes, static_sizes) == ([(32, 64)], [4, 2])
    monkeypatch.undo()
    assert logprobs == pytest.approx(said(given), abs=1e-5)
    plain = said((GivenRows(3, 6, bytes(16), values),))
    assert logprobs != pytest.approx(plain, abs=1e-3)


def test_last_token_of_a_prompt_counts_as_a_decode(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    mixed_sizes: list[tuple[int, int]],
) -> None:
    driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch"))
    driver.add("a", [5, 6, 7])
    driver.add("b", [5, 6, 7])
    driver.step({"a": 3, "b": 1})
    assert (static_sizes, mixed_sizes) == ([], [(4, 64)])
    driver.step({"a": 1, "b": 1})  # The row of b samples nothing.
    driver.step({"a": 1, "b": 1})
    assert (static_sizes, mixed_sizes) == ([2, 2], [(4, 64)])


def test_more_prompts_than_prepared_use_no_step_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, mixed_sizes: list[tuple[int, int]]
) -> None:
    driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch"))
    names = [f"r{index}" for index in range(PROMPT_CHUNKS_MAX + 1)]
    for index, name in enumerate(names):
        driver.add(name, prompt_of(4, index))
    driver.step(dict.fromkeys(names, 2))
    assert mixed_sizes == []
    driver.step(dict.fromkeys(names[1:], 2))
    assert mixed_sizes == [(2 * PROMPT_CHUNKS_MAX, 64)]


def test_without_mixed_graphs_only_decodes_use_steps_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    mixed_sizes: list[tuple[int, int]],
) -> None:
    settings = ModelSettings(device="cpu", cpu_kernels="torch", kv_cache_bytes=2**20, mixed_graphs=False)
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
    runner.allocate_kv(20)
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    driver.generate(["a"], 3)
    assert (static_sizes, mixed_sizes) == ([1, 1], [])


def test_recording_stops_after_a_time_and_larger_steps_serve_smaller_ones(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    mixed_sizes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each recording takes 25 s by the clock of this test."""
    caplog.set_level("INFO")
    prepare = StaticDecode.__init__
    seconds = itertools.count(step=25)
    monkeypatch.setattr(static_decode, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))

    def with_recorder(self: StaticDecode, *arguments: Any, **options: Any) -> None:
        prepare(self, *arguments, **options | {"record": lambda compute: lambda: compute()})

    monkeypatch.setattr(StaticDecode, "__init__", with_recorder)
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch", block_count=60)
    runner.warm_up()
    assert "recorded 3 steps in 75.0 s" in caplog.text
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    driver.step({"a": 3})
    assert mixed_sizes[-1] == (3, 128)


def test_draft_tokens_are_rows_of_steps_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use wrong drafts, right drafts, and rows with penalties, which count the draft tokens before a row."""
    samplings = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6),
        SamplingParams(temperature=1.0, logprobs=1, presence_penalty=1.5),
    )

    def prepared() -> Any:
        driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch"))
        for index, sampling in enumerate(samplings):
            driver.add(f"r{index}", prompt_of(4 + index, index), sampling, seed=index)
        driver.generate(["r0", "r1", "r2"], 1)
        return driver

    plain = prepared()
    plain.generate(["r0", "r1", "r2"], 12)
    wanted = plain.tokens

    def generated() -> Any:
        driver = prepared()
        names = ["r0", "r1", "r2"]
        for step in range(4):
            drafts = {}
            for index, name in enumerate(names):
                known = len(driver.tokens[name])
                right = wanted[name][known : known + (step + index) % 4]
                drafts[name] = [*right, 5, 5] if step % 2 else right  # in every second step, the end is wrong
            result = driver.step(dict.fromkeys(names, 1), drafts)
            assert not result.errors
            assert "r2" in result.logprobs
        return driver.tokens

    del static_sizes[:]
    tokens = generated()
    assert len(static_sizes) == 4
    assert max(static_sizes) > 8
    for name, said in tokens.items():
        assert said == wanted[name][: len(said)]
        assert len(said) > len(prompt_of(4, 0)) + 4
    monkeypatch.undo()
    assert generated() == tokens


def test_only_steps_with_at_most_the_configured_draft_tokens_have_a_fixed_shape(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most two draft tokens are configured. In the first step, each of three sequences has two draft tokens. In the
    second step, one sequence has three.
    """

    def said() -> dict[str, list[int]]:
        options = {"cpu_kernels": "torch", "max_num_seqs": 3, "draft_tokens": 2}
        driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), **options))
        names = ["a", "b", "c"]
        for index, name in enumerate(names):
            driver.add(name, prompt_of(3, index), seed=index)
        driver.generate(names, 1)
        for last in ((5, 6), (5, 6, 7)):
            result = driver.step(dict.fromkeys(names, 1), {"a": (5, 6), "b": (7, 8), "c": last})
            assert not result.errors
        driver.generate(names, 2)
        return driver.tokens

    tokens = said()
    assert static_sizes == [9, 3, 3]
    monkeypatch.undo()
    assert said() == tokens


@pytest.mark.parametrize("kind", ("llama", "qwen2-sliding", "gemma3n", "mixtral", "falcon-h1"))
def test_adapters_use_steps_of_fixed_shape(
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use prompts and decodes, with and without adapters of different ranks. Adapters change between steps."""
    shapes: list[StepSize] = []
    fill = StaticInputs.fill

    def noted(self: StaticInputs, rows: StaticRows, size: StepSize, awaited: Any) -> int:
        shapes.append(size)
        return fill(self, rows, size, awaited)

    monkeypatch.setattr(StaticInputs, "fill", noted)
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")

    def said() -> tuple[dict[str, list[int]], list[Any]]:
        options = {"cpu_kernels": "torch", "max_num_batched_tokens": 64, "max_lora_graph_rank": 12}
        runner = step_driver.load_runner(tiny_checkpoint(kind), **options)
        driver = step_driver.StepDriver(runner)
        logprobs = []

        def load(id: int, rank: int) -> AdapterRef:
            weights = random_adapter(runner.config, "float32", rank, targets[:: 1 + id % 2], id, 0.2)
            runner.add_adapter(AdapterId(id), weights)
            return AdapterRef(AdapterId(id), weights.digest)

        def add(name: str, adapter: AdapterRef | None) -> None:
            driver.add(name, prompt_of(4, 1), SamplingParams(temperature=0.0, logprobs=1), adapter=adapter)

        def step(*names: str) -> None:
            result = driver.step({name: driver.left(name) for name in names})
            assert not result.errors
            logprobs.append({name: entry.logprob for name, entry in result.logprobs.items()})

        add("plain", None)
        add("a", load(1, 3))
        add("b", load(2, 8))
        step("plain", "a")
        step("plain", "b", "a")
        step("a", "plain", "b")
        step("plain")
        runner.remove_adapter(AdapterId(1))
        driver.forget("a")
        add("c", load(3, 5))
        step("c")  # takes the columns of b
        step("c", "b")  # 13 columns in all
        step("b", "plain")
        add("d", load(4, 4))
        step("d", "b")
        step("d", "c", "plain")
        step("b", "d", "plain")
        return driver.tokens, logprobs

    tokens, logprobs = said()
    has_prompts = kind != "falcon-h1"
    kinds = [(bool(size.chunks), size.has_adapters) for size in shapes]
    prompts, decodes, plain = (True, True), (False, True), (False, False)
    first = [prompts, prompts] if has_prompts else []
    third = [prompts] if has_prompts else []
    assert kinds == [*first, decodes, plain, *third, decodes, *third, decodes, decodes]
    monkeypatch.undo()
    wanted_tokens, wanted_logprobs = said()
    assert tokens == wanted_tokens
    for got, wanted in zip(logprobs, wanted_logprobs, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)


def test_adapter_of_a_higher_rank_than_prepared_uses_no_step_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for graph_rank, expected in ((8, [3, 3]), (7, []), (0, [])):
        del static_sizes[:]
        caplog.clear()
        path = tiny_checkpoint("llama")
        runner = step_driver.load_runner(path, cpu_kernels="torch", max_lora_graph_rank=graph_rank)
        weights = random_adapter(runner.config, "float32", 8, ("q_proj",), 1)
        runner.add_adapter(AdapterId(1), weights)
        driver = step_driver.StepDriver(runner)
        names = ["a", "b", "c"]
        for name in names:
            driver.add(name, [5, 6], adapter=AdapterRef(AdapterId(1), weights.digest))
        driver.generate(names, 3)
        assert static_sizes == expected
        assert ("rank 8, and --max-lora-graph-rank is 7" in caplog.text) == (graph_rank == 7)


def test_more_rows_or_longer_contexts_than_prepared_use_no_step_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, static_sizes: list[int]
) -> None:
    settings = ModelSettings(
        device="cpu",
        dtype="float32",
        cpu_kernels="torch",
        block_size=4,
        kv_cache_bytes=2**20,
        max_num_seqs=2,
        context_tokens_max=6,
    )
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
    runner.allocate_kv(20)
    driver = step_driver.StepDriver(runner)
    names = [*add(driver, 1), "b", "c"]
    driver.add("b", [5, 6])
    driver.add("c", [5, 6])
    driver.step({name: driver.left(name) for name in names})
    driver.step(dict.fromkeys(names, 1))
    assert static_sizes == []
    for _ in range(3):
        driver.step(dict.fromkeys(names[:2], 1))
    assert static_sizes == [2, 2, 2]  # Contexts have up to 6 tokens.
    driver.step(dict.fromkeys(names[:2], 1))
    assert static_sizes == [2, 2, 2]
    driver.step({"c": 1})
    assert static_sizes == [2, 2, 2, 1]


def test_row_with_nan_fails_only_its_own_request(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, static_sizes: list[int]
) -> None:
    def damaged(tensor: StoredTensor) -> StoredTensor:
        def read(dtype: Dtype) -> Values:
            values = tensor.read(dtype)
            values[33] = float("nan")
            return values

        return tensor._replace(read=read, rows=None) if tensor.name == "embed.weight" else tensor

    class Damaged:
        vision = audio = encoder = None

        def __init__(self, checkpoint: Any) -> None:
            self.config, self.weight_bytes = checkpoint.config, checkpoint.weight_bytes
            self.tensors = lambda: map(damaged, checkpoint.tensors())

    settings = ModelSettings(device="cpu", dtype="float32", cpu_kernels="torch", block_size=4, kv_cache_bytes=2**20)
    runner = ModelRunner.load(Damaged(open_checkpoint(tiny_checkpoint("llama"))), settings)
    runner.allocate_kv(30)
    driver = step_driver.StepDriver(runner)
    names = add(driver, 3)
    driver.generate(names, 2)
    driver.forget(names[1], tokens=[*driver.tokens[names[1]], 33])
    while driver.left(names[1]) > 1:
        driver.step({names[1]: 1})
    result = driver.step(dict.fromkeys(names, 1))
    assert static_sizes[-1] == 3
    assert list(result.errors) == [names[1]]
    assert [token is None for token in result.token_ids] == [False, True, False]


def test_abandoned_step_is_not_started(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, static_sizes: list[int]
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch")
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    driver.step({"a": 3})
    plan = StepPlan(1, (driver.chunk("a", 1),), 1)
    assert runner.execute(plan, IsAbandoned(0)) is None
    assert static_sizes == []
    assert runner.execute(plan) is not None
    assert static_sizes == [1]


def test_enforce_eager_disables_steps_of_fixed_shape(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, static_sizes: list[int]
) -> None:
    settings = ModelSettings(device="cpu", cpu_kernels="torch", kv_cache_bytes=2**20, enforce_eager=True)
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
    runner.allocate_kv(20)
    assert runner.storage is not None
    assert runner.storage.pages[0].shape[0] == 20
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    driver.generate(["a"], 3)
    assert static_sizes == []


def test_every_size_of_a_fixed_step_is_recorded_largest_first_and_replayed(
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay in this test computes the step again. Recording writes only the spare block."""
    recorded, replayed = [], []

    class Recorder:
        def __call__(self, compute: Callable[[], Any]) -> static_decode.Replay:
            rows = len(compute())
            recorded.append(rows)
            assert all(pages[:30].isnan().all() for pages in runner.storage.pages)

            def replay() -> None:
                replayed.append(rows)
                compute()

            return replay

    prepare = StaticDecode.__init__

    def with_recorder(self: StaticDecode, *arguments: Any, **options: Any) -> None:
        prepare(self, *arguments, **options | {"record": Recorder()})

    monkeypatch.setattr(StaticDecode, "__init__", with_recorder)
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch", block_count=30)
    runner.warm_up()
    assert recorded == sorted((*row_sizes(64), *prompt_row_sizes(512)), reverse=True)
    del replayed[:]
    driver = step_driver.StepDriver(runner)
    names = add(driver, 3)
    driver.generate(names, 4)
    assert replayed == [64, 4, 4, 4]
    monkeypatch.undo()
    plain = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch"))
    add(plain, 3)
    plain.generate(names, 4)
    assert driver.tokens == plain.tokens


@pytest.mark.parametrize("enforce_eager", (False, True), ids=("static", "eager"))
@pytest.mark.parametrize("block_count, context_tokens_max", ((1, 1), (1, 2), (1, 3), (2, None), (33, 130), (33, None)))
def test_warm_up_stays_within_the_limits_and_reads_nothing_unwritten(
    block_count: int,
    context_tokens_max: int | None,
    enforce_eager: bool,
    tiny_checkpoint: Callable[..., Path],
    static_sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is full of NaN, so a decode that reads an unwritten slot would fail."""
    settings = ModelSettings(
        device="cpu",
        dtype="float32",
        cpu_kernels="torch",
        block_size=4,
        kv_cache_bytes=2**20,
        max_num_seqs=1,
        context_tokens_max=context_tokens_max,
        enforce_eager=enforce_eager,
    )
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
    runner.allocate_kv(block_count)
    for pages in runner.storage.pages:
        pages[:] = float("nan")
    longest = 0
    launch = ModelRunner.launch

    def watched(self: ModelRunner, plan: StepPlan, is_abandoned: IsAbandoned) -> Any:
        nonlocal longest
        longest = max(longest, *(chunk.start + chunk.count for chunk in plan.chunks))
        result = launch(self, plan, is_abandoned)()
        assert result is not None
        assert not result.errors
        return lambda: result

    monkeypatch.setattr(ModelRunner, "launch", watched)
    runner.warm_up()
    assert longest == min(SPLIT_TOKENS + 1, 4 * block_count, context_tokens_max or 512)


@pytest.mark.parametrize(
    "rows_max, sizes",
    (
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (24, (1, 2, 4, 8, 16, 24)),
        (150, (1, 2, 4, *range(8, 129, 8), 144, 150)),
        (160, (1, 2, 4, *range(8, 129, 8), 144, 160)),
    ),
)
def test_sizes_of_fixed_steps_end_with_the_largest_row_count(rows_max: int, sizes: tuple[int, ...]) -> None:
    assert row_sizes(rows_max) == sizes


@functools.cache
def request(seed: int) -> EngineRequest:
    return EngineRequest(
        id=RequestId(str(seed)),
        prompt_token_ids=(1,),
        sampling=SAMPLINGS[seed % len(SAMPLINGS)],
        output_tokens_max=99,
        stop_token_ids=frozenset(),
        seed=seed,
    )


def chunk(seed: int, start: int, table: list[int]) -> ScheduledChunk:
    """Return a decode at position `start`, whose token is 100 + seed."""
    return ScheduledChunk(request(seed), [1] * start + [100 + seed], start, 1, table, True)


def test_inputs_sent_to_the_device_equal_the_step() -> None:
    """Check rows, padding and block tables of steps in which requests grow and change rows, blocks and number."""
    sizes = {rows: StepSize(rows, rows) for rows in (2, 4)}
    inputs = StaticInputs(
        list(sizes.values()), kept_max=8, width_max=9, block_size=4, spare_block=77, device=torch.device("cpu")
    )
    long, short = [50, 51, 52, 53, 54], [60, 61]
    for rows, chunks, width in (
        (4, [chunk(1, 19, long), chunk(2, 3, short), chunk(3, 0, [70])], 5),
        (4, [chunk(1, 20, [*long, 55]), chunk(2, 4, short), chunk(3, 1, [70])], 6),
        (4, [chunk(1, 21, [*long, 55]), chunk(2, 5, short)], 6),
        (2, [chunk(2, 5, short)], 2),
        (4, [chunk(1, 21, [*long, 55]), chunk(2, 5, short)], 6),
        (4, [chunk(2, 6, short), chunk(1, 22, [*long, 55])], 6),
        (4, [chunk(2, 7, [60, 62]), chunk(1, 23, [50, *range(80, 85)])], 6),
    ):
        size = sizes[rows]
        assert inputs.fill(StaticRows(chunks), size, {}) == width
        inputs.send(size, width)
        sent = inputs.tensors[size]
        count, padding = len(chunks), [0] * (rows - len(chunks))
        assert sent.ids[sent.id_places].tolist() == [100 + each.request.seed for each in chunks] + padding
        assert sent.positions.tolist() == [each.start for each in chunks] + padding
        assert sent.contexts.tolist() == [each.start + 1 for each in chunks] + padding
        for row, each in enumerate(chunks):
            needed = each.start // 4 + 1
            assert sent.block_tables[row, :needed].tolist() == each.block_table[:needed]
            assert sent.slots[row] == each.block_table[each.start // 4] * 4 + each.start % 4
        assert sent.slots[count:].tolist() == [77 * 4] * len(padding)


def test_tables_of_prompts_equal_the_step() -> None:
    """Send a decode between two prompts, then a step of the same size with fewer rows."""
    size = StepSize(16, 4, chunks=3, tile_tokens=4)
    inputs = StaticInputs([size], kept_max=8, width_max=9, block_size=4, spare_block=77, device=torch.device("cpu"))

    def sent(chunks: list[ScheduledChunk], awaited: dict[int, int]) -> Any:
        rows = StaticRows(chunks)
        inputs.send(size, inputs.fill(rows, size, awaited))
        assert rows.first_rows == [1, 0, 6][: len(chunks)]
        return inputs.tensors[size]

    first = ScheduledChunk(request(1), list(range(200, 220)), 3, 5, [50, 51], False)
    second = ScheduledChunk(request(3), list(range(300, 304)), 0, 4, [60], True)
    inputs.kept_ids[2] = 17
    tensors = sent([first, chunk(2, 5, [40, 41]), second], {0: 2})
    assert tensors.ids[tensors.id_places].tolist() == [17, *range(203, 208), *range(300, 304), *[0] * 6]
    assert tensors.positions.tolist() == [5, 3, 4, 5, 6, 7, 0, 1, 2, 3, *[0] * 6]
    assert tensors.slots.tolist() == [41 * 4 + 1, 203, 204, 205, 206, 207, 240, 241, 242, 243, *[77 * 4] * 6]
    assert tensors.contexts.tolist() == [6, 0, 0, 0, 8, 4, 0, 0]
    assert tensors.row_starts.tolist() == [1, 6, 10, 10, 10]
    assert tensors.tiles.tolist() == [[0, 0], [0, 4], [1, 0], *[[3, 0]] * 4]
    assert tensors.sampled[:2].tolist() == [0, 9]
    assert tensors.block_tables[[0, 4, 5], :2].tolist() == [[40, 41], [50, 51], [60, 0]]
    tensors = sent([first, chunk(2, 6, [40, 41])], {})
    assert tensors.ids[tensors.id_places].tolist() == [102, *range(203, 208), *[0] * 10]
    assert tensors.contexts.tolist() == [7, 0, 0, 0, 8, 0, 0, 0]
    assert tensors.row_starts.tolist() == [1, 6, 6, 6, 6]
    assert tensors.tiles.tolist() == [[0, 0], [0, 4], *[[3, 0]] * 5]


def test_only_the_needed_width_of_block_tables_is_sent() -> None:
    size = StepSize(2, 2)
    inputs = StaticInputs([size], kept_max=8, width_max=9, block_size=4, spare_block=77, device=torch.device("cpu"))
    chunks = [chunk(1, 19, [50, 51, 52, 53, 54]), chunk(2, 19, [60, 61, 62, 63, 64])]
    inputs.fill(StaticRows(chunks), size, {})
    inputs.send(size, 3)
    assert inputs.tensors[size].block_tables[:, :3].tolist() == [[50, 51, 52], [60, 61, 62]]
    assert inputs.tensors[size].block_tables[:, 3:].count_nonzero() == 0
    assert inputs.tensors[size].positions.tolist() == [19, 19]


def test_every_input_field_is_aligned_for_the_kernels() -> None:
    sizes = [*(StepSize(rows, rows) for rows in (1, 2, 3, 9)), StepSize(9, 3, 1, 4), StepSize(12, 9, 3, 4)]
    inputs = StaticInputs(sizes, kept_max=9, width_max=5, block_size=4, spare_block=77, device=torch.device("cpu"))
    for tensors in inputs.tensors.values():
        for field in dataclasses.fields(tensors):
            assert getattr(tensors, field.name).data_ptr() % 16 == 0, field.name
