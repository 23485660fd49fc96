"""Measures two bounds of the machine: matrix products for prompts, and memory bandwidth for decoding."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["product_rate", "read_bandwidth"]

SHAPES = ((1536, 576, 3072), (2048, 2048, 2048))  # rows, depth, columns: of a prompt's rows, and a large square
SECONDS = 0.4  # for each shape and number format
PROCESS_SECONDS_MAX = 120.0
BYTES_PER_THREAD = 256 * 1024 * 1024  # far beyond every cache
ROUNDS = 5


def read_bandwidth() -> float:
    """Measure memory bandwidth. Takes about a second.

    Each thread reduces its own array without the GIL. The reduction costs less than the reading.

    Returns:
        Bytes per second that all cores read together, in the best of a few rounds.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    arrays = [np.ones(BYTES_PER_THREAD // 8, dtype=np.uint64) for _ in range(cores)]
    best_seconds = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best_seconds = min(best_seconds, time.perf_counter() - began)
    return cores * BYTES_PER_THREAD / best_seconds


def product_rate() -> float | None:
    """Measure matrix products of torch on all cores, in bfloat16 and float32. Takes some seconds.

    It runs in another process, because torch and its threads must not stay in the process that measures clients.

    Returns:
        Floating-point operations per second of the best shape and number format, or None if torch is not installed.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", "trioserve.bench.machine_speed"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROCESS_SECONDS_MAX,
            check=True,
        )
        return float(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _measured() -> float:
    import torch

    best = 0.0
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for rows, depth, columns in SHAPES:
                values = torch.rand(rows, depth, dtype=dtype)
                product = torch.nn.Linear(depth, columns, bias=False, dtype=dtype)
                ends_at = time.perf_counter() + SECONDS
                while True:
                    began = time.perf_counter()
                    product(values)
                    ended = time.perf_counter()
                    best = max(best, 2.0 * rows * depth * columns / (ended - began))
                    if ended > ends_at:
                        break
    return best


if __name__ == "__main__":
    print(_measured())
