"""Multi-head latent attention (MLA, arXiv 2405.04434) in torch.

Queries are projected into the space of the latents, which all heads share. The attended latents are projected to each
head's values. So keys and values of single heads are never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from trioserve.model.attention import attend
from trioserve.model.layers import Angles, Linear, MakeLinear, Norm
from trioserve.model.model_config import LatentAttentionConfig, ModelConfig
from trioserve.model.step_tensors import StepTensors
from trioserve.model.torch_formats import TensorSlot
from trioserve_kernels import Kernels

__all__ = ["LatentAttention"]


class LatentAttention:
    """Latent attention of one layer, see LatentAttentionConfig."""

    def __init__(
        self,
        name: str,
        linear: MakeLinear,
        config: ModelConfig,
        attention: LatentAttentionConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._config = attention
        self._name = name
        hidden, rank = config.hidden_size, attention.query_rank
        norm = functools.partial(
            Norm, config=config, kernels=kernels, dtype=dtype, device=device, eps=attention.norm_eps
        )
        self._query_up: Linear | None = None
        self._query_norm: Norm | None = None
        if rank is None:
            self._down = linear(hidden, False, q_proj=attention.query_size, kv_a_proj=attention.entry_dim)
        else:
            self._down = linear(hidden, False, q_a_proj=rank, kv_a_proj=attention.entry_dim)
            self._query_norm = norm(f"{name}.q_a_norm", rank)
            self._query_up = linear(rank, False, q_b_proj=attention.query_size)
        self._latent_norm = norm(f"{name}.kv_a_norm", attention.latent_dim)
        heads = attention.head_count
        self._key_up = torch.empty(heads, attention.latent_dim, attention.plain_dim, dtype=dtype, device=device)
        self._value_up = torch.empty(heads, attention.value_dim, attention.latent_dim, dtype=dtype, device=device)
        self._output = linear(attention.value_size, False, o_proj=hidden)
        up = () if self._query_up is None else (self._query_up,)
        self.linears = (self._down, *up, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for norm in (self._query_norm, self._latent_norm):
            if norm is not None:
                yield from norm.slots()
        for module, weight in (("k_b_proj", self._key_up), ("v_b_proj", self._value_up)):
            rows = weight.flatten(0, 1)
            yield TensorSlot(f"{self._name}.{module}.weight", tuple(rows.shape), weight.dtype, rows.copy_)
        for part in self.linears:
            yield from part.slots()

    def __call__(
        self, normed: Tensor, step: StepTensors, angles: Angles, pages: Tensor, slots_of_layer: Tensor
    ) -> Tensor:
        kernels, attention = self._kernels, self._config
        down = self._down(normed)
        raw, latents, turned = torch.split(
            down, [down.shape[1] - attention.entry_dim, attention.latent_dim, attention.turned_dim], -1
        )
        kernels.rotary_(turned[:, None], *angles)
        entries = torch.cat((self._latent_norm(latents.contiguous()), turned), -1)
        kernels.store_kv_(slots_of_layer, entries, step.slots)
        if step.cleared_slots is not None:
            kernels.clear_slots_(slots_of_layer, step.cleared_slots)
        if self._query_up is not None and self._query_norm is not None:
            raw = self._query_up(self._query_norm(raw.contiguous()))
        queries = self._queries(raw, angles)
        rows = attend(
            kernels,
            queries,
            entries,
            pages,
            step.attention[attention.window],
            attention.score_cap,
            latent_dim=attention.latent_dim,
        )
        values = kernels.linear_by_head(rows.view(len(rows), attention.head_count, -1), self._value_up)
        return self._output(values.reshape(len(rows), -1))

    def _queries(self, raw: Tensor, angles: Angles) -> Tensor:
        """Return queries that meet latents and rotated keys.

        Args:
            raw: [T, H * (plain_dim + turned_dim)].
            angles: cosines and sines of the rows.

        Returns:
            [T, H * entry_dim].
        """
        attention = self._config
        plain, turned = torch.split(
            raw.reshape(len(raw), attention.head_count, -1), [attention.plain_dim, attention.turned_dim], -1
        )
        queries = raw.new_empty(len(raw), attention.head_count, attention.entry_dim)
        queries[..., : attention.latent_dim] = self._kernels.linear_by_head(plain, self._key_up)
        heads = queries[..., attention.latent_dim :]
        heads.copy_(turned)
        self._kernels.rotary_(heads, *angles)
        return queries.mul_(attention.query_factor).flatten(1)
