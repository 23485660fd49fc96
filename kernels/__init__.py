"""Selects an implementation of the torch kernels.

An implementation is a module with the functions of `Kernels`. reference.py defines their meaning, and `NAME` names the
implementation. Importing this package does not import torch.
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trioserve_kernels.four_bits import FourBitWeight
    from trioserve_kernels.paged import DecodeWork
    from trioserve_kernels.reference import Activation

__all__ = ["Kernels", "KernelsName", "pick_kernels", "why_not_triton"]

KernelsName = Literal["torch", "triton"]


class Kernels(Protocol):
    """The kernels of a model's layers. reference.py documents what each kernel computes, with shapes and dtypes."""

    @property
    def NAME(self) -> str: ...

    @property
    def FUSED(self) -> bool:
        """True if the implementation has its own kernels for paged_decode_, paged_chunks_ and choose_tokens.

        A model then also samples with choose_tokens.
        """
        ...

    @property
    def WALKS(self) -> bool:
        """True if a model computes attention with paged_decode_ and paged_chunks_. They need no masks, and no clearing
        of unused slots."""
        ...

    def linear(
        self,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor: ...

    @property
    def KEEPS_FOUR_BITS(self) -> bool:
        """True if 4-bit weights stay packed and four_bit_linear multiplies with them."""
        ...

    def four_bit_linear(self, values: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor: ...

    def fp8_rows(self, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def grouped_linear(
        self, values: Tensor, weight: Tensor | FourBitWeight, ends: Tensor, bias: Tensor | None
    ) -> Tensor: ...

    def weighted_sum(self, products: Tensor, weights: Tensor) -> Tensor: ...

    def rms_norm(self, values: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...

    def add_rms_norm_(self, hidden: Tensor, product: Tensor | None, weight: Tensor, eps: float) -> Tensor: ...

    def rotary_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def activate(self, values: Tensor, activation: Activation) -> Tensor: ...

    def activate_and_mul(self, gate_up: Tensor, activation: Activation = "silu") -> Tensor: ...

    def store_kv_(self, slots_of_layer: Tensor, keys_values: Tensor, slots: Tensor) -> None: ...

    def rotary_and_store_kv_(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots_of_layer: Tensor,
        slots: Tensor,
        kv_heads: int,
        head_norm: tuple[Tensor, float] | None = None,
    ) -> None: ...

    def clear_slots_(self, slots_of_layer: Tensor, slots: Tensor) -> None: ...

    def gather_context(self, pages: Tensor, block_table: Tensor, dtype: torch.dtype) -> Tensor: ...

    def linear_by_head(self, values: Tensor, weight: Tensor) -> Tensor: ...

    def paged_attention_decode(
        self,
        queries: Tensor,
        pages: Tensor,
        block_table: Tensor,
        mask: Tensor,
        score_cap: float | None = None,
        sinks: Tensor | None = None,
        latent_dim: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor: ...

    def attention_prompt(
        self,
        queries: Tensor,
        keys_values: Tensor,
        mask: Tensor | None,
        score_cap: float | None = None,
        sinks: Tensor | None = None,
        latent_dim: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor: ...

    def paged_latents_(
        self,
        attended: Tensor,
        queries: Tensor,
        pages: Tensor,
        block_tables: Tensor,
        contexts: Tensor,
        latent_dim: int,
        row_starts: Tensor | None = None,
        tiles: Tensor | None = None,
        parts: int = 1,
        work: DecodeWork | None = None,
    ) -> None: ...

    def paged_decode_(
        self,
        attended: Tensor,
        queries: Tensor,
        pages: Tensor,
        block_tables: Tensor,
        contexts: Tensor,
        window: int | None,
        parts: int,
        work: DecodeWork,
        score_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None: ...

    def paged_chunks_(
        self,
        attended: Tensor,
        queries: Tensor,
        pages: Tensor,
        block_tables: Tensor,
        contexts: Tensor,
        row_starts: Tensor,
        tiles: Tensor,
        window: int | None,
        score_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None: ...

    def choose_tokens(
        self, scores: Tensor, parameters: Tensor, words: Tensor, masks: tuple[Tensor, Tensor] | None = None
    ) -> Tensor: ...


def pick_kernels(name: KernelsName = "torch", *, batch_invariant: bool = False) -> Kernels:
    """Return an implementation of the kernels.

    Args:
        name: "torch" computes with torch on any device. "triton" computes on CUDA devices.
        batch_invariant: True for kernels in which the bits of a row depend only on its own token and context. With
            "torch", kernels are batch-invariant only on a CPU.

    Raises:
        ModuleNotFoundError: triton is not installed.
    """
    if name == "triton":
        from trioserve_kernels import triton

        if not batch_invariant:
            return triton
        from trioserve_kernels.triton import invariant

        return invariant
    from trioserve_kernels import reference, reference_invariant

    return reference_invariant if batch_invariant else reference


def why_not_triton() -> str | None:
    """Return the reason why Triton cannot launch kernels on this machine's GPU, and what to do. None if it can.

    Before its first launch, Triton compiles a C module, which needs a C compiler and the header Python.h. This function
    makes Triton compile that module now, or find it in its cache.
    """
    try:
        from triton.runtime import driver
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    try:
        driver.active.get_current_device()
    except subprocess.CalledProcessError as error:
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.exists():
            return f"Triton's launcher cannot be compiled without {header}: apt install python3-dev"
        return f"Triton's launcher cannot be compiled: {error}"
    except (AssertionError, OSError, RuntimeError) as error:
        return f"Triton cannot start ({error}); it needs a C compiler: apt install gcc libc6-dev"
    return None
