"""Process of one rank that uses gloo: `python gloo_rank.py PORT RANK SIZE CHECKPOINT`.

It prints its results as JSON. test_torch_collectives.py runs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint
from trioserve.model.parallel.torch_collectives import TorchCollectives
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

BLOCK_COUNT = 100


def settings() -> ModelSettings:
    return ModelSettings(
        dtype="float32", device="cpu", block_size=4, kv_cache_bytes=2**22, cpu_kernels="torch", threads=1
    )


def generated(runner: ModelRunner) -> dict[str, list[int]]:
    """Return the output tokens of a greedy and of a sampled request with the same prompt, by request name."""
    runner.allocate_kv(BLOCK_COUNT)
    core = EngineCore(
        CoreSettings(block_count=BLOCK_COUNT, block_size=4, context_tokens_max=256, max_num_seqs=4, step_tokens_max=16)
    )
    found: dict[str, list[int]] = {"greedy": [], "sampled": []}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.9)):
        core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(range(10, 30)),
                sampling=SamplingParams(temperature=temperature, frequency_penalty=0.5),
                output_tokens_max=24,
                stop_token_ids=frozenset(),
                seed=7,
            )
        )
    while (plan := core.schedule(0.0)) is not None:
        result = runner.execute(plan, core.flights.abandonment(plan))
        assert result is not None
        for chunk, token in zip(plan.chunks, result.token_ids, strict=True):
            if token is not None:
                found[chunk.request.id].append(token)
        core.update_from_output(plan, result, 0.0)
    return found


def called(collectives: Collectives) -> dict[str, object]:
    """Call each collective, with numbers whose sum depends on the order. Return the results."""
    rank = collectives.rank
    numbers = np.array([[1e8, 1.0, -1e8][rank % 3], rank], dtype=np.float32)
    votes = [collectives.sum_(numbers, vote) for vote in (False,)]
    halves = torch.tensor([1.0 + rank, 0.5], dtype=torch.bfloat16)
    votes += [collectives.sum_(halves, rank == 1), collectives.sum_(torch.zeros(3), False)]
    gathered = collectives.gather(torch.tensor([[rank, 7]]))
    return {
        "sum": numbers.tolist(),
        "halves": halves.tolist(),
        "votes": votes,
        "gathered": gathered.tolist(),
        "numpy": collectives.gather(np.array([rank], dtype=np.uint16)).tolist(),
    }


def main() -> None:
    port, rank, size = map(int, sys.argv[1:4])
    collectives = TorchCollectives(
        master_addr="127.0.0.1", master_port=port, rank=rank, size=size, timeout_seconds=60.0
    )
    try:
        found = called(collectives)
        checkpoint = RankCheckpoint(open_checkpoint(Path(sys.argv[4])), rank, size)
        runner = ModelRunner.load(checkpoint, settings(), collectives=collectives)
        found["tokens"] = generated(runner)
        # Only rank 1 wants to abandon this step. Then all ranks must abandon it.
        core = EngineCore(CoreSettings(block_count=BLOCK_COUNT, block_size=4, context_tokens_max=256))
        core.add(
            EngineRequest(
                id=RequestId("left"),
                prompt_token_ids=(5, 6, 7),
                sampling=SamplingParams(temperature=0.0),
                output_tokens_max=4,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
        plan = core.schedule(0.0)
        assert plan is not None
        found["abandoned"] = runner.execute(plan, IsAbandoned(0 if rank == 1 else 1)) is None
        runner.close()
    finally:
        collectives.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
