"""Encoder in torch, which converts mel spectra or a text to the rows that a decoder attends to.

The encoder computes one layer at a time, so that other work can run between two layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.media import SoundPlan, SoundProcessing
from trioserve.model.encoder import ACTIVATIONS
from trioserve.model.loading.encoder_part import TOWER_PREFIX, RowEncoderConfig, SoundConfig, encoder_shapes
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.torch_step.formats import TORCH_DTYPES, TensorSlot
from trioserve.model.torch_step.layers import Linear, RelativeBiases
from trioserve.model.vision.tower import ImagePass, VisionTower

__all__ = ["RowEncoder", "RowEncoding", "SoundTower"]


class RowEncoder:
    """Weights of an encoder.

    Args:
        config: description of the encoder.
        embed: returns the decoder's embeddings of token ids, int64 [n].
        dtype: number format of weights and computation.
        device: device of the weights.
    """

    def __init__(
        self, config: RowEncoderConfig, embed: Callable[[Tensor], Tensor], *, dtype: Dtype, device: torch.device
    ) -> None:
        assert config.activation in ACTIVATIONS, "EncoderPart reads the same activations"
        self.config = config
        self.dtype: Dtype = dtype
        self.device = device
        self._embed = embed
        self._torch_dtype = TORCH_DTYPES[dtype]
        self._activate = ACTIVATIONS[config.activation]
        shapes = encoder_shapes(config)
        is_plain = {name: "layers." not in name or "layer_norm" in name for name in shapes}
        self._plain = {
            name: torch.empty(shape, dtype=self._torch_dtype, device=device)
            for name, shape in shapes.items()
            if is_plain[name] and name != "relative.weight"
        }
        self._relative: RelativeBiases | None = None
        if config.relative is not None:
            self._relative = RelativeBiases(
                "relative", config.relative, config.head_count, is_causal=False, dtype=self._torch_dtype, device=device
            )
        modules = (name.removesuffix(".weight") for name in shapes if not is_plain[name] and name.endswith(".weight"))
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
        for part in (self._relative, *self._linears.values()):
            if part is not None:
                yield from part.slots()

    def begin(self, content: object) -> RowEncoding:
        """Start the encoding of one input.

        Args:
            content: see EncoderInput.
        """
        return RowEncoding(self, content)

    def embedded(self, content: object) -> Tensor:
        """Return the input of the first layer, [rows, hidden_size].

        Args:
            content: see EncoderInput.
        """
        config, plain = self.config, self._plain
        if config.mel_bins:
            # mypy does not know that the content has a buffer.
            spectra = np.frombuffer(content, dtype=np.float32).reshape(config.mel_bins, -1)  # type: ignore[call-overload]
            hidden = torch.from_numpy(spectra.copy()).to(self.device, self._torch_dtype)[None]
            hidden = functional.gelu(functional.conv1d(hidden, plain["conv1.weight"], plain["conv1.bias"], padding=1))
            hidden = functional.conv1d(hidden, plain["conv2.weight"], plain["conv2.bias"], stride=2, padding=1)
            hidden = functional.gelu(hidden)[0].T
        else:
            token_ids = np.frombuffer(content, dtype=np.int64).copy()  # type: ignore[call-overload]
            hidden = self._embed(torch.from_numpy(token_ids).to(self.device)).to(self._torch_dtype)
            hidden = hidden * config.embedding_scale
        if config.position_rows:
            hidden = hidden + plain["embed_positions.weight"][config.position_first :][: len(hidden)]
        return self.normed(hidden, "layernorm_embedding") if config.has_embedding_norm else hidden

    def layer(self, index: int, hidden: Tensor, biases: Tensor | None) -> Tensor:
        """Compute a layer: attention over all rows and an MLP.

        Args:
            index: index of the layer.
            hidden: [rows, hidden_size].
            biases: [1, heads, rows, rows], added to the scores of attention, or a mask, which is False for rows that
                are not attended to. None: nothing is added.
        """
        name, is_post = f"layers.{index}", self.config.normalizes_sums
        attention_norm, mlp_norm = f"{name}.self_attn_layer_norm", f"{name}.final_layer_norm"
        normed = hidden if is_post else self.normed(hidden, attention_norm)
        queries, keys, values = (
            self._linears[f"{name}.self_attn.{part}_proj"](normed)
            .view(len(hidden), self.config.head_count, -1)
            .transpose(0, 1)[None]
            for part in "qkv"
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, biases, scale=self.config.scale)
        hidden = hidden + self._linears[f"{name}.self_attn.out_proj"](attended[0].transpose(0, 1).flatten(1))
        if is_post:
            hidden = self.normed(hidden, attention_norm)
        normed = hidden if is_post else self.normed(hidden, mlp_norm)
        if self.config.has_gate:
            middle = self._activate(self._linears[f"{name}.fc1_gate"](normed)) * self._linears[f"{name}.fc1_up"](normed)
        else:
            middle = self._activate(self._linears[f"{name}.fc1"](normed))
        hidden = hidden + self._linears[f"{name}.fc2"](middle)
        return self.normed(hidden, mlp_norm) if is_post else hidden

    def biases(self, row_count: int) -> Tensor | None:
        """Return the biases of scores by distance, see `layer`.

        Args:
            row_count: number of rows.
        """
        if self._relative is None:
            return None
        return self._relative.masks(torch.arange(row_count, device=self.device), row_count).transpose(0, 1)[None]

    def last(self, hidden: Tensor) -> Tensor:
        """Return the rows for the decoder.

        Args:
            hidden: [rows, hidden_size], output of the last layer.
        """
        return self.normed(hidden, "layer_norm") if self.config.has_last_norm else hidden

    def normed(self, values: Tensor, name: str) -> Tensor:
        config, weight = self.config, self._plain[f"{name}.weight"]
        if config.norm == "rms":
            return functional.rms_norm(values.float(), weight.shape, weight.float(), config.norm_eps).to(values.dtype)
        return functional.layer_norm(values, weight.shape, weight, self._plain[f"{name}.bias"], config.norm_eps)


class RowEncoding:
    """Encodes one input. Call `advance` until it returns True, then read `rows`. Only one thread at a time may use it.

    Args:
        encoder: computes the rows. Its weights are loaded.
        content: see EncoderInput.

    Attributes:
        rows: float32 [rows, hidden_size], complete after the last advance.
    """

    def __init__(self, encoder: RowEncoder, content: object) -> None:
        self._encoder = encoder
        self._content = content
        self._layer = 0
        self._hidden: Tensor | None = None
        self._biases: Tensor | None = None
        self.rows: Float32Array = np.empty(0, dtype=np.float32)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one layer. Return True if the input is complete."""
        encoder = self._encoder
        if self._hidden is None:
            self._hidden = encoder.embedded(self._content)
            self._biases = encoder.biases(len(self._hidden))
        self._hidden = encoder.layer(self._layer, self._hidden, self._biases)
        self._layer += 1
        if self._layer < encoder.config.layer_count:
            return False
        self.rows = encoder.last(self._hidden).to("cpu", torch.float32).contiguous().numpy()
        self._hidden = self._biases = None
        return True


class SoundTower(VisionTower):
    """Encodes sounds to embeddings of a language model, see SoundConfig."""

    def __init__(self, config: SoundConfig, processing: SoundProcessing, *, dtype: Dtype, device: torch.device) -> None:
        super().__init__(config, processing, dtype=dtype, device=device)
        self._config = config
        self._encoder = RowEncoder(config.encoder, _no_embeddings, dtype=dtype, device=device)
        self._projection = [self.linear(f"multi_modal_projector.{name}") for name in config.projection]

    def slots(self) -> Iterator[TensorSlot]:
        for slot in self._encoder.slots():
            yield slot._replace(name=TOWER_PREFIX + slot.name)
        yield from super().slots()

    def begin(self, tiles: Sequence[npt.NDArray[np.float32]], plan: SoundPlan) -> ImagePass:
        """Start the encoding of one sound.

        Args:
            tiles: windows of the sound, each float32 [mel_bins, frame_count].
            plan: plan of the sound.
        """
        return ImagePass(self, zip(tiles, plan.frame_counts, strict=True), plan)

    def encode(self, tile: tuple[npt.NDArray[np.float32], int]) -> Generator[None, None, Tensor]:
        """Encode one window. Yields between two layers.

        Args:
            tile: the window, and its number of spectra before the silence.

        Returns:
            [rows, embedding_size].
        """
        spectra, frame_count = tile
        encoder, config = self._encoder, self._config
        hidden = encoder.embedded(spectra)
        row_count, mask = (frame_count + 1) // 2, None
        if config.joined_rows == 1 and row_count < len(hidden):
            mask = (torch.arange(len(hidden), device=self.device) < row_count).view(1, 1, 1, -1)
        for index in range(config.encoder.layer_count):
            hidden = encoder.layer(index, hidden, mask)
            yield
        if config.joined_rows == 1:
            hidden = encoder.last((hidden[0::2] + hidden[1::2]) / 2)[: row_count // 2]
        else:
            hidden = encoder.last(hidden).reshape(-1, config.joined_rows * hidden.shape[1])
        for index, linear in enumerate(self._projection):
            hidden = linear(hidden if not index else functional.gelu(hidden))
        return hidden


def _no_embeddings(token_ids: Tensor) -> Any:
    raise AssertionError("an encoder of sounds embeds no tokens")
