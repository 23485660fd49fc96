"""Tests of stages: they compute the same bits as one process with the whole model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from trioserve.contracts.errors import StartupError
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.model.layer_config import AttentionConfig, MlpConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import AdapterMatrix, AdapterWeights, StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Float32Array
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint, rank_adapter
from trioserve.model.parallel.stages import StageCheckpoint, stage_adapter, stage_config, stage_runs
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

BLOCK_COUNT = 400


class Passed:
    """Handover between stages in one process."""

    def __init__(self, before: deque[Any], behind: deque[Any]) -> None:
        self._before, self._behind = before, behind

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        hidden: Float32Array | None = self._before.popleft()
        assert hidden is None or hidden.shape == (row_count, hidden_size)
        return hidden

    def send(self, hidden: Float32Array | None) -> None:
        self._behind.append(None if hidden is None else hidden.copy())


class Stages:
    """All stages with the interface of one runner, for StepDriver. They compute one after the other."""

    def __init__(self, path: Path, count: int, **fields: Any) -> None:
        settings = ModelSettings(
            **{"dtype": "float32", "device": "cpu", "block_size": 4, "kv_cache_bytes": 2**24, "threads": 1, **fields}
        )
        whole = open_checkpoint(path)
        between = [deque[Any]() for _ in range(count + 1)]
        self.runners = []
        for stage in range(count):
            checkpoint: Any = RankCheckpoint(StageCheckpoint(whole, stage, count), 0, 1)
            handover = Passed(between[stage], between[stage + 1])
            runner = ModelRunner.load(checkpoint, settings, handover=handover)
            runner.allocate_kv(BLOCK_COUNT)
            runner.warm_up()
            self.runners.append(runner)
        assert not any(between), "warm-up sends nothing to other stages"
        self.between = between[1:-1]
        self.config = whole.config
        self.block_size, self.block_count = 4, BLOCK_COUNT
        self.state_slot_count = max(runner.state_slot_count for runner in self.runners)

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        return [runner.execute(plan, is_abandoned) for runner in self.runners][-1]

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


def whole_runner(path: Path, **fields: Any) -> ModelRunner:
    settings = ModelSettings(
        **{"dtype": "float32", "device": "cpu", "block_size": 4, "kv_cache_bytes": 2**24, "threads": 1, **fields}
    )
    runner = ModelRunner.load(open_checkpoint(path), settings)
    runner.allocate_kv(BLOCK_COUNT)
    return runner


KINDS = (
    "llama",
    "llama-tied",
    "llama-biased",
    "qwen3",
    "gemma2",
    "gemma3",
    "cohere2",
    "phi",
    "gpt2",
    "qwen2-moe",
    "gpt-oss",
    "deepseek-v3",
    "lfm2",
    "falcon-h1",
    "granite-hybrid",
    "qwen3-next",
    "llama4",
)


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_compute_the_same_bits_as_one_process(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[[str], Path], rank_program: ModuleType
) -> None:
    path = tiny_checkpoint(kind)
    whole = whole_runner(path, cpu_kernels=cpu_kernels)
    expected = rank_program.history(whole)
    whole.close()
    for count in range(2, min(3, whole.config.layer_count) + 1):
        stages = Stages(path, count, cpu_kernels=cpu_kernels)
        assert rank_program.history(stages) == expected
        assert not any(stages.between)
        stages.close()


def test_stages_of_sparse_attention_cut_before_an_indexer_only(
    tiny_checkpoint: Callable[[str], Path], rank_program: ModuleType
) -> None:
    path = tiny_checkpoint("deepseek-v3.2")
    whole = whole_runner(path)
    expected = rank_program.history(whole)
    whole.close()
    stages = Stages(path, 2)
    assert rank_program.history(stages) == expected
    stages.close()
    with pytest.raises(StartupError, match="some of which use results of others: 1 stages are possible"):
        stage_runs(open_checkpoint(tiny_checkpoint("glm-moe-dsa")), 2)


def test_each_stage_has_only_its_weights_and_kv(tiny_checkpoint: Callable[[str], Path]) -> None:
    for kind, in_both in (("llama", False), ("llama-tied", True)):
        whole = open_checkpoint(tiny_checkpoint(kind))
        names = [[tensor.name for tensor in StageCheckpoint(whole, stage, 2).tensors()] for stage in range(2)]
        assert ["embed.weight" in of_stage for of_stage in names] == [True, in_both]
        assert ["norm.weight" in of_stage for of_stage in names] == [False, True]
        assert ["lm_head.weight" in of_stage for of_stage in names] == [False, not in_both]
        assert sum(map(len, names)) == len(list(whole.tensors())) + in_both
    stages, alone = Stages(tiny_checkpoint("llama"), 2), whole_runner(tiny_checkpoint("llama"))
    assert sum(runner.kv_cache_bytes for runner in stages.runners) == alone.kv_cache_bytes
    assert all(0 < runner.kv_cache_bytes < alone.kv_cache_bytes for runner in stages.runners)
    stages.close()
    alone.close()


class Sized:
    """Checkpoint with given sizes of embedding, layers and head."""

    def __init__(self, config: ModelConfig, layer_sizes: Sequence[int], embedding: int, head: int) -> None:
        self.config = structs.replace(
            config, layers=(config.layers * len(layer_sizes))[: len(layer_sizes)], tie_word_embeddings=False
        )
        self._sizes = {"embed.weight": embedding, "lm_head.weight": head, "norm.weight": 0}
        self._sizes |= {f"layers.{index}.q_proj.weight": size for index, size in enumerate(layer_sizes)}

    def tensors(self) -> list[StoredTensor]:
        def nothing(*_: object) -> Any:
            raise AssertionError("only sizes are read")

        return [StoredTensor(name, (size,), "float32", nothing, nothing) for name, size in self._sizes.items()]


@pytest.mark.parametrize(
    ("layer_sizes", "embedding", "head", "count", "expected"),
    [
        ([1, 1, 1, 1], 0, 0, 2, [2, 2]),
        ([1, 1, 1, 1, 1], 0, 0, 2, [2, 3]),
        ([1, 1, 1, 1], 0, 3, 2, [3, 1]),
        ([2, 2, 2, 2, 2, 2], 6, 6, 3, [1, 4, 1]),
        ([5, 1, 1, 1, 1, 1], 0, 0, 2, [1, 5]),
        ([1, 1, 1, 1, 1, 1, 1, 1], 9, 9, 4, [1, 3, 3, 1]),
        ([1, 1, 1, 1], 0, 0, 4, [1, 1, 1, 1]),
    ],
)
def test_stages_are_as_even_as_possible(
    layer_sizes: list[int],
    embedding: int,
    head: int,
    count: int,
    expected: list[int],
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    config = open_checkpoint(tiny_checkpoint("llama")).config
    runs = stage_runs(Sized(config, layer_sizes, embedding, head), count)  # type: ignore[arg-type]
    assert [layers for _, layers in runs] == expected
    assert [first for first, _ in runs] == [sum(layers for _, layers in runs[:stage]) for stage in range(count)]


def test_layers_that_share_keys_and_values_stay_together(tiny_checkpoint: Callable[[str], Path]) -> None:
    config = open_checkpoint(tiny_checkpoint("llama")).config
    own = config.layers[0]
    assert isinstance(own.attention, AttentionConfig)
    sharing = structs.replace(own, attention=structs.replace(own.attention, kv_from=1))
    shared = structs.replace(config, layers=(own, own, own, sharing, own))
    checkpoint: Any = Sized(config, [1, 1, 1, 1, 1], 0, 0)
    checkpoint.config = shared
    assert stage_runs(checkpoint, 3) == ((0, 1), (1, 3), (4, 1))
    of_stage = stage_config(shared, (1, 3))
    assert of_stage.kv_layers == (0, 1, 0)
    with pytest.raises(StartupError, match="5 layers, some of which use results of others: 3 stages are possible"):
        stage_runs(checkpoint, 4)


def test_layer_that_adds_a_shortcut_is_in_the_same_stage_as_the_source_of_the_shortcut(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("longcat-flash"))
    assert stage_runs(checkpoint, 2) == ((0, 2), (2, 2))
    with pytest.raises(StartupError, match="4 layers, some of which use results of others: 2 stages are possible"):
        stage_runs(checkpoint, 3)


def test_too_many_stages_are_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(StartupError, match=r"9 stages cannot share \d layers: \d stages are possible"):
        StageCheckpoint(open_checkpoint(tiny_checkpoint("llama")), 0, 9)
    for kind, reason in (("gemma3n", "several streams"), ("zamba2", "layers share a block")):
        with pytest.raises(StartupError, match=reason):
            StageCheckpoint(open_checkpoint(tiny_checkpoint(kind)), 0, 2)


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
@pytest.mark.parametrize("abandoned_in", [0, 1])
def test_abandoned_step_is_abandoned_in_later_stages(
    abandoned_in: int, cpu_kernels: str, tiny_checkpoint: Callable[[str], Path], rank_program: ModuleType
) -> None:
    path = tiny_checkpoint("llama")
    stages = Stages(path, 2, cpu_kernels=cpu_kernels)
    expected = rank_program.history(stages)
    driver = rank_program.step_driver().StepDriver(stages)
    driver.add("left", [5, 6, 7])
    plan = StepPlan(0, (driver.chunk("left", 3),), 3)
    left = IsAbandoned(1)
    left.leave()
    heard = [left if stage == abandoned_in else never_abandoned for stage in range(2)]
    assert [
        runner.execute(plan, is_abandoned) is None for runner, is_abandoned in zip(stages.runners, heard, strict=True)
    ] == [abandoned_in == 0, True]
    assert not any(stages.between), "each step is handed on once"
    assert rank_program.history(stages) == expected
    stages.close()


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
@pytest.mark.parametrize("layers", [(0,), (0, 1)])
def test_each_stage_takes_only_the_adapter_matrices_of_its_own_layers(
    layers: tuple[int, ...], cpu_kernels: str, tiny_checkpoint: Callable[[str], Path], rank_program: ModuleType
) -> None:
    path = tiny_checkpoint("llama")
    whole, stages = whole_runner(path, cpu_kernels=cpu_kernels), Stages(path, 2, cpu_kernels=cpu_kernels)
    hidden, rng = whole.config.hidden_size, np.random.default_rng(3)
    matrices = {
        f"layers.{layer}.{module}": AdapterMatrix(
            rng.standard_normal((4, hidden), dtype=np.float32), rng.standard_normal((size, 4), dtype=np.float32)
        )
        for layer in layers
        for module, size in (("q_proj", whole.config.heads.query_size), ("gate_proj", _middle(whole.config)))
    }
    adapter = AdapterWeights("a", "float32", matrices)
    ref = AdapterRef(AdapterId(1), "a")
    whole.add_adapter(ref.id, adapter)
    for stage, runner in enumerate(stages.runners):
        checkpoint = StageCheckpoint(open_checkpoint(path), stage, 2)
        part = rank_adapter(stage_adapter(adapter, checkpoint), RankCheckpoint(checkpoint, 0, 1))
        assert part.rank_max == 4  # also in the stage without matrices
        runner.add_adapter(ref.id, part)
    said = []
    for computing in (whole, stages):
        driver = rank_program.step_driver().StepDriver(computing)
        for name in ("with", "without"):
            driver.add(name, [5, 6, 7, 8])
        driver._requests["with"] = structs.replace(driver._requests["with"], adapter=ref)
        for _ in range(6):
            driver.step({name: driver.left(name) for name in ("with", "without")})
        said.append(driver.tokens)
    assert said[0] == said[1]
    assert said[0]["with"] != said[0]["without"]
    whole.close()
    stages.close()


def _middle(config: ModelConfig) -> int:
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    return mlp.intermediate_size
