"""Tests of launched steps: the next step begins before the host has read the tokens of the previous step.

The tests run on the CPU, where plain kernels replace fused kernels and a launched step ends at once. So the tests read
results late or not at all, as if a GPU had not finished the step.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trioserve.contracts.events import RequestFinished, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.model.begun_step import BegunStep
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.number_formats import Dtype, Values
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step.step_model import TorchStepModel
from trioserve_kernels import reference_fused

PLAIN = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
)
ASKING = (
    *PLAIN,
    SamplingParams(temperature=0.9, logprobs=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0}, prompt_logprobs=1),
    SamplingParams(temperature=0.8, min_tokens=6),
)
OUTSIDE = 100_000  # This token id is not in the vocabulary.


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)


def load(path: Path, *, enforce_eager: bool = False, max_num_seqs: int = 64) -> ModelRunner:
    settings = ModelSettings(
        device="cpu",
        dtype="float32",
        cpu_kernels="torch",
        block_size=4,
        kv_cache_bytes=2**24,
        max_num_seqs=max_num_seqs,
        enforce_eager=enforce_eager,
    )
    runner = ModelRunner.load(open_checkpoint(path), settings)
    runner.allocate_kv(120)
    assert runner.storage is not None
    for pages in runner.storage.pages:
        pages[:] = float("nan")
    return runner


def request_of(name: str, prompt: tuple[int, ...], sampling: SamplingParams, *, seed: int = 0) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=sampling,
        output_tokens_max=4 + seed % 7,
        stop_token_ids=frozenset(range(0, 320, 9)),
        seed=seed,
    )


class Flight:
    def __init__(self, runner: ModelRunner, core: EngineCore, plan: StepPlan) -> None:
        self.plan = plan
        self.finish = runner.launch(plan, core.flights.abandonment(plan))


def responses(
    runner: ModelRunner, samplings: tuple[SamplingParams, ...], *, overlaps: bool, seed: int = 0, aborts: bool = False
) -> dict[str, list[object]]:
    """Return the responses of a core with this runner, except those of aborted requests. One request asks for a token
    outside of the vocabulary.

    With overlap, the result of a step is read after the next step was launched.
    """
    rng = random.Random(seed)
    core = EngineCore(
        CoreSettings(
            block_count=runner.block_count,
            block_size=runner.block_size,
            context_tokens_max=64,
            max_num_seqs=4,
            step_tokens_max=16,
            overlap_steps=overlaps,
        )
    )
    responses_by_name: dict[str, list[object]] = {}
    for number in range(12):
        name = f"r{number}"
        responses_by_name[name] = []
        prompt = tuple((7 * number + 11 * place) % 300 + 5 for place in range(3 + 4 * number))
        if number == 5:
            prompt = (*prompt[:-1], OUTSIDE)
        core.add(request_of(name, prompt, samplings[number % len(samplings)], seed=number))
    flights: list[Flight] = []
    aborted: set[str] = set()
    while list(core.live_requests()) or flights:
        if not flights:
            plan = core.schedule(0.0)
            assert plan is not None
            flights.append(Flight(runner, core, plan))
        if overlaps and rng.random() < 0.8 and (plan := core.schedule_ahead(0.0)) is not None:
            flights.append(Flight(runner, core, plan))
        if aborts and rng.random() < 0.1:
            name = rng.choice(sorted(responses_by_name))
            aborted.add(name)
            core.abort([RequestId(name)], now=0.0)
        flight = flights.pop(0)
        result = flight.finish()
        if result is None:
            events = core.drop_plan(flight.plan, 0.0)
        else:
            events = core.update_from_output(flight.plan, result, 0.0)
        for event in events:
            if isinstance(event, TokensReady):
                responses_by_name[event.request_id] += event.token_ids
            elif isinstance(event, RequestFinished):
                responses_by_name[event.request_id].append((event.reason, event.stop_token_id))
    assert core.stats().blocks_used == 0
    return {name: said for name, said in responses_by_name.items() if name not in aborted}


@pytest.mark.slow
@pytest.mark.parametrize("samplings", (PLAIN, ASKING), ids=("plain", "asking for more"))
@pytest.mark.parametrize("enforce_eager", (False, True), ids=("static", "eager"))
@pytest.mark.usefixtures("fused")
def test_overlapping_launched_steps_give_the_responses_of_separate_steps(
    enforce_eager: bool, samplings: tuple[SamplingParams, ...], tiny_checkpoint: Callable[..., Path]
) -> None:
    runner = load(tiny_checkpoint("qwen3"), enforce_eager=enforce_eager)
    expected = responses(runner, samplings, overlaps=False)
    assert sum(map(len, expected.values())) > 40
    for seed in range(6):
        got = responses(runner, samplings, overlaps=True, seed=seed, aborts=seed > 2)
        assert len(got) >= 3
        assert got == {name: expected[name] for name in got}


def add_prompts(driver: Any, count: int, samplings: tuple[SamplingParams, ...] = PLAIN) -> list[str]:
    names = [f"r{index}" for index in range(count)]
    for index, name in enumerate(names):
        prompt = [(7 * index + 11 * place) % 300 + 40 for place in range(2 + 3 * index)]
        driver.add(name, prompt, samplings[index % len(samplings)], stop_token_ids=range(0, 320, 3))
    return names


@pytest.mark.parametrize(
    "samplings",
    (
        PLAIN,
        (
            SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
            SamplingParams(temperature=2.0, logprobs=2, presence_penalty=1.0),
            SamplingParams(temperature=0.0, logit_bias={7: 3.0, 9: -50.0}),
            SamplingParams(temperature=0.8, min_tokens=3, repetition_penalty=0.8),
        ),
    ),
    ids=("plain", "asking for more"),
)
@pytest.mark.parametrize("enforce_eager", (False, True), ids=("static", "eager"))
@pytest.mark.usefixtures("fused")
def test_token_is_passed_between_launched_steps_of_any_shape(
    enforce_eager: bool,
    samplings: tuple[SamplingParams, ...],
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts and decodes in one step, then decodes alone in changing rows, then a prompt again, whose first piece
    samples nothing. The result of a step is read after the next step has begun, and every step is launched.
    """

    def compute(*_: Any) -> None:
        raise AssertionError("a step was computed instead of launched")

    path = tiny_checkpoint("llama")
    steps: list[dict[str, int]] = [
        {"r0": 2, "r1": 5, "r2": 3},
        {"r1": 1, "r2": 5, "r0": 1},
        {"r2": 1, "r1": 1},
        {"r0": 1, "r1": 1, "r2": 1},
        {"r3": 6},
        {"r2": 1, "r3": 5, "r0": 1},
        {"r3": 1, "r1": 1},
    ]
    driver = step_driver.StepDriver(load(path, enforce_eager=enforce_eager))
    add_prompts(driver, 4, samplings)
    flying: list[Callable[[], StepResult]] = []
    with monkeypatch.context() as patch:
        patch.setattr(TorchStepModel, "compute", compute)
        for counts in steps:
            flying.append(driver.launch(counts))
            if len(flying) == 2:
                assert not flying.pop(0)().errors
        flying.pop()()
    plain = step_driver.StepDriver(load(path, enforce_eager=True), seed=1)
    add_prompts(plain, 4, samplings)
    for counts in steps:
        plain.step(counts)
    assert driver.tokens == plain.tokens


class Sources(TorchDispatchMode):
    """Records the addresses of tensors that a launch copies without waiting: the step's inputs, its sampling options
    and its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and len(args) == 3 and args[2]:
            self.addresses.append(args[1].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fused")
def test_host_buffer_is_not_overwritten_before_the_device_has_read_it(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The copy of a step's arrays may wait for the previous step while the host fills in the next step."""
    driver = step_driver.StepDriver(load(tiny_checkpoint("llama")))
    driver.add("a", [5, 6, 7])
    driver.launch({"a": 3})()
    sources: list[int] = []
    flying: list[Callable[[], StepResult]] = []
    for _ in range(4):
        with Sources() as seen:
            flying.append(driver.launch({"a": 1}))
        sources.append(seen.addresses[0])
        if len(flying) == 2:
            flying.pop(0)()
    assert all(one != next_one for one, next_one in itertools.pairwise(sources))


@pytest.mark.parametrize("sampling", ASKING)
@pytest.mark.usefixtures("fused")
def test_step_with_an_unfinished_prompt_is_launched(
    sampling: SamplingParams, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """Sampling options of a request only matter in a step that samples it. Prompt logprobs matter in each step."""
    runner = load(tiny_checkpoint("llama"))
    driver = step_driver.StepDriver(runner)
    driver.add("piece", list(range(40, 60)), sampling)
    driver.add("whole", [5, 6, 7])
    plan = StepPlan(0, (driver.chunk("piece", 5), driver.chunk("whole", 3)), 8)
    with Sources() as seen:
        runner.launch(plan)
    assert (len(seen.addresses) == 3) == (sampling.prompt_logprobs is None)


def damaged_runner(path: Path) -> ModelRunner:
    """A runner whose embedding of token 33 is NaN."""
    checkpoint = open_checkpoint(path)

    def damaged(tensor: StoredTensor) -> StoredTensor:
        def read(dtype: Dtype) -> Values:
            values = tensor.read(dtype)
            values[33] = float("nan")
            return values

        return tensor._replace(read=read, rows=None) if tensor.name == "embed.weight" else tensor

    settings = ModelSettings(device="cpu", dtype="float32", cpu_kernels="torch", block_size=4, kv_cache_bytes=2**20)
    changed: Any = SimpleNamespace(
        config=checkpoint.config,
        weight_bytes=checkpoint.weight_bytes,
        vision=None,
        audio=None,
        encoder=None,
        tensors=lambda: map(damaged, checkpoint.tensors()),
    )
    runner = ModelRunner.load(changed, settings)
    runner.allocate_kv(60)
    return runner


@pytest.mark.parametrize("bad", (33, 320), ids=("not a number", "outside the vocabulary"))
@pytest.mark.usefixtures("fused")
def test_request_that_failed_in_the_previous_step_gets_no_second_error(
    bad: int, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The second step ignores the row of the failed request. Other requests are not affected."""
    path = tiny_checkpoint("llama")
    driver = step_driver.StepDriver(damaged_runner(path))
    add_prompts(driver, 2)
    driver.add("bad", [40, 41, bad])
    first = driver.launch({"r0": 2, "bad": 3, "r1": 5})
    second = driver.launch({"bad": 1, "r0": 1, "r1": 1})
    result = first()
    assert list(result.errors) == ["bad"]
    third = driver.launch({"r0": 1, "r1": 1})
    result = second()
    assert not result.errors
    assert [token is None for token in result.token_ids] == [True, False, False]
    assert not third().errors
    plain = step_driver.StepDriver(damaged_runner(path), seed=1)
    names = add_prompts(plain, 2)
    plain.generate(names, 3)
    assert {name: driver.tokens[name] for name in names} == plain.tokens


@pytest.mark.usefixtures("fused")
def test_abandoned_step_is_not_launched_and_its_requests_are_left_out(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = load(tiny_checkpoint("llama"))
    driver = step_driver.StepDriver(runner)
    add_prompts(driver, 2)
    chunk = driver.chunk("r0", 2)
    left = runner.launch(StepPlan(0, (chunk,), 2), IsAbandoned(0))
    ahead = ScheduledChunk(chunk.request, chunk.tokens, 2, 1, chunk.block_table, True, awaits_token=True)
    other = driver.chunk("r1", 5)
    behind = runner.launch(StepPlan(1, (ahead, other), 6, is_ahead=True))
    assert left() is None
    result = behind()
    assert result is not None
    assert not result.errors
    assert [token is None for token in result.token_ids] == [True, False]


@pytest.mark.usefixtures("fused")
def test_step_with_too_many_sampled_rows_is_computed_instead_of_launched(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = load(tiny_checkpoint("llama"), max_num_seqs=2)
    driver = step_driver.StepDriver(runner)
    names = add_prompts(driver, 3)
    first = driver.launch({name: driver.left(name) for name in names})
    second = driver.launch(dict.fromkeys(names, 1))
    assert not first().errors
    assert None not in second().token_ids
    plain = step_driver.StepDriver(load(tiny_checkpoint("llama")), seed=1)
    add_prompts(plain, 3)
    plain.generate(names, 2)
    assert driver.tokens == plain.tokens


@pytest.mark.slow
def test_finished_launched_step_frees_the_previous_step(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """A thousand computed or launched steps must not keep a thousand results in memory."""

    def begun_steps() -> int:
        gc.collect()
        return sum(type(found) is BegunStep for found in gc.get_objects())

    others = begun_steps()  # steps that an earlier test's traceback may still refer to
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    flying = [driver.launch({"a": 3})]
    for _ in range(5):
        flying.append(driver.launch({"a": 1}))
        assert flying.pop(0)().token_ids != (None,)
        assert begun_steps() - others <= 2
    flying.pop()()
    runner.close()
