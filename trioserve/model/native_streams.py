"""Streams and Laurel paths as the native kernels read them, see StreamsConfig and LayerConfig.laurel_rank.

Vectors and small matrices are float32, which represents the numbers of every dtype exactly. PackedWeights has the other
matrices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import numpy as np

from trioserve.model.model_config import ModelConfig, StreamsConfig
from trioserve.model.number_formats import Float32Array, Values
from trioserve.model.packed_weights import PackedWeights
from trioserve.model.weights import Slot
from trioserve_kernels.native import (
    BLOCK_OUTPUTS,
    LaurelStruct,
    LayerStreamsStruct,
    MatrixStruct,
    StreamsStruct,
    address,
)

__all__ = ["NativeLaurel", "NativeLayerStreams", "NativeStreams", "why_not_streams"]


def why_not_streams(config: ModelConfig) -> str | None:
    """Return why the native kernels cannot compute a model's streams and Laurel paths, or None if they can.

    Args:
        config: model.

    Returns:
        Part of a sentence.
    """
    sizes = [("laurel_rank", layer.laurel_rank) for layer in config.layers]
    if config.streams is not None:
        sizes.append(("hidden_size_per_layer_input", config.streams.input_size))
    for name, size in sizes:
        if size % BLOCK_OUTPUTS:
            return f"{name} is {size}, which is no multiple of {BLOCK_OUTPUTS}"
    return None


class NativeStreams:
    """Weights of the model's streams. `struct` has addresses of arrays that this object owns.

    Args:
        config: model.
        streams: streams of the model.
        weights: matrices of the model.
        table_scale: factor of the rows in the table of the layers' inputs.
    """

    def __init__(self, config: ModelConfig, streams: StreamsConfig, weights: PackedWeights, table_scale: float) -> None:
        others = range(streams.count - 1)
        self._ins, self._outs = (
            (MatrixStruct * len(others))(*(weights.matrix(f"streams.{index}.{way}") for index in others))
            for way in ("in", "out")
        )
        self._norm = _empty_float32(streams.input_size)
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
        yield _slot("layer_inputs.norm.weight", self._norm)


class NativeLayerStreams:
    """Weights of one layer's streams."""

    def __init__(self, streams: StreamsConfig, hidden: int) -> None:
        self._has_scale = streams.has_scale
        self._places = {
            "stream_router_norm.weight": _empty_float32(hidden),
            "stream_router.weight": _empty_float32(streams.count, hidden),
            "stream_prediction.weight": _empty_float32(streams.count**2, streams.count),
            "stream_correction.weight": _empty_float32(streams.count, streams.count),
            "input_norm.weight": _empty_float32(hidden),
            "streams.scale": _empty_float32(hidden),
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
            router_norm=found["stream_router_norm.weight"],
            router=found["stream_router.weight"],
            prediction=found["stream_prediction.weight"],
            correction=found["stream_correction.weight"],
            scale=found["streams.scale"] if self._has_scale else None,
            input_norm=found["input_norm.weight"],
        )

    def slots(self, name: str) -> Iterator[Slot]:
        """Yield the slots of these weights.

        Args:
            name: name of the layer, such as layers.0.
        """
        for tensor, place in self._places.items():
            yield _slot(f"{name}.{tensor}", place)


class NativeLaurel:
    """Weights of one layer's Laurel path."""

    def __init__(self, rank: int, hidden: int) -> None:
        self._rank, self._norm = rank, _empty_float32(hidden)

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
        yield _slot(f"{name}.laurel_norm.weight", self._norm)


def _slot(name: str, place: Float32Array) -> Slot:
    return Slot(name, place.shape, "float32", functools.partial(_fill, place))


def _fill(place: Float32Array, values: Values) -> None:
    place[:] = values.reshape(place.shape)


def _empty_float32(*shape: int) -> Float32Array:
    return np.empty(shape, dtype=np.float32)
