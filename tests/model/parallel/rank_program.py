"""One rank of a group, as a process: rank_program.py CASE RANK SIZE DESCRIPTOR. Arguments come pickled from stdin, and
what the case gives goes to stdout the same way."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np

from trioserve.model.parallel.shared_memory import SharedMemoryCollectives
from trioserve_kernels.native import load_library


def sums(collectives: SharedMemoryCollectives, shapes: list[tuple[int, ...]], times: int) -> list[float]:
    """The total of all sums, and of all ranks' numbers."""
    total, ranks = 0.0, 0
    for _ in range(times):
        for shape in shapes:
            values = np.random.default_rng(collectives.rank).standard_normal(shape, dtype=np.float32)
            assert not collectives.sum_(values)
            total += float(values.sum(dtype=np.float64))
        ranks += int(collectives.gather(np.array([collectives.rank])).sum())
    return [total, ranks]


CASES = {"sums": sums}


def main(case: str, rank: str, size: str, descriptor: str) -> None:
    arguments: Any = pickle.loads(sys.stdin.buffer.read())
    collectives = SharedMemoryCollectives(load_library(), int(descriptor), int(rank), int(size))
    sys.stdout.buffer.write(pickle.dumps(CASES[case](collectives, *arguments)))
    collectives.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
