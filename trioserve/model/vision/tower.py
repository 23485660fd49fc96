"""Image encoders in torch, which convert images to embedding rows of the language model.

An encoder computes one layer of one tile at a time, so that other work can run between two layers. The bits of a tile's
result depend only on the tile's pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.media import ImagePlan, SoundPlan, SoundProcessing
from trioserve.model.layer_config import Activation
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.torch_step.formats import TORCH_DTYPES, TensorSlot
from trioserve.model.torch_step.layers import Linear
from trioserve.model.vision.family import VisionConfig, VitActivation, VitConfig
from trioserve.vision.families.family import FamilyProcessing

__all__ = ["ACTIVATIONS", "ImagePass", "VisionTower", "Vit"]

ACTIVATIONS: dict[Activation | VitActivation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "quick_gelu": lambda values: values * torch.sigmoid(1.702 * values),
}


class VisionTower:
    """Weights of an image encoder. Each family has a subclass, which registers its weights in its constructor.

    Args:
        config: description of the encoder.
        processing: preparation of images, or of sounds for SoundTower.
        dtype: number format of weights and computation.
        device: device of the weights.
    """

    def __init__(
        self,
        config: VisionConfig,
        processing: FamilyProcessing | SoundProcessing,
        *,
        dtype: Dtype,
        device: torch.device,
    ) -> None:
        self.processing = processing
        self.dtype: Dtype = dtype
        self.device = device
        self.torch_dtype = TORCH_DTYPES[dtype]
        self._shapes = config.shapes()
        self._plain: dict[str, Tensor] = {}
        self._linears: list[Linear] = []
        self._pixels = _pixel_table(processing) if isinstance(processing, FamilyProcessing) else None

    def plain(self, name: str) -> Tensor:
        """Register a weight that is not the matrix of a linear layer.

        Args:
            name: name of the weight in VisionConfig.shapes.
        """
        self._plain[name] = place = torch.empty(self._shapes[name], dtype=self.torch_dtype, device=self.device)
        return place

    def linear(self, *names: str) -> Linear:
        """Register a linear layer.

        Args:
            names: names of the projections of one input, without ".weight".
        """
        shapes = {name: self._shapes[f"{name}.weight"] for name in names}
        linear = Linear(
            shapes[names[0]][1],
            {name: shape[0] for name, shape in shapes.items()},
            bias=f"{names[0]}.bias" in self._shapes,
            dtype=self.torch_dtype,
            device=self.device,
        )
        self._linears.append(linear)
        return linear

    def layer_norm(self, name: str, eps: float) -> Callable[[Tensor], Tensor]:
        """Register a LayerNorm.

        Args:
            name: name of the norm, without ".weight".
            eps: number that is added to the variance.
        """
        weight, bias = self.plain(f"{name}.weight"), self.plain(f"{name}.bias")
        return lambda values: functional.layer_norm(values, weight.shape, weight, bias, eps)

    def rms_norm(self, name: str, eps: float) -> Callable[[Tensor], Tensor]:
        """Register an RMS norm.

        Args:
            name: name of the norm, without ".weight".
            eps: number that is added to the mean square.
        """
        weight = self.plain(f"{name}.weight")
        return lambda values: functional.rms_norm(values, weight.shape, weight, eps)

    def slots(self) -> Iterator[TensorSlot]:
        for name, place in self._plain.items():
            yield TensorSlot(name, tuple(place.shape), self.torch_dtype, place.copy_)
        for linear in self._linears:
            yield from linear.slots()

    def begin(self, tiles: Any, plan: Any) -> ImagePass:
        """Start the encoding of one image.

        Args:
            tiles: uint8 [tile_count, tile_height, tile_width, 3], see Tiles.
            plan: plan of the image.
        """
        return ImagePass(self, tiles, plan)

    def pixels(self, tile: npt.NDArray[np.uint8]) -> Float32Array:
        """Return the normalized pixels of a tile.

        Args:
            tile: uint8 [tile_height, tile_width, 3].

        Returns:
            float32 [3, tile_height, tile_width].
        """
        assert self._pixels is not None, "a sound has no pixels"
        colours = [self._pixels[colour][tile[:, :, colour]] for colour in range(3)]
        return np.stack(colours)

    def encode(self, tile: Any) -> Generator[None, None, Tensor]:
        """Encode one tile. Yields between two layers.

        Args:
            tile: uint8 [tile_height, tile_width, 3].

        Returns:
            [rows, embedding_size].
        """
        raise NotImplementedError

    def joined(self, rows: Sequence[Tensor], plan: Any) -> Tensor:
        """Return the rows of an image in the order of the prompt.

        Args:
            rows: result of `encode` for each tile, in float32 on the CPU.
            plan: plan of the image.

        Returns:
            [plan.row_count, embedding_size].
        """
        return torch.cat(tuple(rows))


class Vit:
    """A transformer over the patches of a tile, see VitConfig.

    Args:
        tower: encoder that has the weights.
        config: config of the transformer.
    """

    def __init__(self, tower: VisionTower, config: VitConfig) -> None:
        self._tower = tower
        self._config = config
        embeddings = "vision_model.embeddings"
        self._patch = tower.plain(f"{embeddings}.patch_embedding.weight")
        self._patch_bias = tower.plain(f"{embeddings}.patch_embedding.bias") if config.has_patch_bias else None
        self._positions = tower.plain(f"{embeddings}.position_embedding.weight")
        self._class = tower.plain(f"{embeddings}.class_embedding") if config.has_class_token else None
        self._first_norm = None
        if config.has_first_norm:
            self._first_norm = tower.layer_norm("vision_model.pre_layrnorm", config.norm_eps)
        self._layers = [
            _Layer(tower, config, f"vision_model.encoder.layers.{index}") for index in range(config.layer_count)
        ]
        self._last_norm = None
        if config.has_last_norm:
            self._last_norm = tower.layer_norm("vision_model.post_layernorm", config.norm_eps)

    def encode(self, tile: npt.NDArray[np.uint8], position_ids: Tensor | None = None) -> Generator[None, None, Tensor]:
        """Encode one tile. Yields between two layers.

        Args:
            tile: uint8 [tile_height, tile_width, 3].
            position_ids: int64 [patches], index of each patch's position embedding. None: 0, 1, 2, ...

        Returns:
            [patches, hidden_size], after the last norm if there is one.
        """
        pixels = torch.from_numpy(self._tower.pixels(tile)).to(self._tower.device, self._tower.torch_dtype)
        found = functional.conv2d(pixels[None], self._patch, self._patch_bias, stride=self._config.patch_size)
        hidden = found[0].flatten(1).T
        if self._class is not None:
            hidden = torch.cat((self._class.view(1, -1), hidden))
        positions = self._positions.view(-1, hidden.shape[1])
        hidden = hidden + (positions if position_ids is None else positions[position_ids])
        if self._first_norm is not None:
            hidden = self._first_norm(hidden)
        for layer in self._layers:
            hidden = layer(hidden)
            yield
        if self._class is not None:
            hidden = hidden[1:]
        return hidden if self._last_norm is None else self._last_norm(hidden)


class _Layer:
    """Attention over all patches and an MLP, each after a norm."""

    def __init__(self, tower: VisionTower, config: VitConfig, name: str) -> None:
        self._head_count = config.head_count
        parts = ("qkv",) if config.has_joint_qkv else ("q_proj", "k_proj", "v_proj")
        self._projections = [tower.linear(f"{name}.self_attn.{part}") for part in parts]
        self._output = tower.linear(f"{name}.self_attn.out_proj")
        self._up, self._down = (tower.linear(f"{name}.mlp.{part}") for part in ("fc1", "fc2"))
        self._norms = [tower.layer_norm(f"{name}.layer_norm{number}", config.norm_eps) for number in (1, 2)]
        self._scales = [tower.plain(f"{name}.lambda_{number}") if config.has_layer_scale else 1.0 for number in (1, 2)]
        self._activate = ACTIVATIONS[config.activation]

    def __call__(self, hidden: Tensor) -> Tensor:
        normed = self._norms[0](hidden)
        projected = [linear(normed) for linear in self._projections]
        queries, keys, values = (
            part.reshape(normed.shape[0], self._head_count, -1).transpose(0, 1)[None]
            for part in (projected if len(projected) == 3 else projected[0].chunk(3, dim=-1))
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        hidden = hidden + self._scales[0] * self._output(attended[0].transpose(0, 1).reshape(hidden.shape))
        return hidden + self._scales[1] * self._down(self._activate(self._up(self._norms[1](hidden))))


class ImagePass:
    """Encodes one image or sound. Call `advance` until it returns True, then read `rows`. Only one thread at a time
    may use it.

    Args:
        tower: encoder.
        tiles: the tiles or windows, which `tower.encode` encodes one by one.
        plan: plan of the image or sound.

    Attributes:
        rows: float32 [plan.row_count, embedding_size], complete after the last advance.
    """

    def __init__(self, tower: VisionTower, tiles: Iterable[Any], plan: ImagePlan | SoundPlan) -> None:
        self._tower = tower
        self._tiles = tiles
        self._plan = plan
        self._parts = self._compute()
        self.rows: Float32Array = np.empty((0, 0), dtype=np.float32)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Compute one layer of one tile or window. Return True if the image or sound is complete."""
        return next(self._parts, True)

    def _compute(self) -> Iterator[bool]:
        rows = []
        for tile in self._tiles:
            tile_rows = yield from self._unfinished(tile)
            rows.append(tile_rows.to("cpu", torch.float32))
        joined = self._tower.joined(rows, self._plan)
        assert joined.shape == (self._plan.row_count, self._tower.processing.embedding_size), joined.shape
        self.rows = joined.numpy()

    def _unfinished(self, tile: Any) -> Generator[bool, None, Tensor]:
        encoding = self._tower.encode(tile)
        while True:
            try:
                next(encoding)
            except StopIteration as end:
                rows: Tensor = end.value
                return rows
            yield False


def _pixel_table(processing: FamilyProcessing) -> Float32Array:
    """Return the normalized value of each pixel value and colour, float32 [3, 256], rounded as in transformers."""
    scaled = (np.arange(256, dtype=np.float64) * processing.rescale_factor).astype(np.float32)
    mean, std = (np.array(values, dtype=np.float32) for values in (processing.mean, processing.std))
    table: Float32Array = (scaled[None, :] - mean[:, None]) / std[:, None]
    return table
