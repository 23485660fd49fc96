"""Tests of the work that a step of fixed shape launches, on torch's meta device.

The meta device has shapes and no numbers, so any read by the host fails there. Triton's kernels are counted instead of
launched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model import tiny_checkpoints
from trioserve.model.kv_storage import KVStorage, StateStorage
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import FP8_ROWS
from trioserve.model.model_config import ModelConfig
from trioserve.model.torch_step.adapters import AdapterColumns
from trioserve.model.torch_step.decoder import Decoder
from trioserve.model.torch_step.static_decode import StaticDecode
from trioserve.model.torch_step.step_tensors import attention_kinds
from trioserve_kernels import four_bits
from trioserve_kernels.paged import chunk_tile_tokens

pytest.importorskip("triton", reason="triton is not installed (pip install trioserve[gpu])")
from triton.runtime.jit import JITFunction

from trioserve_kernels import triton

META = torch.device("meta")
# Operators that launch nothing: they make views or reserve memory.
FREE = (
    "new_empty",
    "view",
    "reshape",
    "slice",
    "select.int",
    "transpose",
    "t.default",
    "empty",
    "split",
    "unsqueeze",
    "as_strided",
)
FREE += (
    "new_empty",
    "expand",
    "permute",
    "unbind",
    "detach",
    "alias",
    "squeeze",
    "chunk",
    "narrow",
    "flatten",
    "lift_fresh",
)
# Launches of a step before its first layer and after its last one.
STEP_MAX = 6
# Launches of one layer: four products, two norms, rotation with the KV write, attention, and activation.
PLAIN = 9
# Launches of the adapters of one layer: for each of four products, two launches and one for each of its matrices.
ADAPTER_MAX = 15
# Most launches of a layer, with further norms and scales. A mixture of experts has further ones.
DENSE_MAX, LATENT_MAX, STATE_MAX, MIXTURE_MAX = 18, 29, 59, 22
# A dense MLP beside the experts (Gemma 4, LongCat-Flash), or SparseMixer's two softmaxes (Phi-3.5-MoE).
OWN_MIXTURE_MAX = {"gemma4": 4, "phimoe": 4, "longcat_flash": 10}
SECTION_MAX = 12  # launches of a step that find the section of each decode
XIELU_MAX = 9  # Apertus's activation in plain torch
BLOCK_MAX = 24  # a shared block beside a state: attention, an MLP and adapters (Zamba2)
STREAMS_MAX = 105  # Gemma 3n computes several hidden states in parallel.


def layer_max(config: ModelConfig) -> int:
    """Return the allowed number of launches of one layer."""
    dense = DENSE_MAX + XIELU_MAX * (config.family == "apertus")
    plain = STATE_MAX if config.state_bytes else LATENT_MAX if config.has_latents else dense
    plain += BLOCK_MAX * any(layer.block is not None for layer in config.layers)
    if config.streams is not None:
        plain = STREAMS_MAX
    if not config.has_experts:
        return plain
    return plain + MIXTURE_MAX + OWN_MIXTURE_MAX.get(config.family, 0)


class Launches(TorchDispatchMode):
    """Counts operators that launch work, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        self.count += not name.startswith(FREE)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        self._launch = JITFunction.run
        JITFunction.run = lambda *_arguments, **_options: self._note()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        JITFunction.run = self._launch
        super().__exit__(*error)

    def _note(self) -> None:
        self.count += 1


def launches(
    path: Path, rows: int, *, has_prompt: bool = False, has_adapters: bool = False, block_type: str | None = None
) -> tuple[int, int]:
    """Return the number of launches of a step of fixed shape, and the number of layers. Fail if the host reads.

    With has_prompt, the step has tables for prompts beside decodes. With has_adapters, rows may use adapters. With
    block_type, all matrices that may be quantized have this type.
    """
    config = open_checkpoint(path).config
    kernels: Any = triton
    types = {}
    if block_type is not None:
        plain = Decoder(config, kernels, dtype=torch.bfloat16, device=META)
        types = {slot.name: block_type for slot in plain.slots() if len(slot.shape) == 2}
    model = Decoder(config, kernels, dtype=torch.bfloat16, device=META, block_types=types)
    quantized_count = 0
    for slot in model.slots():
        if slot.fill_blocks is None or block_type is None:
            slot.fill(torch.empty(slot.shape, dtype=slot.dtype, device=META))
            continue
        outputs, inputs = slot.shape
        row_bytes = inputs + 4 if block_type == FP8_ROWS else four_bits.kept_bytes(block_type, inputs)
        slot.fill_blocks(torch.empty(outputs, row_bytes, dtype=torch.uint8, device=META))
        quantized_count += 1
    assert bool(quantized_count) == (block_type is not None)
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
    *("lfm2", "falcon-h1", "mamba2", "jamba", "nemotron-h-moe", "qwen3-next"),
)
OTHER_KINDS = (kind for kind in {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS} if kind not in FAST_KINDS)


@pytest.mark.parametrize("kind", (*FAST_KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHER_KINDS)))
def test_host_reads_nothing_in_a_step_and_launches_do_not_depend_on_the_rows(
    kind: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(kind)
    config = open_checkpoint(path).config
    few, layers = launches(path, 2)
    many, _ = launches(path, 64)
    assert few == many
    assert few <= STEP_MAX + SECTION_MAX * bool(config.sections) + layers * layer_max(config)
    with_adapters, _ = launches(path, 2, has_adapters=True)
    assert with_adapters <= few + 1 + ADAPTER_MAX * layers
    tiles = {chunk_tile_tokens(heads.head_count // heads.kv_head_count) for _, heads in attention_kinds(config)}
    if config.state_bytes or config.sections or len(tiles) > 1:
        return  # Prompts of these models have no steps of fixed shape.
    with_prompt, _ = launches(path, 2, has_prompt=True)
    assert with_prompt <= few + 2 * layers  # Zeros for rows without a sequence, and the attention of chunks.


@pytest.mark.parametrize("kind", ("llama", "mistral", "qwen2", "qwen3"))
def test_plain_layer_has_nine_launches(kind: str, tiny_checkpoint: Callable[..., Path]) -> None:
    count, layers = launches(tiny_checkpoint(kind), 2)
    assert count == STEP_MAX + PLAIN * layers


@pytest.mark.parametrize("kind, block_type", (("llama", "Q4_0"), ("llama", "Q4_F32"), ("gpt-oss", "MXFP4")))
def test_four_bit_weights_need_no_further_launches(
    kind: str, block_type: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(kind)
    plain = launches(path, 2)
    monkeypatch.setattr(
        four_bits, "_repeats", lambda _numbers, count: count == 1
    )  # It reads the weights when they are loaded.
    assert launches(path, 2, block_type=block_type) == plain


def test_fp8_weights_need_one_further_launch_for_each_product(tiny_checkpoint: Callable[..., Path]) -> None:
    count, layers = launches(tiny_checkpoint("llama"), 2, block_type=FP8_ROWS)
    assert count == STEP_MAX + (PLAIN + 4) * layers


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
