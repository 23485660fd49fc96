"""Measures whole steps of a model in milliseconds, compared with the bound of the GPU's memory bandwidth.

Models have real shapes and random weights, which are made on the device. A step is one plan through the runner, up to
the token ids: with eager torch, with Triton kernels that are launched one by one, and with the same kernels in CUDA
graphs. A step cannot be faster than its weights and KV can be read. That bound is from the speed at which the device
reads and copies memory in the same run. If the runner launches steps, it is also measured with each step launched
before the token ids of the step before arrive, as with overlapped steps. Then a step takes the time of the device, or
of the host if that is longer.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from trioserve.bench.inside.gpu.machine import Part, measured_bandwidth
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.model.device import DeviceType, attended_token_flops, kv_block_bytes, step_weight_bytes, token_flops
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype
from trioserve.model.real_shapes import SHAPES
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step.step_model import TorchStepModel
from trioserve_kernels import Kernels, reference, reference_fused

__all__ = [
    "SAMPLINGS",
    "Case",
    "bound_seconds",
    "make_runner",
    "measure_decodes",
    "measure_kernel_shares",
    "measure_prefill",
    "plan_of",
    "table",
]

BLOCK_SIZE = 16
WARM_STEPS = 3
STEPS_MIN, STEPS_MAX = 5, 100
CASE_SECONDS = 1.0  # A case takes no further measurement after this time, if it has STEPS_MIN steps.
KV_BYTES_CPU = 2**26
PROFILED_KERNELS = 14
ONE_ROW = "one row with "
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k and top_p": SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    f"{ONE_ROW}logprobs": SamplingParams(temperature=0.0, logprobs=1),
    f"{ONE_ROW}a penalty": SamplingParams(temperature=0.0, frequency_penalty=0.5),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step of `batch` sequences with `context` tokens each. The context includes the computed token."""

    batch: int
    context: int

    @property
    def block_count(self) -> int:
        return self.batch * -(-self.context // BLOCK_SIZE)


def step_bytes(config: ModelConfig, dtype: Dtype, case: Case) -> int:
    """Return the bytes that a step must read: all weights that it uses, and keys and values of every token.

    Args:
        config: the model.
        dtype: number format of weights, keys and values.
        case: the step.
    """
    kv_bytes = kv_block_bytes(config, 1, dtype) * case.batch * case.context
    return step_weight_bytes(config, dtype) + kv_bytes


def bound_seconds(config: ModelConfig, dtype: Dtype, case: Case, bytes_per_second: float) -> float:
    return step_bytes(config, dtype, case) / bytes_per_second


def table(bounds: Mapping[Case, float], measured: Mapping[str, Mapping[Case, float]]) -> str:
    """Return a table with one line per case.

    A line has the bound, then for each variant its milliseconds, and its speed as a fraction of the bound.

    Args:
        bounds: seconds of the bound, by case.
        measured: seconds by variant and case. A missing case becomes a dash.
    """
    lines = ["  batch  context  bound, ms" + "".join(f"{way:>24}" for way in measured)]
    for case, bound in bounds.items():
        cells = []
        for seconds in (times.get(case) for times in measured.values()):
            cells.append("-" if seconds is None else f"{1e3 * seconds:.3f} ({bound / seconds:.0%})")
        lines.append(f"{case.batch:7}  {case.context:7}  {1e3 * bound:9.3f}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def measure_decodes(
    part: Part,
    shapes: Sequence[str],
    cases: Sequence[Case],
    ways: Sequence[str],
    samplings: Sequence[str],
    *,
    wants_transformers: bool = False,
) -> None:
    """Measure decode steps, and print a table per shape and sampling.

    Args:
        part: where the figures go.
        shapes: names in SHAPES.
        cases: sizes of steps.
        ways: names in command.WAYS of the device.
        samplings: names in SAMPLINGS. All after the first one are measured with graphs only.
        wants_transformers: if True, the best methods of that library are also measured with the same shapes.
    """
    for shape in shapes:
        config = SHAPES[shape]
        allowed = [case for case in cases if case.context <= config.context_tokens_max]
        fitting = allowed
        measured: dict[str, dict[str, dict[Case, float]]] = {sampling: {} for sampling in samplings}
        bandwidth = measured_bandwidth(part.device)
        for way in ways:
            if not part.has_time():
                break
            with _ready_runner(part, shape, config, allowed, way) as runner:
                fitting = [case for case in allowed if case.block_count <= runner.block_count]
                for sampling in samplings if way == ways[-1] else samplings[:1]:
                    for name, seconds_of in _measurements(way, runner).items():
                        found = measured[sampling].setdefault(name, {})
                        for case in itertools.takewhile(lambda _case: part.has_time(), fitting):
                            found[case] = seconds_of(runner, case, sampling)
                            part.put(
                                f"{shape}, {name}, {sampling}, {case.batch} x {case.context}",
                                ms=1e3 * found[case],
                                tokens_per_s=case.batch / found[case],
                            )
            bandwidth = max(bandwidth, measured_bandwidth(part.device))
        if wants_transformers:
            from trioserve.bench.inside.gpu.transformers_steps import measure_transformers

            measured[samplings[0]] |= measure_transformers(config, fitting, part.device, print)
        dtype = config.dtype_name
        bounds = {case: bound_seconds(config, dtype, case, bandwidth) for case in allowed}
        weights = step_weight_bytes(config, dtype)
        print(f"\n{shape}, {dtype}, weights {weights / 1e9:.2f} GB, memory read at {bandwidth / 1e9:,.0f} GB/s")
        for sampling in samplings:
            print(f"{sampling}: milliseconds of a decode step\n{table(bounds, measured[sampling])}\n", flush=True)


def measure_prefill(part: Part, shape: str, way: str) -> None:
    """Measure a long prompt alone in chunks of several sizes, and one chunk of it beside decodes.

    Args:
        part: where the figures go.
        shape: name in SHAPES.
        way: name in command.WAYS of the device.
    """
    config = SHAPES[shape]
    length, sizes, beside, counts = (
        (8_192, (512, 2_048, 8_192), Case(16, 1_024), (16, 64, 256, 496))
        if part.is_gpu
        else (48, (16, 48), Case(2, 50), (4,))
    )
    with _ready_runner(part, shape, config, [Case(1, length), beside, Case(beside.batch + 1, length)], way) as runner:
        flops = token_flops(config) * length + attended_token_flops(config) * length * length // 2
        for size in sizes:
            if not part.has_time():
                return

            def prompt(size: int = size) -> None:
                for start in range(0, length, size):
                    chunk = _prompt_chunk(config, length, start, min(size, length - start))
                    runner.execute(StepPlan(0, (chunk,), chunk.count))

            seconds = _median_seconds(prompt, steps_min=2)
            part.put(
                f"{shape}, prompt of {length} in chunks of {size}",
                ms=1e3 * seconds,
                tokens_per_s=length / seconds,
                TFLOP_per_s=flops / seconds / 1e12,
            )
        decodes = plan_of(config, beside, "greedy").chunks
        alone = _median_seconds(lambda: runner.execute(StepPlan(0, decodes, len(decodes))))
        part.put(f"{shape}, {beside.batch} decodes alone", ms=1e3 * alone)
        for count in counts:
            if not part.has_time():
                return
            chunk = _prompt_chunk(config, length, 0, count, first_block=beside.block_count)
            plan = StepPlan(0, (*decodes, chunk), len(decodes) + count)
            seconds = _median_seconds(lambda plan=plan: runner.execute(plan))  # type: ignore[misc]  # mypy loses the default
            part.put(f"{shape}, the same beside {count} prompt tokens", ms=1e3 * seconds, times_alone=seconds / alone)


def measure_kernel_shares(part: Part, shape: str, way: str) -> None:
    """List the kernels that take most time of a decode step, as torch's profiler sees them.

    Args:
        part: where the figures go.
        shape: name in SHAPES.
        way: name in command.WAYS of the device.
    """
    cases = [Case(1, 1_024), Case(64, 4_096)] if part.is_gpu else [Case(2, 50)]
    activity = ProfilerActivity.CUDA if part.is_gpu else ProfilerActivity.CPU
    with _ready_runner(part, shape, SHAPES[shape], cases, way) as runner:
        for case in cases:
            if not part.has_time():
                return
            plan = plan_of(runner.config, case, "greedy")
            for _ in range(WARM_STEPS):
                runner.execute(plan)
            with profile(activities=[activity]) as profiled:
                for _ in range(STEPS_MIN):
                    runner.execute(plan)
                part.wait()
            rows = [
                (event.self_device_time_total if part.is_gpu else event.self_cpu_time_total, event.count, event.key)
                for event in profiled.key_averages()
            ]
            step = f"{shape}, {case.batch} x {case.context}"
            part.put(f"{step}, all kernels", us=sum(time_us for time_us, _count, _key in rows) / STEPS_MIN)
            for time_us, count, key in sorted(rows, reverse=True)[:PROFILED_KERNELS]:
                part.put(f"{step}, {key[:90]}", us=time_us / STEPS_MIN, launches=count / STEPS_MIN)


@contextmanager
def _ready_runner(
    part: Part, shape: str, config: ModelConfig, cases: Sequence[Case], way: str
) -> Iterator[ModelRunner]:
    """Make a runner, fill its KV cache and warm it up. At the end, its memory is free again."""
    began = time.perf_counter()
    runner = make_runner(config, cases, way, part.device)
    try:
        fitting = [case.block_count for case in cases if case.block_count <= runner.block_count]
        runner.allocate_kv(max(fitting, default=1))
        _fill_kv(runner)
        loaded = time.perf_counter()
        free_bytes = torch.cuda.mem_get_info()[0] if part.is_gpu else 0
        runner.warm_up()
        part.wait()
        part.put(
            f"{shape}, {way}, ready",
            computed_by=runner.computed_by,
            weights_s=loaded - began,
            warm_up_s=time.perf_counter() - loaded,
            warm_up_MiB=(free_bytes - torch.cuda.mem_get_info()[0]) / 2**20 if part.is_gpu else 0.0,
        )
        yield runner
    finally:
        runner.close()
        del runner
        gc.collect()
        if part.is_gpu:
            torch.cuda.empty_cache()


def _fill_kv(runner: ModelRunner) -> None:
    """Fill the KV cache with random numbers.

    This code is a separate function, since a local variable that outlives the runner would keep the memory of a layer.
    """
    assert runner.storage is not None
    for pages in runner.storage.pages:
        pages.normal_()


def _measurements(way: str, runner: ModelRunner) -> dict[str, Callable[[ModelRunner, Case, str], float]]:
    """Return the measurements of a variant, by the name of their column."""
    if not runner.launches:
        return {way: _step_seconds}
    return {way: _step_seconds, f"{way}, overlapped": _overlapped_seconds}


def make_runner(config: ModelConfig, cases: Sequence[Case], way: str, device: DeviceType) -> ModelRunner:
    """Return a runner with random weights, whose allocate_kv has not been called yet.

    Args:
        config: the model.
        cases: steps that the runner must be able to compute.
        way: name in command.WAYS of the device.
        device: where the model is computed.
    """
    settings = ModelSettings(
        device=device,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=KV_BYTES_CPU if device == "cpu" else None,
        max_num_seqs=max(case.batch for case in cases),
        context_tokens_max=max(case.context for case in cases),
        enforce_eager=way in ("torch", "triton"),
    )
    model = TorchStepModel(config, settings, dtype=config.dtype_name, device=device, kernels=_kernels(way))
    for slot in model.tensor_slots():
        if "norm" in slot.name:
            slot.fill(torch.ones(slot.shape, dtype=slot.dtype, device=device))
        else:
            slot.fill(torch.empty(slot.shape, dtype=slot.dtype, device=device).normal_(0.0, 0.02))
    if device == "cuda":
        torch.cuda.empty_cache()  # Without this call, memory that filling the cache used would still count as in use.
    return ModelRunner(model, settings)


def _kernels(way: str) -> Kernels:
    if way == "torch":
        return reference
    if way == "static":
        return reference_fused
    from trioserve_kernels import triton

    return triton


def _step_seconds(runner: ModelRunner, case: Case, sampling: str) -> float:
    """Return the median seconds of some steps. Each step waits for its token ids."""
    plan = plan_of(runner.config, case, sampling)
    return _median_seconds(lambda: runner.execute(plan))


def _overlapped_seconds(runner: ModelRunner, case: Case, sampling: str) -> float:
    """Return the median seconds of some steps. Each step is launched before the previous step's token ids arrive."""
    begun = [runner.launch(plan_of(runner.config, case, sampling))]
    plan = plan_of(runner.config, case, sampling, is_ahead=True)

    def step() -> None:
        begun.append(runner.launch(plan))
        begun.pop(0)()

    seconds = _median_seconds(step)
    begun.pop()()
    return seconds


def _median_seconds(step: Callable[[], object], steps_min: int = STEPS_MIN) -> float:
    for _ in range(min(WARM_STEPS, steps_min)):
        step()
    seconds: list[float] = []
    while len(seconds) < steps_min or (sum(seconds) < CASE_SECONDS and len(seconds) < STEPS_MAX):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def plan_of(config: ModelConfig, case: Case, sampling: str, *, is_ahead: bool = False) -> StepPlan:
    """Return the plan of a decode step.

    Args:
        config: the model.
        case: the size of the step.
        sampling: name in SAMPLINGS. A name that begins with ONE_ROW is for the first row, and the others are greedy.
        is_ahead: True: the last token of every sequence is the token that the previous step samples. The length of the
            context is the same.
    """
    width = -(-case.context // BLOCK_SIZE)
    chunks = []
    for sequence in range(case.batch):
        prompt = tuple((7919 * (sequence + 1) + 104_729 * index) % config.vocab_size for index in range(case.context))
        own_sampling = sampling if sequence == 0 or not sampling.startswith(ONE_ROW) else "greedy"
        request = _request(str(sequence), prompt, SAMPLINGS[own_sampling], seed=sequence)
        # Blocks of one sequence are far from each other, as in a pool that has been used for a while.
        blocks = list(range(sequence, case.block_count, case.batch))
        assert len(blocks) == width
        tokens = prompt[:-1] if is_ahead else prompt
        chunks.append(ScheduledChunk(request, tokens, case.context - 1, 1, blocks, True, awaits_token=is_ahead))
    return StepPlan(0, tuple(chunks), len(chunks), is_ahead=is_ahead)


def _prompt_chunk(config: ModelConfig, length: int, start: int, count: int, *, first_block: int = 0) -> ScheduledChunk:
    prompt = tuple((7919 * index) % config.vocab_size for index in range(length))
    blocks = list(range(first_block, first_block - (-(start + count) // BLOCK_SIZE)))
    request = _request("prompt", prompt, SAMPLINGS["greedy"], seed=0)
    return ScheduledChunk(request, prompt, start, count, blocks, start + count == length)


def _request(request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, *, seed: int) -> EngineRequest:
    return EngineRequest(
        id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=sampling,
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=seed,
    )
