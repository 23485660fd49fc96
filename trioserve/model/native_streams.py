"""A hidden state of several streams as the native kernels read it, and what comes in behind attention besides: vectors
in float32, which holds every dtype exactly, and so the small matrices that are multiplied row by row. The other
matrices are where all are, in PackedWeights."""

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
    """Why the native kernels cannot compute these, as a part of a sentence; None if they can."""
    sizes = [("laurel_rank", layer.laurel_rank) for layer in config.layers]
    if config.streams is not None:
        sizes.append(("hidden_size_per_layer_input", config.streams.input_size))
    for name, size in sizes:
        if size % BLOCK_OUTPUTS:
            return f"{name} is {size}, no multiple of {BLOCK_OUTPUTS}"
    return None


class NativeStreams:
    """What the model has of them. Its struct has addresses of what it holds."""

    def __init__(self, config: ModelConfig, streams: StreamsConfig, weights: PackedWeights, table_scale: float) -> None:
        """table_scale: what a row of the layers' inputs is multiplied by."""
        others = range(streams.count - 1)
        self._ins, self._outs = (
            (MatrixStruct * len(others))(*(weights.matrix(f"streams.{index}.{way}") for index in others))
            for way in ("in", "out")
        )
        self._norm = _singles(streams.input_size)
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
    """What one layer has of them."""

    def __init__(self, streams: StreamsConfig, hidden: int) -> None:
        self._has_scale = streams.has_scale
        self._places = {
            "stream_router_norm.weight": _singles(hidden),
            "stream_router.weight": _singles(streams.count, hidden),
            "stream_prediction.weight": _singles(streams.count**2, streams.count),
            "stream_correction.weight": _singles(streams.count, streams.count),
            "input_norm.weight": _singles(hidden),
            "streams.scale": _singles(hidden),
        }

    def struct(self, name: str, weights: PackedWeights) -> LayerStreamsStruct:
        """name: as for slots. It holds addresses of what this has."""
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
        """name: the layer's, such as layers.0."""
        for tensor, place in self._places.items():
            yield _slot(f"{name}.{tensor}", place)


class NativeLaurel:
    """What one layer has of it."""

    def __init__(self, rank: int, hidden: int) -> None:
        self._rank, self._norm = rank, _singles(hidden)

    def struct(self, name: str, weights: PackedWeights) -> LaurelStruct:
        """name: as for slots. It holds addresses of what this has."""
        ways = {f"{way}wards": weights.matrix(f"{name}.laurel_{way}") for way in ("in", "out")}
        return LaurelStruct(**ways, norm=address(self._norm), rank=self._rank)

    def slots(self, name: str) -> Iterator[Slot]:
        """name: the layer's, such as layers.0."""
        yield _slot(f"{name}.laurel_norm.weight", self._norm)


def _slot(name: str, place: Float32Array) -> Slot:
    return Slot(name, place.shape, "float32", functools.partial(_fill, place))


def _fill(place: Float32Array, values: Values) -> None:
    place[:] = values.reshape(place.shape)


def _singles(*shape: int) -> Float32Array:
    return np.empty(shape, dtype=np.float32)
