"""Tests that an abandoned step ends between two layers, and that the runner then computes the next step."""

from __future__ import annotations

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings


def test_a_step_is_abandoned_between_two_layers(tiny_checkpoint, cpu_kernels):
    settings = ModelSettings(dtype="float32", device="cpu", kv_cache_bytes=2**20, cpu_kernels=cpu_kernels)
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
    runner.allocate_kv(4)
    request = EngineRequest(
        id=RequestId("r"),
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(temperature=0),
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=0,
    )
    plan = StepPlan(0, (ScheduledChunk(request, request.prompt_token_ids, 0, 3, [0], True),), 3)

    class LeftOnceItHasBegun(IsAbandoned):
        def __call__(self) -> bool:
            was_abandoned = super().__call__()
            self.waited_for[0] = 0
            return was_abandoned

    assert runner.config.layer_count >= 2
    assert runner.execute(plan, LeftOnceItHasBegun(1)) is None
    result = runner.execute(plan)
    assert result is not None
    assert result.token_ids[0] is not None
    runner.close()
