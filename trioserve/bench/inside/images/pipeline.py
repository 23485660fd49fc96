"""The pipeline of diffusers that a model was saved with, for image_bench: the same pictures, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from trioserve.contracts.image_generation import Picture

__all__ = ["PlainPipeline"]


class PlainPipeline:
    """Computes in whichever thread calls it. on_step: called there before each denoising step."""

    def __init__(self, directory: Path) -> None:
        self._pipeline = DiffusionPipeline.from_pretrained(directory)
        self._pipeline.set_progress_bar_config(disable=True)
        self.on_step: Callable[[], None] = lambda: None
        denoiser = getattr(self._pipeline, "unet", None) or self._pipeline.transformer
        denoiser.register_forward_pre_hook(lambda *_: self.on_step())

    def draw(self, prompts: Sequence[str], seeds: Sequence[int], step_count: int, guidance: float) -> list[Picture]:
        """One batch, in the size that the model was made for."""
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
        return [Picture(image.width, image.height, image.convert("RGB").tobytes()) for image in images]
