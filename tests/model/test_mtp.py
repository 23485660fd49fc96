"""Tests of drafting with a model's own prediction layer (MTP): draft tokens equal a plain reference's, and responses
do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trioserve.assemble import open_engine
from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.ids import RequestId
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.drafts.checkpoints import DraftSource, MtpCheckpoint
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.testing.invariants import check_idle

pytestmark = pytest.mark.slow

KINDS = ("glm4-moe", "deepseek-v3")
GREEDY = SamplingParams(temperature=0.0)


def opened(draft_driver: ModuleType, directory: Path, kernels: str = "auto", *, drafts: bool = True) -> ModelRunner:
    checkpoint = open_checkpoint(directory)
    settings = draft_driver.settings(kernels)
    draft = DraftSource("mtp", MtpCheckpoint(checkpoint), settings, draft_driver.DRAFT_TOKENS) if drafts else None
    runner = ModelRunner.load(checkpoint, settings, draft=draft)
    runner.allocate_kv(min(200, runner.block_count))
    return runner


@pytest.mark.parametrize("is_shared", [False, True], ids=["own matrices", "the model's"])
@pytest.mark.parametrize("kind", KINDS)
def test_draft_tokens_of_an_mtp_layer_equal_the_reference(
    kind: str,
    is_shared: bool,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_mtp: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    directory = tiny_mtp.write_mtp(tiny_checkpoint(kind), tmp_path, is_shared=is_shared)
    plain = tiny_mtp.PlainMtp(directory)
    runner = opened(draft_driver, directory, cpu_kernels)
    draft_driver.check_proposed(runner, plain.proposed)
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_layer_does_not_change_the_response(
    kind: str,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_mtp: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    directory = tiny_mtp.write_mtp(tiny_checkpoint(kind), tmp_path)
    crowded = {"step_tokens_max": 40, "block_count": 40, "context_tokens_max": 100}
    responses = []
    for drafts in (False, True):
        runner = opened(draft_driver, directory, cpu_kernels, drafts=drafts)
        # There are so few blocks that requests are preempted, and find their prefix in the cache when they resume.
        driver = draft_driver.Driver(runner, source="head" if drafts else None, **crowded)
        draft_driver.add_all(driver)
        driver.add("hit", draft_driver.prompt_of(5 + 11 * 3, 3), GREEDY)
        responses.append(driver.run())
        assert (driver.core.stats().draft_tokens_total > 0) == drafts
        assert driver.core.stats().preemptions_total > 0
        runner.close()
    draft_driver.check_equal(responses[1], responses[0])


@pytest.mark.parametrize("kind", KINDS)
def test_aborts_at_any_step_with_an_mtp_layer_leave_no_blocks(
    kind: str, tiny_checkpoint: Callable[..., Path], tiny_mtp: ModuleType, draft_driver: ModuleType, tmp_path: Path
) -> None:
    runner = opened(draft_driver, tiny_mtp.write_mtp(tiny_checkpoint(kind), tmp_path))
    for left_at in range(1, 7):
        driver = draft_driver.Driver(runner, source="head", step_tokens_max=40)
        draft_driver.add_all(driver)
        for _ in range(left_at):
            driver.step()
        driver.core.abort([RequestId(name) for name in list(draft_driver.SAMPLINGS)[::2]], now=0.0)
        driver.run()
        check_idle(driver.core)
    runner.close()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_accepted_draft_tokens_of_an_mtp_layer_save_steps(
    kind: str,
    sampling: SamplingParams,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_mtp: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    """Use a model whose next token depends on the last one only, and a prediction layer that computes the same."""
    runner = opened(
        draft_driver, tiny_mtp.write_mtp(tiny_checkpoint(kind), tmp_path, is_always_right=True), cpu_kernels
    )
    driver = draft_driver.Driver(runner, source="head")
    driver.add("a", draft_driver.prompt_of(9, 1), sampling, tokens=40)
    driver.run()
    stats = driver.core.stats()
    assert len(driver.responses["a"][0]) == 40
    assert stats.accepted_tokens_total == stats.draft_tokens_total == 30
    assert len(driver.plans) == 10
    runner.close()


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("enorm.weight", None, "has no enorm"),
        ("eh_proj.weight", torch.zeros(64, 64), r"eh_proj of .* has shape \[64, 64\]"),
        ("input_layernorm.weight", None, "the weights lack model.layers.0.input_layernorm"),
    ],
)
def test_damaged_mtp_layer_is_refused(
    name: str,
    tensor: torch.Tensor | None,
    sentence: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_mtp: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    directory = tiny_mtp.write_mtp(tiny_checkpoint("glm4-moe"), tmp_path)
    weights = load_file(directory / "model.safetensors")
    full = next(each for each in weights if each.endswith("enorm.weight")).replace("enorm.weight", name)
    weights.pop(full)
    if tensor is not None:
        weights[full] = tensor
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=sentence):
        opened(draft_driver, directory)


@pytest.mark.parametrize("kind", KINDS)
async def test_engine_drafts_with_the_prediction_layer_if_the_flag_says_mtp(
    kind: str, tiny_checkpoint: Callable[..., Path], tiny_mtp: ModuleType, tmp_path: Path
) -> None:
    directory = str(tiny_mtp.write_mtp(tiny_checkpoint(kind), tmp_path, is_always_right=True))
    sampling = SamplingParams(temperature=0.9, max_tokens=40, seed=5, ignore_eos=True)
    responses = []
    for name in (None, "mtp"):
        tokens: list[int] = []
        async with open_engine(directory, speculative_model=name, kv_cache_memory=0.05, max_model_len=128) as engine:
            async with engine.generate(tuple(range(5, 20)), sampling) as stream:
                async for delta in stream:
                    tokens += delta.token_ids
            assert (engine.stats().accepted_tokens_total > 0) == (name is not None)
        responses.append(tokens)
    assert responses[0] == responses[1]
    assert len(responses[0]) == 40


def test_checkpoint_without_prediction_layer_is_refused(tiny_checkpoint: Callable[..., Path], tiny_gguf: Any) -> None:
    for path in (tiny_checkpoint("glm4-moe"), tiny_gguf("llama")):
        with pytest.raises(StartupError, match="num_nextn_predict_layers"):
            MtpCheckpoint(open_checkpoint(path))


def test_log_names_an_unused_prediction_layer(
    tiny_checkpoint: Callable[..., Path], tiny_mtp: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    directory = tiny_mtp.write_mtp(tiny_checkpoint("glm4-moe"), tmp_path)
    open_checkpoint(directory, uses_further_layers=True)
    assert "are not used" not in caplog.text
    open_checkpoint(directory)
    assert "are not used" in caplog.text
