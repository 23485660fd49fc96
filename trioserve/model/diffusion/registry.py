"""Which pipelines of diffusers are served, and by which family: what is known of each without its weights.

To add one, write its file in families/ and its line in PIPELINES.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import ModelLoadError

__all__ = ["PIPELINES", "Pipeline", "find_pipeline"]

NOISE_SAMPLERS = ("ddim", "dpm++", "euler")
FLOW_SAMPLERS = ("flow-euler",)


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """family: as the description names it, and its file in families/. denoiser: the folder of the network that computes
    the steps. classes: which classes each component may have; a component that is not named here is not loaded.
    steps, guidance: what diffusers' pipeline does by itself. samplers: that can be had. patch_side: latent pixels in a
    side of what the network takes as one. has_one_size: it makes pictures of one size only. corrects_scheduler: the
    pipeline sets right what it takes for outdated in a scheduler's file."""

    family: str
    file: str
    denoiser: str
    classes: dict[str, tuple[str, ...]]
    steps: int
    guidance: float
    samplers: tuple[str, ...] = NOISE_SAMPLERS
    patch_side: int = 1
    takes_texts: bool = True
    takes_images: bool = False
    has_guided_rows: bool = True
    has_one_size: bool = False
    corrects_scheduler: bool = False


DIT = Pipeline(
    family="dit",
    file="dit",
    denoiser="transformer",
    classes={"transformer": ("DiTTransformer2DModel", "Transformer2DModel"), "vae": ("AutoencoderKL",)},
    steps=50,
    guidance=4.0,
    takes_texts=False,
    has_one_size=True,
)
STABLE_DIFFUSION = Pipeline(
    family="stable-diffusion",
    file="stable_diffusion",
    denoiser="unet",
    classes={
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel",),
        "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    },
    steps=50,
    guidance=7.5,
    takes_images=True,
    corrects_scheduler=True,
)

PIPELINES: dict[str, Pipeline] = {
    "DiTPipeline": DIT,
    "StableDiffusionPipeline": STABLE_DIFFUSION,
    "StableDiffusionImg2ImgPipeline": STABLE_DIFFUSION,
}
"""By what `_class_name` in model_index.json says."""


def find_pipeline(class_name: str, source: str) -> Pipeline:
    """Raises ModelLoadError for one that is not served."""
    found = PIPELINES.get(class_name)
    if found is None:
        raise ModelLoadError(
            f"{source} is a {class_name}, and pictures are made by {', '.join(sorted(PIPELINES))}: take a checkpoint "
            "of one of these"
        )
    return found
