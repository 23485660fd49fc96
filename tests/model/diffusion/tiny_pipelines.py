"""Random image models that are small enough for a test, saved by diffusers, with tokenizers of single letters."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch
import transformers

transformers.utils.logging.disable_progress_bar()  # tqdm would start a thread

LETTERS = "abcdefghijklmnopqrstuvwxyz"

NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}


def save_dit(path: Path, *, classes: int = 1000, learned_variance: bool = False, **scheduler: object) -> Path:
    torch.manual_seed(7)
    channels = 4
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels * (2 if learned_variance else 1),
        num_layers=2,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=classes,
        norm_num_groups=4,
        attention_bias=True,
    )
    _shake(transformer)
    pipeline = diffusers.DiTPipeline(
        transformer, tiny_vae(channels), diffusers.DDIMScheduler(clip_sample=False, **scheduler)
    )
    pipeline.save_pretrained(path)
    # The pipeline reads the names of classes but does not write them.
    index = json.loads((path / "model_index.json").read_text())
    index["id2label"] = {str(label): f"{LETTERS[label % 26]}{label}" for label in range(classes)}
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def save_stable_diffusion(path: Path, scheduler: object = None, **unet: object) -> Path:
    torch.manual_seed(8)
    pipeline = diffusers.StableDiffusionPipeline(
        vae=tiny_vae(4),
        text_encoder=tiny_clip(32),
        tokenizer=clip_tokenizer(),
        unet=tiny_unet(cross_attention_dim=32, **unet),
        scheduler=scheduler or diffusers.DDIMScheduler(clip_sample=False, steps_offset=1, **NOISE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(path)
    return path


def save_inpainting(path: Path) -> Path:
    """Save an inpainting model, whose network reads the mask."""
    torch.manual_seed(12)
    pipeline = diffusers.StableDiffusionInpaintPipeline(
        vae=tiny_vae(4),
        text_encoder=tiny_clip(32),
        tokenizer=clip_tokenizer(),
        unet=tiny_unet(cross_attention_dim=32, in_channels=9),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1, **NOISE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(path)
    return path


def save_stable_diffusion_xl(path: Path, **settings: object) -> Path:
    torch.manual_seed(9)
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(4),
        text_encoder=tiny_clip(32),
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config(24, projection_dim=24)).eval(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=tiny_unet(
            cross_attention_dim=56,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24 + 6 * 8,
            transformer_layers_per_block=(1, 2),
        ),
        scheduler=diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **NOISE),
        **settings,
    )
    pipeline.save_pretrained(path)
    return path


def save_pixart(path: Path, *, sample_size: int = 8, is_sigma: bool = False) -> Path:
    torch.manual_seed(10)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=sample_size,
        num_layers=2,
        patch_size=2,
        attention_head_dim=12,
        num_attention_heads=2,
        cross_attention_dim=24,
        caption_channels=16,
        in_channels=4,
        out_channels=8,
        norm_num_groups=4,
        attention_bias=True,
        num_embeds_ada_norm=1000,
    )
    _shake(transformer)
    kind = diffusers.PixArtSigmaPipeline if is_sigma else diffusers.PixArtAlphaPipeline
    pipeline = kind(
        tokenizer=t5_tokenizer(),
        text_encoder=tiny_t5(16),
        vae=tiny_vae(4),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    pipeline.save_pretrained(path)
    return path


def save_pixart_sigma(path: Path) -> Path:
    return save_pixart(path, is_sigma=True)


def save_pixart_large(path: Path) -> Path:
    """Save a model whose network reads the size of the image."""
    return save_pixart(path, sample_size=128)


def save_flux(path: Path, *, takes_guidance: bool = True) -> Path:
    torch.manual_seed(11)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=takes_guidance,
    )
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=takes_guidance, shift=3.0),
        text_encoder=tiny_clip(32),
        text_encoder_2=tiny_t5(16),
        tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
        vae=tiny_vae(4, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False),
    )
    pipeline.save_pretrained(path)
    return path


def save_flux_distilled(path: Path) -> Path:
    return save_flux(path, takes_guidance=False)


def tiny_unet(*, cross_attention_dim: int, **more: object) -> torch.nn.Module:
    settings = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "norm_num_groups": 4,
        **more,
    }
    return diffusers.UNet2DConditionModel(cross_attention_dim=cross_attention_dim, **settings)


def tiny_vae(channels: int, **more: object) -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        **more,
    )


def tiny_clip(size: int) -> torch.nn.Module:
    return transformers.CLIPTextModel(clip_config(size)).eval()


def clip_config(size: int, **more: object) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        hidden_size=size,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=64,
        max_position_embeddings=12,
        **more,
    )


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """Build a tokenizer with one token per letter."""
    names = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    return transformers.CLIPTokenizer(
        vocab={name: index for index, name in enumerate(names)}, merges=[], model_max_length=12
    )


def tiny_t5(size: int) -> torch.nn.Module:
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=40, d_model=size, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    ).eval()


def t5_tokenizer() -> transformers.T5Tokenizer:
    """Build a tokenizer with one token per letter."""
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *LETTERS]
    return transformers.T5Tokenizer(vocab=[(piece, -float(rank)) for rank, piece in enumerate(pieces)], extra_ids=0)


def _shake(network: torch.nn.Module) -> None:
    """Replace parameters that are initialized as zeros by random numbers, so that every block has an effect."""
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)


SAVES = {
    "dit": save_dit,
    "stable-diffusion": save_stable_diffusion,
    "inpainting": save_inpainting,
    "stable-diffusion-xl": save_stable_diffusion_xl,
    "pixart": save_pixart,
    "pixart-sigma": save_pixart_sigma,
    "pixart-large": save_pixart_large,
    "flux": save_flux,
    "flux-distilled": save_flux_distilled,
}
PROMPTS: dict[str, tuple[str | int, ...]] = {"dit": (3, 7, 1, 999, 0)}
TEXTS = ("a cat", "two dogs at a lake", "", "q", "a very long text that is cut somewhere")


def prompts(family: str) -> tuple[str | int, ...]:
    """Return five different prompts."""
    return PROMPTS.get(family, TEXTS)


SIZES = {"dit": (8, 8)}


def has_guided_rows(family: str) -> bool:
    return not family.startswith("flux")
