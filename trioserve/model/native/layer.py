"""Stores the biases and norms of one layer for the native kernels, and describes the layer to them.

PackedWeights stores all matrices.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence

import numpy as np

from trioserve.model.layer_config import (
    XIELU_NUMBERS,
    AttentionConfig,
    ExpertsConfig,
    KVAttention,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    NormKind,
    RotaryConfig,
)
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.packed_weights import PackedWeights, has_pairs_together, pairs_together
from trioserve.model.native.recurrent import (
    NativeLaurel,
    NativeLayerStreams,
    NativeRecurrent,
    empty_float32,
    float32_slot,
)
from trioserve.model.number_formats import Float32Array
from trioserve.model.weights import Slot
from trioserve_kernels.native import address
from trioserve_kernels.structs import (
    ACTIVATIONS,
    BLOCK_OUTPUTS,
    QK_NORMS,
    SCORINGS,
    ExpertsStruct,
    LatentStruct,
    LaurelStruct,
    LayerStreamsStruct,
    LayerStruct,
    MatrixStruct,
)

# Norms of a mixture of experts, see ExpertsConfig.has_own_norms: their names in the kernels' struct, and our names.
EXPERT_NORMS = {
    "router_norm": "router_norm",
    "norm": "experts_norm",
    "output_norm": "experts_output_norm",
    "shared_output_norm": "shared_output_norm",
}

__all__ = ["NativeLayer", "intermediate_sizes", "norm_slots", "norm_values", "padded_zeros"]


def intermediate_sizes(layer: LayerConfig) -> tuple[int, ...]:
    """Return the intermediate sizes of a layer's MLP and experts. That of an MLP comes first."""
    own = (layer.mlp.intermediate_size,) if isinstance(layer.mlp, MlpConfig) else ()
    experts = layer.experts
    if experts is None:
        return own
    return *own, experts.intermediate_size, *((experts.shared_size,) if experts.shared_size else ())


class NativeLayer:
    """Biases and norms of one layer in float32, which represents the numbers of every dtype exactly."""

    def __init__(self, index: int, config: ModelConfig) -> None:
        layer = config.layers[index]
        hidden, attention, mlp, experts = config.hidden_size, layer.attention, layer.mlp, layer.experts
        self._layer = layer
        self._part = None if config.part is None else config.part.layers[index]
        self._own_experts = range(0) if experts is None else config.experts_of(index)
        self._recurrent = None if layer.recurrent is None else NativeRecurrent(layer.recurrent, hidden)
        self.query_norm: Float32Array | None = None
        self.key_norm: Float32Array | None = None
        self.qkv_bias: Float32Array | None = None
        self.output_bias: Float32Array | None = None
        self.sinks: Float32Array | None = None
        self.slopes: Float32Array | None = None
        self.activation_weights: Float32Array | None = None
        self.value_norm: Float32Array | None = None
        self.scale = empty_float32(1) if layer.has_scale else None
        self.attention_gate_bias: Float32Array | None = None
        self._attention_gate: MatrixStruct | None = None
        self._laurel = NativeLaurel(layer.laurel_rank, hidden) if layer.laurel_rank else None
        self._streams = None if config.streams is None else NativeLayerStreams(config.streams, hidden)
        # The layer's struct contains the addresses of these structs, so this object keeps them alive.
        self._laurel_struct: LaurelStruct | None = None
        self._streams_struct: LayerStreamsStruct | None = None
        if isinstance(attention, AttentionConfig):
            self._make_attention(attention, hidden, config.norm)
        elif isinstance(attention, LatentAttentionConfig):
            # There are two latents: queries are projected from one, keys and values from the other. Both have a norm.
            self.query_norm = None if attention.query_rank is None else empty_float32(attention.query_rank)
            self.key_norm = empty_float32(attention.latent_dim)
        self._norm_kind = config.norm
        self.attention_norm = norm_values(hidden, config.norm) if layer.has_attention_norm else None
        self.mlp_norm = norm_values(hidden, config.norm) if layer.has_mlp_norm else None
        self.attention_output_norm = norm_values(hidden, config.norm) if layer.has_output_norms else None
        self.mlp_output_norm = norm_values(hidden, config.norm) if layer.has_mlp_output_norm else None
        self._latent: LatentStruct | None = None
        if isinstance(mlp, MlpConfig) and mlp.activation == "xielu":
            self.activation_weights = empty_float32(len(XIELU_NUMBERS))
        self._has_gate = mlp is None or mlp.has_gate
        self.gate_up_bias: Float32Array | None = None
        self.down_bias: Float32Array | None = None
        if isinstance(mlp, MlpConfig) and mlp.has_bias:
            self.gate_up_bias = empty_float32((1 + self._has_gate) * mlp.intermediate_size)
            self.down_bias = empty_float32(hidden)
        self.shared_gate = empty_float32(hidden) if experts is not None and experts.has_shared_gate else None
        self.score_bias: Float32Array | None = None
        if experts is not None and experts.has_score_bias:
            self.score_bias = empty_float32(experts.choice_count)
        self.router_bias: Float32Array | None = None
        if experts is not None and experts.has_router_bias:
            self.router_bias = padded_zeros(experts.choice_count)
        self.expert_biases: tuple[Float32Array, Float32Array] | None = None
        if experts is not None and experts.has_bias:
            count = len(self._own_experts)
            self.expert_biases = empty_float32(count * 2 * experts.intermediate_size), empty_float32(count * hidden)
        self._expert_norms: dict[str, Float32Array] = {}
        if experts is not None and experts.has_own_norms:
            self._expert_norms = {name: empty_float32(hidden) for name in EXPERT_NORMS}
            self._expert_norms["expert_scale"] = empty_float32(experts.expert_count)
        self._experts: ExpertsStruct | None = None
        self._expert_matrices: tuple[ctypes.Array[MatrixStruct], ...] = ()

    def _make_attention(self, attention: AttentionConfig, hidden: int, norm: NormKind) -> None:
        heads, keys = attention.query_size, attention.key_size
        by_head = attention.qk_norm in ("head", "unit")
        if attention.qk_norm == "head":
            self.query_norm = norm_values(attention.head_dim, norm)
            self.key_norm = norm_values(attention.head_dim, norm) if attention.kv_from is None else None
        elif attention.qk_norm != "none":
            self.query_norm = _ones(attention.head_dim if by_head else heads)
            self.key_norm = _ones(attention.head_dim if by_head else keys) if attention.kv_from is None else None
        if attention.has_value_norm:
            self.value_norm = _ones(attention.head_dim)
        if attention.has_bias:
            self.qkv_bias = empty_float32(attention.projected_size)
            self.attention_gate_bias = padded_zeros(attention.gate_size) if attention.has_gate else None
        if attention.has_output_bias:
            self.output_bias = empty_float32(hidden)
        if attention.has_sinks:
            self.sinks = padded_zeros(attention.head_count)
        if attention.slopes is not None:
            # Kernels subtract from scores that are not yet divided by sqrt(head_dim).
            self.slopes = np.array(attention.slopes, dtype=np.float32) * np.float32(math.sqrt(attention.head_dim))

    def struct(
        self, name: str, weights: PackedWeights, rotaries: Sequence[tuple[RotaryConfig | None, int]]
    ) -> LayerStruct:
        """Return the layer's description for the kernels. It contains addresses of arrays that this object owns.

        Args:
            name: name of the layer, such as layers.0.
            rotaries: distinct rotary configs of the model, see ModelConfig.
        """
        attention, mlp = self._layer.attention, self._layer.mlp
        own: tuple[str, ...] = ("qkv", "output") if isinstance(attention, KVAttention) else ()
        own += ("gate_up", "down") if isinstance(mlp, MlpConfig) else ()
        matrices = {matrix: weights.matrix(f"{name}.{matrix}") for matrix in own}
        experts: int | None = None
        if self._layer.experts is not None:
            self._experts = self._experts_struct(name, self._layer.experts, weights)
            experts = ctypes.addressof(self._experts)
        if isinstance(attention, LatentAttentionConfig):
            self._latent = self._latent_struct(name, attention, weights)
        structs = ("experts", "shortcut", "recurrent", "latent", "laurel", "streams", "attention_gate")
        if isinstance(attention, AttentionConfig) and attention.has_gate:
            self._attention_gate = weights.matrix(f"{name}.attention_gate")
        if self._laurel is not None:
            self._laurel_struct = self._laurel.struct(name, weights)
        if self._streams is not None:
            self._streams_struct = self._streams.struct(name, weights)
        pointers = [
            field[0] for field in LayerStruct._fields_ if field[1] is ctypes.c_void_p and field[0] not in structs
        ]
        addresses = {pointer: _address(getattr(self, pointer)) for pointer in pointers}
        own_fields: dict[str, float] = {}
        if isinstance(attention, KVAttention):
            own_fields = {
                "window": attention.window or 0,
                "section": attention.section or 0,
                "has_temperature": attention.temperature is not None,
                "rotary": rotaries.index((attention.rotary, attention.turned_dim)),
                "head_count": attention.head_count,
                "kv_head_count": attention.kv_entry.head_count,
                "head_dim": attention.kv_entry.head_dim,
                "query_factor": attention.query_factor,
                "score_cap": attention.score_cap or 0.0,
            }
        if isinstance(attention, AttentionConfig):
            own_fields |= {
                "pairs_together": has_pairs_together(attention),
                "qk_norm": QK_NORMS[attention.qk_norm],
                "shares_kv": attention.kv_from is not None,
                "has_turned_norms": attention.has_turned_norms,
                "clip": attention.clip or 0.0,
                "value_dim": attention.value_dim,
                "has_softplus_gate": attention.has_softplus_gate,
                "gates_heads": attention.has_gate_of_heads,
            }
        if isinstance(mlp, MlpConfig) and mlp.cutoff is not None:
            own_fields |= {"has_cutoff": True, "cutoff": mlp.cutoff}
        return LayerStruct(
            **matrices,
            **addresses,
            **own_fields,
            activation=0 if mlp is None else ACTIVATIONS[mlp.activation],
            is_parallel=self._layer.is_parallel,
            has_gate=self._has_gate,
            sums_attention=self._part is not None and self._part.sums_attention,
            sums_mlp=self._part is not None and self._part.sums_mlp,
            residual_scale=self._layer.residual_scale,
            experts=experts if self._layer.shortcut is None else None,
            shortcut=experts if self._layer.shortcut is not None else None,
            recurrent=None if self._recurrent is None else ctypes.addressof(self._recurrent.struct(name, weights)),
            latent=None if self._latent is None else ctypes.addressof(self._latent),
            laurel=None if self._laurel_struct is None else ctypes.addressof(self._laurel_struct),
            streams=None if self._streams_struct is None else ctypes.addressof(self._streams_struct),
            attention_gate=None if self._attention_gate is None else ctypes.addressof(self._attention_gate),
        )

    def _latent_struct(self, name: str, attention: LatentAttentionConfig, weights: PackedWeights) -> LatentStruct:
        rank = attention.query_rank or 0
        query_up = {"query_up": weights.matrix(f"{name}.query_up")} if rank else {}
        return LatentStruct(
            **query_up,
            key_up=weights.address(f"{name}.key_up"),
            value_up=weights.address(f"{name}.value_up"),
            query_norm=_address(self.query_norm),
            latent_norm=_address(self.key_norm),
            query_rank=rank,
            plain_dim=attention.plain_dim,
            turned_dim=attention.turned_dim,
            value_dim=attention.value_dim,
            norm_eps=attention.norm_eps,
        )

    def _experts_struct(self, name: str, mlp: ExpertsConfig, weights: PackedWeights) -> ExpertsStruct:
        own = [f"{name}.experts.{expert}" for expert in self._own_experts]
        # The struct contains the addresses of these arrays, so this object keeps them alive.
        gate_up, down = self._expert_matrices = tuple(
            (MatrixStruct * len(own))(*(weights.matrix(f"{expert}.{matrix}") for expert in own))
            for matrix in ("gate_up", "down")
        )
        shared = {
            f"shared_{matrix}": weights.matrix(f"{name}.shared.{matrix}")
            for matrix in ("gate_up", "down")
            if mlp.shared_size
        }
        gate_up_bias, down_bias = self.expert_biases or (None, None)
        return ExpertsStruct(
            router=weights.matrix(f"{name}.router"),
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            shared_gate=_address(self.shared_gate),
            router_bias=_address(self.router_bias),
            gate_up_bias=_address(gate_up_bias),
            down_bias=_address(down_bias),
            count=mlp.choice_count,
            own_first=self._own_experts.start,
            own_count=len(self._own_experts),
            per_token=mlp.experts_per_token,
            score_bias=_address(self.score_bias),
            normalizes=mlp.normalizes,
            weighs_inputs=mlp.weighs_inputs,
            middle=mlp.intermediate_size,
            shared_middle=mlp.shared_size,
            scoring=SCORINGS[mlp.scoring],
            group_count=mlp.group_count,
            groups_per_token=mlp.groups_per_token,
            group_leaders=mlp.group_leaders,
            scale=mlp.scale,
            logit_cap=mlp.logit_cap or 0.0,
            nearness=mlp.nearness,
            identity_first=mlp.expert_count if mlp.has_identity_results else mlp.choice_count,
            **shared,
            **{name: address(values) for name, values in self._expert_norms.items()},
        )

    def _attention_biases(self, attention: AttentionConfig) -> tuple[tuple[str, Float32Array | None], ...]:
        def of_heads(bias: Float32Array | None) -> Float32Array | None:
            if bias is None or not has_pairs_together(attention):
                return bias
            return pairs_together(bias, attention.head_dim)

        heads, keys = attention.query_size, attention.key_size
        own = (
            ("k_proj", of_heads(_part(self.qkv_bias, heads, keys))),
            ("v_proj", _part(self.qkv_bias, heads + keys, attention.value_size)),
        )
        return (
            ("q_proj", of_heads(_part(self.qkv_bias, 0, heads))),
            *(own if attention.kv_from is None else ()),
            ("q_gate_proj", _part(self.attention_gate_bias, 0, attention.gate_size)),
            ("o_proj", self.output_bias),
        )

    def _expert_biases(self) -> Iterator[tuple[str, Float32Array | None]]:
        if self.expert_biases is None:
            return
        count = len(self._own_experts)
        rows = zip(self._own_experts, *(biases.reshape(count, -1) for biases in self.expert_biases), strict=True)
        for expert, of_gate_up, of_down in rows:
            yield f"experts.{expert}.gate_proj", _every_other_block(of_gate_up, 0)
            yield f"experts.{expert}.up_proj", _every_other_block(of_gate_up, 1)
            yield f"experts.{expert}.down_proj", of_down

    def slots(self, name: str) -> Iterator[Slot]:
        attention = self._layer.attention
        for part in (self._recurrent, self._laurel, self._streams):
            if part is not None:
                yield from part.slots(name)
        for projection, bias in (
            *(self._attention_biases(attention) if isinstance(attention, AttentionConfig) else ()),
            ("gate_proj", _every_other_block(self.gate_up_bias, 0) if self._has_gate else None),
            ("up_proj", _every_other_block(self.gate_up_bias, 1) if self._has_gate else self.gate_up_bias),
            ("down_proj", self.down_bias),
            ("router", _part(self.router_bias, 0, getattr(self._layer.experts, "choice_count", 0))),
            *self._expert_biases(),
        ):
            if bias is not None:
                yield float32_slot(f"{name}.{projection}.bias", bias, (bias.size,))
        if self.activation_weights is not None:
            for index, number in enumerate(XIELU_NUMBERS):
                yield float32_slot(f"{name}.xielu.{number}", self.activation_weights[index : index + 1])
        if self.scale is not None:
            yield float32_slot(f"{name}.layer.scale", self.scale)
        if self.sinks is not None:
            assert isinstance(attention, AttentionConfig), "only AttentionConfig has sinks"
            sinks = self.sinks[: attention.head_count]
            yield float32_slot(f"{name}.sinks.weight", sinks)
        if self.shared_gate is not None:
            yield float32_slot(f"{name}.shared_gate.weight", self.shared_gate, (1, self.shared_gate.size))
        if self.score_bias is not None:
            yield float32_slot(f"{name}.router.score_bias", self.score_bias)
        for module, place in self._expert_norms.items():
            tensor = f"{EXPERT_NORMS[module]}.weight" if module in EXPERT_NORMS else "router.expert_scale"
            yield float32_slot(f"{name}.{tensor}", place)
        is_latent = isinstance(attention, LatentAttentionConfig)
        is_unit = isinstance(attention, AttentionConfig) and attention.qk_norm == "unit"
        is_of_heads = isinstance(attention, AttentionConfig) and attention.qk_norm == "head"
        for norm, values in (
            ("attention_norm", self.attention_norm),
            ("attention_output_norm", self.attention_output_norm),
            ("mlp_norm", self.mlp_norm),
            ("mlp_output_norm", self.mlp_output_norm),
            ("q_norm", self.query_norm if is_of_heads else None),
            ("k_norm", self.key_norm if is_of_heads else None),
        ):
            if values is not None:
                yield from norm_slots(f"{name}.{norm}", values, self._norm_kind)
        for norm, weight in (
            ("q_a_norm" if is_latent else "q_norm", None if is_unit or is_of_heads else self.query_norm),
            ("kv_a_norm" if is_latent else "k_norm", None if is_unit or is_of_heads else self.key_norm),
        ):
            if weight is None:
                continue
            if not (isinstance(attention, AttentionConfig) and attention.qk_norm == "each"):
                yield float32_slot(f"{name}.{norm}.weight", weight)
                continue
            for head, row in enumerate(weight.reshape(-1, attention.head_dim)):
                yield float32_slot(f"{name}.heads.{head}.{norm}.weight", row)


def norm_values(size: int, kind: NormKind) -> Float32Array:
    """Return an array for the weights of a norm, and for its biases after them.

    Args:
        size: number of values that are normalized together.
        kind: type of norm, see ModelConfig.
    """
    return _ones(2 * size if kind == "layer_biased" else size)


def norm_slots(name: str, values: Float32Array, kind: NormKind) -> Iterator[Slot]:
    """Yield the slots of a norm's tensors.

    Args:
        name: name of the norm.
        values: array that norm_values returned.
        kind: type of norm, see ModelConfig.
    """
    if kind == "layer_biased":
        weights, biases = values.reshape(2, -1)
        yield float32_slot(f"{name}.weight", weights)
        yield float32_slot(f"{name}.bias", biases)
    elif kind != "layer_bare":
        yield float32_slot(f"{name}.weight", values)


def padded_zeros(count: int) -> Float32Array:
    """Return an array of zeros. Its size is rounded up to whole blocks, because the kernels read whole blocks.

    Args:
        count: number of values that are used.
    """
    return np.zeros(-(-count // BLOCK_OUTPUTS) * BLOCK_OUTPUTS, dtype=np.float32)


def _address(tensor: Float32Array | None) -> int | None:
    return None if tensor is None else address(tensor)


def _part(bias: Float32Array | None, first: int, count: int) -> Float32Array | None:
    return None if bias is None else bias[first : first + count]


def _every_other_block(bias: Float32Array | None, first: int) -> Float32Array | None:
    return None if bias is None else bias.reshape(-1, 2, BLOCK_OUTPUTS)[:, first]


def _ones(count: int) -> Float32Array:
    return np.ones(count, dtype=np.float32)
