"""Tiny random checkpoints that read images, as transformers saves them, with tokenizer, chat template and image
processor, and small images.

A tile is 32 pixels wide and high, and becomes 16 rows of the model, or 64 in models that do not combine patches.
"""

from __future__ import annotations

import io
import math
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["IMAGE_TOKEN", "KINDS", "TILE_TOKENS", "VOCAB_SIZE", "image_file", "processor", "write_checkpoint"]

KINDS = (
    "idefics3",
    "smolvlm",
    "gemma3",
    "gemma3_crops",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "internvl",
    "qianfan_ocr",
    "aya_vision",
    "cohere2_vision",
    "mistral3",
    "pixtral",
    "lighton_ocr",
)
VOCAB_SIZE = 320
IMAGE_TOKEN = "<image>"
TILE_TOKENS = 16
_SPECIAL = (
    "<unk>",
    "<|im_start|>",
    "<end_of_utterance>",
    IMAGE_TOKEN,
    "<fake_token_around_image>",
    "<global-img>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<video>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|image_pad|>",
    "<|IMG_PATCH|>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_LINE_BREAK|>",
)
# Signs of images in chat templates, and tokens of rows. Others have IMAGE_TOKEN.
_SIGNS = {
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
    "lighton_ocr": "<|image_pad|>",
    "cohere2_vision": "<|IMG_PATCH|>",
}
_ROW_TOKENS = {**_SIGNS, "gemma3": "<image_soft_token>", "aya_vision": "<|IMG_PATCH|>", "qianfan_ocr": "<IMG_CONTEXT>"}
# Classes of transformers. Others have the name of their kind.
_CLASSES = {"pixtral": "llava"}
_CANVASES = [[32 * rows, 32 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
END_TOKEN_ID = _SPECIAL.index("<end_of_utterance>")
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_TEXTS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": END_TOKEN_ID,
    "pad_token_id": 0,
}
_TEXTS_OF: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llava_onevision": {"model_type": "qwen2"},
    "internvl": {"model_type": "qwen2"},
    "qianfan_ocr": {"model_type": "qwen3", "head_dim": 16},
    # transformers' classes with images ignore logit_scale, which its class for texts multiplies logits by.
    "aya_vision": {"model_type": "cohere2", "logit_scale": 1.0, "rms_norm_eps": None, "sliding_window": 50},
    "cohere2_vision": {"model_type": "cohere2", "logit_scale": 1.0, "rms_norm_eps": None},
    "mistral3": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "pixtral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "lighton_ocr": {"model_type": "qwen3", "head_dim": 16},
}
_EYES_OF: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "clip_vision_model", "num_hidden_layers": 3},
    "llava_next": {"model_type": "clip_vision_model", "num_hidden_layers": 3},
    "llava_next_video": {"model_type": "clip_vision_model", "num_hidden_layers": 3},
    "llava_onevision": {"model_type": "siglip_vision_model"},
    "internvl": {"model_type": "internvl_vision"},
    "qianfan_ocr": {"model_type": "qianfan_ocr_vision"},
    "aya_vision": {"model_type": "siglip_vision_model", "vision_use_head": False},
    "cohere2_vision": {"model_type": "siglip_vision_model"},
    "mistral3": {"model_type": "pixtral", "hidden_act": "silu", "rope_parameters": {"rope_theta": 100.0}},
    "pixtral": {"model_type": "pixtral"},
    "lighton_ocr": {"model_type": "pixtral", "hidden_act": "silu"},
}
_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}


def write_checkpoint(
    directory: Path, kind: str = "smolvlm", *, dtype: str = "float32", longest_edge: int = 64, image_size: int = 32
) -> None:
    """Save a checkpoint.

    Args:
        longest_edge: longest edge of an image before it is divided into tiles.
        image_size: image size of the position embeddings, 32 or another one.
    """
    import torch
    import transformers

    whole_kind, kind = kind, kind.removesuffix("_crops")
    fields: dict[str, Any] = {
        "idefics3": {"scale_factor": 2},
        "smolvlm": {"scale_factor": 2},
        "gemma3": {
            "mm_tokens_per_image": TILE_TOKENS,
            "boi_token_index": _SPECIAL.index("<start_of_image>"),
            "eoi_token_index": _SPECIAL.index("<end_of_image>"),
        },
        "llava": {"image_seq_length": 64},
        "llava_next": {"image_grid_pinpoints": _CANVASES},
        "llava_next_video": {
            "image_grid_pinpoints": _CANVASES,
            "video_token_index": _SPECIAL.index("<video>"),
        },
        "llava_onevision": {
            "image_grid_pinpoints": _CANVASES,
            "vision_aspect_ratio": "anyres_max_2",
            "video_token_index": _SPECIAL.index("<video>"),
        },
        "internvl": {"image_seq_length": TILE_TOKENS},
        "qianfan_ocr": {"image_seq_length": TILE_TOKENS},
        "aya_vision": {"alignment_intermediate_size": 36, "adapter_layer_norm_eps": 1e-3},
        "cohere2_vision": {"alignment_intermediate_size": 36},
        "mistral3": {"spatial_merge_size": 2},
        "pixtral": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "lighton_ocr": {"spatial_merge_size": 2},
    }[kind]
    row_token = _SPECIAL.index(_ROW_TOKENS.get(kind, IMAGE_TOKEN))
    class_name = _CLASSES.get(kind, kind)
    config = transformers.AutoConfig.for_model(
        class_name,
        text_config={**_TEXTS, **_TEXTS_OF.get(kind, {})},
        vision_config={**_EYES, "image_size": image_size, **_EYES_OF.get(kind, {})},
        **{
            "image_token_index"
            if class_name
            in ("gemma3", "aya_vision", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3")
            else "image_token_id": row_token
        },
        tie_word_embeddings=kind in ("aya_vision", "cohere2_vision"),
        pad_token_id=0,
        **fields,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(20_260_101)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of the image part are large, so that a forgotten image shows up.
            parameter.normal_(
                0.0,
                0.3 if any(part in name for part in ("vision", "connector", "projector")) else 0.1,
                generator=generator,
            )
            if "norm" in name:
                parameter.add_(1.0)
    model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=END_TOKEN_ID)
    model.save_pretrained(directory)
    if kind == "qianfan_ocr":
        _rename_language_model(directory / "model.safetensors")
    prepares = processor(whole_kind, longest_edge=longest_edge)
    if kind in (
        "llava_next_video",
        "llava_onevision",
        "internvl",
        "qianfan_ocr",
        "cohere2_vision",
        "mistral3",
        "pixtral",
        "lighton_ocr",
    ):  # Without a processor of videos, transformers saves only the parts.
        prepares.image_processor.save_pretrained(directory)
        prepares.tokenizer.save_pretrained(directory)
    else:
        prepares.save_pretrained(directory)


def _rename_language_model(file: Path) -> None:
    """Give the language model's tensors the names of published files. transformers 5.24 saves other names."""
    from safetensors.torch import load_file, save_file

    saved, published = "language_model.model.encoder.layers.", "language_model.model.layers."
    tensors = load_file(file)
    save_file({name.replace(saved, published): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})


def processor(kind: str = "smolvlm", *, longest_edge: int = 64, splits: bool = True) -> Any:
    """Return transformers' processor."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.internvl.processing_internvl import InternVLProcessor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    named = {}
    if kind.startswith("gemma3"):
        named = {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        }
    if kind == "internvl":
        named = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    crops = kind.endswith("_crops")
    kind = kind.removesuffix("_crops")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        unk_token="<unk>",
        eos_token="<end_of_utterance>",
        pad_token="<unk>",
        extra_special_tokens=named,
    )
    template = CHAT_TEMPLATE.replace(IMAGE_TOKEN, _SIGNS.get(kind, IMAGE_TOKEN))
    tokenizer.chat_template = template
    if kind == "gemma3":
        cuts = {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 16,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }
        distorted = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, **(cuts if crops else {}))
        whole = Gemma3Processor(distorted, tokenizer, chat_template=template, image_seq_length=TILE_TOKENS)
        if crops:  # transformers' processor does not read these fields of its image processor.
            whole.images_kwargs = {**whole.images_kwargs, **cuts}
        return whole
    square = {"height": 32, "width": 32}
    if kind in ("llava", "llava_next", "llava_next_video"):
        sizes = {"size": {"shortest_edge": 32}, "crop_size": square}
        is_next = kind != "llava"
        return (LlavaNextProcessor if is_next else LlavaProcessor)(
            LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=_CANVASES)
            if is_next
            else CLIPImageProcessorPil(**sizes),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
    if kind == "llava_onevision":
        anyres = LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=_CANVASES)
        return _without_videos(LlavaOnevisionProcessor)(
            anyres,
            tokenizer,
            num_image_tokens=64,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_2",
            chat_template=template,
        )
    if kind == "internvl":
        tiles = GotOcr2ImageProcessorPil(size=square, max_patches=6)
        return _without_videos(InternVLProcessor)(
            tiles, tokenizer, image_seq_length=TILE_TOKENS, chat_template=template
        )
    if kind == "qianfan_ocr":
        return PlainProcessor(
            GotOcr2ImageProcessorPil(size=square, max_patches=6, crop_to_patches=True),
            tokenizer,
            IMAGE_TOKEN,
            lambda prepared, index: f"<img>{'<IMG_CONTEXT>' * TILE_TOKENS * int(prepared['num_patches'][index])}</img>",
        )
    if kind == "aya_vision":
        cropping = GotOcr2ImageProcessorPil(size=square, max_patches=6)
        return AyaVisionProcessor(
            cropping, tokenizer, patch_size=4, img_size=32, downsample_factor=2, chat_template=template
        )
    if kind == "cohere2_vision":
        tile = _SIGNS[kind] * TILE_TOKENS + "<|IMG_LINE_BREAK|>"
        return PlainProcessor(
            _cohere2_image_processor()(size=square, max_patches=6, patch_size=4, crop_to_patches=True),
            tokenizer,
            _SIGNS[kind],
            lambda prepared, index: f"<|START_OF_IMG|>{tile * int(prepared['num_patches'][index])}<|END_OF_IMG|>",
        )
    if kind == "lighton_ocr":
        # An odd number of patches: transformers' model drops the last one.
        uneven = PixtralImageProcessorPil(size={"longest_edge": longest_edge}, patch_size=4)
        return PlainProcessor(
            uneven,
            tokenizer,
            _SIGNS[kind],
            lambda prepared, index: _SIGNS[kind] * math.prod(side // 8 for side in prepared["image_sizes"][index]),
        )
    if kind in ("mistral3", "pixtral"):
        square_size = 8 if kind == "mistral3" else 4
        whole = PixtralImageProcessorPil(size={"longest_edge": longest_edge}, patch_size=square_size)

        def text(prepared: dict[str, Any], index: int) -> str:
            height, width = prepared["image_sizes"][index]
            lines = ["[IMG]" * (width // square_size)] * (height // square_size)
            return "[IMG_BREAK]".join(lines) + "[IMG_END]"

        return PlainProcessor(whole, tokenizer, "[IMG]", text)
    images = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}[kind](
        size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 32}, do_image_splitting=splits
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=TILE_TOKENS, chat_template=template)


class PlainProcessor:
    """Processor of a family whose own class in transformers needs torchvision.

    Args:
        image_processor: transformers' processor of images.
        tokenizer: tokenizer with a chat template.
        sign: text of an image in the chat template.
        text: returns the text that replaces a sign, from the result of `image_processor` and the image's index.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, sign: str, text: Callable[[Any, int], str]) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self._sign = sign
        self._text = text

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def __call__(self, images: list[list[Any]], text: list[str], return_tensors: str) -> dict[str, Any]:
        prepared = dict(self.image_processor(images[0], return_tensors=return_tensors))
        first, *others = text[0].split(self._sign)
        whole = first + "".join(self._text(prepared, index) + rest for index, rest in enumerate(others))
        ids = self.tokenizer([whole], add_special_tokens=False, return_tensors=return_tensors)["input_ids"]
        return {**prepared, "input_ids": ids}


def _cohere2_image_processor() -> Any:
    """Return the class of processors of Command A Vision. That of transformers needs torchvision."""
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2

    class Cohere2ImageProcessor(got_ocr2.GotOcr2ImageProcessorPil):
        def crop_image_to_patches(self, image: Any, min_patches: int, max_patches: int, **options: Any) -> Any:
            with unittest.mock.patch.object(got_ocr2, "get_optimal_tiled_canvas", cohere2_canvas):
                return super().crop_image_to_patches(image, min_patches, max_patches, **options)

    return Cohere2ImageProcessor


def cohere2_canvas(
    image_size: tuple[int, int], tile_size: tuple[int, int], min_tiles: int, max_tiles: int
) -> tuple[int, int]:
    """Return the columns and rows of tiles, as in transformers.models.cohere2_vision.modular_cohere2_vision."""
    sides = range(1, max_tiles + 1)
    grids = sorted(
        ((columns, rows) for columns in sides for rows in sides if columns * rows <= max_tiles), key=math.prod
    )
    scale = np.min(np.array(grids) * tile_size[0] / np.stack(image_size[::-1]), axis=-1)
    best = np.argmax(scale) if np.all(scale < 1) else np.argmin(np.where(scale < 1.0, 10e9, scale))
    return grids[int(best)]


def _without_videos(whole: Any) -> Any:
    """Return a class of processors whose processor of videos is None, because that one needs torchvision."""

    class WithoutVideos(whole):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    return WithoutVideos


def image_file(width: int = 50, height: int = 40, *, seed: int = 0, format: str = "PNG", mode: str = "RGB") -> bytes:
    """Return noise over a gradient, so that every tile differs from every other."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    slope = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
    pixels = np.clip(slope * [1.0, 0.6, 0.3] + rng.integers(0, 60, (height, width, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format)
    return file.getvalue()


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    assert len(tokens) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return tokenizer
