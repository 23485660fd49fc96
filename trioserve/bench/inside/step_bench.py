"""Measures whole steps in milliseconds: native kernels, plain torch, and the bound of the memory bandwidth.

    python -m trioserve bench inside step [--model smollm2] [--rounds 15] [--threads 2] [--steps sampled shared]
    python -m trioserve bench inside step --quantization none int8 int4 file
    python -m trioserve bench inside step --kv-cache-dtype auto int8 fp8 --steps context
    python -m trioserve bench inside step --batch-invariant
    python -m trioserve bench inside step --against OTHER_CHECKOUT [--steps decode sampled shared prompt]

Each round measures all variants, one after the other, so that other work on the machine affects all of them. The output
has the least and the median of the rounds. A decode step cannot be faster than its weights and KV can be read. This
bound is computed from the speed at which as many threads read memory in the same rounds.

With --quantization, the native kernels compute once with each of these formats, instead of plain torch.
With --kv-cache-dtype, they also compute once with each of these, with the first format of --quantization.
With --batch-invariant, they compute with and without that mode, instead of plain torch.
With --against, the native kernels of another checkout of this project replace plain torch. They compute in a separate
process, with the first format of --quantization.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import resolve_model
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.trio_tools.progress import with_progress

if TYPE_CHECKING:  # This file also runs in older checkouts, which lack these names.
    from trioserve.model.settings import KvCacheDtypeName, QuantizationName

__all__ = ["CASES", "FILLED_AT_ONCE", "Case", "add_arguments", "run", "step_plan"]

KV_CACHE_DTYPES = ("auto", "int8", "fp8")
QUANTIZATIONS = ("auto", "none", "file", "int8", "int4")

READ_BYTES = 2**28  # number of bytes that each thread reads, more than any cache has
FILLED_AT_ONCE = 8  # number of sequences whose KV is written in one step


@dataclass(frozen=True)
class Case:
    """One step: the last `count` tokens of each of `batch` sequences with `context` tokens.

    Attributes:
        batch: number of sequences.
        context: tokens of each sequence.
        count: tokens of each sequence that the step computes.
        shared: tokens at the beginning that all sequences share. Their full blocks exist once.
        is_sampled: True: temperature 0.8 and top_p 0.95. False: greedy.
    """

    batch: int
    context: int
    count: int = 1
    shared: int = 0
    is_sampled: bool = False

    def __str__(self) -> str:
        name = f"prompt of {self.context}" if self.count > 1 else f"decode {self.batch:3} x {self.context}"
        name += f", {self.shared} of them shared" if self.shared else ""
        return name + (", sampled" if self.is_sampled else "")


CASES = {
    "decode": [Case(batch, 256) for batch in (1, 16, 64)],
    "sampled": [Case(batch, 256, is_sampled=True) for batch in (1, 16, 64)],
    "shared": [Case(batch, 1020, shared=1000) for batch in (16, 64)],
    "prompt": [Case(1, tokens, count=tokens) for tokens in (128, 512)],
    "long": [Case(1, 1500, count=1500)],
    "context": [Case(1, 8000), Case(8, 4000)],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds of each step, in turns")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="threads; None: as many as serve uses")
    parser.add_argument("--steps", nargs="+", choices=CASES, default=["decode", "prompt"], help="which steps to time")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout of this project, instead of plain torch"
    )
    parser.add_argument(
        "--quantization", nargs="+", default=["auto"], choices=QUANTIZATIONS, help="number formats of weights"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        default=["auto"],
        choices=KV_CACHE_DTYPES,
        help="number formats of keys and values",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="measure with and without that mode")
    parser.add_argument("--answering", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    quantizations: list[QuantizationName] = arguments.quantization
    natives = [_Local("native", arguments.model, arguments.threads, quantization) for quantization in quantizations]
    kept: list[KvCacheDtypeName] = [name for name in arguments.kv_cache_dtype if name != "auto"]
    natives += [
        _Local("native", arguments.model, arguments.threads, quantizations[0], kv_cache_dtype=name) for name in kept
    ]
    names = ["native" if quantization == "auto" else f"native {quantization}" for quantization in quantizations]
    names += [f"{names[0]} KV {name}" for name in kept]
    if arguments.answering:
        return _respond(natives[0])
    runner = natives[0].runner
    contestants: dict[str, _Contestant] = dict(zip(names, natives, strict=True))
    if arguments.batch_invariant:
        contestants["native batch-invariant"] = _Local(
            "native", arguments.model, arguments.threads, quantizations[0], True
        )
    if arguments.against:
        contestants["against"] = _Other(arguments.against, arguments.model, arguments.threads, quantizations[0])
    elif len(natives) == 1 and not arguments.batch_invariant:
        contestants["torch"] = _Local("torch", arguments.model, arguments.threads)
    try:
        # Older checkouts, in which this file also runs, do not have this module.
        from trioserve.model.device import default_thread_count

        threads = arguments.threads or default_thread_count()
        reading = _Reading(threads)
        print(
            f"{arguments.model}, {str(runner.dtype).removeprefix('torch.')}, {threads} threads, load average "
            f"{os.getloadavg()[0]:.1f}; milliseconds, least / median of the rounds"
        )
        for case in (case for step in arguments.steps for case in CASES[step]):
            rounds = arguments.rounds if case.count == 1 else max(3, arguments.rounds // 3)
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for contestant in contestants.values():
                contestant.fill(case)
            for _ in with_progress(range(rounds), f"measuring {case}", unit="rounds"):
                reading.measure()
                for name, contestant in contestants.items():
                    times[name] += contestant.times(case)
            shown = ", ".join(f"{name} {_shown(seconds)}" for name, seconds in times.items())
            if case.count == 1:
                bounds = (_bytes_read(native, case) / reading.best_bytes_per_second for native in natives)
                shown_bounds = ", ".join(f"{1e3 * bound:.1f}" for bound in bounds)
                print(f"{case}: {shown}  bound {shown_bounds} (read {reading})", flush=True)
            else:
                flops = 1e-12 * runner.token_flops * case.context
                speeds = ", ".join(f"{name} {flops / min(seconds):.2f}" for name, seconds in times.items())
                print(f"{case}: {shown}  TFLOP/s of the layers' products: {speeds}", flush=True)
    finally:
        for contestant in contestants.values():
            contestant.close()
    return 0


class _Contestant(Protocol):
    def fill(self, case: Case) -> None:
        """Write the KV of all tokens before those that the step of a case computes."""
        ...

    def times(self, case: Case) -> list[float]:
        """Return the seconds of some steps."""
        ...

    def close(self) -> None: ...


class _Local:
    """A model in this process."""

    def __init__(
        self,
        cpu_kernels: Literal["native", "torch"],
        model: str,
        threads: int | None,
        quantization: QuantizationName = "auto",
        batch_invariant: bool = False,
        kv_cache_dtype: KvCacheDtypeName = "auto",
    ) -> None:
        settings = ModelSettings(device="cpu", threads=threads, cpu_kernels=cpu_kernels)
        if batch_invariant:  # Older checkouts do not have the three settings of this branch.
            settings = msgspec.structs.replace(settings, batch_invariant=True)
        if kv_cache_dtype != "auto":
            settings = msgspec.structs.replace(settings, kv_cache_dtype=kv_cache_dtype)
        if quantization != "auto":
            settings = msgspec.structs.replace(settings, quantization=quantization)
        self.runner = ModelRunner.load(open_checkpoint(resolve_model(model)), settings)
        self.block_bytes = self.runner.kv_cache_bytes // self.runner.block_count
        self.runner.allocate_kv(
            max(_block_count(case, self.runner.block_size) for some in CASES.values() for case in some)
        )

    def fill(self, case: Case) -> None:
        start = 0
        for first in range(0, case.batch, FILLED_AT_ONCE):
            if first == 0 and case.shared:
                self.runner.execute(_plan(self.runner, case, range(1), 0))
                start = _shared_blocks(case, self.runner.block_size) * self.runner.block_size
            sequences = range(first, min(first + FILLED_AT_ONCE, case.batch))
            self.runner.execute(_plan(self.runner, case, sequences, start))

    def times(self, case: Case) -> list[float]:
        plan = _plan(self.runner, case, range(case.batch), case.context - case.count)
        self.runner.execute(plan)  # This step replaces data of the other variants in the CPU's caches.
        seconds = []
        for _ in range(2):
            started_at = time.perf_counter()
            self.runner.execute(plan)
            seconds.append(time.perf_counter() - started_at)
        return seconds

    def close(self) -> None:
        self.runner.close()


class _Other:
    """The native kernels of another checkout, in a separate process that runs this file."""

    def __init__(self, checkout: Path, model: str, threads: int | None, quantization: QuantizationName) -> None:
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "trioserve_kernels").symlink_to((checkout / "kernels").resolve())
        path = os.pathsep.join((str(checkout.resolve()), self._folder.name))
        more = [] if threads is None else ["--threads", str(threads)]
        more += [] if quantization == "auto" else ["--quantization", quantization]
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--answering", "--model", model, *more],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fill(self, case: Case) -> None:
        self._ask("fill", case)

    def times(self, case: Case) -> list[float]:
        return self._ask("times", case)

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def _ask(self, what: str, case: Case) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, asdict(case)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the process of the other checkout has ended")
        response: list[float] = json.loads(line)
        return response


def _respond(local: _Local) -> int:
    """Answer the requests of _Other, in the process of the other checkout."""
    for line in sys.stdin:
        what, fields = json.loads(line)
        response: list[float] = []
        if what == "fill":
            local.fill(Case(**fields))
        else:
            response = local.times(Case(**fields))
        print(json.dumps(response), flush=True)
    local.close()
    return 0


class _Reading:
    """Measures how fast several threads together read memory."""

    def __init__(self, threads: int) -> None:
        self._arrays = [np.ones(READ_BYTES // 8) for _ in range(threads)]
        self.best_bytes_per_second = 0.0

    def measure(self) -> None:
        # numpy's sum reads the whole array with vector instructions, and releases the GIL.
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


def _shared_blocks(case: Case, block_size: int) -> int:
    return case.shared // block_size


def _block_count(case: Case, block_size: int) -> int:
    """Return the blocks of all sequences of a step."""
    shared = _shared_blocks(case, block_size)
    return shared + case.batch * (-(-case.context // block_size) - shared)


def _bytes_read(local: _Local, case: Case) -> int:
    runner = local.runner
    return runner.step_weight_bytes + _block_count(case, runner.block_size) * local.block_bytes


def _plan(runner: ModelRunner, case: Case, sequences: Sequence[int], start: int) -> StepPlan:
    return step_plan(case, sequences, start, runner.block_size, runner.config.vocab_size, runner.state_slot_count)


def step_plan(
    case: Case, sequences: Sequence[int], start: int, block_size: int, vocab_size: int, state_slot_count: int = 0
) -> StepPlan:
    """Return a step that computes the tokens of sequences from a position on.

    Args:
        case: the step.
        sequences: numbers of the sequences.
        start: first position to compute.
        block_size: tokens of a block.
        vocab_size: number of token ids.
        state_slot_count: slots for states of the model. 0: the model has no states.
    """
    shared = _shared_blocks(case, block_size)
    own = -(-case.context // block_size) - shared
    sampling = SamplingParams(temperature=0.8, top_p=0.95) if case.is_sampled else SamplingParams(temperature=0.0)
    chunks = []
    for sequence in sequences:
        prompt = tuple(
            (7919 * (1 if index < case.shared else sequence + 1) + 104_729 * index) % vocab_size
            for index in range(case.context)
        )
        request = EngineRequest(
            id=RequestId(str(sequence)),
            prompt_token_ids=prompt,
            sampling=sampling,
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=sequence,
        )
        first = shared + sequence * own
        table = [*range(shared), *range(first, first + own)]
        states: tuple[StateSpan, ...] = ()
        if state_slot_count:
            states = (StateSpan(case.context - start, None, sequence % state_slot_count),)
        chunks.append(ScheduledChunk(request, prompt, start, case.context - start, table, True, states=states))
    return StepPlan(0, tuple(chunks), len(chunks) * (case.context - start))


def _shown(seconds: list[float]) -> str:
    return f"{1e3 * min(seconds):.1f} / {1e3 * statistics.median(seconds):.1f}"


if __name__ == "__main__":  # This branch runs in the process of the other checkout.
    _parser = argparse.ArgumentParser()
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
