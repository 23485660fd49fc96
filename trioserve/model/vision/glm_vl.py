"""The image encoders of GLM-4.1V, GLM-4.5V (arXiv 2507.01006) and GLM-OCR."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.family import (
    IMAGE_SIZE_MAX,
    activation_of,
    check_range,
    square_of,
    vision_fields,
)
from trioserve.model.vision.qwen_vl import GridConfig, grid_fields, grid_processing
from trioserve.vision.families.qwen_vl import GlmVLProcessing, QwenVLProcessing

__all__ = ["GLM_LINEARS", "GlmVLConfig", "read_glm4v", "read_glm_ocr"]

GLM_LINEARS = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""Names of the projections of a layer."""


class GlmVLConfig(GridConfig, frozen=True, kw_only=True, tag="glm_vl"):
    """The image encoder of a GLM model.

    Attributes:
        norm_eps: number that RMS norms add to the mean square.
        merger_size: inner size of the MLP after the encoder.
        biased: names of the projections of a layer that have biases.
        has_qk_norm: heads of queries and keys have norms.
    """

    norm_eps: float
    merger_size: int
    biased: tuple[str, ...]
    has_qk_norm: bool

    def __post_init__(self) -> None:
        GridConfig.__post_init__(self)
        if not 0 < self.norm_eps < 1:
            raise ModelLoadError(f"the vision_config has rms_norm_eps {self.norm_eps}, it must be a small number")

    def shapes(self) -> dict[str, Shape]:
        hidden, middle, size, merge = self.hidden_size, self.intermediate_size, self.output_size, self.merge_size
        patch = (hidden, 3, self.frame_count, self.patch_size, self.patch_size)
        shapes: dict[str, Shape] = {
            "visual.patch_embed.proj.weight": patch,
            "visual.patch_embed.proj.bias": (hidden,),
            "visual.post_layernorm.weight": (hidden,),
            "visual.downsample.weight": (size, hidden, merge, merge),
            "visual.downsample.bias": (size,),
            "visual.merger.proj.weight": (size, size),
            "visual.merger.post_projection_norm.weight": (size,),
            "visual.merger.post_projection_norm.bias": (size,),
            "visual.merger.gate_proj.weight": (self.merger_size, size),
            "visual.merger.up_proj.weight": (self.merger_size, size),
            "visual.merger.down_proj.weight": (size, self.merger_size),
        }
        if self.positions_per_side:
            shapes["visual.post_conv_layernorm.weight"] = (hidden,)
            shapes["visual.embeddings.position_embedding.weight"] = (self.positions_per_side**2, hidden)
        sizes = ((3 * hidden, hidden), (hidden, hidden), (middle, hidden), (middle, hidden), (hidden, middle))
        for index in range(self.layer_count):
            layer = f"visual.blocks.{index}"
            shapes |= {f"{layer}.norm{number}.weight": (hidden,) for number in (1, 2)}
            for name, shape in zip(GLM_LINEARS, sizes, strict=True):
                shapes[f"{layer}.{name}.weight"] = shape
                if name in self.biased:
                    shapes[f"{layer}.{name}.bias"] = shape[:1]
            if self.has_qk_norm:
                shapes |= {f"{layer}.attn.{part}_norm.weight": (hidden // self.head_count,) for part in ("q", "k")}
        return shapes


def read_glm4v(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[GlmVLConfig, QwenVLProcessing]:
    """Read the config files of GLM-4.1V or GLM-4.5V.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    shared = grid_fields(fields, texts, patch_size=14, layer_count=24, head_count=12)
    image_size = square_of(fields, "image_size", 336)
    check_range("vision_config", "image_size", image_size, IMAGE_SIZE_MAX)
    config = GlmVLConfig(
        hidden_size=fields.whole_or("hidden_size", 1536),
        intermediate_size=texts.hidden_size,
        merger_size=fields.whole_or("intermediate_size", 13_696),
        activation=activation_of(fields, "silu"),
        positions_per_side=max(image_size // max(shared["patch_size"], 1), 1),
        norm_eps=fields.number_or("rms_norm_eps", 1e-5),
        biased=("attn.qkv",) if fields.flag_or("attention_bias", False) else (),
        has_qk_norm=False,
        **shared,
    )
    return config, _processing(directory, outer, texts, config, fields, 151_343)


def read_glm_ocr(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[GlmVLConfig, QwenVLProcessing]:
    """Read the config files of GLM-OCR, whose encoder has no learned positions.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    square_of(fields, "image_size", 336)  # Has no meaning without learned positions.
    config = GlmVLConfig(
        hidden_size=fields.whole_or("hidden_size", 1024),
        intermediate_size=fields.whole_or("intermediate_size", 4096),
        merger_size=3 * texts.hidden_size,
        activation=activation_of(fields, "silu"),
        norm_eps=fields.number_or("rms_norm_eps", 1e-5),
        biased=GLM_LINEARS if fields.flag_or("attention_bias", True) else (),
        has_qk_norm=True,
        **grid_fields(fields, texts, patch_size=14, layer_count=24),
    )
    return config, _processing(directory, outer, texts, config, fields, 59_280)


def _processing(
    directory: Path, outer: Fields, texts: ModelConfig, config: GlmVLConfig, fields: Fields, image_token: int
) -> QwenVLProcessing:
    size = config.output_size
    return grid_processing(
        directory, outer, texts, config, fields, image_token, embedding_size=size, kind=GlmVLProcessing
    )
