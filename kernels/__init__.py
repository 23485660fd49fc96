"""Picks an implementation of the kernels once, and can say which: its NAME.

An implementation is a module with the functions of `Kernels`; what they mean is written in reference.py. Importing this
package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Kernels", "pick_kernels"]


class Kernels(Protocol):
    """What a model calls in every layer. Shapes and meanings are those of reference.py."""

    @property
    def NAME(self) -> str: ...

    def rms_norm(self, values: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...

    def rotary_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def store_kv_(self, slots_of_layer: Tensor, keys_values: Tensor, slots: Tensor) -> None: ...

    def clear_slots_(self, slots_of_layer: Tensor, slots: Tensor) -> None: ...

    def gather_context(self, pages: Tensor, block_table: Tensor) -> Tensor: ...

    def paged_attention_decode(self, queries: Tensor, pages: Tensor, block_table: Tensor, mask: Tensor) -> Tensor: ...

    def attention_prompt(self, queries: Tensor, keys_values: Tensor, mask: Tensor | None) -> Tensor: ...


def pick_kernels() -> Kernels:
    """The implementation for this machine; today plain torch everywhere."""
    from trioserve_kernels import reference

    return reference
