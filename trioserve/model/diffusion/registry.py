"""Which pipelines of diffusers are served, and by which family: what is known of each without its weights.

To add one, write its file in families/ and its line in PIPELINES.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import PNDM

__all__ = ["PIPELINES", "Pipeline", "find_pipeline"]

NOISE_SAMPLERS = ("ddim", "dpm++", "euler", "euler-ancestral", PNDM)
FLOW_SAMPLERS = ("flow-euler",)


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """family: as the description names it, and its file in families/. denoiser: the folder of the network that computes
    the steps. classes: which classes each component may have; a component that is not named here is not loaded.
    steps, guidance: what diffusers' pipeline does by itself. samplers: that can be had. patch_side: latent pixels in a
    side of what the network takes as one. packed_count: that are one pixel of its input. latent_side: that it was made
    for, where its file does not say. has_one_size: it makes pictures of one size only. corrects_scheduler: the pipeline
    sets right what it takes for outdated in a scheduler's file."""

    family: str
    file: str
    denoiser: str
    classes: dict[str, tuple[str, ...]]
    steps: int
    guidance: float
    samplers: tuple[str, ...] = NOISE_SAMPLERS
    patch_side: int = 1
    packed_count: int = 1
    latent_side: int | None = None
    takes_texts: bool = True
    takes_images: bool = False
    has_guided_rows: bool = True
    has_one_size: bool = False
    corrects_scheduler: bool = False


CLIP = {"text_encoder": ("CLIPTextModel",), "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast")}
T5_TOKENIZERS = ("T5Tokenizer", "T5TokenizerFast")

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
        **CLIP,
    },
    steps=50,
    guidance=7.5,
    takes_images=True,
    corrects_scheduler=True,
)
STABLE_DIFFUSION_XL = Pipeline(
    family="stable-diffusion-xl",
    file="stable_diffusion_xl",
    denoiser="unet",
    classes={
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        **CLIP,
        "text_encoder_2": ("CLIPTextModelWithProjection",),
        "tokenizer_2": CLIP["tokenizer"],
    },
    steps=50,
    guidance=5.0,
    takes_images=True,
)
PIXART = Pipeline(
    family="pixart",
    file="pixart",
    denoiser="transformer",
    classes={
        "transformer": ("PixArtTransformer2DModel", "Transformer2DModel"),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("T5EncoderModel",),
        "tokenizer": T5_TOKENIZERS,
    },
    steps=20,
    guidance=4.5,
    patch_side=2,
)
FLUX = Pipeline(
    family="flux",
    file="flux",
    denoiser="transformer",
    classes={
        "transformer": ("FluxTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        **CLIP,
        "text_encoder_2": ("T5EncoderModel",),
        "tokenizer_2": T5_TOKENIZERS,
    },
    steps=28,
    guidance=3.5,
    samplers=FLOW_SAMPLERS,
    patch_side=2,
    packed_count=4,
    latent_side=128,
    has_guided_rows=False,
)

PIPELINES: dict[str, Pipeline] = {
    "DiTPipeline": DIT,
    "StableDiffusionPipeline": STABLE_DIFFUSION,
    "StableDiffusionImg2ImgPipeline": STABLE_DIFFUSION,
    "StableDiffusionInpaintPipeline": STABLE_DIFFUSION,
    "StableDiffusionXLPipeline": STABLE_DIFFUSION_XL,
    "StableDiffusionXLImg2ImgPipeline": STABLE_DIFFUSION_XL,
    "StableDiffusionXLInpaintPipeline": STABLE_DIFFUSION_XL,
    "PixArtAlphaPipeline": PIXART,
    "PixArtSigmaPipeline": PIXART,
    "FluxPipeline": FLUX,
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
