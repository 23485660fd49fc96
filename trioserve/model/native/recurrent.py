"""Stores the weights of recurrent layers, streams and LAuReL paths in the format that the native kernels read.

See StreamsConfig and LayerConfig.laurel_rank. Vectors and small matrices are float32, which represents the numbers of
every dtype exactly. PackedWeights stores all large matrices.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator

import numpy as np

from trioserve.model.layer_config import (
    DeltaNetConfig,
    LightningConfig,
    Recurrent,
    SelectiveScanConfig,
    ShortConvConfig,
    StateSpaceConfig,
)
from trioserve.model.model_config import ModelConfig, StreamsConfig
from trioserve.model.native.packed_weights import PackedWeights
from trioserve.model.number_formats import Float32Array, Values
from trioserve.model.weights import Slot
from trioserve_kernels.native import address
from trioserve_kernels.structs import (
    BLOCK_OUTPUTS,
    CONV_KERNEL_MAX,
    STATE_NORMS,
    LaurelStruct,
    LayerStreamsStruct,
    MatrixStruct,
    RecurrentStruct,
    StreamsStruct,
)

__all__ = [
    "NativeRecurrent",
    "empty_float32",
    "float32_slot",
    "why_not_recurrent",
    "NativeLaurel",
    "NativeLayerStreams",
    "NativeStreams",
    "why_not_streams",
]


def why_not_recurrent(layer: Recurrent) -> str | None:
    """Return the reason why the native kernels cannot compute a recurrent layer, as a phrase, or None if they can.

    Args:
        layer: description of the recurrent layer.
    """
    if isinstance(layer, LightningConfig):
        return "they do not compute lightning attention"
    sizes = [("a convolution's number of channels", layer.convolved_size)]
    if isinstance(layer, StateSpaceConfig):
        sizes.append(("a state space's head_dim", layer.head_dim))
    if isinstance(layer, DeltaNetConfig):
        # Parts of the first projection follow each other in whole blocks.
        decays = ("the rank of the decays", layer.rank) if layer.rank else ("linear_num_value_heads", layer.head_count)
        sizes += [("linear_value_head_dim", layer.head_dim), decays, ("a state's decays", layer.decay_count)]
    if isinstance(layer, SelectiveScanConfig):
        sizes += [("the rank of the time steps", layer.rank), ("a state space's state size", layer.vector_size)]
    for name, size in sizes:
        if size % BLOCK_OUTPUTS:
            return f"{name} is {size}, which is no multiple of {BLOCK_OUTPUTS}"
    return f"a convolution sees {layer.kernel_size} tokens" if layer.kernel_size > CONV_KERNEL_MAX else None


class NativeRecurrent:
    """Vectors of one recurrent layer."""

    def __init__(self, layer: Recurrent, hidden: int) -> None:
        assert not isinstance(layer, LightningConfig), "checked by why_not_recurrent"
        self._layer = layer
        has_conv_bias = layer.has_bias if isinstance(layer, ShortConvConfig) else layer.has_conv_bias
        padded = math.ceil(layer.projected_size / BLOCK_OUTPUTS) * BLOCK_OUTPUTS
        # Biases of both projections. Zeros pad the bias of the first projection to a whole block.
        self._input_bias = np.zeros(padded, dtype=np.float32) if layer.has_bias else None
        self._output_bias = empty_float32(hidden) if layer.has_bias else None
        self._conv_weights = empty_float32(layer.kernel_size, layer.convolved_size)
        self._conv_bias = empty_float32(layer.convolved_size) if has_conv_bias else None
        self._vectors: dict[str, Float32Array] = {}
        self._limits = (0.0, 0.0)
        if isinstance(layer, StateSpaceConfig):
            self._vectors = {name: empty_float32(layer.head_count) for name in ("rates", "skips", "time_step_bias")}
            if layer.norm != "none":
                self._vectors["gate_norm"] = empty_float32(layer.inner_size)
            self._limits = (layer.time_step_min, layer.time_step_max)
        elif isinstance(layer, DeltaNetConfig):
            self._vectors = {
                "rates": empty_float32(layer.head_count),
                "time_step_bias": empty_float32(layer.decay_count),
            }
            self._vectors["gate_norm"] = empty_float32(layer.head_count, layer.head_dim)
        self._selection_norms: dict[str, Float32Array] = {}
        if isinstance(layer, SelectiveScanConfig):
            self._vectors = {
                "rates": empty_float32(layer.vector_size, layer.channel_count),
                "skips": empty_float32(layer.channel_count),
                "time_step_bias": empty_float32(layer.channel_count),
            }
            # The norms are adjacent in memory, in the order of the projection's outputs.
            self._selection_norm = np.ones(sum(layer.selected_sizes), dtype=np.float32)
            parts = np.split(self._selection_norm, np.cumsum(layer.selected_sizes)[:-1])
            if layer.norm == "weighted":
                self._selection_norms = dict(zip(("time_step_norm", "b_norm", "c_norm"), parts, strict=True))
        self._struct = RecurrentStruct(
            input_bias=None if self._input_bias is None else address(self._input_bias),
            output_bias=None if self._output_bias is None else address(self._output_bias),
            conv_weights=address(self._conv_weights),
            conv_bias=None if self._conv_bias is None else address(self._conv_bias),
            **{name: address(vector) for name, vector in self._vectors.items()},
            channels=layer.convolved_size,
            kernel=layer.kernel_size,
            projected=layer.projected_size,
            time_step_min=self._limits[0],
            time_step_max=self._limits[1],
        )
        if isinstance(layer, SelectiveScanConfig):
            # All channels are one head, whose states have the usual order.
            self._struct.heads, self._struct.head_dim, self._struct.vectors = 1, layer.channel_count, layer.vector_size
            self._struct.norm, self._struct.norm_groups, self._struct.rank = STATE_NORMS["none"], 1, layer.rank
            self._struct.selection_eps = layer.norm_eps
            if layer.norm != "none":
                self._struct.selection_norm = address(self._selection_norm)
        elif not isinstance(layer, ShortConvConfig):
            self._struct.heads, self._struct.head_dim = layer.head_count, layer.head_dim
            self._struct.groups, self._struct.vectors = layer.group_count, layer.vector_size
            self._struct.norm_groups = layer.group_count
        if isinstance(layer, StateSpaceConfig):
            self._struct.norm = STATE_NORMS[layer.norm]
        elif isinstance(layer, DeltaNetConfig):
            self._struct.norm, self._struct.norm_groups = STATE_NORMS["ungated"], layer.head_count
            self._struct.is_delta, self._struct.in_turn = True, layer.has_heads_in_turn
            self._struct.share_scale, self._struct.norm_eps = layer.share_scale, layer.norm_eps or 0.0
            self._struct.latent = layer.rank

    def struct(self, name: str, weights: PackedWeights) -> RecurrentStruct:
        """Return the layer's description for the kernels. It is valid as long as this object exists.

        Args:
            name: name of the layer, such as layers.0.
            weights: matrices of the model.
        """
        self._struct.input, self._struct.output = weights.matrix(f"{name}.input"), weights.matrix(f"{name}.mixed")
        if isinstance(self._layer, SelectiveScanConfig):
            self._struct.selection = weights.matrix(f"{name}.selection")
            self._struct.time_step = weights.matrix(f"{name}.time_step")
        if isinstance(self._layer, DeltaNetConfig) and self._layer.rank:
            self._struct.gate_up = weights.matrix(f"{name}.delta_gate_up")
            self._struct.decay_up = weights.matrix(f"{name}.delta_decay_up")
        return self._struct

    def slots(self, name: str) -> Iterator[Slot]:
        """Yield the loading slots of these vectors.

        Args:
            name: name of the layer, such as layers.0.
        """
        layer = self._layer
        first = 0
        parts = layer.conv_sizes if isinstance(layer, DeltaNetConfig) else {"conv": layer.convolved_size}
        for module, size in parts.items():
            yield float32_slot(f"{name}.{module}.weight", self._conv_weights[:, first : first + size].T)
            first += size
        places = {
            "in_proj.bias": None if self._input_bias is None else self._input_bias[: layer.projected_size],
            "out_proj.bias": self._output_bias,
            "conv.bias": self._conv_bias,
            "gate_norm.weight": self._vectors.get("gate_norm"),
            **{f"state.{kind}": self._vectors.get(kind) for kind in ("skips", "time_step_bias")},
            **{f"{norm}.weight": place for norm, place in self._selection_norms.items()},
        }
        if (rates := self._vectors.get("rates")) is not None:
            yield float32_slot(f"{name}.state.rates", rates.T)
        for tensor, place in places.items():
            # All heads of the delta rule share one norm, whose weights are copied for each head.
            if place is not None:
                yield float32_slot(f"{name}.{tensor}", place, place.shape[-1:])


def _fill(place: Float32Array, values: Values) -> None:
    place[:] = values if values.size < place.size else values.reshape(place.shape)


def empty_float32(*shape: int) -> Float32Array:
    return np.empty(shape, dtype=np.float32)


def why_not_streams(config: ModelConfig) -> str | None:
    """Return the reason why the native kernels cannot compute a model's streams and LAuReL paths.

    Args:
        config: model.

    Returns:
        A phrase, or None if the kernels can compute the model.
    """
    sizes = [("laurel_rank", layer.laurel_rank) for layer in config.layers]
    if config.streams is not None:
        sizes.append(("hidden_size_per_layer_input", config.streams.input_size))
    for name, size in sizes:
        if size % BLOCK_OUTPUTS:
            return f"{name} is {size}, which is no multiple of {BLOCK_OUTPUTS}"
    return None


class NativeStreams:
    """Weights of the model's streams. `struct` contains addresses of arrays that this object owns.

    Args:
        config: model.
        streams: streams of the model.
        weights: matrices of the model.
        table_scale: factor of the rows in the embedding table of the layers' inputs.
    """

    def __init__(self, config: ModelConfig, streams: StreamsConfig, weights: PackedWeights, table_scale: float) -> None:
        others = range(streams.count - 1)
        self._ins, self._outs = (
            (MatrixStruct * len(others))(*(weights.matrix(f"streams.{index}.{way}") for index in others))
            for way in ("in", "out")
        )
        self._norm = empty_float32(streams.input_size)
        self.struct = StreamsStruct(
            input_table=weights.matrix("layer_inputs.embed"),
            input_projection=weights.matrix("layer_inputs.proj"),
            ins=ctypes.addressof(self._ins),
            outs=ctypes.addressof(self._outs),
            input_norm=address(self._norm),
            count=streams.count,
            active=streams.active,
            input_size=streams.input_size,
            input_vocab_size=streams.input_vocab_size,
            table_scale=table_scale,
        )

    def slots(self) -> Iterator[Slot]:
        yield float32_slot("layer_inputs.norm.weight", self._norm)


class NativeLayerStreams:
    """Weights of one layer's streams."""

    def __init__(self, streams: StreamsConfig, hidden: int) -> None:
        self._has_scale = streams.has_scale
        self._places = {"input_norm.weight": empty_float32(hidden)}
        if streams.count > 1:
            self._places |= {
                "stream_router_norm.weight": empty_float32(hidden),
                "stream_router.weight": empty_float32(streams.count, hidden),
                "stream_prediction.weight": empty_float32(streams.count**2, streams.count),
                "stream_correction.weight": empty_float32(streams.count, streams.count),
                "streams.scale": empty_float32(hidden),
            }

    def struct(self, name: str, weights: PackedWeights) -> LayerStreamsStruct:
        """Return the kernels' description. It has addresses of arrays that this object owns.

        Args:
            name: name of the layer, such as layers.0.
            weights: matrices of the model.
        """
        found = {tensor: address(place) for tensor, place in self._places.items()}
        return LayerStreamsStruct(
            input_gate=weights.matrix(f"{name}.input_gate"),
            input_projection=weights.matrix(f"{name}.input_proj"),
            router_norm=found.get("stream_router_norm.weight"),
            router=found.get("stream_router.weight"),
            prediction=found.get("stream_prediction.weight"),
            correction=found.get("stream_correction.weight"),
            scale=found["streams.scale"] if self._has_scale else None,
            input_norm=found["input_norm.weight"],
        )

    def slots(self, name: str) -> Iterator[Slot]:
        """Yield the slots of these weights.

        Args:
            name: name of the layer, such as layers.0.
        """
        for tensor, place in self._places.items():
            yield float32_slot(f"{name}.{tensor}", place)


class NativeLaurel:
    """Weights of one layer's LAuReL path."""

    def __init__(self, rank: int, hidden: int) -> None:
        self._rank, self._norm = rank, empty_float32(hidden)

    def struct(self, name: str, weights: PackedWeights) -> LaurelStruct:
        """Return the kernels' description. It has addresses of arrays that this object owns.

        Args:
            name: name of the layer, such as layers.0.
            weights: matrices of the model.
        """
        ways = {f"{way}wards": weights.matrix(f"{name}.laurel_{way}") for way in ("in", "out")}
        return LaurelStruct(**ways, norm=address(self._norm), rank=self._rank)

    def slots(self, name: str) -> Iterator[Slot]:
        """Yield the slots of these weights.

        Args:
            name: name of the layer, such as layers.0.
        """
        yield float32_slot(f"{name}.laurel_norm.weight", self._norm)


def float32_slot(name: str, place: Float32Array, shape: tuple[int, ...] | None = None) -> Slot:
    """Return the loading slot of a float32 array.

    Args:
        name: name of the tensor, see loading/names.py.
        place: array that the slot fills.
        shape: shape of the tensor. None: the shape of the array.
    """
    return Slot(name, place.shape if shape is None else shape, "float32", functools.partial(_fill, place))
