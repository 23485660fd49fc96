"""Image encoder in torch, which converts images to embedding rows of the language model.

The encoder computes one layer of one tile at a time, so that other work can run between two layers. The bits of a
tile's result depend only on the tile's pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.images import ImageProcessing
from trioserve.model.layer_config import Activation
from trioserve.model.layers import Linear
from trioserve.model.loading.vision_part import VisionConfig, vision_shapes
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.torch_formats import TORCH_DTYPES, TensorSlot

__all__ = ["TileEncoding", "VisionTower"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


class VisionTower:
    """Weights of the image encoder.

    Args:
        config: description of the encoder.
        processing: preparation of images.
        dtype: number format of weights and computation.
        device: device of the weights.
    """

    def __init__(
        self, config: VisionConfig, processing: ImageProcessing, *, dtype: Dtype, device: torch.device
    ) -> None:
        self.config = config
        self.processing = processing
        self.dtype: Dtype = dtype
        self.device = device
        self._torch_dtype = TORCH_DTYPES[dtype]
        self._plain = {
            name: torch.empty(shape, dtype=self._torch_dtype, device=device)
            for name, shape in vision_shapes(config).items()
            if ("encoder" not in name and "proj" not in name) or "norm" in name
        }
        self._layers = [_Layer(self, index) for index in range(config.layer_count)]
        self._projection = self.linear(
            "connector.modality_projection.proj", config.hidden_size * config.scale_factor**2
        )
        self._pixels = _pixel_table(processing)

    def linear(self, name: str, inputs: int) -> Linear:
        outputs = vision_shapes(self.config)[f"{name}.weight"][0]
        has_bias = f"{name}.bias" in vision_shapes(self.config)
        return Linear(inputs, {name: outputs}, bias=has_bias, dtype=self._torch_dtype, device=self.device)

    def slots(self) -> Iterator[TensorSlot]:
        for name, place in self._plain.items():
            yield TensorSlot(name, tuple(place.shape), self._torch_dtype, place.copy_)
        for layer in self._layers:
            for linear in layer.linears:
                yield from linear.slots()
        yield from self._projection.slots()

    def begin(self, tiles: npt.NDArray[np.uint8]) -> TileEncoding:
        """Start the encoding of one image.

        Args:
            tiles: uint8 [tiles, tile_size, tile_size, 3], see Tiles.
        """
        return TileEncoding(self, tiles)

    def normed(self, values: Tensor, name: str) -> Tensor:
        weight, bias = self._plain[f"{name}.weight"], self._plain[f"{name}.bias"]
        return functional.layer_norm(values, (self.config.hidden_size,), weight, bias, self.config.norm_eps)

    def pixels(self, tile: npt.NDArray[np.uint8]) -> Float32Array:
        """Return the normalized pixels of a tile.

        Args:
            tile: uint8 [tile_size, tile_size, 3].

        Returns:
            float32 [3, tile_size, tile_size].
        """
        colours = [self._pixels[colour][tile[:, :, colour]] for colour in range(3)]
        return np.stack(colours)

    def patches(self, tile: npt.NDArray[np.uint8]) -> Tensor:
        """Return the input of the first layer.

        Args:
            tile: uint8 [tile_size, tile_size, 3].

        Returns:
            [patches, hidden_size].
        """
        pixels = torch.from_numpy(self.pixels(tile)).to(self.device, self._torch_dtype)
        name = "vision_model.embeddings.patch_embedding"
        size = self.config.patch_size
        found = functional.conv2d(pixels[None], self._plain[f"{name}.weight"], self._plain[f"{name}.bias"], stride=size)
        count = tile.shape[0] // size
        positions = self._plain["vision_model.embeddings.position_embedding.weight"]
        return found[0].flatten(1).T + positions[_position_ids(count, self.config.positions_per_side, self.device)]

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        return self._layers[index](hidden)

    def rows(self, hidden: Tensor) -> Tensor:
        """Combine adjacent patches and project them to rows of the language model.

        Args:
            hidden: [patches, hidden_size], output of the last layer.

        Returns:
            [tile_tokens, output_size].
        """
        hidden = self.normed(hidden, "vision_model.post_layernorm")
        scale, size = self.config.scale_factor, self.config.hidden_size
        side = round(hidden.shape[0] ** 0.5)
        squares = hidden.view(side // scale, scale, side // scale, scale, size).permute(0, 2, 1, 3, 4)
        return self._projection(squares.reshape(-1, size * scale**2))


class _Layer:
    """Attention over all patches and an MLP, each after a norm."""

    def __init__(self, tower: VisionTower, index: int) -> None:
        self._tower = tower
        self._name = f"vision_model.encoder.layers.{index}"
        config = tower.config
        hidden = config.hidden_size
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1")
        self.linears = [tower.linear(f"{self._name}.{name}", hidden) for name in names]
        self.linears.append(tower.linear(f"{self._name}.mlp.fc2", config.intermediate_size))
        self._activate = _ACTIVATIONS[config.activation]

    def __call__(self, hidden: Tensor) -> Tensor:
        query, key, value, output, up, down = self.linears
        heads = self._tower.config.head_count
        normed = self._tower.normed(hidden, f"{self._name}.layer_norm1")
        queries, keys, values = (
            linear(normed).view(normed.shape[0], heads, -1).transpose(0, 1)[None] for linear in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        hidden = hidden + output(attended[0].transpose(0, 1).reshape(hidden.shape))
        normed = self._tower.normed(hidden, f"{self._name}.layer_norm2")
        return hidden + down(self._activate(up(normed)))


class TileEncoding:
    """Encodes one image. Call `advance` until it returns True, then read `rows`. Only one thread at a time may use it.

    Args:
        tower: encoder.
        tiles: uint8 [tiles, tile_size, tile_size, 3].
    """

    def __init__(self, tower: VisionTower, tiles: npt.NDArray[np.uint8]) -> None:
        processing = tower.processing
        self._tower = tower
        self._tiles = tiles
        self._tile = self._layer = 0
        self._hidden: Tensor | None = None
        self.rows: Float32Array = np.empty(
            (len(tiles) * processing.tile_tokens, processing.embedding_size), dtype=np.float32
        )
        """float32 [tiles * tile_tokens, embedding_size], complete after the last advance."""

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one layer of one tile. Return True if the image is complete."""
        tower = self._tower
        hidden = tower.patches(self._tiles[self._tile]) if self._hidden is None else self._hidden
        self._hidden = tower.layer(self._layer, hidden)
        self._layer += 1
        if self._layer < tower.config.layer_count:
            return False
        count = tower.processing.tile_tokens
        rows = tower.rows(self._hidden).to("cpu", torch.float32)
        self.rows[self._tile * count :][:count] = rows.numpy()
        self._hidden, self._layer, self._tile = None, 0, self._tile + 1
        return self._tile == len(self._tiles)


def _position_ids(count: int, trained: int, device: torch.device) -> Tensor:
    """Return the index of each patch's position embedding, int64 [count * count].

    Limits between positions are computed in float32, as in transformers, because the rounding changes some results.
    """
    boundaries = torch.arange(1 / trained, 1.0, 1 / trained, device=device)
    step = 1.0 / torch.tensor(count, device=device)
    places = torch.clamp(torch.arange(count, device=device, dtype=torch.float32) * step, max=1.0 - 1e-6)
    buckets = torch.bucketize(places, boundaries, right=True)
    return (buckets[:, None] * trained + buckets[None, :]).flatten()


def _pixel_table(processing: ImageProcessing) -> Float32Array:
    """Return the normalized value of each pixel value and colour, float32 [3, 256], rounded as in transformers."""
    scaled = (np.arange(256, dtype=np.float64) * processing.rescale_factor).astype(np.float32)
    mean, std = (np.array(values, dtype=np.float32) for values in (processing.mean, processing.std))
    table: Float32Array = (scaled[None, :] - mean[:, None]) / std[:, None]
    return table
