"""Handlers of GET /v1/models on a server that generates images: names, limits and options of the model."""

from __future__ import annotations

from typing import Any

from trioserve.api.images.image_context import ImageContext
from trioserve.api.openai.models import MODEL_PATH
from trioserve.contracts.image_generation import PARTIAL_IMAGES_MAX
from trioserve.vision.rgb_image import IMAGE_FORMATS

__all__ = ["list_image_models", "read_image_model"]


async def list_image_models(context: ImageContext) -> None:
    data = [_card(context, name) for name in context.served_names]
    await context.respond_json({"object": "list", "data": data})


async def read_image_model(context: ImageContext) -> None:
    """Answer with the description of the model named in the path.

    Args:
        context: The request.

    Raises:
        UnknownModel: The model is not served.
    """
    await context.respond_json(_card(context, context.model_name(context.exchange.path.removeprefix(MODEL_PATH))))


def _card(context: ImageContext, name: str) -> dict[str, Any]:
    model, limits = context.engine.model, context.engine.limits
    return {
        "id": name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "trioserve",
        "root": model.source,
        "parent": None,
        "family": model.family,
        "fingerprint": model.fingerprint,
        "image": {
            "size": f"{model.width}x{model.height}",
            "side_multiple": model.side_multiple,
            "side_min": model.side_min,
            "side_max": model.side_max,
            "pixels_max": limits.pixels_max,
            "steps": min(model.steps, limits.steps_max),
            "steps_max": limits.steps_max,
            "guidance": model.guidance,
            "takes_guidance": model.takes_guidance,
            "samplers": model.samplers,
            "classes": model.classes,
            "n_max": limits.n_max,
            "takes_negative_prompt": model.takes_negative,
            "takes_images": model.takes_images,
            "partial_images_max": PARTIAL_IMAGES_MAX,
            "output_formats": IMAGE_FORMATS,
        },
    }
