"""Milliseconds of whole steps, native kernels beside plain torch, and beside what the memory allows.

    python -m trioserve.model.step_bench [--model smollm2] [--rounds 15] [--threads 2]

Both compute in turns, round for round, so that whatever else the machine does meets both. Shown are the least and the
median of the rounds. A decode step cannot be faster than its weights and KV can be read: that bound comes from the
speed at which as many threads read memory, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.model.device import kv_block_bytes
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import resolve_model
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

__all__ = ["main"]

BATCHES = (1, 16, 64)
CONTEXT = 256
PROMPTS = (128, 512)
READ_BYTES = 2**28  # of each thread; beyond any cache


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trioserve.model.step_bench", description="Time whole steps.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(arguments.model))
    runners: dict[str, ModelRunner] = {}
    for name in ("native", "torch"):
        settings = ModelSettings(device="cpu", threads=arguments.threads, cpu_kernels=name)
        runner = runners[name] = ModelRunner.load(checkpoint, settings)
        runner.allocate_kv(max(BATCHES) * CONTEXT // runner.block_size + max(PROMPTS))
        for first in range(0, max(BATCHES), 8):
            runner.execute(_plan(runner, sequences=range(first, first + 8), tokens=CONTEXT, count=CONTEXT))
    threads = torch.get_num_threads()
    reading = _Reading(threads)
    native = runners["native"]
    print(
        f"{arguments.model}, {str(native.dtype).removeprefix('torch.')}, {threads} threads, load average "
        f"{os.getloadavg()[0]:.1f}; milliseconds, least / median of the rounds"
    )
    for batch in BATCHES:
        times = _times(
            runners,
            reading,
            functools.partial(_plan, sequences=range(batch), tokens=CONTEXT, count=1),
            arguments.rounds,
        )
        kv_bytes = batch * CONTEXT // native.block_size * kv_block_bytes(native.config, native.block_size, native.dtype)
        bound = (native.step_weight_bytes + kv_bytes) / reading.best_bytes_per_second
        print(f"decode {batch:3} x {CONTEXT}: {_shown(times)}  bound {1e3 * bound:.1f} (read {reading})", flush=True)
    for tokens in PROMPTS:
        rounds = max(3, arguments.rounds // 3)
        times = _times(
            runners, reading, functools.partial(_plan, sequences=range(1), tokens=tokens, count=tokens), rounds
        )
        speeds = (f"{name} {2e-12 * _layer_count(native) * tokens / min(times[name]):.2f}" for name in runners)
        print(f"prompt of {tokens}: {_shown(times)}  TFLOP/s of the layers' products: {', '.join(speeds)}", flush=True)
    for runner in runners.values():
        runner.close()
    return 0


class _Reading:
    """How fast the machine's threads read memory together."""

    def __init__(self, threads: int) -> None:
        self._arrays = [np.ones(READ_BYTES // 8) for _ in range(threads)]
        self.best_bytes_per_second = 0.0

    def measure(self) -> None:
        # numpy's sum reads from end to end with vector instructions and lets the GIL go.
        workers = [threading.Thread(target=array.sum) for array in self._arrays]
        started_at = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - started_at
        self.best_bytes_per_second = max(self.best_bytes_per_second, len(workers) * READ_BYTES / seconds)

    def __str__(self) -> str:
        return f"{self.best_bytes_per_second / 1e9:.1f} GB/s"


def _times(
    runners: dict[str, ModelRunner], reading: _Reading, plan_for: Callable[[ModelRunner], StepPlan], rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    plans = {name: plan_for(runner) for name, runner in runners.items()}
    for _ in range(rounds):
        reading.measure()
        for name, runner in runners.items():
            runner.execute(plans[name])  # what the others left in the caches is gone now
            for _ in range(2):
                started_at = time.perf_counter()
                runner.execute(plans[name])
                times[name].append(time.perf_counter() - started_at)
    return times


def _plan(runner: ModelRunner, *, sequences: Sequence[int], tokens: int, count: int) -> StepPlan:
    """The last `count` tokens of sequences of that many tokens, each in blocks of its own."""
    width = -(-tokens // runner.block_size)
    chunks = []
    for sequence in sequences:
        prompt = tuple((7919 * (sequence + 1) + 104_729 * index) % runner.config.vocab_size for index in range(tokens))
        request = EngineRequest(
            id=RequestId(str(sequence)),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=0,
        )
        table = range(sequence * width, (sequence + 1) * width)
        chunks.append(ScheduledChunk(request, prompt, tokens - count, count, table, True))
    return StepPlan(0, tuple(chunks), len(chunks) * count)


def _layer_count(runner: ModelRunner) -> int:
    """Weights of all layers' matrices."""
    config = runner.config
    heads = (2 * config.head_count + 2 * config.kv_head_count) * config.head_dim
    return config.layer_count * config.hidden_size * (heads + 3 * config.intermediate_size)


def _shown(times: dict[str, list[float]]) -> str:
    return ", ".join(
        f"{name} {1e3 * min(seconds):.1f} / {1e3 * statistics.median(seconds):.1f}" for name, seconds in times.items()
    )


if __name__ == "__main__":
    sys.exit(main())
