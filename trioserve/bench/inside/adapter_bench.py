"""Measures the cost of LoRA adapters for a decode step, alternately with the same step without adapters.

    python -m trioserve bench inside adapters [--model smollm2] [--rank 16] [--streams 16] [--targets all attention]

Adapters are random. The output has the ratio of tokens per second with adapters to tokens per second without adapters,
from the medians of the rounds. The cost depends on the size of an adapter relative to its model: an adapter of rank 16
for all projections has 3.6 % of SmolLM2-135M's numbers, and 0.6 % of those of a model of 7B.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from trioserve.bench.settings import at_least_one
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.model.device import default_thread_count
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import resolve_model
from trioserve.model.loading.names import tensor_shapes
from trioserve.model.loading.stored_tensor import AdapterMatrix, AdapterWeights
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values, convert, empty_values
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.trio_tools.progress import with_progress

__all__ = ["add_arguments", "random_adapter", "run"]

TARGETS: Mapping[str, tuple[str, ...]] = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qv": ("q_proj", "v_proj"),  # The library peft adapts these projections by default in most models.
}
CONTEXT = 256
STEPS_OF_ROUND = 3
QUANTIZATIONS = ("auto", "none", "file", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument("--rounds", type=at_least_one, default=15, metavar="N", help="rounds of each side, in turns")
    parser.add_argument(
        "--threads", type=at_least_one, default=None, metavar="N", help="threads; None: as many as serve uses"
    )
    parser.add_argument("--rank", type=at_least_one, default=16, metavar="N", help="rank of every adapter")
    parser.add_argument("--streams", type=at_least_one, nargs="+", default=[16], metavar="N", help="streams in a step")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["all", "qv"], help="which projections")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto", help="number format of weights")


def run(arguments: argparse.Namespace) -> int:
    settings = ModelSettings(device="cpu", threads=arguments.threads, quantization=arguments.quantization)
    runner = ModelRunner.load(open_checkpoint(resolve_model(arguments.model)), settings)
    streams_max = max(arguments.streams)
    runner.allocate_kv(streams_max * -(-CONTEXT // runner.block_size))
    threads = arguments.threads or default_thread_count()
    print(
        f"{arguments.model}, {runner.computed_by}, {threads} threads, load average {os.getloadavg()[0]:.1f}; rank "
        f"{arguments.rank}; milliseconds of a decode step with contexts of {CONTEXT}, least / median of rounds, and "
        "tokens per second relative to those without adapters"
    )
    try:
        for targets in arguments.targets:
            refs = _load(runner, streams_max, arguments.rank, TARGETS[targets])
            for streams in arguments.streams:
                _measure(runner, streams, refs, targets, arguments.rounds)
            for ref in refs:
                runner.remove_adapter(ref.id)
    finally:
        runner.close()
    return 0


def random_adapter(
    config: ModelConfig, dtype: Dtype, rank: int, targets: Sequence[str], seed: int, size: float = 0.02
) -> AdapterWeights:
    """Return an adapter of random numbers for some projections of every layer.

    Args:
        config: the model.
        dtype: number format of the factors.
        rank: rank of the factors.
        targets: names of the projections.
        seed: seed of the numbers.
        size: standard deviation of the numbers.
    """
    generator = np.random.default_rng(seed)

    def numbers(*shape: int) -> Values:
        values = empty_values(shape, dtype)
        convert(generator.standard_normal(shape, dtype=np.float32) * np.float32(size), values)
        return values

    matrices = {}
    for name, shape in tensor_shapes(config).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets and ".experts." not in module:
            matrices[module] = AdapterMatrix(numbers(rank, shape[1]), numbers(shape[0], rank))
    return AdapterWeights(f"{seed:032x}", dtype, matrices)


def _load(runner: ModelRunner, count: int, rank: int, targets: Sequence[str]) -> list[AdapterRef]:
    refs = []
    for seed in range(count):
        weights = random_adapter(runner.config, runner.dtype, rank, targets, seed)
        ref = AdapterRef(AdapterId(seed + 1), weights.digest)
        runner.add_adapter(ref.id, weights)
        refs.append(ref)
    return refs


def _measure(runner: ModelRunner, streams: int, refs: Sequence[AdapterRef], targets: str, rounds: int) -> None:
    sides: dict[str, list[AdapterRef | None]] = {
        "without": [None] * streams,
        "one for all": [refs[0]] * streams,
        "one each": list(refs[:streams]),
        "every other": [ref if index % 2 else None for index, ref in enumerate(refs[:streams])],
    }
    runner.execute(_plan(runner, sides["without"], 0))
    plans = {name: _plan(runner, side, CONTEXT - 1) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in with_progress(range(rounds), f"measuring {targets}, {streams} streams", unit="rounds"):
        for name, plan in plans.items():
            runner.execute(plan)  # This step replaces data of the other variants in the CPU's caches.
            for _ in range(STEPS_OF_ROUND):
                started_at = time.perf_counter()
                runner.execute(plan)
                times[name].append(time.perf_counter() - started_at)
    base = statistics.median(times["without"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        shown = f"{1e3 * min(seconds):6.1f} / {1e3 * median:6.1f}   x{base / median:.2f}"
        print(f"{targets:9} {streams:3} streams, {name:11}: {shown}", flush=True)


def _plan(runner: ModelRunner, adapters: Sequence[AdapterRef | None], start: int) -> StepPlan:
    """Return a step that computes the tokens of all streams from `start` on."""
    blocks = -(-CONTEXT // runner.block_size)
    chunks = []
    for stream, adapter in enumerate(adapters):
        prompt = tuple((7919 * (stream + 1) + 104_729 * index) % runner.config.vocab_size for index in range(CONTEXT))
        request = EngineRequest(
            id=RequestId(str(stream)),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=stream,
            adapter=adapter,
        )
        table = [*range(stream * blocks, (stream + 1) * blocks)]
        chunks.append(ScheduledChunk(request, prompt, start, CONTEXT - start, table, True))
    return StepPlan(0, tuple(chunks), len(chunks) * (CONTEXT - start))
