"""Tiny random checkpoints of Qwen's vision models, as transformers saves them, with tokenizer, chat template and image
processor.

Squares of two times two patches are one row of the language model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["KINDS", "chat_template", "image_token", "image_processor", "tokenizer", "write_checkpoint"]

VOCAB_SIZE = 320
SPECIAL = (
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|image|>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_PAD|>",
)
END_TOKEN_ID = SPECIAL.index("<|im_end|>")
PIXELS_MIN, PIXELS_MAX = 64, 6_000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": END_TOKEN_ID,
    "pad_token_id": 0,
}
_EYES: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_WINDOWS: dict[str, Any] = {
    **_EYES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "window_size": 24,
    "fullatt_block_indexes": [1],
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Windows of 3 x 3 rows, so that most images have windows of four sizes.
    "qwen2_5_vl": ({}, {**_WINDOWS, "out_hidden_size": 64}),
    "exaone4_5": (
        {"model_type": "exaone4", "sliding_window": 20, "rope_parameters": {"rope_theta": 10_000.0}},
        {**_WINDOWS, "out_hidden_size": 64, "num_heads": 4, "num_key_value_heads": 2},
    ),
    "hyperclovax_vision_v2": (
        {"model_type": "hyperclovax", "logits_scaling": 0.5, "rope_parameters": {"rope_theta": 10_000.0}},
        {**_WINDOWS, "model_type": "qwen2_5_vl_vision", "out_hidden_size": 40},
    ),
    "qwen2_vl": ({}, {**_EYES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "glm4v": (
        {},
        {
            **_EYES,
            "hidden_size": 32,
            "intermediate_size": 80,
            "out_hidden_size": 64,
            "image_size": 24,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "glm4v_moe": (
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
        {**_EYES, "hidden_size": 32, "intermediate_size": 80, "out_hidden_size": 64, "image_size": 24},
    ),
    "glm46v": (
        {"model_type": "glm4v_text"},
        {
            **_EYES,
            "model_type": "glm4v_vision",
            "hidden_size": 32,
            "intermediate_size": 80,
            "out_hidden_size": 64,
            "image_size": 24,
        },
    ),
    "paddleocr_vl": (
        {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False},
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 24,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "layer_norm_eps": 1e-3,
        },
    ),
    "glm_ocr": ({}, {**_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}),
    "qwen3_5": (
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
            },
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {
            **_EYES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 36,
        },
    ),
    "qwen3_vl": (
        {"head_dim": 16},
        {
            **_EYES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
    ),
}


def write_checkpoint(directory: Path, kind: str, *, dtype: str = "float32") -> None:
    """Save a checkpoint. kind: a key of KINDS."""
    import torch
    import transformers

    texts, eyes = KINDS[kind]
    config = transformers.AutoConfig.for_model(
        kind,
        text_config={**_TEXTS, **texts},
        vision_config=eyes,
        image_token_id=SPECIAL.index(image_token(kind)),
        video_token_id=SPECIAL.index("<|video_pad|>"),
        vision_start_token_id=SPECIAL.index("<|vision_start|>"),
        vision_end_token_id=SPECIAL.index("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(20_260_102)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of the image part are large, so that a forgotten image shows up.
            parameter.normal_(0.0, 0.3 if "visual" in name or "vision_model" in name else 0.1, generator=generator)
            if "norm" in name or "ln_q" in name:
                parameter.add_(1.0)
    model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(eos_token_id=END_TOKEN_ID)
    model.save_pretrained(directory)
    made = tokenizer()
    made.chat_template = chat_template(kind)
    made.save_pretrained(directory)
    image_processor(kind).save_pretrained(directory)


def image_token(kind: str) -> str:
    """Return the token of an image's rows. kind: a key of KINDS."""
    others = {"paddleocr_vl": "<|IMAGE_PLACEHOLDER|>", "hyperclovax_vision_v2": "<|IMAGE_PAD|>"}
    if kind in others:
        return others[kind]
    return "<|image|>" if kind.startswith("glm") else "<|image_pad|>"


def chat_template(kind: str) -> str:
    """Return the chat template. kind: a key of KINDS."""
    return CHAT_TEMPLATE.replace("<|image_pad|>", image_token(kind))


def tokenizer() -> Any:
    """Return transformers' tokenizer, without a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<unk>")


def image_processor(kind: str) -> Any:
    """Return transformers' image processor. kind: a key of KINDS."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if kind == "paddleocr_vl":
        return PaddleOCRVLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=PIXELS_MIN, max_pixels=PIXELS_MAX
        )
    if kind.startswith("glm"):
        size = {"shortest_edge": 2 * PIXELS_MIN, "longest_edge": 2 * PIXELS_MAX}
        return Glm4vImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=PIXELS_MIN, max_pixels=PIXELS_MAX
    )
