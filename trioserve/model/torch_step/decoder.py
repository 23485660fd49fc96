"""Decoder in torch. It computes any model family layer by layer, as its ModelConfig describes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.kv_storage import KVStorage, StateStorage
from trioserve.model.layer_config import (
    AttentionConfig,
    DeltaNetConfig,
    KVAttention,
    LatentAttentionConfig,
    LayerConfig,
    LightningConfig,
    MlpConfig,
    NormedSums,
    SelectiveScanConfig,
    ShortConvConfig,
)
from trioserve.model.loading.stored_tensor import FP8_ROWS
from trioserve.model.model_config import LayerPart, ModelConfig
from trioserve.model.parallel.collectives import Collectives, Lonely, RankSums
from trioserve.model.torch_step.attention import LatentAttention, attend
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import (
    Angles,
    Embedding,
    HeadNorms,
    Linear,
    MakeLinear,
    Norm,
    RankVocabulary,
    RelativeBiases,
    RotaryAngles,
    Sinks,
    temperature_factors,
)
from trioserve.model.torch_step.mlp import Experts, Mlp, Xielu
from trioserve.model.torch_step.recurrent_layers import DeltaNet, Lightning, SelectiveScan, ShortConv, StateSpace
from trioserve.model.torch_step.step_tensors import (
    AttentionTensors,
    DecodeGroup,
    EncodedRows,
    HeadShape,
    PromptPart,
    StepTensors,
)
from trioserve.model.torch_step.streams import LayerStreams, Streams
from trioserve_kernels import Kernels
from trioserve_kernels.fp8 import Fp8Weight

__all__ = ["Decoder"]


_Recurrent: TypeAlias = ShortConv | StateSpace | SelectiveScan | DeltaNet | Lightning


class _Carried(NamedTuple):
    """Results of one step's layers that later layers use.

    Attributes:
        keys_values: keys and values of the step's rows by layer, [T, 2 * K * D] each.
        shortcuts: result of the previous layer's shortcut, [T, hidden_size]. Empty if it has none.
        selected: tokens that the last indexer has selected. Empty if there was none.
        embedded: embeddings of the step's rows, [T, hidden_size]. None if no layer reads them.
    """

    keys_values: dict[int, Tensor]
    shortcuts: list[Tensor]
    selected: list[AttentionTensors]
    embedded: Tensor | None


class _Laurel:
    """Low-rank path that runs parallel to attention, see LayerConfig.laurel_rank."""

    def __init__(self, linear: MakeLinear, norm: Norm, hidden: int, rank: int) -> None:
        self._norm = norm
        self._in = linear(hidden, False, laurel_in=rank)
        self._out = linear(rank, False, laurel_out=hidden)
        self.linears = (self._in, self._out)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._norm, *self.linears):
            yield from part.slots()

    def add_(self, hidden: Tensor, normed: Tensor) -> None:
        """Add the input of attention to hidden in place, and also the norm of this input's product with both matrices.

        Args:
            hidden: [T, hidden_size], which already contains the result of attention.
            normed: [T, hidden_size], input of attention.
        """
        hidden.add_(normed + self._norm(self._out(self._in(normed)))).mul_(0.5**0.5)


class _Attention:
    """Attention of one layer with keys and values for each head, see AttentionConfig.

    Args:
        inputs: size of the rows that are projected. None: the hidden size.
    """

    def __init__(
        self,
        name: str,
        linear: MakeLinear,
        config: ModelConfig,
        attention: AttentionConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        inputs: int | None = None,
    ) -> None:
        self._kernels = kernels
        self._config, self._norm_eps = attention, config.norm_eps
        self._kind = attention.window, HeadShape.of(attention)
        hidden, keys, queries = config.hidden_size, attention.key_size, attention.query_size
        own = {"k_proj": keys, "v_proj": attention.value_size} if attention.kv_from is None else {}
        unbiased = () if attention.has_key_bias else ("k_proj",)
        self._qkv = linear(inputs or hidden, attention.has_bias, unbiased, q_proj=queries, **own)
        self._gate: Linear | None = None
        if attention.has_gate:
            self._gate = linear(hidden, attention.has_bias, q_gate_proj=attention.gate_size)
        self._head_norms: HeadNorms | None = None
        if attention.qk_norm != "none":
            self._head_norms = HeadNorms(name, attention, config, kernels, dtype=dtype, device=device)
        self._sinks = Sinks(name, attention, device=device) if attention.has_sinks else None
        self._slopes: Tensor | None = None
        if attention.slopes is not None:
            self._slopes = torch.tensor(attention.slopes, dtype=torch.float32, device=device)
        self._output = linear(attention.attended_size, attention.has_output_bias, o_proj=hidden)
        self.adapted = (self._qkv, self._output)
        gates = () if self._gate is None else (self._gate,)
        self.linears = (self._qkv, *gates, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._head_norms, self._sinks, *self.linears):
            if part is not None:
                yield from part.slots()

    def __call__(
        self,
        normed: Tensor,
        step: StepTensors,
        angles: Angles,
        pages: Tensor,
        slots_of_layer: Tensor,
        shared: Tensor | None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention, and write the step's keys and values into the KV cache.

        Args:
            normed: [T, hidden_size].
            pages: KV buffer of the layer that keeps the keys and values.
            slots_of_layer: the buffer of `pages` with the shape [slots, numbers of a token].
            shared: keys and values of the step's rows that another layer computed. None: this layer computes its own.
            added: numbers that are added to the projections to queries, keys and values.

        Returns:
            Result of attention [T, hidden_size], and the rows' keys and values [T, 2 * K * D].
        """
        kernels, attention = self._kernels, self._config
        qkv = self._qkv(normed, step.adapters)
        if added is not None:
            qkv += added
        if attention.value_dim < attention.head_dim and shared is None:
            qkv = _with_padded_values(qkv, attention)
        queries = qkv[:, : attention.query_size]
        if attention.clip is not None:
            qkv.clamp_(-attention.clip, attention.clip)
        head_norm = None
        if self._head_norms is not None and not attention.has_turned_norms:
            head_norm = self._head_norms.in_rotation if shared is None else None
            if head_norm is None:
                self._head_norms(qkv)
        if shared is not None:
            keys_values = shared
            kernels.rotary_(queries.view(len(queries), -1, attention.head_dim), *angles)
        else:
            keys_values = qkv[:, attention.query_size :]
            if attention.has_value_norm:
                values = keys_values[:, attention.key_size :].view(len(qkv), -1, attention.head_dim)
                values.copy_(kernels.rms_norm(values, None, self._norm_eps))
            # Queries and keys are adjacent in memory, so one call normalizes and rotates both in place.
            if attention.has_turned_norms and self._head_norms is not None:
                heads = qkv[:, : attention.query_size + attention.key_size]
                kernels.rotary_(heads.view(len(qkv), -1, attention.head_dim), *angles)
                self._head_norms(qkv)
                kernels.store_kv_(slots_of_layer, keys_values, step.slots)
            else:
                kernels.rotary_and_store_kv_(
                    qkv, *angles, slots_of_layer, step.slots, attention.kv_head_count, head_norm
                )
        if attention.query_factor != 1.0:
            queries.mul_(attention.query_factor)
        if attention.temperature is not None:
            queries.mul_(temperature_factors(step.positions, attention.temperature)[:, None])
        if step.cleared_slots is not None and shared is None:
            kernels.clear_slots_(slots_of_layer, step.cleared_slots)
        tensors = step.sections[attention.section] if attention.section else step.attention[self._kind]
        sinks = None if self._sinks is None else self._sinks.values
        rows = attend(kernels, queries, keys_values, pages, tensors, attention.score_cap, sinks, slopes=self._slopes)
        if attention.value_dim < attention.head_dim:
            rows = rows.view(len(rows), -1, attention.head_dim)[..., : attention.value_dim].flatten(1)
        if self._gate is not None:
            # The position of a number in a tensor can change torch's result slightly. In float64, the later rounding
            # removes this difference, so the result of a row does not depend on the batch.
            gates = self._gate(normed).double()
            gates = functional.softplus(gates) if attention.has_softplus_gate else gates.sigmoid()
            rows.view(*gates.shape, -1).mul_(gates[..., None])
        return self._output(rows, step.adapters), keys_values


def _with_padded_values(qkv: Tensor, attention: AttentionConfig) -> Tensor:
    """Return projections in which the values of a head have the size of its keys, with zeros at the end.

    Args:
        qkv: [T, (H + K) * D + K * V], queries, keys and values.

    Returns:
        [T, (H + 2 K) * D].
    """
    first = attention.query_size + attention.key_size
    padded = qkv.new_zeros(len(qkv), first + attention.key_size)
    padded[:, :first] = qkv[:, :first]
    values = padded[:, first:].view(len(qkv), -1, attention.head_dim)
    values[..., : attention.value_dim] = qkv[:, first:].view(len(qkv), -1, attention.value_dim)
    return padded


class _CrossAttention:
    """Cross attention of one layer, see ModelConfig.cross. Heads and biases are those of self-attention.

    Args:
        linear: makes the projections.
        hidden: size of a row.
        attention: self-attention of the layer.
        kernels: kernels that compute.
        dtype: number format of the projections.
    """

    def __init__(
        self, linear: MakeLinear, hidden: int, attention: AttentionConfig, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        self._attention, self._kernels, self._dtype = attention, kernels, dtype
        keys, queries = attention.key_size, attention.query_size
        unbiased = () if attention.has_key_bias else ("cross_k_proj",)
        self._query = linear(hidden, attention.has_bias, cross_q_proj=queries)
        self._key_value = linear(hidden, attention.has_bias, unbiased, cross_k_proj=keys, cross_v_proj=keys)
        self._output = linear(queries, attention.has_output_bias, cross_o_proj=hidden)
        self.linears = (self._query, self._key_value, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for part in self.linears:
            yield from part.slots()

    def store(self, encoded: EncodedRows, slots_of_layer: Tensor) -> None:
        """See _Layer.store_encoded."""
        keys_values = self._key_value(encoded.rows.to(self._dtype))
        self._kernels.store_kv_(slots_of_layer, keys_values, encoded.slots)

    def __call__(self, normed: Tensor, step: StepTensors, pages: Tensor) -> Tensor:
        """Return the result of cross attention, [T, hidden_size].

        Args:
            normed: [T, hidden_size], input of cross attention.
            pages: KV buffer of this layer.
        """
        assert step.cross is not None, "the step was made for another model"
        queries = self._query(normed)
        if self._attention.query_factor != 1.0:
            queries.mul_(self._attention.query_factor)
        return self._output(attend(self._kernels, queries, queries, pages, step.cross, self._attention.score_cap))


def _biased(
    tensors: AttentionTensors, relative: RelativeBiases, positions: Tensor, heads: HeadShape
) -> AttentionTensors:
    """Return attention tensors whose masks include biases by distance. Attention has neither windows nor a walk."""

    def masks(part: DecodeGroup | PromptPart, key_count: int) -> Tensor:
        found = relative.masks(positions[part.first : part.end], key_count)
        return found.view(len(found), heads.kv_head_count, -1, key_count)

    groups = tuple(replace(group, mask=masks(group, group.mask.shape[-1])) for group in tensors.decode_groups)
    parts = (replace(part, mask=masks(part, part.context).permute(1, 2, 0, 3)) for part in tensors.prompt_parts)
    return AttentionTensors(groups, tuple(parts))


def _linear_maker(
    name: str, kernels: Kernels, block_types: Mapping[str, str], *, dtype: torch.dtype, device: torch.device
) -> MakeLinear:
    """Return a function that makes the linear layers of a module.

    Args:
        name: name of the module, such as layers.0.
        block_types: see Decoder.
    """

    def linear(inputs: int, has_bias: bool, unbiased: Collection[str] = (), **outputs: int) -> Linear:
        named = {f"{name}.{module}": size for module, size in outputs.items()}
        kept = {block_types.get(f"{each}.weight") for each in named}
        block_type = kept.pop() if len(kept) == 1 else None
        if block_type == FP8_ROWS and not Fp8Weight.fits(inputs, sum(named.values())):
            block_type = None
        return Linear(
            inputs,
            named,
            bias=has_bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
            unbiased=[f"{name}.{module}" for module in unbiased],
            block_type=block_type,
        )

    return linear


class _Layer:
    """One layer: attention and MLP, with their norms and residual sums, see LayerConfig."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layer: LayerConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_types: Mapping[str, str],
        name: str | None = None,
    ) -> None:
        self._kernels = kernels
        self._layer, self._index = layer, index
        self._part = LayerPart(sums_attention=False, sums_mlp=False)
        if config.part is not None:
            self._part = config.part.layers[index]
        # In a parallel layer, the results of MLP and attention are added in one sum over the ranks.
        assert not layer.is_parallel or self._part.sums_attention == self._part.sums_mlp, "ranks divide both alike"
        # Indexes of the layers whose keys and values are also used by other layers.
        self._shared = {source for place, source in enumerate(config.kv_layers) if place != source}
        attention, mlp = layer.attention, layer.mlp
        self.rotary = (attention.rotary, attention.turned_dim) if isinstance(attention, KVAttention) else None
        hidden = config.hidden_size
        name = f"layers.{index}" if name is None else name

        def made_norm(module: str) -> Norm:
            return Norm(f"{name}.{module}", hidden, config, kernels, dtype=dtype, device=device)

        def norm(module: str, is_there: bool) -> Norm | None:
            return made_norm(module) if is_there else None

        linear = _linear_maker(name, kernels, block_types, dtype=dtype, device=device)
        self._attention_norm = norm("attention_norm", layer.has_attention_norm)
        self._attention_output_norm = norm("attention_output_norm", layer.has_output_norms)
        self._mlp_norm = norm("mlp_norm", layer.has_mlp_norm)
        self._mlp_output_norm = norm("mlp_output_norm", layer.has_mlp_output_norm)
        self._attention: _Attention | LatentAttention | _Recurrent | None
        if attention is None:
            self._attention = None
        elif isinstance(attention, AttentionConfig):
            self._attention = _Attention(name, linear, config, attention, kernels, dtype=dtype, device=device)
        elif isinstance(attention, LatentAttentionConfig):
            self._attention = LatentAttention(name, linear, config, attention, kernels, dtype=dtype, device=device)
        elif isinstance(attention, ShortConvConfig):
            self._attention = ShortConv(name, config, attention, dtype=dtype, device=device)
        elif isinstance(attention, DeltaNetConfig):
            self._attention = DeltaNet(name, config, attention, dtype=dtype, device=device)
        elif isinstance(attention, LightningConfig):
            self._attention = Lightning(name, config, attention, dtype=dtype, device=device)
        elif isinstance(attention, SelectiveScanConfig):
            self._attention = SelectiveScan(name, config, attention, dtype=dtype, device=device)
        else:
            self._attention = StateSpace(name, config, attention, dtype=dtype, device=device)
        self._cross_norm = norm("cross_norm", config.cross is not None)
        self._cross: _CrossAttention | None = None
        if config.cross is not None:
            assert isinstance(attention, AttentionConfig), "checked by ModelConfig"
            self._cross = _CrossAttention(linear, hidden, attention, kernels, dtype)
        self._beside: StateSpace | None = None
        if layer.beside is not None:
            self._beside = StateSpace(name, config, layer.beside, dtype=dtype, device=device)
        self._mlp: Mlp | Experts | None = None
        self._shortcut: Experts | None = None
        if layer.experts is not None:
            mixture = Experts(
                linear,
                name,
                hidden,
                layer.experts,
                config.experts_of(index),
                kernels,
                norm=made_norm,
                dtype=dtype,
                device=device,
                block_types=block_types,
            )
            self._mlp, self._shortcut = (mixture, None) if layer.shortcut is None else (None, mixture)
        if isinstance(mlp, MlpConfig):
            self._mlp = Mlp(
                linear,
                "",
                hidden,
                mlp.intermediate_size,
                mlp.activation,
                kernels,
                xielu=Xielu(name, dtype=dtype, device=device) if mlp.activation == "xielu" else None,
                has_bias=mlp.has_bias,
                has_gate=mlp.has_gate,
                cutoff=mlp.cutoff,
                limit=mlp.limit,
            )
        self.scale: Tensor | None = None
        if layer.has_scale:
            self.scale = torch.empty(1, dtype=dtype, device=device)
        self._laurel: _Laurel | None = None
        if laurel_norm := norm("laurel_norm", layer.laurel_rank > 0):
            self._laurel = _Laurel(linear, laurel_norm, hidden, layer.laurel_rank)
        self.streams: LayerStreams | None = None
        if config.streams is not None:
            assert mlp is not None, "checked by ModelConfig"
            assert mlp.activation != "xielu", "streams use the activation of a gate"
            self.streams = LayerStreams(
                index, config, config.streams, mlp.activation, kernels, linear, dtype=dtype, device=device
            )

    @property
    def linears(self) -> tuple[Linear, ...]:
        parts = (self._attention, self._cross, self._beside, self._laurel, self.streams, self._mlp, self._shortcut)
        return tuple(linear for part in parts if part is not None for linear in part.linears)

    @property
    def adapted(self) -> tuple[Linear, ...]:
        """Linear layers that add the products of adapters."""
        attention = self._attention.adapted if isinstance(self._attention, _Attention) else ()
        return *attention, *(self._mlp.linears if isinstance(self._mlp, Mlp) else ())

    @property
    def products(self) -> dict[tuple[int, int], Callable[[Tensor], Tensor]]:
        """Products of experts, see Experts."""
        experts = self._mlp if isinstance(self._mlp, Experts) else self._shortcut
        return {} if experts is None else experts.products

    @property
    def saved_bytes(self) -> int:
        own: tuple[Linear, ...] = () if self._attention is None else self._attention.linears
        mlps = (self._mlp, self._shortcut)
        return sum(part.saved_bytes for part in (*own, *mlps) if part is not None)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (
            self._attention_norm,
            self._attention_output_norm,
            self._mlp_norm,
            self._mlp_output_norm,
            self._attention,
            self._cross_norm,
            self._cross,
            self._beside,
            self._laurel,
            self.streams,
            self._mlp,
            self._shortcut,
        ):
            if part is not None:
                yield from part.slots()
        if self.scale is not None:
            yield TensorSlot(f"layers.{self._index}.layer.scale", (1,), self.scale.dtype, self.scale.copy_)

    def __call__(
        self,
        hidden: Tensor,
        product: Tensor | None,
        step: StepTensors,
        angles: Angles | None,
        pages: Tensor,
        slots_of_layer: Tensor,
        states: Tensor | None,
        carried: _Carried,
        sums: RankSums,
    ) -> Tensor | None:
        """Compute the layer, and write the step's keys and values or states.

        One kernel computes the residual sum and the norm after it. Therefore, a layer does not add its last product to
        the hidden state. It returns the product, and the next layer adds it.

        Args:
            hidden: [T, hidden_size], changed in place.
            product: [T, hidden_size], product of the previous layer that is not yet added to hidden. None if there is
                no such product.
            angles: cosines and sines of the layer's rotary embedding. None for a layer without attention.
            pages: KV buffer of the layer that keeps the keys and values.
            slots_of_layer: the buffer of `pages` with the shape [slots, numbers of a token].
            states: state buffer of the layer. None if the layer has no states.
            carried: results of other layers that this layer uses. The layer adds its own results that other layers use.
            sums: computes sums over all ranks.

        Returns:
            [T, hidden_size], a product that is not yet added to hidden. None: every product is added.
        """
        if self._attention is None:
            return self._compute_mlp(_added(hidden, product, self._mlp_norm), hidden, step, carried, sums)
        is_post = self._layer.normalizes_sums
        normed = _added(hidden, product, None if is_post else self._attention_norm)
        weights = self._layer.sums
        if weights is not None:
            _weigh(hidden, normed, weights.attention[0], weights)
        if isinstance(self._attention, _Attention):
            assert angles is not None
            source = self._layer.attention.kv_from if isinstance(self._layer.attention, AttentionConfig) else None
            shared = None if source is None else carried.keys_values[source]
            attended, found = self._attention(normed, step, angles, pages, slots_of_layer, shared)
            if self._index in self._shared:
                carried.keys_values[self._index] = found
        elif isinstance(self._attention, LatentAttention):
            assert angles is not None
            before = carried.selected[-1] if carried.selected else None
            attended, selected = self._attention(normed, step, angles, pages, slots_of_layer, before)
            carried.selected[:] = () if selected is None else (selected,)
        else:
            attended = _compute_recurrent(self._attention, normed, step, states)
        if self._beside is not None:
            attended += _compute_recurrent(self._beside, normed, step, states)
        if self._mlp is not None and self._layer.is_parallel:
            beside = normed if self._mlp_norm is None else self._mlp_norm(hidden)
            attended += self._mlp(beside, step.adapters)
        if self._part.sums_attention:
            sums.add_(attended)
        if self._layer.is_parallel:
            return self._scaled(attended)
        if self._mlp is None:
            return self._scaled(_normed(attended, self._attention_output_norm))
        attended = self._scaled(_normed(attended, self._attention_output_norm))
        if is_post:
            _normalize_sum(hidden, attended, self._attention_norm)
            if self._cross is not None:
                _normalize_sum(hidden, self._scaled(self._cross(hidden, step, pages)), self._cross_norm)
            _normalize_sum(hidden, self._compute_mlp(hidden, hidden, step, carried, sums), self._mlp_norm)
            return None
        if self._cross is not None:
            attended = self._scaled(self._cross(_added(hidden, attended, self._cross_norm), step, pages))
        if weights is not None:
            normed = _added(hidden, attended.mul_(weights.attention[1]), self._mlp_norm)
            _weigh(hidden, normed, weights.mlp[0], weights)
            return self._compute_mlp(normed, hidden, step, carried, sums).mul_(weights.mlp[1])
        if self._laurel is None:
            normed = _added(hidden, attended, self._mlp_norm)
        else:
            self._laurel.add_(hidden.add_(attended), normed)
            normed = _added(hidden, None, self._mlp_norm)
        return self._compute_mlp(normed, hidden, step, carried, sums)

    def store_encoded(self, encoded: EncodedRows, slots_of_layer: Tensor) -> None:
        """Write the cross-attention keys and values of an encoder's rows into the KV cache.

        Args:
            encoded: rows of this step.
            slots_of_layer: KV buffer of this layer with the shape [slots, numbers of a token].
        """
        assert self._cross is not None, "a layer without cross attention"
        self._cross.store(encoded, slots_of_layer)

    def _compute_mlp(
        self, normed: Tensor, hidden: Tensor, step: StepTensors, carried: _Carried, sums: RankSums
    ) -> Tensor:
        assert self._mlp is not None, "the caller has checked that there is an MLP"
        if isinstance(self._mlp, Experts):
            product = self._mlp(normed, step.adapters, hidden)
        else:
            product = self._mlp(normed, step.adapters)
        if self._shortcut is not None:
            carried.shortcuts.append(self._shortcut(normed))
        elif carried.shortcuts:
            product += carried.shortcuts.pop()
        if self._part.sums_mlp:
            sums.add_(product)
        return self._scaled(_normed(product, self._mlp_output_norm))

    def _scaled(self, product: Tensor) -> Tensor:
        scale = self._layer.residual_scale
        return product if scale == 1.0 else product.mul_(scale)


class _SharedBlock:
    """Weights of a transformer block that several layers share, see SharedBlock."""

    def __init__(
        self, config: ModelConfig, index: int, kernels: Kernels, block_types: Mapping[str, str], **placement: Any
    ) -> None:
        name, layer, hidden = f"layers.{index}.block", config.layers[index], config.hidden_size
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, AttentionConfig), "checked by LayerConfig"
        assert isinstance(mlp, MlpConfig), "checked by LayerConfig"
        assert mlp.activation != "xielu", "checked by LayerConfig"
        linear = _linear_maker(name, kernels, block_types, **placement)
        self._norm = Norm(f"{name}.attention_norm", 2 * hidden, config, kernels, **placement)
        self._attention = _Attention(name, linear, config, attention, kernels, **placement, inputs=2 * hidden)
        self._mlp_norm = Norm(f"{name}.mlp_norm", hidden, config, kernels, **placement)
        size, has_bias = mlp.intermediate_size, mlp.has_bias
        self._mlp = Mlp(linear, "", hidden, size, mlp.activation, kernels, has_bias=has_bias)
        self.linears = (*self._attention.linears, *self._mlp.linears)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._norm, self._attention, self._mlp_norm, self._mlp):
            yield from part.slots()

    def __call__(
        self,
        inputs: Tensor,
        adapters: Mapping[str, tuple[Linear, Linear]],
        step: StepTensors,
        angles: Angles,
        pages: Tensor,
        slots_of_layer: Tensor,
    ) -> Tensor:
        """Compute the block, and write the step's keys and values.

        Args:
            inputs: [T, 2 * hidden_size], hidden state and embedding of each row.
            adapters: two matrices for each adapter of the layer, by name.

        Returns:
            [T, hidden_size].
        """
        normed = self._norm(inputs)
        products = [adapters[name][1](adapters[name][0](normed)) for name in "qkv" if name in adapters]
        added = torch.cat(products, -1) if products else None
        attended, _ = self._attention(normed, step, angles, pages, slots_of_layer, None, added)
        normed = self._mlp_norm(attended)
        first, second = adapters["gate_up"]
        return self._mlp(normed, added=second(first(normed)))


class _HybridLayer:
    """Layer whose state space reads the hidden state plus the result of a shared block, see SharedBlock.

    Args:
        blocks: shared blocks by the index of their first layer. If this layer is a block's first, it adds the block.
    """

    streams: LayerStreams | None = None
    scale: Tensor | None = None
    adapted: tuple[Linear, ...] = ()
    products: Mapping[tuple[int, int], Callable[[Tensor], Tensor]] = {}

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        kernels: Kernels,
        blocks: dict[int, _SharedBlock],
        block_types: Mapping[str, str],
        **placement: Any,
    ) -> None:
        layer = config.layers[index]
        attention, block = layer.attention, layer.block
        assert isinstance(attention, AttentionConfig), "checked by LayerConfig"
        assert block is not None, "the caller has checked that there is a block"
        if block.first == index:
            blocks[index] = _SharedBlock(config, index, kernels, block_types, **placement)
        self._block, self._owned = blocks[block.first], [blocks[index]] if block.first == index else []
        self.rotary = (attention.rotary, attention.turned_dim)
        mixer = LayerConfig(attention=layer.beside, mlp=None)
        name = f"layers.{index}"
        self._mixer = _Layer(config, index, mixer, kernels, **placement, block_types=block_types, name=f"{name}.hybrid")
        linear = _linear_maker(name, kernels, block_types, **placement)
        self._output = linear(config.hidden_size, False, block_proj=config.hidden_size)
        linear = _linear_maker(f"layers.{block.first}.adapters.{block.use}", kernels, block_types, **placement)
        self._adapters: dict[str, tuple[Linear, Linear]] = {}
        for adapter, (inputs, outputs) in block.adapters(layer, config.hidden_size).items():
            first = linear(inputs, False, **{f"{adapter}_a": block.rank})
            self._adapters[adapter] = first, linear(block.rank, False, **{f"{adapter}_b": outputs})
        self._own = (self._output, *(linear for pair in self._adapters.values() for linear in pair))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*(linear for block in self._owned for linear in block.linears), *self._own, *self._mixer.linears)

    @property
    def saved_bytes(self) -> int:
        return sum(linear.saved_bytes for linear in self.linears)

    def slots(self) -> Iterator[TensorSlot]:
        parts: tuple[_SharedBlock | Linear | _Layer, ...] = (*self._owned, *self._own, self._mixer)
        for part in parts:
            yield from part.slots()

    def __call__(
        self,
        hidden: Tensor,
        product: Tensor | None,
        step: StepTensors,
        angles: Angles | None,
        pages: Tensor,
        slots_of_layer: Tensor,
        states: Tensor | None,
        carried: _Carried,
        sums: RankSums,
    ) -> Tensor | None:
        """Compute the layer, see _Layer."""
        assert angles is not None, "a layer with attention has angles"
        assert carried.embedded is not None, "the embeddings are kept for this layer"
        inputs = torch.cat((_added(hidden, product, None), carried.embedded), -1)
        found = self._output(self._block(inputs, self._adapters, step, angles, pages, slots_of_layer))
        return self._mixer(found.add_(hidden), None, step, None, pages, slots_of_layer, states, carried, sums)


def _compute_recurrent(layer: _Recurrent, normed: Tensor, step: StepTensors, states: Tensor | None) -> Tensor:
    assert states is not None, "a layer that keeps states needs their buffer"
    assert step.states is not None, "a layer that keeps states needs chunks with states"
    return layer(normed, step.states, states)


def _added(hidden: Tensor, product: Tensor | None, norm: Norm | None) -> Tensor:
    """Add product to hidden in place, and return the norm of the sum.

    Without a norm, return hidden itself. The caller must then not change hidden while it uses the result.
    """
    if norm is not None:
        return norm.of_sum(hidden, product)
    return hidden if product is None else hidden.add_(product)


def _normalize_sum(hidden: Tensor, product: Tensor, norm: Norm | None) -> None:
    """Replace hidden by the norm of its sum with product."""
    hidden.copy_(_added(hidden, product, norm))


def _weigh(hidden: Tensor, normed: Tensor, factor: float, sums: NormedSums) -> None:
    """Multiply the hidden state by its factor in a sum, in place. Its norm may replace it before."""
    if sums.keeps_norms:
        hidden.copy_(normed)
    hidden.mul_(factor)


def _normed(product: Tensor, norm: Norm | None) -> Tensor:
    return product if norm is None else norm(product)


class Decoder:
    """Embedding, layers, last norm and output projection.

    Args:
        config: model.
        kernels: kernels that compute.
        dtype: number format.
        device: device of weights and tensors.
        block_types: block types of the matrices that stay in 4 bits or in FP8, by name. The kernels multiply with 4-bit
            blocks.
        collectives: connection to the ranks that have the other shards of the model. None if this process has the
            whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_types: Mapping[str, str] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        part = config.part
        self._collectives: Collectives = Lonely() if collectives is None else collectives
        assert self._collectives.size == (1 if part is None else part.size), "one rank for each part of the model"
        self._vocabulary: RankVocabulary | None = None
        if part is not None and part.size > 1:
            self._vocabulary = RankVocabulary(part, config.vocab_size, self._collectives)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kernels = kernels
        first = None if part is None or part.size == 1 else part.vocab_first
        self._embedding: Embedding | None = None
        if config.has_embedding or (config.has_head and config.tie_word_embeddings):
            self._embedding = Embedding(config.vocab_count, config.hidden_size, dtype=dtype, device=device, first=first)
        self._positions: Tensor | None = None
        if config.position_rows:
            self._positions = torch.empty(config.position_rows, config.hidden_size, dtype=dtype, device=device)
        self._embedding_norm: Norm | None = None
        if config.has_embedding and config.has_embedding_norm:
            self._embedding_norm = Norm("embed_norm", config.hidden_size, config, kernels, dtype=dtype, device=device)
        # The scale is rounded to the dtype, as in the reference implementations. The scale is a Python number, because
        # a tensor would be copied to the device in each step.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        blocks: dict[int, _SharedBlock] = {}
        self._layers: list[_Layer | _HybridLayer] = [
            _Layer(config, index, layer, kernels, dtype=dtype, device=device, block_types=block_types or {})
            if layer.block is None
            else _HybridLayer(config, index, kernels, blocks, block_types or {}, dtype=dtype, device=device)
            for index, layer in enumerate(config.layers)
        ]
        self._kv_layers = config.kv_layers
        self._streams: Streams | None = None
        if config.streams is not None:
            self._streams = Streams(config, config.streams, kernels, dtype=dtype, device=device)
        self._relative: RelativeBiases | None = None
        if config.relative is not None:
            heads = config.heads.head_count
            self._relative = RelativeBiases(
                "relative", config.relative, heads, is_causal=True, dtype=dtype, device=device
            )
        self._norm: Norm | None = None
        self._head: Linear | None = None
        if config.has_head and config.has_last_norm:
            self._norm = Norm("norm", config.hidden_size, config, kernels, dtype=dtype, device=device)
        if config.has_head:
            self._head = Linear(
                config.hidden_size,
                {"lm_head": config.vocab_count},
                bias=config.has_head_bias,
                dtype=dtype,
                device=device,
                kernels=kernels,
            )
        self._rotaries = {
            turned: RotaryAngles(*turned, config, dtype=dtype, device=device) for turned in config.rotaries
        }

    @property
    def products(self) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
        """Number of inputs and function of each product, one for each shape of a weight, for a check of torch."""
        streams = () if self._streams is None else self._streams.linears
        head = () if self._head is None else (self._head,)
        linears = [*(linear for layer in self._layers for linear in layer.linears), *streams, *head]
        plain = {(linear.inputs, linear.outputs): linear for linear in linears}
        grouped = {shape: product for layer in self._layers for shape, product in layer.products.items()}
        return [(inputs, product) for found in (plain, grouped) for (inputs, _), product in found.items()]

    @property
    def adapted(self) -> list[Linear]:
        """Linear layers that add the products of adapters."""
        return [linear for layer in self._layers for linear in layer.adapted]

    @property
    def saved_bytes(self) -> int:
        """Bytes of a step's weights that 4 bits save, compared with the dtype."""
        return sum(layer.saved_bytes for layer in self._layers)

    def slots(self) -> Iterator[TensorSlot]:
        """Yield a slot for every tensor of the checkpoint."""
        tied = self.config.tie_word_embeddings
        if self._embedding is not None:
            yield from self._embedding.slots(tied=self._head if tied else None)
        if (table := self._positions) is not None:
            yield TensorSlot("positions.weight", tuple(table.shape), table.dtype, table.copy_)
        for part in (self._embedding_norm, self._streams, self._relative, *self._layers, self._norm):
            if part is not None:
                yield from part.slots()
        for slot in () if self._head is None else self._head.slots():
            if not tied or slot.name.endswith(".bias"):
                yield slot

    def forward(
        self,
        step: StepTensors,
        storage: KVStorage[Tensor],
        is_abandoned: IsAbandoned = never_abandoned,
        *,
        begun: Tensor | None = None,
        states: StateStorage[Tensor] | None = None,
        tapped: dict[int, Tensor] | None = None,
        tapped_layers: Collection[int] = (),
    ) -> Tensor | None:
        """Compute every row of a step, and write its KV and its states.

        Args:
            step: index tensors of the step.
            storage: KV cache.
            is_abandoned: polled before each layer. With several ranks, it is polled with each sum.
            begun: [T, hidden_size], hidden state from the stage that has the embedding. The tensor is overwritten.
            states: state slots of the layers that keep states.
            tapped: the function adds the inputs of the tapped layers to this mapping, by layer. The key layer_count
                stands for the last layer's output.
            tapped_layers: indexes of the layers whose inputs the caller needs.

        Returns:
            [T, hidden_size] after the last layer. None if the step was abandoned. Some layers have then already written
            their new states, and others have not.
        """
        sums = RankSums(self._collectives, is_abandoned)
        hidden = self._embedded(step, sums) if begun is None else begun
        angles = {rotary: angles.cos_sin(step.positions) for rotary, angles in self._rotaries.items()}
        product = None
        deep = self._deep_rows(step) if begun is None else []
        memories = (None,) * len(self._layers) if states is None else states.buffers
        has_blocks = any(layer.block is not None for layer in self.config.layers)
        carried = _Carried({}, [], [], hidden.clone() if has_blocks else None)
        streams = None if self._streams is None else self._streams.begin(hidden, step.token_ids)
        if step.encoded is not None:
            for layer, pages in zip(self._layers, storage.pages, strict=True):
                if sums.is_over:
                    return None
                assert isinstance(layer, _Layer), "checked by ModelConfig"
                layer.store_encoded(step.encoded, pages.flatten(0, 1).flatten(1))
        if not len(hidden):  # The step has only positions before the decoder's first token.
            return hidden
        if self._relative is not None:
            relative = self._relative
            biased = {kind: _biased(one, relative, step.positions, kind[1]) for kind, one in step.attention.items()}
            step = replace(step, attention=biased)
        places = zip(self._layers, self._kv_layers, memories, strict=True)
        for index, (layer, kv_layer, memory) in enumerate(places):
            if sums.is_over:
                return None
            if streams is not None and layer.streams is not None:
                hidden, product = layer.streams.predict(streams), None
            if tapped is not None and index in tapped_layers:
                tapped[index] = hidden.clone() if product is None else hidden + product
            pages = storage.pages[kv_layer]
            slots_of_layer = pages.flatten(0, 1).flatten(1)
            layer_angles = None if layer.rotary is None else angles[layer.rotary]
            product = layer(hidden, product, step, layer_angles, pages, slots_of_layer, memory, carried, sums)
            if streams is not None and layer.streams is not None:
                layer.streams.correct(streams, _added(hidden, product, None))
                product = None
            if layer.scale is not None:
                _added(hidden, product, None).mul_(layer.scale)
                product = None
            if index < len(deep):
                rows, values = deep[index]
                (hidden if product is None else product).index_add_(0, rows, values.to(hidden.dtype))
        if self._streams is not None and streams is not None:
            result = self._streams.combine(streams)
        else:
            result = hidden if product is None else hidden.add_(product)
        if tapped is not None and len(self._layers) in tapped_layers:
            tapped[len(self._layers)] = result
        return result

    def _deep_rows(self, step: StepTensors) -> list[tuple[Tensor, Tensor]]:
        """Return what is added to the output of each of the first layers: indexes of rows, and values."""
        if step.given is None:
            return []
        rows, values = step.given
        size = self.config.hidden_size
        return [(rows, values[:, first : first + size]) for first in range(size, values.shape[1], size)]

    def embeddings(self, token_ids: Tensor) -> Tensor:
        """Return the rows of the embedding table that this rank has, unscaled.

        Args:
            token_ids: int64 [n].

        Returns:
            [n, hidden_size], a copy.
        """
        assert self._embedding is not None, "another stage has the embedding"
        return self._embedding(token_ids)

    def _embedded(self, step: StepTensors, sums: RankSums) -> Tensor:
        hidden = self.embeddings(step.token_ids)
        if self._vocabulary is not None:
            sums.add_(hidden)
        if self.config.embedding_scale != 1.0:
            hidden *= self._embedding_scale
        if self._positions is not None and self.config.position_first is not None:
            hidden += self._positions.index_select(0, step.positions + self.config.position_first)
        if self._embedding_norm is not None:
            hidden = self._embedding_norm(hidden)
        if step.given is not None:
            values = step.given[1][:, : hidden.shape[1]]
            hidden.index_copy_(0, step.given[0], values.to(hidden.dtype))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits. Every rank must call this.

        Args:
            hidden: [n, hidden_size], rows of forward's result.

        Returns:
            [n, vocab_size].
        """
        own = self._own_logits(hidden)
        return own if self._vocabulary is None else self._vocabulary.logits(own)

    def largest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the token with the largest logit of each row, without an exchange of all logits, see RankVocabulary.

        Args:
            hidden: [n, hidden_size], rows of forward's result.

        Returns:
            Token id of each row, and whether the row's logits are finite. None if there is only one rank.
        """
        return None if self._vocabulary is None else self._vocabulary.largest(self._own_logits(hidden))

    def _own_logits(self, hidden: Tensor) -> Tensor:
        assert self._head is not None, "another stage has the head"
        logits = self._head(self.normed(hidden))
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows after the last norm.

        Args:
            hidden: [n, hidden_size], rows of forward's result.

        Returns:
            [n, hidden_size].
        """
        if not self.config.has_last_norm:
            return hidden
        assert self._norm is not None, "another stage has the last norm"
        return self._norm(hidden)
