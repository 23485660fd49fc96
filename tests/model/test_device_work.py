"""Tests of the work that a step of fixed shape launches, on torch's meta device.

The meta device has shapes and no numbers, so any read by the host fails there. The kernels' own launches count as one
operator each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model import tiny_checkpoints
from trioserve.model.decoder import Decoder
from trioserve.model.kv_storage import KVStorage, StateStorage
from trioserve.model.layer_config import ExpertsConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.model_config import ModelConfig
from trioserve.model.static_decode import StaticDecode
from trioserve.model.torch_adapters import AdapterColumns
from trioserve_kernels import reference_fused

META = torch.device("meta")
# Operators that launch nothing: they make views or reserve memory.
FREE = ("view", "reshape", "slice", "select.int", "transpose", "t.default", "empty", "split", "unsqueeze", "as_strided")
FREE += ("expand", "permute", "unbind", "detach", "alias", "squeeze", "chunk", "narrow", "flatten", "lift_fresh")
# Launches of the adapters of one layer: for each of four products, two launches and one for each of its matrices.
ADAPTER_MAX = 15
# Launches of one layer in plain torch, where some kernels are several operators. A mixture of experts has further ones.
DENSE_MAX, LATENT_MAX, STATE_MAX, MIXTURE_MAX = 25, 36, 64, 24
STREAMS_MAX = 112  # Gemma 3n computes several hidden states in parallel.


def layer_max(config: ModelConfig) -> int:
    """Return the allowed number of launches of one layer."""
    plain = STATE_MAX if config.state_bytes else LATENT_MAX if config.has_latents else DENSE_MAX
    if config.streams is not None:
        plain = STREAMS_MAX
    return plain + (MIXTURE_MAX if any(isinstance(layer.mlp, ExpertsConfig) for layer in config.layers) else 0)


class Launches(TorchDispatchMode):
    """Counts operators that launch work."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.count += not name.startswith(FREE)
        return func(*args, **(kwargs or {}))


def one_operator(*arguments: Any, **options: Any) -> None:
    arguments[0].zero_()


def choose_tokens(scores: Tensor, *_: Any) -> Tensor:
    return scores.new_zeros(2, scores.shape[0], dtype=torch.int64)


def grouped_linear(values: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    return values.new_zeros(values.shape[0], weight.shape[1])


def weighted_sum(products: Tensor, weights: Tensor) -> Tensor:
    return products.new_zeros(products.shape[0], products.shape[2])


KERNELS: Any = SimpleNamespace(
    **{
        **{name: getattr(reference_fused, name) for name in reference_fused.__all__},
        "paged_decode_": one_operator,
        "paged_chunks_": one_operator,
        "paged_latents_": one_operator,
        "grouped_linear": grouped_linear,
        "weighted_sum": weighted_sum,
        "choose_tokens": choose_tokens,
    }
)


def launches(path: Path, rows: int, *, has_prompt: bool = False, has_adapters: bool = False) -> tuple[int, int]:
    """Return the launches of a step of fixed shape, and the number of layers. Fail if the host reads.

    With has_prompt, the step has tables for prompts beside decodes. With has_adapters, rows may use adapters.
    """
    config = open_checkpoint(path).config
    model = Decoder(config, KERNELS, dtype=torch.bfloat16, device=META)
    for slot in model.slots():
        slot.fill(torch.empty(slot.shape, dtype=slot.dtype, device=META))
    storage: Any = KVStorage(
        config,
        block_count=40,
        block_size=4,
        make=lambda shape: torch.empty(shape, dtype=torch.bfloat16, device=META),
        has_spare=True,
    )
    states: Any = None
    if config.state_bytes:
        states = StateStorage(config, slot_count=9, make=lambda shape: torch.empty(shape, device=META))
    static = StaticDecode(
        model,
        storage,
        states=states,
        rows_max=rows,
        kept_max=rows,
        context_tokens_max=100,
        prompt_rows_max=64 if has_prompt else 0,
        adapters=AdapterColumns(model.adapted, {}, 32, dtype=torch.bfloat16, device=META) if has_adapters else None,
    )
    wanted = (has_prompt, has_adapters)
    sizes = (size for size in static.sizes if (bool(size.chunks), size.has_adapters) == wanted)
    size = next(size for size in sizes if size.rows >= rows)
    with Launches() as seen, torch.inference_mode():
        static._compute(size)
    return seen.count, config.layer_count


FAST_KINDS = (
    *("llama", "mixtral", "qwen2-moe", "gpt-oss", "glm4-moe", "minicpm3", "deepseek-v3"),
    *("lfm2", "falcon-h1", "mamba2", "jamba", "qwen3-next"),
)
OTHER_KINDS = (kind for kind in {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS} if kind not in FAST_KINDS)


@pytest.mark.parametrize("kind", (*FAST_KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)))
def test_host_reads_nothing_in_a_step_and_launches_do_not_depend_on_the_rows(
    kind: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(kind)
    config = open_checkpoint(path).config
    if config.sections:
        pytest.skip("the host computes which tokens attention in sections reads, so its steps have no fixed shape")
    few, layers = launches(path, 2)
    many, _ = launches(path, 64)
    assert few == many
    assert few < 16 + layers * layer_max(config)
    with_adapters, _ = launches(path, 2, has_adapters=True)
    assert with_adapters <= few + 1 + ADAPTER_MAX * layers
    if config.state_bytes:
        return  # Prompts of models with states have no steps of fixed shape.
    with_prompt, _ = launches(path, 2, has_prompt=True)
    assert with_prompt <= few + 2 * layers  # Zeros for rows without a sequence, and the attention of chunks.


def test_torch_has_a_grouped_product_without_reads(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare torch's grouped product with products of single groups, some of them empty, with a bias."""
    from trioserve_kernels import reference

    values, weight = torch.randn(10, 16, dtype=torch.bfloat16), torch.randn(4, 24, 16, dtype=torch.bfloat16)
    bias, ends = torch.randn(4, 24, dtype=torch.bfloat16), torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    wanted = [reference.grouped_linear(values, weight, ends, each) for each in (None, bias)]
    monkeypatch.setattr(reference, "has_grouped_mm", lambda *_: True)
    for each, plain in zip((None, bias), wanted, strict=True):
        got = reference.grouped_linear(values, weight, ends, each)
        torch.testing.assert_close(got[:8], plain[:8], atol=0.05, rtol=0.02)
    on_meta = [tensor.to(META) for tensor in (values, weight, ends, bias)]
    assert reference.grouped_linear(*on_meta).shape == (10, 24)
