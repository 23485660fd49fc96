"""The image encoder of PaddleOCR-VL (arXiv 2510.14528): SigLIP with rotary positions for images of any aspect ratio,
then an MLP that joins squares of patches."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.names import Shape
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.family import IMAGE_SIZE_MAX, activation_of, check_range, square_of, vision_fields
from trioserve.model.vision.qwen_vl import GridConfig, grid_processing
from trioserve.vision.families.qwen_vl import PaddleProcessing, QwenVLProcessing

__all__ = ["PaddleConfig", "read_paddleocr"]


class PaddleConfig(GridConfig, frozen=True, kw_only=True, tag="paddleocr_vl"):
    """The image encoder of PaddleOCR-VL.

    Attributes:
        norm_eps: number that the norms of the transformer add to the variance.
    """

    norm_eps: float

    names: ClassVar[tuple[tuple[str, str], ...]] = (("projector.", "mlp_AR."),)

    def __post_init__(self) -> None:
        GridConfig.__post_init__(self)
        if not 0 < self.norm_eps < 1:
            raise ModelLoadError(f"the vision_config has layer_norm_eps {self.norm_eps}, it must be a small number")

    def shapes(self) -> dict[str, Shape]:
        hidden, middle, size = self.hidden_size, self.intermediate_size, self.patch_size
        merged = hidden * self.merge_size**2
        shapes: dict[str, Shape] = {
            "vision_model.embeddings.patch_embedding.weight": (hidden, 3, size, size),
            "vision_model.embeddings.patch_embedding.bias": (hidden,),
            "vision_model.embeddings.position_embedding.weight": (self.positions_per_side**2, hidden),
        }
        norms = ["vision_model.post_layernorm", "projector.pre_norm"]
        linears = {"projector.linear_1": (merged, merged), "projector.linear_2": (self.output_size, merged)}
        for index in range(self.layer_count):
            layer = f"vision_model.encoder.layers.{index}"
            norms += (f"{layer}.layer_norm1", f"{layer}.layer_norm2")
            linears |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")}
            linears |= {f"{layer}.mlp.fc1": (middle, hidden), f"{layer}.mlp.fc2": (hidden, middle)}
        for name in norms:
            shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
        for name, shape in linears.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes


def read_paddleocr(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[PaddleConfig, QwenVLProcessing]:
    """Read the config files.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    fields = vision_fields(outer)
    if fields.whole_or("num_channels", 3) != 3:
        raise fields.wrong("num_channels", "3")
    fields.whole_or("temporal_patch_size", 1)  # Published files have 2, which has no meaning: patches have one frame.
    patch_size, image_size = square_of(fields, "patch_size", 14), square_of(fields, "image_size", 384)
    check_range("vision_config", "image_size", image_size, IMAGE_SIZE_MAX)
    config = PaddleConfig(
        hidden_size=fields.whole_or("hidden_size", 1152),
        intermediate_size=fields.whole_or("intermediate_size", 4304),
        layer_count=fields.whole_or("num_hidden_layers", 27),
        head_count=fields.whole_or("num_attention_heads", 16),
        patch_size=patch_size,
        frame_count=1,
        merge_size=fields.whole_or("spatial_merge_size", 2),
        activation=activation_of(fields, "gelu_pytorch_tanh"),
        positions_per_side=max(image_size // max(patch_size, 1), 1),
        norm_eps=fields.number_or("layer_norm_eps", 1e-6),
        output_size=texts.hidden_size,
    )
    size = config.output_size
    return config, grid_processing(
        directory, outer, texts, config, fields, 100_295, embedding_size=size, kind=PaddleProcessing
    )
