"""Tests of an EAGLE-3 head: its draft tokens equal a plain reference's, and it changes no response."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.ids import RequestId
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.invariants import check_idle

TARGET = "smollm3"  # The target model has four layers.


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Callable[..., Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(TARGET), dtype=torch.float32).eval()


@torch.inference_mode()
def tapped_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Return the inputs of the first three layers at all tokens but the last, [len(tokens) - 1, 3 * hidden_size]."""
    states = reference(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in range(3)], -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"own_embedding": True}, {"draft_vocab_size": 320}, {"norm_before_residual": True}],
    ids=["plain", "own embedding", "whole vocabulary", "norm before residual"],
)
def test_draft_tokens_of_an_eagle_head_equal_the_reference(
    changes: dict[str, Any],
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_eagle: ModuleType,
    draft_driver: ModuleType,
    reference: Any,
    tmp_path: Path,
) -> None:
    directory = tiny_eagle.write_eagle(tmp_path / "head", **changes)
    plain = tiny_eagle.PlainHead(directory, reference.get_input_embeddings().weight.detach())
    runner = draft_driver.opened(tiny_checkpoint(TARGET), directory, (cpu_kernels, "auto"))

    @torch.inference_mode()
    def expected(tokens: list[int], count: int) -> list[int]:
        return plain.proposed(tokens, tapped_of(reference, tokens), count)

    draft_driver.check_proposed(runner, expected)
    runner.close()


def test_head_does_not_change_the_response(
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_eagle: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    responses = []
    for source in (None, "head"):
        head = None if source is None else tiny_eagle.write_eagle(tmp_path / "head")
        runner = draft_driver.opened(tiny_checkpoint(TARGET), head, (cpu_kernels, "auto"))
        driver = draft_driver.Driver(runner, source=source, step_tokens_max=40)
        draft_driver.add_all(driver)
        responses.append(driver.run())
        assert (driver.core.stats().draft_tokens_total > 0) == (source is not None)
        runner.close()
    draft_driver.check_equal(responses[1], responses[0])


def test_aborts_at_any_step_with_an_eagle_head_leave_no_blocks(
    tiny_checkpoint: Callable[..., Path], tiny_eagle: ModuleType, draft_driver: ModuleType, tmp_path: Path
) -> None:
    runner = draft_driver.opened(tiny_checkpoint(TARGET), tiny_eagle.write_eagle(tmp_path / "head"))
    for left_at in range(1, 7):
        driver = draft_driver.Driver(runner, source="head", step_tokens_max=40)
        draft_driver.add_all(driver)
        for _ in range(left_at):
            driver.step()
        driver.core.abort([RequestId(name) for name in list(draft_driver.SAMPLINGS)[::2]], now=0.0)
        driver.run()
        check_idle(driver.core)
    runner.close()


def test_accepted_draft_tokens_of_an_eagle_head_save_steps(
    tiny_checkpoint: Callable[..., Path], tiny_eagle: ModuleType, draft_driver: ModuleType, tmp_path: Path
) -> None:
    """Use a head that always proposes token 7, and a bias that makes the target model choose token 7."""
    directory = tiny_eagle.write_eagle(tmp_path / "head", draft_vocab_size=320)
    weights = load_file(directory / "model.safetensors")
    weights["norm.weight"] = torch.zeros_like(weights["norm.weight"])
    save_file(weights, directory / "model.safetensors")
    runner = draft_driver.opened(tiny_checkpoint(TARGET), directory)
    driver = draft_driver.Driver(runner, source="head")
    driver.add("a", draft_driver.prompt_of(9, 1), SamplingParams(temperature=0.0, logit_bias={7: 100.0}), tokens=40)
    assert driver.run()["a"][0] == [7] * 40
    assert driver.core.stats().accepted_tokens_total == 30
    assert len(driver.plans) == 10
    runner.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, "layers 0, 1, 4, but the model has 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "has 2 layers, it must have 3"),
        ({"eagle_config": None}, "layers 2, 2, 1, but the model has 4"),
        ({"num_hidden_layers": 2}, "has 2 layers, but must have one"),
        ({"vocab_size": 319, "draft_vocab_size": 200}, "a vocabulary of 319 tokens, but the model has one of 320"),
        ({"hidden_size": 128, "head_dim": 16}, "name the head that was trained for this model"),
    ],
)
def test_head_of_another_model_is_refused(
    changes: dict[str, Any],
    sentence: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_eagle: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    directory = tiny_eagle.write_eagle(tmp_path / "head", **changes)
    with pytest.raises((ModelLoadError, StartupError), match=sentence):
        draft_driver.opened(tiny_checkpoint(TARGET), directory)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("fc.weight", None, "has no fc.weight"),
        ("fc.weight", torch.zeros(64, 64), r"fc.weight in .* has shape \[64, 64\]"),
        ("d2t", None, "has no d2t"),
        ("d2t", torch.full((200,), 200), "names tokens that the model does not have"),
        ("midlayer.self_attn.q_proj.bias", torch.zeros(64), "has midlayer.self_attn.q_proj.bias, which is not"),
    ],
)
def test_damaged_eagle_head_is_refused(
    name: str,
    tensor: torch.Tensor | None,
    sentence: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_eagle: ModuleType,
    draft_driver: ModuleType,
    tmp_path: Path,
) -> None:
    directory = tiny_eagle.write_eagle(tmp_path / "head")
    weights = load_file(directory / "model.safetensors")
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=sentence):
        draft_driver.opened(tiny_checkpoint(TARGET), directory)
