"""Describes an image model: allowed sizes, steps and samplers, and defaults. Also defines the model's settings."""

from __future__ import annotations

import time

import msgspec

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.image_generation import PNDM, ImageModelDescription
from trioserve.model.diffusion.directory import ImageDirectory
from trioserve.model.settings import DeviceName, DtypeName, ModelSettings

__all__ = ["ImageModelSettings", "SAMPLER_NAMES", "describe", "samplers_of"]


class ImageModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an image model.

    Attributes:
        dtype: "auto" selects the checkpoint's dtype. On a CPU, where float16 is slow, it selects float32 for a float16
            checkpoint. Only float32 guarantees that the bytes of an image do not depend on other requests.
        device: "auto" selects CUDA if there is a GPU.
        threads: CPU threads for computing. None selects torch's default, which is one per core.
        slot_count: number of latent slots, at least 1. Running requests and kept states use them.

    Raises:
        StartupError: a value is not allowed. The error names the field.
    """

    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    threads: int | None = None
    slot_count: int = 8

    def __post_init__(self) -> None:
        self.placing()
        if self.slot_count < 1:
            raise StartupError(f"slot_count is {self.slot_count}, but must be at least 1")

    def placing(self) -> ModelSettings:
        """Return the settings that image models have in common with text models."""
        return ModelSettings(dtype=self.dtype, device=self.device, threads=self.threads)


# Images may have this many pixels per side, or twice the trained size if that is more. Larger images lose quality.
SIDE_MAX = 2048
STEPS_WITHOUT_GUIDANCE = 4  # Models without guidance are distilled: they need only few steps.
SAMPLER_NAMES = {
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpm++",
    "EulerAncestralDiscreteScheduler": "euler-ancestral",
    "EulerDiscreteScheduler": "euler",
    "FlowMatchEulerDiscreteScheduler": "flow-euler",
    "PNDMScheduler": PNDM,
}
PNDM_PREDICTIONS = ("epsilon", "v_prediction")


def samplers_of(directory: ImageDirectory) -> tuple[str, ...]:
    """Return the names of a model's samplers. The sampler of the model's own scheduler is the first.

    If the model's scheduler is not supported, the result contains only the other samplers. Each of them can sample the
    model.

    Args:
        directory: the diffusers directory.
    """
    scheduler = directory.scheduler
    own = SAMPLER_NAMES.get(scheduler["_class_name"])
    if own == PNDM and not scheduler.get("skip_prk_steps", False):
        own = None  # The first steps of this scheduler are Runge-Kutta steps, which are not implemented.
    allowed = directory.pipeline.samplers
    if scheduler.get("prediction_type", "epsilon") not in PNDM_PREDICTIONS:
        allowed = tuple(name for name in allowed if name != PNDM)
    return (own, *(name for name in allowed if name != own)) if own in allowed else allowed


def describe(directory: ImageDirectory, *, served_names: tuple[str, ...], source: str) -> ImageModelDescription:
    """Describe a model.

    Args:
        directory: the diffusers directory.
        served_names: names that requests may use.
        source: path or name that the model was opened by.

    Raises:
        ModelLoadError: the directory's configs contradict each other or the family.
    """
    pipeline = directory.pipeline
    scale = directory.vae_scale
    height, width = (side * scale for side in directory.latent_sides)
    multiple = scale * pipeline.patch_side
    side_min, side_max = multiple, max(SIDE_MAX, 2 * width, 2 * height) // multiple * multiple
    if pipeline.has_one_size:
        if width != height:
            raise ModelLoadError(
                f"{source} makes images of {width}x{height}, but a {pipeline.family} model must make square ones"
            )
        side_min = side_max = width
    takes_guidance = pipeline.has_guided_rows or bool(directory.denoiser.get("guidance_embeds"))
    return ImageModelDescription(
        served_names=served_names,
        source=source,
        family=pipeline.family,
        width=width,
        height=height,
        steps=pipeline.steps if takes_guidance else STEPS_WITHOUT_GUIDANCE,
        guidance=pipeline.guidance if takes_guidance else 1.0,
        samplers=samplers_of(directory),
        side_multiple=multiple,
        side_min=side_min,
        side_max=side_max,
        steps_max=_steps_max(directory),
        classes=None if pipeline.takes_texts else _classes(directory),
        takes_guidance=takes_guidance,
        has_guided_rows=pipeline.has_guided_rows,
        takes_negative=pipeline.takes_texts and pipeline.has_guided_rows,
        takes_images=pipeline.takes_images,
        created_at=int(time.time()),
    )


def _steps_max(directory: ImageDirectory) -> int:
    count = directory.scheduler.get("num_train_timesteps", 1000)  # 1000 is the default of diffusers.
    if not isinstance(count, int) or count < 1:
        raise ModelLoadError(
            f"{directory.path}: scheduler_config.json: num_train_timesteps is {count!r}, but must be at least 1"
        )
    return count


def _classes(directory: ImageDirectory) -> tuple[str, ...]:
    """Return the names of a model's classes. A class without a name is named by its number.

    If only the first classes have names, the model has no other classes. A network has at least 1000 embeddings even if
    it has fewer classes, because DiTPipeline always uses the index 1000 for rows without a class.
    """
    count = directory.denoiser.get("num_embeds_ada_norm", 1000)  # 1000 is the default of diffusers.
    labels = directory.labels
    if not isinstance(count, int) or count < 1 or any(not 0 <= index < count for index in labels):
        raise ModelLoadError(
            f"{directory.path}: id2label names classes up to {max(labels, default=0)}, but the network has {count}"
        )
    if labels and max(labels) == len(labels) - 1:
        count = len(labels)
    return tuple(labels.get(index, str(index)) for index in range(count))
