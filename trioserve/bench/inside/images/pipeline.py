"""The diffusers pipeline of a saved model, which makes the same images in batches, for image_bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from trioserve.contracts.image_generation import RGBImage

__all__ = ["PlainPipeline"]


class PlainPipeline:
    """A diffusers pipeline. It computes in the thread that calls it.

    Args:
        directory: folder of the saved model.

    Attributes:
        on_step: called before each denoising step, in that thread.
    """

    def __init__(self, directory: Path) -> None:
        self._pipeline = DiffusionPipeline.from_pretrained(directory)
        self._pipeline.set_progress_bar_config(disable=True)
        self.on_step: Callable[[], None] = lambda: None
        denoiser = getattr(self._pipeline, "unet", None) or self._pipeline.transformer
        denoiser.register_forward_pre_hook(lambda *_: self.on_step())

    def draw(self, prompts: Sequence[str], seeds: Sequence[int], step_count: int, guidance: float) -> list[RGBImage]:
        """Return one batch of images in the model's default size.

        Args:
            prompts: prompt of each image.
            seeds: seed of each image.
            step_count: number of denoising steps.
            guidance: guidance scale.
        """
        pipeline = self._pipeline
        asked = {"prompt": list(prompts)}
        if hasattr(pipeline, "get_label_ids"):
            asked = {"class_labels": pipeline.get_label_ids(list(prompts))}
        images = pipeline(
            **asked,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=step_count,
            guidance_scale=guidance,
        ).images
        return [RGBImage(image.width, image.height, image.convert("RGB").tobytes()) for image in images]
