"""The image encoders of all families: what follows their transformers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.media import ImagePlan
from trioserve.model.loading.encoder_part import SoundConfig
from trioserve.model.row_encoder import SoundTower
from trioserve.model.vision.cohere import CohereVisionConfig
from trioserve.model.vision.family import VisionConfig
from trioserve.model.vision.gemma3 import Gemma3Config
from trioserve.model.vision.glm_vl import GLM_LINEARS, GlmVLConfig
from trioserve.model.vision.idefics3 import Idefics3Config
from trioserve.model.vision.internvl import InternvlConfig, QianfanConfig
from trioserve.model.vision.llava import LlavaConfig
from trioserve.model.vision.paddleocr import PaddleConfig
from trioserve.model.vision.pixtral import PIXTRAL_NORM_EPS, LightOnConfig, PixtralConfig
from trioserve.model.vision.qwen_tower import GridLayer, GridPlaces, GridTower, QwenTower
from trioserve.model.vision.qwen_vl import HyperClovaConfig, QwenVLConfig
from trioserve.model.vision.tower import ACTIVATIONS, VisionTower, Vit
from trioserve.vision.families.family import FamilyProcessing
from trioserve.vision.families.llava import OneVisionProcessing

__all__ = ["tower_class"]


def tower_class(config: VisionConfig) -> type[VisionTower]:
    """Return the encoder of a family.

    Args:
        config: config of the family.
    """
    return _TOWERS[type(config)]


class Idefics3Tower(VisionTower):
    """SigLIP, then adjacent patches are combined and projected."""

    def __init__(self, config: Idefics3Config, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._vit = Vit(self, config.vit)
        self._projection = self.linear("connector.modality_projection.proj")

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        vit, scale = self._config.vit, self._config.scale_factor
        side = tile.shape[0] // vit.patch_size
        hidden = yield from self._vit.encode(tile, _position_ids(side, vit.positions_per_side, self.device))
        return self._projection(_squares(hidden, scale))


def _squares(hidden: Tensor, scale: int) -> Tensor:
    """Combine the rows of scale * scale adjacent patches.

    Args:
        hidden: [patches, hidden_size], patches of a square.
        scale: patches per side that become one row.

    Returns:
        [patches / scale^2, hidden_size * scale^2].
    """
    side = round(hidden.shape[0] ** 0.5)
    squares = hidden.reshape(side // scale, scale, side // scale, scale, -1).permute(0, 2, 1, 3, 4)
    return squares.reshape(-1, hidden.shape[1] * scale**2)


def _position_ids(count: int, trained: int, device: torch.device) -> Tensor:
    """Return the index of each patch's position embedding, int64 [count * count].

    Limits between positions are computed in float32, as in transformers, because the rounding changes some results.
    """
    boundaries = torch.arange(1 / trained, 1.0, 1 / trained, device=device)
    step = 1.0 / torch.tensor(count, device=device)
    places = torch.clamp(torch.arange(count, device=device, dtype=torch.float32) * step, max=1.0 - 1e-6)
    buckets = torch.bucketize(places, boundaries, right=True)
    return (buckets[:, None] * trained + buckets[None, :]).flatten()


class InternvlTower(VisionTower):
    """InternViT, then adjacent patches are combined and projected by an MLP."""

    def __init__(self, config: InternvlConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._vit = Vit(self, config.vit)
        self._norm = self.layer_norm("multi_modal_projector.layer_norm", 1e-5)
        self._up, self._down = (self.linear(f"multi_modal_projector.linear_{number}") for number in (1, 2))

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        hidden = yield from self._vit.encode(tile)
        return self._down(functional.gelu(self._up(self._norm(_squares(hidden, self._config.scale_factor)))))


class CohereTower(VisionTower):
    """SigLIP, then adjacent patches are combined and projected by a gated MLP."""

    def __init__(self, config: CohereVisionConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._vit = Vit(self, config.vit)
        self._norm: Callable[[Tensor], Tensor] = lambda values: values
        if config.norm_eps is not None:
            self._norm = self.layer_norm("multi_modal_projector.layernorm", config.norm_eps)
        self._up, self._down = (self.linear(f"multi_modal_projector.linear_{number}") for number in (1, 2))

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        hidden = yield from self._vit.encode(tile)
        values, gates = self._up(self._norm(_squares(hidden, self._config.scale_factor))).chunk(2, dim=-1)
        return self._down(functional.silu(gates) * values)


class Gemma3Tower(VisionTower):
    """SigLIP, then average pooling, RMSNorm and a projection."""

    def __init__(self, config: Gemma3Config, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._vit = Vit(self, config.vit)
        self._norm = self.plain("multi_modal_projector.mm_soft_emb_norm.weight")
        self._projection = self.plain("multi_modal_projector.mm_input_projection_weight")

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        hidden = yield from self._vit.encode(tile)
        side = self._config.vit.positions_per_side
        squares = hidden.T.reshape(1, -1, side, side)
        pooled = functional.avg_pool2d(squares, side // self._config.tokens_per_side)[0].flatten(1).T.float()
        normed = functional.rms_norm(pooled, self._norm.shape, 1.0 + self._norm.float(), self._config.vit.norm_eps)
        return normed.to(self.torch_dtype) @ self._projection


class LlavaTower(VisionTower):
    """CLIP or SigLIP, and an MLP. For LLaVA-NeXT and LLaVA-OneVision, the rows of all tiles become lines of the whole
    image."""

    def __init__(self, config: LlavaConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._patches_per_side = config.vit.positions_per_side
        self._vit = Vit(self, config.vit)
        self._up, self._down = (self.linear(f"multi_modal_projector.linear_{number}") for number in (1, 2))
        self._newline = self.plain("image_newline") if config.has_newline else None

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        hidden = yield from self._vit.encode(tile)
        return self._down(functional.gelu(self._up(hidden)))

    def joined(self, rows: Sequence[Tensor], plan: ImagePlan) -> Tensor:
        if self._newline is None:
            return super().joined(rows, plan)
        newline = self._newline.to("cpu", torch.float32)
        if not plan.rows:
            return torch.cat((*rows, newline[None]))
        assert isinstance(self.processing, OneVisionProcessing)
        grid, side = self.processing.grid(plan), self._patches_per_side
        whole = torch.stack(tuple(rows[1:])).view(plan.rows, plan.columns, side, side, -1)
        lines = whole.permute(4, 0, 2, 1, 3).reshape(len(newline), plan.rows * side, plan.columns * side)
        top, left = (lines.shape[1] - grid.height) // 2, (lines.shape[2] - grid.width) // 2
        lines = lines[:, top : top + grid.height, left : left + grid.width]
        if (grid.row_count, grid.column_count) != (grid.height, grid.width):
            lines = functional.interpolate(lines[None], (grid.row_count, grid.column_count), mode="bilinear")[0]
        ends = newline[:, None, None].expand(-1, grid.row_count, 1)
        return torch.cat((rows[0], torch.cat((lines, ends), dim=-1).flatten(1).T))


class PixtralTower(VisionTower):
    """A transformer over the patches of an image of any aspect ratio, and an MLP."""

    def __init__(self, config: PixtralConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._patch = self.plain("vision_model.patch_conv.weight")
        self._first_norm = self.rms_norm("vision_model.ln_pre", PIXTRAL_NORM_EPS)
        self._layers = [self._layer(f"vision_model.encoder.layers.{index}") for index in range(config.layer_count)]
        self._up, self._down = (self.linear(f"multi_modal_projector.linear_{number}") for number in (1, 2))
        if config.merge_size is not None:
            self._merger_norm = self.rms_norm("multi_modal_projector.norm", config.merger_eps)
            self._merger = self.linear("multi_modal_projector.patch_merger.merging_layer")

    def _layer(self, name: str) -> GridLayer:
        return GridLayer(
            self._config.head_count,
            [self.rms_norm(f"{name}.{norm}_norm", PIXTRAL_NORM_EPS) for norm in ("attention", "ffn")],
            [
                self.linear(*(f"{name}.attention.{part}_proj" for part in ("q", "k", "v"))),
                self.linear(f"{name}.attention.o_proj"),
                *(self.linear(f"{name}.feed_forward.{part}_proj") for part in ("gate", "up", "down")),
            ],
            self._config.activation,
        )

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        pixels = torch.from_numpy(self.pixels(tile)).to(self.device, self.torch_dtype)
        found = functional.conv2d(pixels[None], self._patch, stride=self._config.patch_size)[0]
        places = self._places(*found.shape[1:])
        hidden = self._first_norm(found.flatten(1).T)
        for layer in self._layers:
            hidden = layer(hidden, places)
            yield
        if self._config.merge_size is not None:
            squares = self._merger_norm(hidden).T.view(1, *found.shape)
            size = self._config.merge_size
            hidden = self._merger(functional.unfold(squares, size, stride=size)[0].T)
        return self._down(functional.gelu(self._up(hidden)))

    def _places(self, row_count: int, column_count: int) -> GridPlaces:
        patches = torch.arange(row_count * column_count, device=self.device)
        rows, columns = patches // column_count, patches % column_count
        head_dim = self._config.hidden_size // self._config.head_count
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=self.device) / head_dim
        frequencies = 1.0 / self._config.theta**exponents
        angles = torch.cat((rows[:, None] * frequencies[::2], columns[:, None] * frequencies[1::2]), dim=-1)[:, None]
        return GridPlaces(rows, columns, angles.cos(), angles.sin())


class GlmTower(GridTower):
    """A transformer over the patches of an image, a convolution that joins squares of patches, and an MLP."""

    def __init__(self, config: GlmVLConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        self._patch, self._patch_bias = (self.plain(f"visual.patch_embed.proj.{part}") for part in ("weight", "bias"))
        if config.positions_per_side:
            self._first_norm = self.rms_norm("visual.post_conv_layernorm", config.norm_eps)
            self._positions = self.plain("visual.embeddings.position_embedding.weight")
        self._layers = [self._layer(f"visual.blocks.{index}") for index in range(config.layer_count)]
        self._last_norm = self.rms_norm("visual.post_layernorm", config.norm_eps)
        self._join, self._join_bias = (self.plain(f"visual.downsample.{part}") for part in ("weight", "bias"))
        self._merger_norm = self.layer_norm("visual.merger.post_projection_norm", 1e-5)
        self._merger, self._gate, self._up, self._down = (
            self.linear(f"visual.merger.{part}") for part in ("proj", "gate_proj", "up_proj", "down_proj")
        )

    def _layer(self, name: str) -> GridLayer:
        config = self._config

        def norms(*names: str) -> list[Callable[[Tensor], Tensor]]:
            return [self.rms_norm(f"{name}.{part}", config.norm_eps) for part in names]

        return GridLayer(
            config.head_count,
            norms("norm1", "norm2"),
            [self.linear(f"{name}.{part}") for part in GLM_LINEARS],
            config.activation,
            qk_norms=norms("attn.q_norm", "attn.k_norm") if config.has_qk_norm else (),
        )

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        places = self.places(tile)
        hidden = functional.linear(self.patches(tile), self._patch.flatten(1), self._patch_bias)
        if self._config.positions_per_side:
            hidden = self._first_norm(hidden) + self._sampled(tile, places)
        for layer in self._layers:
            hidden = layer(hidden, places)
            yield
        squares = self._last_norm(hidden).view(-1, self._config.merge_size**2, hidden.shape[1]).transpose(1, 2)
        joined = functional.linear(squares.flatten(1), self._join.flatten(1), self._join_bias)
        merged = functional.gelu(self._merger_norm(self._merger(joined)))
        return self._down(ACTIVATIONS[self._config.activation](self._gate(merged)) * self._up(merged))

    def _sampled(self, tile: npt.NDArray[np.uint8], places: GridPlaces) -> Tensor:
        """Return the learned position of each patch, interpolated between the positions of the table."""
        side, size = self._config.positions_per_side, self._config.patch_size
        table = self._positions.view(1, side, side, -1).permute(0, 3, 1, 2).float()
        down, across = (
            (position + 0.5) / (pixels // size) * 2 - 1
            for position, pixels in zip((places.rows, places.columns), tile.shape, strict=False)
        )
        sampled = functional.grid_sample(
            table,
            torch.stack((across, down), dim=-1)[None, :, None],
            mode="bicubic",
            padding_mode="border",
            align_corners=False,
        )
        return sampled[0, :, :, 0].T.to(self.torch_dtype)


class PaddleTower(GridTower):
    """SigLIP with rotary positions, and an MLP that joins squares of patches."""

    def __init__(self, config: PaddleConfig, processing: FamilyProcessing, **place: Any) -> None:
        super().__init__(config, processing, **place)
        self._config = config
        embeddings = "vision_model.embeddings"
        self._patch, self._patch_bias = (
            self.plain(f"{embeddings}.patch_embedding.{part}") for part in ("weight", "bias")
        )
        self._positions = self.plain(f"{embeddings}.position_embedding.weight")
        self._layers = [self._layer(f"vision_model.encoder.layers.{index}") for index in range(config.layer_count)]
        self._last_norm = self.layer_norm("vision_model.post_layernorm", config.norm_eps)
        self._merger_norm = self.layer_norm("projector.pre_norm", 1e-5)
        self._up, self._down = (self.linear(f"projector.linear_{number}") for number in (1, 2))

    def _layer(self, name: str) -> GridLayer:
        return GridLayer(
            self._config.head_count,
            [self.layer_norm(f"{name}.layer_norm{number}", self._config.norm_eps) for number in (1, 2)],
            [
                self.linear(*(f"{name}.self_attn.{part}_proj" for part in ("q", "k", "v"))),
                *(self.linear(f"{name}.{part}") for part in ("self_attn.out_proj", "mlp.fc1", "mlp.fc2")),
            ],
            self._config.activation,
        )

    def encode(self, tile: npt.NDArray[np.uint8]) -> Generator[None, None, Tensor]:
        places = self.places(tile)
        hidden = functional.linear(self.patches(tile), self._patch.flatten(1), self._patch_bias)
        side, size = self._config.positions_per_side, self._config.patch_size
        table = self._positions.view(1, side, side, -1).permute(0, 3, 1, 2).float()
        grid = (tile.shape[0] // size, tile.shape[1] // size)
        positions = functional.interpolate(table, grid, mode="bilinear", align_corners=False)[0]
        hidden = hidden + positions[:, places.rows, places.columns].T.to(self.torch_dtype)
        for layer in self._layers:
            hidden = layer(hidden, places)
            yield
        squares = self._merger_norm(self._last_norm(hidden)).view(-1, self._config.merge_size**2 * hidden.shape[1])
        return self._down(functional.gelu(self._up(squares)))


_TOWERS: dict[type[VisionConfig], type[VisionTower]] = {
    CohereVisionConfig: CohereTower,
    Gemma3Config: Gemma3Tower,
    GlmVLConfig: GlmTower,
    Idefics3Config: Idefics3Tower,
    HyperClovaConfig: QwenTower,
    QianfanConfig: InternvlTower,
    QwenVLConfig: QwenTower,
    InternvlConfig: InternvlTower,
    LightOnConfig: PixtralTower,
    LlavaConfig: LlavaTower,
    PaddleConfig: PaddleTower,
    PixtralConfig: PixtralTower,
    SoundConfig: SoundTower,
}
