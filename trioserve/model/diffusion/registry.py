"""Lists the supported diffusers pipelines, with the properties of each that are known without the model's files.

To support another pipeline, add a module in families/ and an entry in PIPELINES.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import PNDM

__all__ = ["PIPELINES", "Pipeline", "find_pipeline"]

NOISE_SAMPLERS = ("ddim", "dpm++", "euler", "euler-ancestral", PNDM)
FLOW_SAMPLERS = ("flow-euler",)


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A supported diffusers pipeline.

    Attributes:
        family: name of the model family in descriptions.
        file: name of the family's module in families/.
        denoiser: name of the component that computes the steps.
        classes: allowed classes of each component. Other components are not loaded.
        steps: diffusers' default number of steps.
        guidance: diffusers' default guidance scale.
        samplers: names of the allowed samplers.
        patch_side: latent pixels per side of one network token.
        packed_count: latent pixels that are packed into the channels of one network token.
        latent_side: side that the model was trained with, in latent pixels, if the config does not contain it.
        takes_texts: True if prompts are texts, False if they are classes.
        takes_images: True if requests may edit images.
        has_guided_rows: True if guidance needs a second row in each step.
        has_one_size: True if all images have the trained size.
        corrects_scheduler: True if diffusers' pipeline overrides outdated fields of the scheduler's config.
    """

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
"""Pipelines by `_class_name` in model_index.json."""


def find_pipeline(class_name: str, source: str) -> Pipeline:
    """Return the pipeline of a class.

    Args:
        class_name: `_class_name` in model_index.json.
        source: path of the model, for the error text.

    Raises:
        ModelLoadError: the class is not supported.
    """
    found = PIPELINES.get(class_name)
    if found is None:
        raise ModelLoadError(
            f"{source} is a {class_name}, but supported are {', '.join(sorted(PIPELINES))}: use a checkpoint of one of "
            "these pipelines"
        )
    return found
