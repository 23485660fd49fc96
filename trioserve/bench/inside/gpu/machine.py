"""Measures what a GPU gives to any program: the speed of its memory and of torch's matrix products.

Part is a running part of the GPU measurement: its device, the time it has left, and its figures.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from trioserve.model.device import DeviceType

__all__ = ["COLD_BYTES", "Part", "measure_machine", "measured_bandwidth", "seconds_of"]


class Part:
    """One part of the measurement. Every figure is printed and stored at once, so that a time limit loses none.

    Args:
        name: name of the part, stored with every figure.
        device: "cpu" is only for a test of the measurement.
        seconds_max: after this time, the part begins no further case.
        results: file to which one line of JSON is added for each row. None: rows are only printed.

    Attributes:
        wrong_count: results that differ too much from the reference.
        was_cut_off: True if some cases were not measured because the time was over.
    """

    def __init__(self, name: str, device: DeviceType, seconds_max: float, results: Path | None = None) -> None:
        self.name, self.device = name, device
        self.wrong_count = 0
        self.was_cut_off = False
        self._results = results
        self._ends_at = time.monotonic() + seconds_max

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def has_time(self) -> bool:
        """Return True if another case may begin. Otherwise, the part is marked as cut off."""
        if time.monotonic() < self._ends_at:
            return True
        if not self.was_cut_off:
            self.was_cut_off = True
            self.put("time is over", note="the other cases of this part were not measured")
        return False

    def put(self, what: str, **figures: Any) -> None:
        """Print and store one row.

        Args:
            what: the thing that was measured.
            **figures: values by name. A name ends in its unit.
        """
        shown = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        print(f"{what:45} {'  '.join(shown)}", flush=True)
        if self._results is not None:
            with self._results.open("a") as file:
                file.write(json.dumps({"part": self.name, "what": what, **figures}) + "\n")

    def compare(self, what: str, error: float, tolerance: float) -> None:
        """Report the error of a result, and count it if it is too large or not a number.

        Args:
            what: name of the result, for the report.
            error: difference from the reference.
            tolerance: largest allowed error.
        """
        is_right = error <= tolerance  # False for NaN.
        self.wrong_count += not is_right
        self.put(what, error=error, allowed=tolerance, verdict="right" if is_right else "WRONG")

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def numbers(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return normally distributed random numbers on the device.

        Args:
            *shape: shape of the tensor.
            dtype: number format.
        """
        return torch.randn(*shape, device=self.device, dtype=dtype)


MOVE_ROUNDS, MOVES = 10, 8
READ_BYTES: dict[DeviceType, int] = {"cuda": 2**30, "cpu": 2**26}
REPEATS = 20  # number of launches in a graph
REPLAYS = 5  # Number of replays of a graph. The time of the fastest replay counts.
# Bytes that are moved between two uses of a set of tensors. The number is twice the size of the largest L2 cache.
COLD_BYTES = 2**28
SQUARE: dict[DeviceType, int] = {"cuda": 8_192, "cpu": 128}
# Outputs and inputs of the matrices of Llama 3.1 8B.
MATRICES = {
    "qkv": (6_144, 4_096),
    "output": (4_096, 4_096),
    "gate and up": (28_672, 4_096),
    "down": (4_096, 14_336),
    "logits": (128_256, 4_096),
}
MATRIX_ROWS = (1, 16, 64, 256, 512, 2_048, 8_192)
LOGIT_ROWS_MAX = 512  # Logits of more rows are not computed in a step.


def measure_machine(part: Part) -> None:
    """Report versions, the speed of memory, and the speed of torch's products in the shapes of an 8B model.

    Args:
        part: where the figures go.
    """
    part.put("versions", python=platform.python_version(), processors=os.cpu_count(), **dict(_versions(part)))
    bandwidth = measured_bandwidth(part.device)
    part.put("memory", GB_per_s=bandwidth / 1e9)
    size = SQUARE[part.device]
    left, right = part.numbers(size, size), part.numbers(size, size)
    seconds = seconds_of([lambda: left @ right], part.device)
    part.put(f"product of {size} cubed", TFLOP_per_s=2 * size**3 / seconds / 1e12)
    for name, (outputs, inputs) in (MATRICES if part.is_gpu else {"small": (64, 64)}).items():
        byte_count = 2 * outputs * inputs
        weights = [
            part.numbers(outputs, inputs) for _ in range(min(8, COLD_BYTES // byte_count + 1) if part.is_gpu else 1)
        ]
        for rows in MATRIX_ROWS:
            if (name == "logits" and rows > LOGIT_ROWS_MAX) or not part.has_time():
                break
            values = part.numbers(rows, inputs)
            seconds = seconds_of([partial(linear, values, weight) for weight in weights], part.device)
            part.put(
                f"torch's linear, {name}, {rows} rows",
                us=seconds * 1e6,
                share_of_memory_bound=byte_count / bandwidth / seconds,
                TFLOP_per_s=2 * rows * outputs * inputs / seconds / 1e12,
            )


def _versions(part: Part) -> Iterator[tuple[str, str]]:
    for package in ("torch", "triton"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "none"
    if part.is_gpu:
        device = torch.cuda.get_device_properties(0)
        yield "gpu", device.name
        yield "capability", f"{device.major}.{device.minor}"
        yield "multiprocessors", str(device.multi_processor_count)
        yield "GiB", f"{device.total_memory / 2**30:.1f}"
        yield "cuda", str(torch.version.cuda)


def measured_bandwidth(device: DeviceType) -> float:
    """Return the memory bandwidth in bytes per second: the best of reading and copying a large tensor.

    Args:
        device: a CUDA device.
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

    def moves() -> None:
        for _ in range(MOVES):
            move()

    return _seconds_by_events(moves) / MOVES


def _host_seconds(move: Callable[[], object]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def _seconds_by_events(work: Callable[[], object]) -> float:
    began, ended = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        for _ in range(2)
    )
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def seconds_of(launches: Sequence[Callable[[], object]], device: DeviceType, repeats: int = REPEATS) -> float:
    """Return the seconds of one launch. On a GPU, it is measured in a CUDA graph of several launches.

    Args:
        launches: launches over different tensors, used in turn.
        device: where they run.
        repeats: number of launches in the graph.
    """
    if device == "cpu":
        return min(_host_seconds(launch) for launch in launches)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # The first launch compiles the kernel.
            launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # All results are kept, so that each launch writes to different memory.
        results = [launch() for launch in itertools.islice(itertools.cycle(launches), repeats)]
    graph.replay()
    others = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    best = float("inf")
    for _ in range(REPLAYS):
        others.sum()  # Only reads, because the GPU would write changed data back to memory during the timing.
        best = min(best, _seconds_by_events(graph.replay) / repeats)
    del results
    return best
