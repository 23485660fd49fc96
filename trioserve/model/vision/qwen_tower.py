"""Parts of image encoders for images of any aspect ratio in torch, and the encoders of Qwen's vision models."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.torch_step.layers import Linear
from trioserve.model.vision.family import VitActivation
from trioserve.model.vision.qwen_vl import NORM_EPS, GridConfig, HyperClovaConfig, QwenVLConfig
from trioserve.model.vision.tower import ACTIVATIONS, VisionTower
from trioserve.vision.families.family import FamilyProcessing

__all__ = ["GridLayer", "GridPlaces", "GridTower", "QwenTower"]

THETA = 10_000.0


class GridPlaces(NamedTuple):
    """Places of an image's patches. The patches of a square that becomes one row are consecutive.

    Attributes:
        rows: int64 [patches].
        columns: int64 [patches].
        cosines: float32 [patches, 1, head_dim / 2].
        sines: the same shape.
        windows: for windows of equal size, the indexes of their patches, int64 [windows, patches of a window]. Empty if
            no layer has windows.
    """

    rows: Tensor
    columns: Tensor
    cosines: Tensor
    sines: Tensor
    windows: tuple[Tensor, ...] = ()


class GridTower(VisionTower):
    """Cuts an image of any aspect ratio into patches, and places them in rows and columns.

    Args:
        config: config of the family.
        processing: preparation of images.
        place: number format and device, see VisionTower.
    """

    def __init__(self, config: GridConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._grid = config

    def patches(self, tile: npt.NDArray[np.uint8]) -> Tensor:
        """Return the normalized pixels of each patch.

        Args:
            tile: uint8 [tile_height, tile_width, 3].

        Returns:
            [patches, 3 * frame_count * patch_size**2].
        """
        config = self._grid
        pixels = torch.from_numpy(self.pixels(tile)).to(self.device, self.torch_dtype)
        size, merge = config.patch_size, config.merge_size
        squares = pixels.view(
            3, tile.shape[0] // config.square, merge, size, tile.shape[1] // config.square, merge, size
        )
        patches = squares.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        return patches.expand(*patches.shape[:5], config.frame_count, size, size).flatten(4).flatten(0, 3)

    def places(self, tile: npt.NDArray[np.uint8]) -> GridPlaces:
        """Return the places of the patches of a tile.

        Args:
            tile: uint8 [tile_height, tile_width, 3].
        """
        config = self._grid
        merge = config.merge_size
        down, across = (side // config.square for side in tile.shape[:2])
        squares = torch.arange(down * across, device=self.device).view(down, across)

        def of_patches(places: Tensor, inner: Tensor) -> Tensor:
            return (places[:, :, None, None] * merge + inner).flatten()

        inner = torch.arange(merge, device=self.device)
        rows = of_patches(squares // across, inner[:, None].expand(merge, merge))
        columns = of_patches(squares % across, inner[None, :].expand(merge, merge))
        head_dim = config.hidden_size // config.head_count
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=self.device) / (head_dim // 2)
        frequencies = 1.0 / THETA**exponents
        angles = torch.cat([places[:, None].float() * frequencies for places in (rows, columns)], dim=-1)[:, None]
        return GridPlaces(rows, columns, angles.cos(), angles.sin(), self._windows(squares))

    def _windows(self, squares: Tensor) -> tuple[Tensor, ...]:
        size, count = self._grid.window_size, self._grid.merge_size**2
        if size is None:
            return ()
        inner = torch.arange(count, device=self.device)
        found: dict[tuple[int, ...], list[Tensor]] = {}
        down, across = squares.shape
        for row, column in itertools.product(range(0, down, size), range(0, across, size)):
            window = squares[row : row + size, column : column + size]
            patches = (window.flatten()[:, None] * count + inner).flatten()
            found.setdefault(tuple(window.shape), []).append(patches)
        return tuple(torch.stack(windows) for windows in found.values())


class QwenTower(GridTower):
    """A transformer over the patches of an image. A merger joins squares of patches."""

    def __init__(self, config: QwenVLConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._patch = self.plain("visual.patch_embed.proj.weight")
        self._patch_bias = self._positions = None
        if config.positions_per_side:
            self._patch_bias = self.plain("visual.patch_embed.proj.bias")
            self._positions = self.plain("visual.pos_embed.weight")
        self._layers = [self._layer(f"visual.blocks.{index}", index) for index in range(config.layer_count)]
        self._mergers = [_Merger(self, config, name) for name in config.mergers]
        self._projection = self.linear("projector") if isinstance(config, HyperClovaConfig) else None

    def norm(self, name: str) -> Callable[[Tensor], Tensor]:
        """Register a norm of the family's kind.

        Args:
            name: name of the norm, without ".weight".
        """
        return (self.rms_norm if self._config.kind == "qwen2_5_vl" else self.layer_norm)(name, NORM_EPS)

    def _layer(self, name: str, index: int) -> GridLayer:
        config = self._config
        return GridLayer(
            config.head_count,
            [self.norm(f"{name}.norm{number}") for number in (1, 2)],
            [self.linear(f"{name}.{part}") for part in ("attn.qkv", "attn.proj", *config.mlp_names)],
            config.activation,
            kv_head_count=config.kv_head_count,
            has_windows=config.window_size is not None and index not in config.whole_layers,
        )

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        places = self.places(tile)
        hidden = functional.linear(self.patches(tile), self._patch.flatten(1), self._patch_bias)
        if self._positions is not None:
            hidden = hidden + self._interpolated(self._positions, tile, places)
        last, *others = self._mergers
        deep: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, places)
            if index in self._config.deep_layers:
                deep.append(others[len(deep)](hidden))
            yield
        rows = torch.cat((last(hidden), *deep), dim=1)
        return rows if self._projection is None else self._projection(rows)

    def _interpolated(self, table: Tensor, tile: npt.NDArray[np.uint8], places: GridPlaces) -> Tensor:
        """Return the learned position of each patch, interpolated between the four nearest ones of the table."""
        side = self._config.positions_per_side
        axes = []
        for position, pixels in ((places.rows, tile.shape[0]), (places.columns, tile.shape[1])):
            exact = position.float() * (side - 1) / max(pixels // self._config.patch_size - 1, 1)
            low = exact.floor()
            share = exact - low
            axes.append((low.long(), (low.long() + 1).clamp(max=side - 1), share))
        (top, bottom, down), (left, right, along) = axes
        found = torch.zeros((), device=self.device)
        for row, row_share in ((top, 1 - down), (bottom, down)):
            for column, column_share in ((left, 1 - along), (right, along)):
                found = found + table[row * side + column] * (row_share * column_share)[:, None]
        return found.to(self.torch_dtype)


class GridLayer:
    """Attention over the patches of the image or of a window, and an MLP, each after a norm. Positions in rows and
    columns rotate queries and keys.

    Args:
        head_count: heads of the attention.
        norms: norm before the attention, and norm before the MLP.
        linears: queries, keys and values in one; output of the attention; gate of the MLP if it has one; its inner and
            its outer projection.
        activation: activation of the MLP.
        kv_head_count: heads of keys and values. None: head_count.
        has_windows: True if patches attend only to the patches of the same window.
        qk_norms: norms of the heads of queries and of keys. Empty: there are none.
    """

    def __init__(
        self,
        head_count: int,
        norms: Sequence[Callable[[Tensor], Tensor]],
        linears: Sequence[Linear],
        activation: VitActivation,
        *,
        kv_head_count: int | None = None,
        has_windows: bool = False,
        qk_norms: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> None:
        self._head_count = head_count
        self._kv_head_count = kv_head_count or head_count
        self._norms = norms
        self._qkv, self._output, *self._inner, self._down = linears
        self._activate = ACTIVATIONS[activation]
        self._has_windows = has_windows
        self._qk_norms = qk_norms

    def __call__(self, hidden: Tensor, places: GridPlaces) -> Tensor:
        qkv = self._qkv(self._norms[0](hidden)).view(len(hidden), self._head_count + 2 * self._kv_head_count, -1)
        counts = [self._head_count, self._kv_head_count, self._kv_head_count]
        *heads, values = torch.split(qkv, counts, dim=1)
        if self._qk_norms:
            heads = [norm(part) for norm, part in zip(self._qk_norms, heads, strict=True)]
        queries, keys = (_rotated(part, places) for part in heads)
        if self._has_windows:
            attended = torch.empty_like(queries)
            for patches in places.windows:
                attended[patches] = _attended(*(heads[patches] for heads in (queries, keys, values)))
        else:
            attended = _attended(queries[None], keys[None], values[None])[0]
        hidden = hidden + self._output(attended.reshape(hidden.shape))
        normed = self._norms[1](hidden)
        gate, *up = (linear(normed) for linear in self._inner)
        return hidden + self._down(functools.reduce(torch.mul, up, self._activate(gate)))


class _Merger:
    """Joins the patches of each square, and projects them to rows of the language model."""

    def __init__(self, tower: QwenTower, config: QwenVLConfig, name: str) -> None:
        norm, first, second = config.merger_names
        self._size = config.hidden_size * config.merge_size**2
        self._joins_first = config.mergers[name]
        self._norm = tower.norm(f"{name}.{norm}")
        self._first, self._second = tower.linear(f"{name}.{first}"), tower.linear(f"{name}.{second}")

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._joins_first:
            hidden = hidden.view(-1, self._size)
        squares = self._norm(hidden).view(-1, self._size)
        return self._second(functional.gelu(self._first(squares)))


def _attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend to all patches of the same window. Each tensor is [windows, patches, heads, head_dim]."""
    attended = functional.scaled_dot_product_attention(
        queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=keys.shape != queries.shape
    )
    return attended.transpose(1, 2)


def _rotated(heads: Tensor, places: GridPlaces) -> Tensor:
    """Apply rotary positions of rows and columns. heads: [patches, heads, head_dim]."""
    first, second = heads.float().chunk(2, -1)
    cosines, sines = places.cosines, places.sines
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(heads.dtype)
