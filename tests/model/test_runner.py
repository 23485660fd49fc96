"""Tests guarantees of the runner apart from numbers: a fault affects only its request, and loading is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.number_formats import Dtype, Values
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

SETTINGS = ModelSettings(device="cpu", kv_cache_bytes=2**20, block_size=4)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def driver(cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType) -> Any:
    return step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels=cpu_kernels))


def changed(checkpoint: Checkpoint, change: Callable[[StoredTensor], list[StoredTensor]]) -> Any:
    """The checkpoint with each tensor replaced by the result of `change`."""

    def tensors() -> Iterator[StoredTensor]:
        for tensor in checkpoint.tensors():
            yield from change(tensor)

    return SimpleNamespace(
        config=checkpoint.config,
        weight_bytes=checkpoint.weight_bytes,
        tensors=tensors,
        vision=None,
        audio=None,
        encoder=None,
    )


# --- faults of one request ------------------------------------------------------------------------------------------


def check_fails_alone(driver: Any, bad: dict[str, Any], sentence: str) -> None:
    """Run a bad request (arguments of add) with two good requests. The bad request must get an error. The good requests
    must get the same tokens as without the bad request.
    """
    driver.add("a", [5, 6, 7], GREEDY)
    driver.add("b", [8, 9], GREEDY)
    driver.step({"a": 3, "b": 2})
    driver.add("bad", **bad)
    result = driver.step({"a": 1, "bad": len(bad["prompt"]), "b": 1})
    assert list(result.errors) == ["bad"]
    assert sentence in result.errors["bad"]
    assert result.token_ids[1] is None
    driver.generate(["a", "b"], 3)
    for name, prompt in (("a", [5, 6, 7]), ("b", [8, 9])):
        driver.add(f"{name} alone", prompt, GREEDY)
        driver.generate([f"{name} alone"], 5)
        assert driver.tokens[name] == driver.tokens[f"{name} alone"]


def test_prompt_token_outside_the_vocabulary_fails_only_its_own_request(driver: Any) -> None:
    check_fails_alone(driver, {"prompt": [4, 320]}, "token id 320")


def test_unknown_token_that_only_needs_a_prompt_logprob_fails_only_its_own_request(driver: Any) -> None:
    """The token follows the last token of the chunk."""
    driver.add("a", [5, 6, 7], GREEDY)
    driver.add("bad", [4, 5, 320], SamplingParams(prompt_logprobs=1))
    result = driver.step({"a": 3, "bad": 2})
    assert list(result.errors) == ["bad"]
    assert "token id 320" in result.errors["bad"]
    assert isinstance(result.token_ids[0], int)


def test_logit_bias_outside_the_vocabulary_fails_only_its_own_request(driver: Any) -> None:
    sampling = SamplingParams(logit_bias={3: 1.0, 400: 1.0})
    check_fails_alone(driver, {"prompt": [4], "sampling": sampling}, "logit_bias names token id 400")


def test_step_in_which_every_request_fails_has_a_result(driver: Any) -> None:
    driver.add("bad", [320])
    result = driver.step({"bad": 1})
    assert result.token_ids == (None,)
    assert list(result.errors) == ["bad"]


@pytest.mark.parametrize("sampling", (GREEDY, SamplingParams(prompt_logprobs=1), SamplingParams(temperature=0.7)))
def test_nan_in_an_embedding_fails_only_the_request_with_this_token(
    sampling: SamplingParams, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The embedding of one token is NaN. Its request fails, and later owners of its blocks are not affected."""

    def damage(tensor: StoredTensor) -> list[StoredTensor]:
        def read(dtype: Dtype) -> Values:
            values = tensor.read(dtype)
            values[33] = float("nan")
            return values

        return [tensor._replace(read=read, rows=None) if tensor.name == "embed.weight" else tensor]

    settings = msgspec.structs.replace(SETTINGS, cpu_kernels=cpu_kernels)
    runner = ModelRunner.load(changed(open_checkpoint(tiny_checkpoint("llama")), damage), settings)
    runner.allocate_kv(12)
    driver = step_driver.StepDriver(runner)
    prompt = [33, 4, 6, 7, 8, 9]
    check_fails_alone(driver, {"prompt": prompt, "sampling": sampling}, "NaN or infinity")
    driver.forget("bad")
    for name in ("a", "b", "a alone", "b alone"):
        driver.forget(name)
    # The later requests need all twelve blocks of four tokens, including the blocks of the failed request.
    for name in ("c", "d", "e", "f"):
        driver.add(name, [5, 6, 7, 8, 9], GREEDY)
    driver.step({"c": 5, "d": 3, "e": 5, "f": 1})
    driver.generate(["c", "d", "e", "f"], 4)
    assert driver.tokens["c"][5:9] == driver.tokens["d"][5:9] == driver.tokens["f"][5:9]


# --- plans ----------------------------------------------------------------------------------------------------------


def test_chunk_before_the_last_token_samples_nothing(driver: Any) -> None:
    driver.add("a", [5, 6, 7, 8], GREEDY)
    driver.add("b", [5, 6], GREEDY)
    result = driver.step({"a": 3, "b": 2})
    assert result.token_ids[0] is None
    assert isinstance(result.token_ids[1], int)


def test_prompt_logprobs_cover_the_prompt_without_gaps_or_overlap(driver: Any) -> None:
    """This also holds after a preemption, when output tokens are recomputed in a chunk like prompt tokens."""
    prompt = [5, 6, 7, 8, 9, 10]
    driver.add("a", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    first = driver.step({"a": 2}).prompt_logprobs["a"]
    second = driver.step({"a": 4}).prompt_logprobs["a"]
    assert [entry.token_id for entry in first + second] == prompt[1:]
    decode = driver.step({"a": 1})
    assert decode.prompt_logprobs.get("a", ()) == ()
    driver.forget("a")
    again = driver.step({"a": driver.left("a")}).prompt_logprobs["a"]
    assert [entry.logprob for entry in again] == pytest.approx([e.logprob for e in first + second], abs=1e-4)


def test_seed_gives_equal_tokens_in_any_batch_and_after_preemption(driver: Any) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95)
    driver.add("alone", [5, 6, 7], sampling, seed=42)
    driver.generate(["alone"], 12)
    driver.add("crowded", [5, 6, 7], sampling, seed=42)
    for index in range(6):
        driver.add(f"other {index}", list(range(1, 4 + index)), SamplingParams(temperature=1.0), seed=index)
    crowd = [f"other {index}" for index in range(6)]
    driver.generate([*crowd[:3], "crowded", *crowd[3:]], 5)
    driver.forget("crowded")
    driver.generate(["crowded", *crowd], 7)
    assert driver.tokens["crowded"] == driver.tokens["alone"]
    assert len({tuple(driver.tokens[name][-8:]) for name in crowd}) == 6


def test_runner_can_be_closed_after_a_warm_up(tiny_checkpoint: Callable[..., Path], step_driver: ModuleType) -> None:
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("qwen3")), SETTINGS)
    fits = runner.block_count
    assert runner.kv_cache_bytes <= 2**20 < runner.kv_cache_bytes // fits * (fits + 1)
    runner.allocate_kv(3)
    assert runner.block_count == 3
    runner.warm_up()
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    driver.generate(["a"], 2)
    runner.close()
    with pytest.raises(AssertionError, match="close"):
        runner.execute(StepPlan(0, (), 0))


def test_warm_up_computes_only_the_steps_that_the_kernels_need(
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warm-up computes a prompt and a decode, each greedy and drawn.

    It computes only one token if no kernel depends on the step's shape.
    """
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels=cpu_kernels)
    computed: list[list[tuple[int, int]]] = []
    execute = ModelRunner.execute

    def noted(self: ModelRunner, plan: StepPlan) -> Any:
        computed.append([(chunk.start, chunk.count) for chunk in plan.chunks])
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", noted)
    runner.warm_up()
    by_shape = [[(0, 64)], [(63, 1)]] * 2
    assert computed == (by_shape if cpu_kernels == "torch" else [[(0, 1)]])


# --- loading --------------------------------------------------------------------------------------------------------


def test_progress_counts_every_byte_and_may_end_the_loading(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen2"))
    seen: list[tuple[int, int]] = []
    ModelRunner.load(checkpoint, SETTINGS, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.weight_bytes, checkpoint.weight_bytes)

    class Enough(Exception):
        pass

    def abandon(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        ModelRunner.load(checkpoint, SETTINGS, progress=abandon)


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda tensor: [tensor] * (tensor.name != "layers.1.k_proj.weight"), "layers.1.k_proj.weight"),
        (lambda tensor: [tensor] * (2 if tensor.name == "norm.weight" else 1), "norm.weight twice"),
        (
            lambda tensor: [tensor._replace(name=tensor.name.replace("layers.1.", "layers.7."))],
            "layers.7.*does not use",
        ),
        (
            lambda tensor: [tensor._replace(shape=(95, 64)) if tensor.name == "layers.0.up_proj.weight" else tensor],
            r"layers.0.up_proj.weight has shape \[95, 64\].*\[96, 64\]",
        ),
    ),
    ids=("missing", "twice", "unknown", "shape"),
)
def test_checkpoint_with_wrong_tensors_is_refused(
    change: Any, message: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    with pytest.raises(ModelLoadError, match=message):
        ModelRunner.load(changed(checkpoint, change), SETTINGS)


@pytest.mark.parametrize("kind", ("llama", "llama-tied", "qwen2", "qwen3"))
def test_order_of_tensors_in_a_checkpoint_has_no_effect(
    kind: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(kind))
    backwards = SimpleNamespace(
        config=checkpoint.config,
        weight_bytes=checkpoint.weight_bytes,
        vision=None,
        audio=None,
        encoder=None,
        tensors=lambda: reversed(list(checkpoint.tensors())),
    )
    tokens = []
    for source in (checkpoint, backwards):
        runner = ModelRunner.load(source, SETTINGS)
        runner.allocate_kv(8)
        driver = step_driver.StepDriver(runner)
        driver.add("a", [5, 6, 7])
        driver.generate(["a"], 6)
        tokens.append(driver.tokens["a"])
    assert tokens[0] == tokens[1]


def test_gguf_file_gives_the_tokens_of_its_directory(
    tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path], step_driver: ModuleType
) -> None:
    tokens = []
    for path in (tiny_checkpoint("llama3-rope"), tiny_gguf("llama3-rope", "F32")):
        driver = step_driver.StepDriver(step_driver.load_runner(path))
        driver.add("a", list(range(5, 90)))
        driver.generate(["a"], 6)
        tokens.append(driver.tokens["a"])
    assert tokens[0] == tokens[1]


def test_kv_cache_too_small_for_one_block_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    settings = ModelSettings(device="cpu", kv_cache_bytes=100)
    with pytest.raises(StartupError, match="one block of 16 tokens needs"):
        ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
