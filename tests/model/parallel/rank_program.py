"""Process of one rank: `rank_program.py CASE RANK SIZE DESCRIPTOR`.

Arguments of the case are read pickled from stdin, and its result is written pickled to stdout. Tests also call its
functions in threads.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from trioserve.contracts.pooling import Pooling
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.parallel.collectives import Collectives, SharedMemoryCollectives
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve_kernels.native import load_library

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, logprobs=3),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, logprobs=5, logit_bias={7: 3.0, 300: -4.0}),
    SamplingParams(temperature=0.9, prompt_logprobs=4),
)
BLOCK_COUNT = 400


def step_driver() -> ModuleType:
    path = Path(__file__).parent.parent / "step_driver.py"
    spec = importlib.util.spec_from_file_location("step_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("step_driver", module)
    spec.loader.exec_module(module)
    return module


def rank_runner(
    path: Path, collectives: Collectives | None, *, expert_parallel: bool = False, **fields: Any
) -> ModelRunner:
    """Load a rank's model, or the whole model if there are no collectives."""
    settings = ModelSettings(
        **{"dtype": "float32", "device": "cpu", "block_size": 4, "kv_cache_bytes": 2**24, "threads": 1, **fields}
    )
    checkpoint: Any = open_checkpoint(path)
    if collectives is not None:
        checkpoint = RankCheckpoint(checkpoint, collectives.rank, collectives.size, expert_parallel=expert_parallel)
    runner = ModelRunner.load(checkpoint, settings, collectives=collectives)
    runner.allocate_kv(BLOCK_COUNT)
    return runner


def history(runner: ModelRunner, steps: int = 5) -> dict[str, Any]:
    """Compute steps of prompt chunks and decodes, with different samplings and one request for label probabilities."""
    driver = step_driver().StepDriver(runner)
    rng = np.random.default_rng(0)
    names = []
    for index, sampling in enumerate(SAMPLINGS):
        names.append(f"r{index}")
        driver.add(names[-1], rng.integers(5, 320, 3 + 8 * index).tolist(), sampling, seed=index)
    labels = Pooling(task="labels", method="last", normalize=False, label_token_ids=(9, 250, 317))
    driver.add("labels", [7, 8, 9, 200], pooling=labels)
    results = [
        driver.step({"r0": 3, "r3": 20, "r4": 9}),
        driver.step({"r0": 1, "r2": 19, "labels": 4}),
        *(driver.step({name: driver.left(name) for name in names}) for _ in range(steps)),
    ]
    assert not any(result.errors for result in results)
    pooled = results[1].pooled["labels"]
    assert pooled is not None
    return {
        "tokens": driver.tokens,
        "logprobs": [msgspec.to_builtins(result.logprobs) for result in results],
        "prompt_logprobs": [msgspec.to_builtins(result.prompt_logprobs) for result in results],
        "labels": np.frombuffer(pooled.data, dtype="<f4").tolist(),
    }


def steps(collectives: SharedMemoryCollectives, path: Path, **options: Any) -> dict[str, Any]:
    runner = rank_runner(path, collectives, **options)
    found = history(runner)
    runner.close()
    return found


def sums(collectives: SharedMemoryCollectives, shapes: list[tuple[int, ...]], times: int) -> list[float]:
    """Return the total of all summed values, and the total of the gathered rank numbers."""
    total, ranks = 0.0, 0
    for _ in range(times):
        for shape in shapes:
            values = np.random.default_rng(collectives.rank).standard_normal(shape, dtype=np.float32)
            assert not collectives.sum_(values)
            total += float(values.sum(dtype=np.float64))
        ranks += int(collectives.gather(np.array([collectives.rank])).sum())
    return [total, ranks]


CASES = {"sums": sums, "steps": steps}


def main(case: str, rank: str, size: str, descriptor: str) -> None:
    arguments: Any = pickle.loads(sys.stdin.buffer.read())
    collectives = SharedMemoryCollectives(load_library(), int(descriptor), int(rank), int(size))
    sys.stdout.buffer.write(pickle.dumps(CASES[case](collectives, *arguments)))
    collectives.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
