"""How fast this machine multiplies matrices, which is most of what a prompt takes."""

from __future__ import annotations

import subprocess
import sys
import time

__all__ = ["product_rate"]

SHAPES = ((1536, 576, 3072), (2048, 2048, 2048))  # rows, depth, columns: of a prompt's rows, and a large square
SECONDS = 0.4  # for each shape and number format
PROCESS_SECONDS_MAX = 120.0


def product_rate() -> float | None:
    """Floating-point operations a second of torch's matrix products on all cores, the best of some shapes, in bfloat16
    or float32. Some seconds; None, if torch cannot be had.

    It runs in a process of its own: torch and its threads are not to stay where clients are measured.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", "trioserve.bench.product_rate"],
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
