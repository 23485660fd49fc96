"""Measures whole decode steps on a GPU in milliseconds, compared with the bound of its memory bandwidth.

    python -m trioserve bench inside gpu [--shape llama-3.2-1b llama-3.1-8b qwen3-8b] [--transformers]
    python -m trioserve bench inside gpu --device cpu --shape tiny --batch 1 2 --context 64

Models have real shapes and random weights, which are made on the device. A step is one plan through the runner, up to
the token ids: with eager torch, with Triton kernels that are launched one by one, and with the same kernels in CUDA
graphs. A step cannot be faster than its weights and KV can be read. That bound is from the speed at which the device
reads and copies memory in the same run. If the runner launches steps, it is also measured with each step launched
before the token ids of the step before arrive, as with --overlap-steps. Then a step takes the time of the device, or of
the host if that is longer. --transformers measures the best methods of that library with the same shapes. The CPU is
only for a test of this program, with plain torch and with steps of fixed shape, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trioserve.bench.settings import at_least_one
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.model.device import DeviceType, kv_block_bytes, step_weight_bytes
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype
from trioserve.model.real_shapes import SHAPES, TINY
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step_model import TorchStepModel
from trioserve_kernels import Kernels, reference, reference_fused

__all__ = ["Case", "add_arguments", "bound_seconds", "run", "table"]

BLOCK_SIZE = 16
WAYS: dict[DeviceType, tuple[str, ...]] = {"cuda": ("torch", "triton", "graphs"), "cpu": ("torch", "static")}
WARM_STEPS = 3
STEPS_MIN, STEPS_MAX = 5, 100
CASE_SECONDS = 1.0  # A case takes no further measurement after this time, if it has STEPS_MIN steps.
KV_BYTES_CPU = 2**26
MOVE_ROUNDS, MOVES = 10, 8
READ_BYTES: dict[DeviceType, int] = {"cuda": 2**30, "cpu": 2**26}


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = [name for name in SHAPES if name != TINY]
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=shapes, help="real shapes to measure")
    parser.add_argument(
        "--batch", nargs="+", type=at_least_one, default=[1, 16, 64, 256], metavar="N", help="numbers of sequences"
    )
    parser.add_argument(
        "--context",
        nargs="+",
        type=at_least_one,
        default=[256, 1024, 4096],
        metavar="TOKENS",
        help="tokens of each sequence",
    )
    ways = sorted({*WAYS["cuda"], *WAYS["cpu"]})
    parser.add_argument(
        "--ways", nargs="+", choices=ways, default=None, help="ways to compute; None: all of the device"
    )
    parser.add_argument("--device", choices=WAYS, default="cuda", help="cpu is only for a test of this program")
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="sample with temperature 0.8 and top_p 0.95, instead of the largest logit",
    )
    parser.add_argument("--transformers", action="store_true", help="also measure transformers")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Return the exit code, which is 2 if this machine cannot measure the cases.

    Args:
        arguments: the parsed command line.
    """
    device: DeviceType = arguments.device
    ways: Sequence[str] = arguments.ways or WAYS[device]
    refusal = _refusal(device, arguments.shape, ways, arguments.context, wants_transformers=arguments.transformers)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 2
    sampling = SamplingParams(temperature=0.8, top_p=0.95) if arguments.sampled else SamplingParams(temperature=0.0)
    cases = [Case(batch, context) for batch, context in itertools.product(arguments.batch, arguments.context)]
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; milliseconds of a decode step, median", flush=True)
    for shape in arguments.shape:
        _measure_shape(shape, cases, ways, device, sampling, wants_transformers=arguments.transformers)
    return 0


def _refusal(
    device: DeviceType,
    shapes: Sequence[str],
    ways: Sequence[str],
    contexts: Sequence[int],
    *,
    wants_transformers: bool,
) -> str | None:
    """Return the reason why the cases cannot be measured, as one sentence, or None if they can be measured."""
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device: run this on a machine with a GPU, or test it with --device cpu --shape tiny"
    if device == "cpu" and list(shapes) != [TINY]:
        return f"the CPU is only for a test of this program: use --shape {TINY}, not {' '.join(shapes)}"
    if foreign := [way for way in ways if way not in WAYS[device]]:
        return f"--ways has {', '.join(foreign)}, but --device {device} has {', '.join(WAYS[device])}"
    if {"triton", "graphs"} & set(ways) and importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton, or use --ways torch"
    if wants_transformers and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers, or omit --transformers"
    longest = min(SHAPES[shape].context_tokens_max for shape in shapes)
    if max(contexts) > longest:
        return f"--context has {max(contexts)}, but these shapes allow up to {longest} tokens"
    return None


def _measure_shape(
    shape: str,
    cases: Sequence[Case],
    ways: Sequence[str],
    device: DeviceType,
    sampling: SamplingParams,
    *,
    wants_transformers: bool,
) -> None:
    config, dtype = SHAPES[shape], SHAPES[shape].dtype_name
    bandwidth = measured_bandwidth(device)
    measured: dict[str, dict[Case, float]] = {}
    fitting: list[Case] = []
    for way in ways:
        began = time.perf_counter()
        runner = _make_runner(config, cases, way, device)
        try:
            fitting = [case for case in cases if case.block_count <= runner.block_count]
            runner.allocate_kv(max((case.block_count for case in fitting), default=1))
            _fill_kv(runner)
            runner.warm_up()
            print(f"{shape}, {way}: {runner.computed_by}, ready in {time.perf_counter() - began:.1f} s", flush=True)
            for name, seconds_of in _measurements(way, runner).items():
                measured[name] = {}
                for case in fitting:
                    measured[name][case] = seconds = seconds_of(runner, case, sampling)
                    print(f"{shape}, {name}, {case.batch} x {case.context}: {1e3 * seconds:.3f} ms", flush=True)
        finally:
            runner.close()
            del runner
            gc.collect()
        bandwidth = max(bandwidth, measured_bandwidth(device))
    if wants_transformers:
        from trioserve.bench.inside.gpu_bench_transformers import measure_transformers

        measured |= measure_transformers(config, fitting, device, _notice)
    weights = step_weight_bytes(config, dtype)
    print(f"\n{shape}, {dtype}, weights {weights / 1e9:.2f} GB, memory read at {bandwidth / 1e9:,.0f} GB/s")
    bounds = {case: bound_seconds(config, dtype, case, bandwidth) for case in cases}
    print(table(bounds, measured) + "\n", flush=True)


def _fill_kv(runner: ModelRunner) -> None:
    """Fill the KV cache with random numbers.

    This code is a separate function, since a local variable that outlives the runner would keep the memory of a layer.
    """
    assert runner.storage is not None
    for pages in runner.storage.pages:
        pages.normal_()


def _measurements(way: str, runner: ModelRunner) -> dict[str, Callable[[ModelRunner, Case, SamplingParams], float]]:
    """Return the measurements of a variant, by the name of their column."""
    if not runner.launches:
        return {way: _step_seconds}
    return {way: _step_seconds, f"{way}, overlapped": _overlapped_seconds}


def _notice(sentence: str) -> None:
    print(sentence, flush=True)


def _make_runner(config: ModelConfig, cases: Sequence[Case], way: str, device: DeviceType) -> ModelRunner:
    """Return a runner with random weights, whose allocate_kv has not been called yet."""
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


def _step_seconds(runner: ModelRunner, case: Case, sampling: SamplingParams) -> float:
    """Return the median seconds of some steps. Each step waits for its token ids."""
    plan = _plan(runner.config, case, sampling)
    return _median_seconds(lambda: runner.execute(plan))


def _overlapped_seconds(runner: ModelRunner, case: Case, sampling: SamplingParams) -> float:
    """Return the median seconds of some steps. Each step is launched before the previous step's token ids arrive."""
    begun = [runner.launch(_plan(runner.config, case, sampling))]
    plan = _plan(runner.config, case, sampling, is_ahead=True)

    def step() -> None:
        begun.append(runner.launch(plan))
        begun.pop(0)()

    seconds = _median_seconds(step)
    begun.pop()()
    return seconds


def _median_seconds(step: Callable[[], object]) -> float:
    for _ in range(WARM_STEPS):
        step()
    seconds: list[float] = []
    while len(seconds) < STEPS_MIN or (sum(seconds) < CASE_SECONDS and len(seconds) < STEPS_MAX):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _plan(config: ModelConfig, case: Case, sampling: SamplingParams, *, is_ahead: bool = False) -> StepPlan:
    """Return the plan of a step.

    With is_ahead, the last token of every sequence is the token that the previous step samples. The length of the
    context is the same.
    """
    width = -(-case.context // BLOCK_SIZE)
    chunks = []
    for sequence in range(case.batch):
        prompt = tuple((7919 * (sequence + 1) + 104_729 * index) % config.vocab_size for index in range(case.context))
        request = EngineRequest(
            id=RequestId(str(sequence)),
            prompt_token_ids=prompt,
            sampling=sampling,
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=sequence,
        )
        # Blocks of one sequence are far from each other, as in a pool that has been used for a while.
        blocks = list(range(sequence, case.block_count, case.batch))
        assert len(blocks) == width
        tokens = prompt[:-1] if is_ahead else prompt
        chunks.append(ScheduledChunk(request, tokens, case.context - 1, 1, blocks, True, awaits_token=is_ahead))
    return StepPlan(0, tuple(chunks), len(chunks), is_ahead=is_ahead)


def measured_bandwidth(device: DeviceType) -> float:
    """Return the memory bandwidth in bytes per second: the best of reading and copying a large tensor.

    Args:
        device: the device.
    """
    source = torch.ones(READ_BYTES[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moves: tuple[tuple[Callable[[], object], int], ...] = (
        (source.sum, READ_BYTES[device]),
        (lambda: target.copy_(source), 2 * READ_BYTES[device]),
    )
    seconds = _device_seconds if device == "cuda" else _host_seconds
    return max(byte_count / min(seconds(move) for _ in range(MOVE_ROUNDS)) for move, byte_count in moves)


def _device_seconds(move: Callable[[], object]) -> float:
    """Return the mean seconds of several successive memory operations, by the device's clock.

    The host's clock would include launch and return, which matter: a large GPU reads a GiB in a third of a millisecond.
    """
    began, ended = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        for _ in range(2)
    )
    began.record()
    for _ in range(MOVES):
        move()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / MOVES


def _host_seconds(move: Callable[[], object]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began
