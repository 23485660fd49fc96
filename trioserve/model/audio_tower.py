"""Audio encoder in torch, which converts mel spectra to the rows that a decoder attends to.

The encoder computes one layer at a time, so that other work can run between two layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.media import AudioProcessing
from trioserve.model.layers import Linear
from trioserve.model.loading.audio_part import AudioConfig, audio_shapes
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.torch_formats import TORCH_DTYPES, TensorSlot
from trioserve.model.vision.tower import ACTIVATIONS

__all__ = ["AudioEncoding", "AudioTower"]

NORM_EPS = 1e-5


class AudioTower:
    """Weights of the audio encoder.

    Args:
        config: description of the encoder.
        processing: preparation of sound.
        dtype: number format of weights and computation.
        device: device of the weights.
    """

    def __init__(self, config: AudioConfig, processing: AudioProcessing, *, dtype: Dtype, device: torch.device) -> None:
        self.config = config
        self.processing = processing
        self.dtype: Dtype = dtype
        self.device = device
        self._torch_dtype = TORCH_DTYPES[dtype]
        shapes = audio_shapes(config)
        self._plain = {
            name: torch.empty(shape, dtype=self._torch_dtype, device=device)
            for name, shape in shapes.items()
            if "layers." not in name or "layer_norm" in name
        }
        modules = (
            name.removesuffix(".weight") for name in shapes if name not in self._plain and name.endswith(".weight")
        )
        self._linears = {
            module: Linear(
                shapes[f"{module}.weight"][1],
                {module: shapes[f"{module}.weight"][0]},
                bias=f"{module}.bias" in shapes,
                dtype=self._torch_dtype,
                device=device,
            )
            for module in modules
        }

    def slots(self) -> Iterator[TensorSlot]:
        for name, place in self._plain.items():
            yield TensorSlot(name, tuple(place.shape), self._torch_dtype, place.copy_)
        for linear in self._linears.values():
            yield from linear.slots()

    def begin(self, features: object) -> AudioEncoding:
        """Start the encoding of one window.

        Args:
            features: buffer of float32 [mel_bins, frame_count].
        """
        return AudioEncoding(self, features)

    def embedded(self, features: Float32Array) -> Tensor:
        """Return the input of the first layer, [row_count, hidden_size].

        Args:
            features: float32 [mel_bins, frame_count].
        """
        plain = self._plain
        hidden = torch.from_numpy(features).to(self.device, self._torch_dtype)[None]
        hidden = functional.gelu(functional.conv1d(hidden, plain["conv1.weight"], plain["conv1.bias"], padding=1))
        hidden = functional.conv1d(hidden, plain["conv2.weight"], plain["conv2.bias"], stride=2, padding=1)
        return functional.gelu(hidden)[0].T + plain["embed_positions.weight"]

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """Compute a layer: attention over all rows and an MLP, each after a norm.

        Args:
            index: index of the layer.
            hidden: [row_count, hidden_size].
        """
        name = f"layers.{index}"
        normed = self.normed(hidden, f"{name}.self_attn_layer_norm")
        queries, keys, values = (
            self._linears[f"{name}.self_attn.{part}_proj"](normed)
            .view(len(hidden), self.config.head_count, -1)
            .transpose(0, 1)[None]
            for part in "qkv"
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        hidden = hidden + self._linears[f"{name}.self_attn.out_proj"](attended[0].transpose(0, 1).reshape(hidden.shape))
        normed = self.normed(hidden, f"{name}.final_layer_norm")
        activate = ACTIVATIONS[self.config.activation]
        return hidden + self._linears[f"{name}.fc2"](activate(self._linears[f"{name}.fc1"](normed)))

    def normed(self, values: Tensor, name: str) -> Tensor:
        weight, bias = self._plain[f"{name}.weight"], self._plain[f"{name}.bias"]
        return functional.layer_norm(values, (self.config.hidden_size,), weight, bias, NORM_EPS)


class AudioEncoding:
    """Encodes one window. Call `advance` until it returns True, then read `rows`. Only one thread at a time may use it.

    Args:
        tower: encoder.
        features: buffer of float32 [mel_bins, frame_count].

    Attributes:
        rows: float32 [row_count, hidden_size], complete after the last advance.
    """

    def __init__(self, tower: AudioTower, features: object) -> None:
        self._tower = tower
        # mypy does not know that the features have a buffer.
        numbers: Float32Array = np.frombuffer(features, dtype=np.float32)  # type: ignore[call-overload]
        self._features = numbers.reshape(tower.processing.mel_bins, tower.processing.frame_count)
        self._layer = 0
        self._hidden: Tensor | None = None
        self.rows: Float32Array = np.empty(0, dtype=np.float32)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one layer. Return True if the window is complete."""
        tower = self._tower
        hidden = tower.embedded(self._features.copy()) if self._hidden is None else self._hidden
        self._hidden = tower.layer(self._layer, hidden)
        self._layer += 1
        if self._layer < tower.config.layer_count:
            return False
        self.rows = tower.normed(self._hidden, "layer_norm").to("cpu", torch.float32).contiguous().numpy()
        self._hidden = None
        return True
