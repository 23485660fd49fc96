"""Tests of torch's flash attention for prompts, with a stand-in on the CPU that computes what torch documents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from trioserve.contracts.sampling import SamplingParams
from trioserve.model.layer_config import AttentionConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step import step_tensors
from trioserve.model.torch_step.step_tensors import HeadShape
from trioserve_kernels import flash_prompts, reference_fused
from trioserve_kernels.flash_prompts import FlashPrompts, pick_flash_prompts

CPU, META = torch.device("cpu"), torch.device("meta")


class StandIn:
    """Computes varlen_attn on the CPU, sequence by sequence.

    Attributes:
        calls: for each call, the number of rows and of context tokens of each sequence.
        error: error that a call raises, or None.
        shift: number that is added to every result.
    """

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        self.error: Exception | None = None
        self.shift = 0.0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        if self.error is not None:
            raise self.error
        assert (window_size, enable_gqa) == ((-1, 0), True)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
        assert (ends_q[-1], ends_k[-1]) == (len(query), len(key))
        result = torch.full(query.shape, float("nan"), dtype=query.dtype)
        sizes = []
        for first_q, end_q, first_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            rows, context = end_q - first_q, end_k - first_k
            assert rows <= max_q
            assert context <= max_k
            sizes.append((rows, context))
            # The last query attends to every key.
            seen = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
            given = (query[first_q:end_q], key[first_k:end_k], value[first_k:end_k])
            by_head = (each.transpose(0, 1)[None] for each in given)
            found = scaled_dot_product_attention(*by_head, attn_mask=seen, enable_gqa=True)
            result[first_q:end_q] = found[0].transpose(0, 1)
        self.calls.append(sizes)
        return result + self.shift


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(varlen, "varlen_attn", made)
    return made


@pytest.fixture
def spoken(
    stand_in: StandIn, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, list[int]]]:
    """Function spoken(kind, has_flash) that returns the tokens of three prompts, in pieces and whole."""
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
    monkeypatch.setattr(step_tensors, "FLASH_ROWS_MIN", 8)

    def tokens(kind: str, has_flash: bool) -> dict[str, list[int]]:
        def flash(config: ModelConfig, *_: object) -> dict[HeadShape, FlashPrompts]:
            kinds = [layer.attention for layer in config.layers if isinstance(layer.attention, AttentionConfig)]
            return {HeadShape.of(each): FlashPrompts(each.head_dim) for each in kinds} if has_flash else {}

        monkeypatch.setattr(torch_step_model, "_flash", flash)
        runner = step_driver.load_runner(tiny_checkpoint(kind), cpu_kernels="torch", enforce_eager=True)
        driver = step_driver.StepDriver(runner)
        for index, length in enumerate((41, 12, 23)):
            prompt = [(7 * each + index) % 300 + 5 for each in range(length)]
            driver.add(f"r{index}", prompt, SamplingParams(temperature=0.0))
        for counts in ({"r0": 20}, {"r0": 21, "r1": 12}, {"r2": 4}, {"r2": 19, "r0": 1, "r1": 1}):
            result = driver.step(counts)
            assert not result.errors
        driver.generate(["r0", "r1", "r2"], 4)
        said: dict[str, list[int]] = driver.tokens
        return said

    return tokens


@pytest.mark.parametrize("kind", ("llama", "qwen3", "gemma"))
def test_prompts_by_flash_attention_give_the_same_tokens(
    kind: str, spoken: Callable[..., dict[str, list[int]]], stand_in: StandIn
) -> None:
    got = spoken(kind, True)
    # Whole prompts, pieces with earlier tokens, and a piece beside decodes. A chunk of 4 rows is too short.
    assert list(dict.fromkeys(map(tuple, stand_in.calls))) == [((20, 20),), ((21, 41), (12, 12)), ((19, 23),)]
    del stand_in.calls[:]
    assert got == spoken(kind, False)
    assert stand_in.calls == []


@pytest.mark.parametrize("kind, has_calls", (("qwen2-sliding", True), ("gpt-oss", False), ("gemma2", False)))
def test_windows_sinks_and_caps_use_the_kernels(
    kind: str, has_calls: bool, spoken: Callable[..., dict[str, list[int]]], stand_in: StandIn
) -> None:
    got = spoken(kind, True)
    assert bool(stand_in.calls) == has_calls  # layers without a window
    assert got == spoken(kind, False)


def test_refused_call_is_logged_once_and_the_kernels_compute(
    spoken: Callable[..., dict[str, list[int]]], stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.error = RuntimeError("head dimension is odd\nand more")
    assert spoken("llama", True) == spoken("llama", False)
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage().endswith("refuses prompts, so Triton's kernel computes them: head dimension is odd")


@pytest.mark.parametrize("error", (torch.OutOfMemoryError("full"), torch.AcceleratorError("CUDA error: illegal")))
def test_error_of_the_device_is_no_refusal(error: Exception, stand_in: StandIn) -> None:
    stand_in.error = error
    with pytest.raises(type(error)):
        pick_flash_prompts(4, 2, 64, torch.bfloat16, CPU)


def test_flash_attention_is_used_if_its_results_are_right(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    assert pick_flash_prompts(4, 2, 64, torch.bfloat16, CPU) is not None
    assert pick_flash_prompts(4, 2, 64, torch.float32, CPU) is None
    assert pick_flash_prompts(4, 2, 66, torch.bfloat16, CPU) is None
    assert pick_flash_prompts(4, 2, 264, torch.bfloat16, CPU) is None
    assert caplog.records == []
    assert stand_in.calls == [[(3, 3), (40, 75)]]
    stand_in.shift = 0.1
    assert pick_flash_prompts(4, 2, 64, torch.bfloat16, CPU) is None
    assert "gives wrong results here (off by 0.1" in caplog.text


def test_operator_of_torch_has_shapes_on_the_meta_device_and_no_results_on_a_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    starts = tensor(3, dtype=torch.int32)
    flash = FlashPrompts(64)
    # Keys and values of the step's own rows are a part of wider rows.
    context = tensor(60, 8 * 64)[:, 4 * 64 :].unflatten(-1, (2, 2, 64))
    assert flash(tensor(60, 256), tensor(60, 512)[:, :256], context, starts, starts, 40, 40)
    assert caplog.records == []
    assert pick_flash_prompts(4, 2, 64, torch.bfloat16, CPU) is None
    assert "torch's flash attention refuses prompts" in caplog.text
    assert flash_prompts.FlashPrompts(64).is_usable
