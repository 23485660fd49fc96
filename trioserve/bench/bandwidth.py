"""How fast this machine reads memory: what a decode step, which reads all weights, cannot be faster than."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["read_bandwidth"]

BYTES_PER_THREAD = 256 * 1024 * 1024  # far beyond every cache
ROUNDS = 5


def read_bandwidth() -> float:
    """Bytes a second that all cores read together from memory, the best of a few rounds. About a second.

    Each thread sums its own array, as numpy does without the GIL: the sums cost less than the reading.
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
