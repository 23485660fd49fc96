"""Lists the families of vision models, and decodes image files to tiles."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import ImagePlan, Tiles
from trioserve.vision.families.gemma3 import Gemma3Processing
from trioserve.vision.families.idefics3 import Idefics3Processing
from trioserve.vision.families.internvl import (
    AyaProcessing,
    CohereProcessing,
    InternvlProcessing,
    QianfanProcessing,
)
from trioserve.vision.families.llava import LlavaProcessing, OneVisionProcessing
from trioserve.vision.families.pixtral import LightOnProcessing, PixtralProcessing
from trioserve.vision.families.qwen_vl import (
    ExaoneProcessing,
    GlmVLProcessing,
    HyperClovaProcessing,
    PaddleProcessing,
    QwenVLProcessing,
)
from trioserve.vision.image_file import pixels_of

__all__ = ["ImageProcessing", "tiles_from", "tiles_of"]

ImageProcessing: TypeAlias = (
    AyaProcessing
    | CohereProcessing
    | ExaoneProcessing
    | Gemma3Processing
    | GlmVLProcessing
    | HyperClovaProcessing
    | Idefics3Processing
    | InternvlProcessing
    | LightOnProcessing
    | LlavaProcessing
    | OneVisionProcessing
    | PaddleProcessing
    | PixtralProcessing
    | QianfanProcessing
    | QwenVLProcessing
)


def tiles_of(content: bytes, processing: ImageProcessing, plan: ImagePlan, place: str) -> npt.NDArray[np.uint8]:
    """Decode an image file and split it into tiles.

    Args:
        content: bytes of the file.
        processing: how images are prepared for the model, such as the tile size.
        plan: plan of the image.
        place: name of the image in error messages.

    Returns:
        uint8 [count, tile_height, tile_width, 3]: the tiles in the order of the family.

    Raises:
        InvalidRequest: the file is damaged.

    Cost:
        0.1 to 0.2 seconds for a large image.
    """
    return processing.tiles(pixels_of(content, place), plan)


def tiles_from(pixels: bytes | bytearray | memoryview, plan: ImagePlan) -> Tiles:
    """Return the tiles that another process has computed, without a copy.

    Args:
        pixels: bytes of the result of tiles_of.
        plan: plan of the image.
    """
    return np.frombuffer(pixels, dtype=np.uint8).reshape(plan.tile_count, plan.tile_height, plan.tile_width, 3)
