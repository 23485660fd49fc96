"""Tiny random checkpoints in real formats: directories as transformers saves them, and GGUF files as llama.cpp's
converter writes them.

Weights have a fixed seed. Biases and norms are random, too, so that a forgotten one shows up. Each checkpoint has a
byte-level tokenizer and a chat template.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

__all__ = [
    "FAMILY_KINDS",
    "GGUF_QUANT_TYPES",
    "KINDS",
    "VOCAB_SIZE",
    "write_checkpoint",
    "write_family_gguf",
    "write_gguf",
]

VOCAB_SIZE = 320
BOS_TOKEN_ID, EOS_TOKEN_ID, IM_START_ID, IM_END_ID = 1, 2, 3, 4
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "t h",
    "th e",
    "i n",
    "a n",
    "e r",
    "r e",
    "o n",
    "Ġ the",
    "Ġ a",
    "i t",
    "o u",
    "in g",
    "an d",
    "Ġ and",
    "l l",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.1, 1.9, 3.0, 5.0, 9.0, 14.0],
    "partial_rotary_factor": 0.75,
}
_MINICPM_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 1.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0],
    "original_max_position_embeddings": 512,
}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MIXED = ["sliding_attention", "full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-biased-64": (
        "llama",
        {
            "attention_bias": True,
            "hidden_size": 96,
            "head_dim": 64,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "llama3-rope": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    # K quants need rows of 256 or 512.
    "llama-wide": ("llama", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}),
    # Each size is a multiple of 16, but not of 32.
    "llama-padded": (
        "llama",
        {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN_ROPE}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
# one or two kinds of each further family; write_gguf does not support them
_MAMBA_1 = {"state_size": 16, "conv_kernel": 3, "layer_norm_epsilon": 1e-4, "pad_token_id": 0}
_ZAMBA2 = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "n_mamba_heads": 8,
    "adapter_rank": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_JAMBA = {
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 16,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 3,
    "expert_layer_offset": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
# transformers writes the weights of a convolution in three equal parts.
_KIMI_LINEAR = {
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_head_dim": 16,
    "linear_num_heads": 6,
}
_OLMO_HYBRID = {
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
_NEMOTRON_H = {
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-4,
}
FAMILY_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral": ("ministral", {"head_dim": 32, "sliding_window": 8, "layer_types": _MIXED}),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "laurel_rank": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 300,
            "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.9, 0.0],
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 32,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-inputs": (
        "gemma4_text",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            "head_dim": 32,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": _MIXED,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "hunyuan-dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "moe_topk": [2, 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {
            "head_dim": 64,
            "global_head_dim": 32,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": _MIXED,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000.0},
                "sliding_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 10_000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
            },
        },
    ),
    "gemma3n-biased": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
            "intermediate_size": [96, 64, 96, 32, 96],
            "laurel_rank": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3-part": (
        "phi3",
        {
            "pad_token_id": 0,
            "head_dim": 32,
            "hidden_size": 128,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        },
    ),
    # The context length is that before scaling. test_parity.py changes it.
    "phi3-longrope": (
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": 512, "rope_parameters": _LONGROPE},
    ),
    "olmo": ("olmo", {"attention_bias": True}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "attn_config": {"clip_qkv": 0.4, "kv_n_heads": 2, "rope_theta": 500_000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 6, "moe_top_k": 3},
        },
    ),
    "mimo-v2-flash": (
        "mimo_v2_flash",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "v_head_dim": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.25},
            },
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "phimoe": (
        "phimoe",
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "sliding_window": 8,
            "rope_parameters": {**_MINICPM_ROPE, "long_factor": [4.0] * 8, "short_mscale": 1.2, "long_mscale": 1.3},
        },
    ),
    "longcat-flash": (
        "longcat_flash",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 5,
            "zero_expert_num": 3,
            "moe_topk": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "v_head_dim": 32,
            "rms_norm_eps": 1e-3,
            "routed_scaling_factor": 3.0,
            "rope_parameters": _YARN_ROPE,
        },
    ),
    "laguna": (
        "laguna",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_key_value_heads": 2,
            "num_attention_heads_per_layer": [4, 6, 4],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 1.5,
            "moe_router_logit_softcapping": 0.5,
            "rope_parameters": {
                "full_attention": {**_YARN_ROPE, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    "laguna-elements": (
        "laguna",
        {
            "gating": "per-element",
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "axk1": (
        "axk1",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": {**_YARN_ROPE, "mscale_all_dim": 0.7, "mscale": 0.7},
        },
    ),
    "kimi-linear": ("kimi_linear", _KIMI_LINEAR),
    "kimi-linear-lora": (
        "kimi_linear",
        {
            **_KIMI_LINEAR,
            "q_lora_rank": 48,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.3}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {"full_attention": _YARN_ROPE, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "glm": ("glm", {"head_dim": 32, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 32, "pad_token_id": 0}),
    "cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere-normed": (
        "cohere",
        {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
    ),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.25, "tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window": 8},
    ),
    "exaone4": (
        "exaone4",
        {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "exaone": ("exaone", {"rope_parameters": _LLAMA3_ROPE}),
    "internlm3": ("internlm3", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32, "use_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "helium": ("helium", {"head_dim": 16, "attention_bias": True}),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 0.125,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "cwm": ("cwm", {"head_dim": 32, "sliding_window": 8, "rope_parameters": _LLAMA3_ROPE}),
    "gpt-neox": ("gpt_neox", {"hidden_act": "gelu", "layer_norm_eps": 1e-3}),
    "gpt-neox-serial": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 20_000.0,
                "factor": 2.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "phi": ("phi", {"hidden_size": 128, "num_key_value_heads": 2}),
    "phi-normed": ("phi", {"qk_layernorm": True, "hidden_act": "gelu", "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 8, "norm_epsilon": 1e-3}),
    "stablelm": (
        "stablelm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "layer_norm_eps": 1e-3}),
    "stablelm-normed": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("nemotron", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-3}),
    "jais2": ("jais2", {"head_dim": 32, "layer_norm_eps": 1e-3}),
    "arcee": ("arcee", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE}),
    "apertus": ("apertus", {"head_dim": 32, "attention_bias": True, "rope_parameters": _LLAMA3_ROPE}),
    "gpt2": ("gpt2", {"n_inner": 96, "layer_norm_epsilon": 1e-3}),
    "gpt2-scaled": (
        "gpt2",
        {
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "gpt-bigcode": ("gpt_bigcode", {"n_inner": 96, "layer_norm_epsilon": 1e-3}),
    "gpt-bigcode-heads": (
        "gpt_bigcode",
        {
            "multi_query": False,
            "scale_attn_weights": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1}),
    "opt-bare": (
        "opt",
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "pad_token_id": 1,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "gptj": ("gptj", {"n_inner": 96, "rotary_dim": 8, "layer_norm_epsilon": 1e-3}),
    "codegen": ("codegen", {"rotary_dim": 8, "activation_function": "gelu", "tie_word_embeddings": True}),
    "falcon": ("falcon", {"layer_norm_epsilon": 1e-3}),
    "falcon-serial": (
        "falcon",
        {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "activation": "relu",
            "ffn_hidden_size": 96,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False, "bias": True, "parallel_attn": False}),
    "bloom": ("bloom", {"layer_norm_epsilon": 1e-3}),
    "bloom-odd": ("bloom", {"num_attention_heads": 6, "hidden_size": 96, "tie_word_embeddings": False}),
    "mpt": (
        "mpt",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "layer_norm_epsilon": 1e-3,
            "attn_config": {"softmax_scale": 0.3, "clip_qkv": 0.4},
        },
    ),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-grouped-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "persimmon": ("persimmon", {"layer_norm_eps": 1e-3}),
    "gemma3-images": (
        "gemma3",
        {
            "text_config": {
                "head_dim": 32,
                "tie_word_embeddings": True,
                "sliding_window": 8,
                "query_pre_attn_scalar": 24,
                "layer_types": _MIXED,
            },
            "vision_config": _EYES,
            "mm_tokens_per_image": 4,
            "image_token_index": VOCAB_SIZE - 1,
        },
    ),
    "mistral3-images": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 32},
            "vision_config": {**_EYES, "model_type": "pixtral", "head_dim": 16},
            "image_token_index": VOCAB_SIZE - 1,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 20,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite-moe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.75,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
_INDEXER = {"index_topk": 10, "index_n_heads": 16, "index_head_dim": 32}
_DEEPSEEK_YARN = {**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}
FAMILY_KINDS |= {
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": 48,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_LATENT,
            **_ROUTED,
            "num_hidden_layers": 3,
            "q_lora_rank": 48,
            "rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": (
        "deepseek_v3",
        {**_LATENT, **_ROUTED, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {**_LATENT, **_ROUTED, "q_lora_rank": 48, "first_k_dense_replace": None, "pad_token_id": 0},
    ),
    # The indexer selects few tokens of the contexts that tests have.
    "deepseek-v3.2": (
        "deepseek_v32",
        {
            **_LATENT,
            **_ROUTED,
            **_INDEXER,
            "q_lora_rank": 48,
            "rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm-moe-dsa": (
        "glm_moe_dsa",
        {**_LATENT, **_ROUTED, **_INDEXER, "q_lora_rank": 48, "indexer_types": ["full", "shared"]},
    ),
    "minicpm3": (
        "minicpm3",
        {**_LATENT, "q_lora_rank": 48, "v_head_dim": 16, "rope_parameters": _MINICPM_ROPE},
    ),
    "glm4-moe": (
        "glm4_moe",
        {**_ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "pad_token_id": 0},
    ),
    "dots1": ("dots1", {**_ROUTED, "head_dim": 32, "sliding_window": None, "num_hidden_layers": 3}),
}
FAMILY_KINDS["gpt-oss"] = (
    "gpt_oss",
    {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {**_YARN_ROPE, "truncate": False},
    },
)
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
_DELTA: dict[str, Any] = {
    "layer_types": None,
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_FALCON_H1: dict[str, Any] = {**_MAMBA, "mamba_d_ssm": 192, "head_dim": 32}
_FALCON_H1_MULTIPLIERS: dict[str, Any] = {
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.9, 0.7, 0.5, 1.5, 0.6],
    "mlp_multipliers": [0.8, 0.4],
}
FAMILY_KINDS |= {
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 32},
    ),
    "lfm2-biased": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "granite-hybrid-moe": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    # These are llama.cpp's defaults.
    "granite-hybrid-unturned-moe": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.1,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            **_FALCON_H1_MULTIPLIERS,
        },
    ),
    "falcon-h1-biased": (
        "falcon_h1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "embedding_multiplier": 5.5,
            "lm_head_multiplier": 0.25,
            **_FALCON_H1_MULTIPLIERS,
        },
    ),
    "falcon-h1-unnormed": ("falcon_h1", {**_FALCON_H1, "mamba_conv_bias": False, "tie_word_embeddings": True}),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 6,
            "head_dim": 32,
            "expand": 3,
            "n_groups": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "num_hidden_layers": 3,
            "layer_norm_epsilon": 1e-5,
            "chunk_size": 8,
            "pad_token_id": 0,
        },
    ),
    "mamba": ("mamba", {**_MAMBA_1, "time_step_rank": 16, "num_hidden_layers": 3}),
    "mamba-biased": (
        "mamba",
        {
            **_MAMBA_1,
            "hidden_size": 256,
            "intermediate_size": 256,
            "expand": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-mamba": ("falcon_mamba", {**_MAMBA_1, "time_step_rank": 32, "mixer_rms_eps": 1e-5}),
    "jamba": ("jamba", {**_JAMBA, "num_experts": 4, "num_hidden_layers": 4}),
    "jamba-dense": (
        "jamba",
        {**_JAMBA, "num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3},
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp", "mlp"],
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        {**_OLMO_HYBRID, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "olmo-hybrid-unturned": (
        "olmo_hybrid",
        {
            **_OLMO_HYBRID,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "nemotron-h-steps": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp"], "time_step_min": 0.3},
    ),
    "nemotron-h-moe": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "ministral3": ("ministral3", {"head_dim": 32, "rope_parameters": _MINISTRAL3_ROPE}),
    "ministral3-images": (
        "mistral3",
        {
            "text_config": {"model_type": "ministral3", "head_dim": 32, "rope_parameters": _MINISTRAL3_ROPE},
            "vision_config": {**_EYES, "model_type": "pixtral", "head_dim": 16},
            "image_token_index": VOCAB_SIZE - 1,
            "tie_word_embeddings": False,
        },
    ),
    "step3p5": (
        "step3p7",
        {
            "text_config": {
                "num_hidden_layers": 4,
                "head_dim": 32,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "sliding_window": 8,
                "num_sliding_attention_heads": 6,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "share_expert_dim": 32,
                "moe_router_scaling_factor": 2.5,
                "query_pre_attn_scalar": 24,
                "swiglu_limits": [0.0, 0.0, 0.05, 0.0],
                "swiglu_limits_shared": [0.1, 0.0, 0.05, 0.0],
                "rope_parameters": {
                    "full_attention": {**_LLAMA3_ROPE, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
                },
            },
            "vision_config": _EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "minimax": (
        "minimax",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "head_dim": 32,
            "num_local_experts": 4,
            "block_size": 8,
            "linear_attn_alpha_factor": 3.0,
            "linear_attn_beta_factor": 0.5,
            "full_attn_alpha_factor": 2.0,
            "full_attn_beta_factor": 1.5,
            "mlp_alpha_factor": 0.75,
            "mlp_beta_factor": 4.0,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "minimax-windowed": ("minimax", {"num_local_experts": 4, "num_hidden_layers": 3, "sliding_window": 8}),
    "minimax-m2": (
        "minimax_m2",
        {
            "head_dim": 32,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3-next": ("qwen3_next", {**_DELTA, **_QWEN_EXPERTS, "num_hidden_layers": 3}),
    "qwen3-next-biased": (
        "qwen3_next",
        {**_DELTA, **_QWEN_EXPERTS, "linear_num_key_heads": 16, "attention_bias": True, "mlp_only_layers": [1]},
    ),
    "qwen3.5": ("qwen3_5_text", {**_DELTA, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_DELTA, **_QWEN_EXPERTS, "linear_num_key_heads": 2}),
    "zamba2": ("zamba2", _ZAMBA2),
    "zamba2-adapted": (
        "zamba2",
        {
            **_ZAMBA2,
            "num_hidden_layers": 7,
            "layers_block_type": [
                "hybrid",
                "linear_attention",
                "hybrid",
                "hybrid",
                "linear_attention",
                "hybrid",
                "hybrid",
            ],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "num_key_value_heads": 4,
            "use_mem_rope": True,
            "add_bias_linear": True,
            "mamba_ngroups": 2,
            "time_step_min": 0.5,
            "rms_norm_eps": 1e-3,
        },
    ),
    "bamba": ("bamba", {**_MAMBA, "head_dim": 32, "attn_layer_indices": [1], "num_hidden_layers": 3}),
}
FAMILY_KINDS |= {
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
        },
    ),
    "ernie4_5-moe-plain": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "tie_word_embeddings": True,
        },
    ),
    "exaone-moe": (
        "exaone_moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "exaone-moe-mixed": (
        "exaone_moe",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "cohere2-moe": (
        "cohere2_moe",
        {
            "head_dim": 32,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
            "num_hidden_layers": 5,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 112,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
        },
    ),
    "cohere2-moe-sigmoid": (
        "cohere2_moe",
        {
            "head_dim": 16,
            "rms_norm_eps": None,
            "layer_norm_eps": 1e-4,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "prefix_dense_sliding_window_pattern": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "norm_topk_prob": False,
        },
    ),
}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
_READ_IMAGES = (
    *("gemma3", "glm4v", "glm4v_moe", "glm_ocr", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
_QWEN_EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_QWEN3_EYES = {**_QWEN_EYES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
FAMILY_KINDS |= {
    "glm4v": (
        "glm4v",
        {
            "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
            "vision_config": _QWEN_EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "glm4v-moe": (
        "glm4v_moe",
        {
            "text_config": {
                **_ROUTED,
                "head_dim": 32,
                "pad_token_id": 0,
                "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
            },
            "vision_config": _QWEN_EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "glm-ocr": (
        "glm_ocr",
        {
            "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
            "vision_config": _QWEN_EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "qwen2-vl": (
        "qwen2_vl",
        {
            "text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
            "vision_config": {**_QWEN_EYES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "text_config": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
            "vision_config": _QWEN_EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "text_config": {"head_dim": 32, "attention_bias": True, "rope_parameters": _MROPE},
            "vision_config": _QWEN3_EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                "head_dim": 32,
                "num_hidden_layers": 3,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 48,
                "mlp_only_layers": [1],
                "rope_parameters": _MROPE,
            },
            "vision_config": _QWEN3_EYES,
            "image_token_id": VOCAB_SIZE - 1,
        },
    ),
    "solar-open": (
        "solar_open",
        {
            **_ROUTED,
            "first_k_dense_replace": 0,
            "head_dim": 32,
            "attention_bias": True,
        },
    ),
    "flex-olmo": (
        "flex_olmo",
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "pad_token_id": 0},
    ),
    "afmoe": (
        "afmoe",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "num_dense_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "route_scale": 1.75,
            "sliding_window": 8,
            "global_attn_every_n_layers": 3,
            "mup_enabled": True,
        },
    ),
    "granite-moe-shared": (
        "granitemoeshared",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "hy-v3": (
        "hy_v3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "mellum": (
        "mellum",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "full_attention": _YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
}
_LLAMA4 = {
    "head_dim": 32,
    "num_hidden_layers": 5,
    "intermediate_size_mlp": 112,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
}
FAMILY_KINDS |= {
    "llama4": (
        "llama4_text",
        {**_LLAMA4, "attention_chunk_size": 20, "floor_scale": 8, "attn_scale": 0.5, "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama4-images": (
        "llama4",
        {
            "text_config": {**_LLAMA4, "attention_chunk_size": 20},
            "vision_config": {
                **_EYES,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": VOCAB_SIZE - 1,
        },
    ),
    # llama.cpp assumes this value.
    "llama4-long": ("llama4_text", {**_LLAMA4, "num_experts_per_tok": 1, "use_qk_norm": True}),
}
# transformers computes these as Llamas and names that class. The authors' configs have their own class names.
_PUBLISHED_CLASSES = {"exaone": "ExaoneForCausalLM", "internlm3": "InternLM3ForCausalLM"}
GGUF_QUANT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
GGUF_QUANT_TYPES += ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")


def write_checkpoint(
    directory: Path,
    kind: str,
    *,
    dtype: str = "float32",
    sharded: bool = False,
    layers: int | None = None,
    fields: dict[str, Any] | None = None,
) -> None:
    """Save a checkpoint of one of the kinds, its tokenizer and generation settings with transformers.

    Args:
        layers: number of layers, instead of the kind's own number.
        fields: fields of the config that differ from the kind's. config.json gets them unchanged, null included.
    """
    import torch
    import transformers

    model_type, changes = {**KINDS, **FAMILY_KINDS}[kind]
    if layers is not None:
        changes = {**changes, "num_hidden_layers": layers}
    if "text_config" in changes:
        all_fields = {**changes, "text_config": {**_SMALL, **changes["text_config"]}}
    else:
        all_fields = {**_SMALL, **changes, **(fields or {})}
    config = transformers.AutoConfig.for_model(model_type, **all_fields)
    auto = transformers.AutoModelForImageTextToText if "text_config" in changes else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(20_260_101)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
            if name.endswith(("gate_up_proj_bias", "sinks")):
                # The weights are so large that some numbers are clamped, and that some heads attend sharply.
                parameter.mul_(40.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.normal_(0.9, 0.1, generator=generator)
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=[EOS_TOKEN_ID, IM_END_ID],
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
    )
    model.save_pretrained(directory, max_shard_size="100KB" if sharded else "1GB")
    if model_type == "qwen3_vl_moe":
        _transpose_experts(directory / "model.safetensors")
    if model_type == "olmo_hybrid":
        _rename_norms_of_attention(directory / "model.safetensors")
    if model_type == "kimi_linear":
        _rename_dense_mlps(directory / "model.safetensors")
    written = dict(fields or {})
    if model_type in _PUBLISHED_CLASSES:
        written["architectures"] = [_PUBLISHED_CLASSES[model_type]]
    if written:
        path = directory / "config.json"
        saved = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**saved, **written}), encoding="utf-8")
    if model_type in _READ_IMAGES:
        side = _EYES["image_size"]
        size = {"size": {"height": side, "width": side}} if model_type == "gemma3" else {}
        (directory / "preprocessor_config.json").write_text(json.dumps(size))
    _write_tokenizer(directory)


def _transpose_experts(path: Path) -> None:
    """Transpose the matrices of experts, as in the published checkpoints. transformers reads both layouts."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


def _rename_norms_of_attention(path: Path) -> None:
    """Give a norm the name that it has in the authors' files. transformers reads both names, but writes the other."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".post_feedforward_layernorm.weight")]:
        layer = name.removesuffix("post_feedforward_layernorm.weight")
        tensors[f"{layer}post_attention_layernorm.weight"] = tensors.pop(f"{layer}feedforward_layer_norm.weight")
    save_file(tensors, path, {"format": "pt"})


def _rename_dense_mlps(path: Path) -> None:
    """Give dense MLPs the names that they have in the authors' files. transformers reads both names."""
    from safetensors.torch import load_file, save_file

    pattern = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
    save_file({pattern.sub("mlp", name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def _vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    assert len(tokens) <= VOCAB_SIZE
    return tokens


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _vocabulary()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in MERGES],
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_gguf(checkpoint: Path, path: Path, *, quant_type: str = "F32") -> None:
    """Write a checkpoint directory as GGUF: matrices in quant_type, everything else in float32.

    A matrix whose rows are no multiple of the type's block is stored as Q8_0. As in llama.cpp's converter, Mistral
    becomes a llama, q and k of llama are permuted for rotary positions in adjacent pairs, llama3 rope scaling becomes
    the tensor rope_freqs.weight, and sliding windows are lost.
    """
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _add_tokenizer(writer)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_frequency_factors(rope, head_dim))
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            values = tensor.to(torch.float32).numpy()
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
            if architecture == "llama" and heads is not None:
                values = _permute_for_adjacent_pairs(values, config[heads])
            _add_tensor(writer, _gguf_name(name), values, quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Further metadata that llama.cpp's converter writes, by the config's fields.
_FAMILY_METADATA: dict[str, str] = {
    "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "layer_norm_eps": "add_layer_norm_eps",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "num_hidden_layers": "add_block_count",
    "max_position_embeddings": "add_context_length",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "num_local_experts": "add_expert_count",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "interleave_moe_layer_step": "add_interleave_moe_layer_step",
    "n_routed_experts": "add_expert_count",
    "n_shared_experts": "add_expert_shared_count",
    "n_group": "add_expert_group_count",
    "topk_group": "add_expert_group_used_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "routed_scaling_factor": "add_expert_weights_scale",
    "use_parallel_residual": "add_parallel_residual",
}
_USUAL_FIELDS = {
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_num_shared_experts": "n_shared_experts",
    "num_shared_experts": "n_shared_experts",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_layer_interval": "interleave_moe_layer_step",
}
_GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_ROUTED_BY_SIGMOID = ("deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "mimo_v2_flash")
_HYBRIDS = ("granitemoehybrid", "jamba", "lfm2", "lfm2_moe")
_PERMUTED_BY_THE_CONVERTER = (
    "granite",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "mixtral",
    "ministral3",
    "olmo",
    "smollm3",
)
_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "ministral3": "mistral3",
    "minimax_m2": "minimax-m2",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "gpt_bigcode": "starcoder",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
    "mimo_v2_flash": "mimo2",
    "llama4_text": "llama4",
}


def write_family_gguf(
    checkpoint: Path,
    path: Path,
    *,
    expert_type: str = "F32",
    special_tokens: tuple[str, ...] = (),
    has_latent_halves: bool = False,
    has_both_forms: bool = False,
    has_indexer_types: bool = True,
    quant_type: str = "F32",
) -> None:
    """Write a checkpoint directory of a kind of FAMILY_KINDS as GGUF, with the tensor names of the gguf package.

    Args:
        expert_type: type of experts' matrices.
        quant_type: type of other matrices.
        special_tokens: these replace the last tokens.
        has_latent_halves: the projections of latents to keys and to values are two tensors, as in the converter since
            2025.
        has_both_forms: the joint tensor of both projections is written, too.
        has_indexer_types: the metadata says which layers have an indexer, as in the converter since 2026.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    model_type = config["model_type"]
    architecture = _ARCHITECTURES.get(model_type, model_type)
    if model_type == "nemotron_h":
        config["num_hidden_layers"] = len(config["layers_block_type"])
        if "moe" in config["layers_block_type"]:
            architecture = "nemotron_h_moe"
        else:
            config = {field: value for field, value in config.items() if "expert" not in field and "moe" not in field}
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    if model_type in ("bloom", "gpt2", "gpt_bigcode"):
        config |= {usual: config[field] for field, usual in _GPT2_FIELDS.items() if field in config}
        config["intermediate_size"] = config.get("n_inner") or 4 * config["hidden_size"]
    if model_type == "falcon":
        config["intermediate_size"] = config.get("ffn_hidden_size") or 4 * config["hidden_size"]
        config["layer_norm_eps"] = config["layer_norm_epsilon"]
        config["num_key_value_heads"] = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    if model_type == "hunyuan_v1_moe":
        config |= {"num_experts_per_tok": config["moe_topk"][0], "moe_intermediate_size": config["intermediate_size"]}
        config |= {"shared_expert_intermediate_size": config["intermediate_size"], "n_shared_experts": 1}
    further = config.get("num_nextn_predict_layers", 0)
    config["num_hidden_layers"] += further
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    if has_latent_halves:
        config["num_key_value_heads"] = 1
    if model_type == "mimo_v2_flash":
        _add_mimo_metadata(writer, config, further)
        config |= {"num_key_value_heads": None, "sliding_window": config["sliding_window"] - 1}
    if further:
        writer.add_nextn_predict_layers(further)
    if "intermediate_size_mlp" in config:
        config |= {
            "moe_intermediate_size": config["intermediate_size"],
            "intermediate_size": config["intermediate_size_mlp"],
        }
    config = {_USUAL_FIELDS.get(field, field): value for field, value in config.items()}
    if model_type in ("nemotron", "starcoder2"):
        config["layer_norm_eps"] = config.get("norm_eps") or config["norm_epsilon"]
    for field, method in _FAMILY_METADATA.items():
        is_other_norm = field == "rms_norm_eps" and "layer_norm_eps" in config
        is_by_layer = field == "num_key_value_heads" and model_type in _HYBRIDS
        if config.get(field) is not None and not is_other_norm and not is_by_layer:
            getattr(writer, method)(config[field])
    if model_type in _HYBRIDS:
        _add_hybrid_metadata(writer, config)
    if model_type == "falcon_h1":
        _add_state_space_metadata(writer, config, config["mamba_d_ssm"])
    if model_type in _ROUTED_BY_SIGMOID:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if model_type == "exaone_moe":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if model_type == "glm_moe_dsa":
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
        if has_indexer_types:
            kinds = [kind == "full" for kind in config["indexer_types"]]
            writer.add_array("glm-dsa.attention.indexer.types", kinds)
    if model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if model_type == "mamba2":
        _add_mamba2_metadata(writer, config)
    if model_type == "nemotron_h":
        _add_nemotron_h_metadata(writer, config)
    if model_type in ("mamba", "falcon_mamba"):
        _add_mamba_metadata(writer, config)
    if model_type == "ministral3":
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
    if model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "linear_num_value_heads" in config:
        _add_delta_metadata(writer, config)
    if model_type == "gemma3n_text":
        _add_streams_metadata(writer, config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "kv_lora_rank" in config:
        head_dim = config["qk_rope_head_dim"]
        _add_latent_metadata(writer, config, has_latent_halves)
    elif model_type != "phi3":  # for phi3 the converter only writes the rotated dimensions
        writer.add_key_length(head_dim)
        writer.add_value_length(config.get("v_head_dim", head_dim))
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10_000.0}
    whole = rope.get("full_attention", rope)
    if model_type == "hunyuan_v1_dense":  # The converter multiplies the base.
        theta = whole["rope_theta"] * whole["alpha"] ** (head_dim / (head_dim - 2))
        whole = {"rope_type": "default", "rope_theta": theta}
    writer.add_rope_dimension_count(int(head_dim * whole.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(whole["rope_theta"])
    if whole["rope_type"] == "longrope":
        original = config.get("original_max_position_embeddings") or whole["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(whole["factor"]) / np.log(original))))
        for length in ("long", "short"):
            values = np.array(whole[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", values)
    elif whole["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_frequency_factors(whole, head_dim))
    elif whole["rope_type"] != "default":
        if whole["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
        writer.add_rope_scaling_type(gguf.RopeScalingType(whole["rope_type"]))
        writer.add_rope_scaling_factor(whole["factor"])
        if "mscale_all_dim" in whole:
            writer.add_rope_scaling_yarn_log_mul(0.1 * whole["mscale_all_dim"])
    _add_tokenizer(writer, special_tokens)
    stacked = _with_stacked_streams(_with_stacked_experts(load_file(checkpoint / "model.safetensors")))
    stacked = dict(part for named in stacked.items() for part in _as_deltas_are_written(*named, config))
    written = [part for name, values in stacked.items() for part in _as_hybrids_are_written(name, values, config)]
    for name, values in written:
        if model_type == "falcon_h1":
            values = _with_multipliers(name, values, config)
        if model_type.startswith("gemma") and model_type != "gemma3n_text" and "norm" in name:
            values = values + 1.0
        if model_type == "nemotron" and name.endswith("norm.weight"):
            values = values + 1.0
        if model_type == "gpt2" and ".c_" in name and values.ndim == 2:
            values = np.ascontiguousarray(values.T)
        if model_type in ("bloom", "gpt_neox") and "query_key_value" in name:
            by_head = values.reshape(config["num_attention_heads"], 3, head_dim, *values.shape[1:])
            values = np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(values.shape)
        if model_type == "falcon" and "query_key_value" in name:
            groups = config["num_key_value_heads"]
            group = values.reshape(groups, -1, head_dim, *values.shape[1:])
            split = (group[:, :-2], group[:, -2:-1], group[:, -1:])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in split])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if model_type in _PERMUTED_BY_THE_CONVERTER and heads is not None:
            values = _permute_for_adjacent_pairs(values, config[heads])
        if model_type == "bloom":
            name = name.removeprefix("transformer.")
        name = name.replace("attention_sink_bias", "attention_sink_bias.weight")
        parts = {name.replace("e_score_correction_bias", "e_score_correction.bias"): values}
        if "moe_statics" in name:
            parts = {part: bias.squeeze(0) for part, bias in parts.items()}
        if has_latent_halves and "kv_b_proj" in name:
            heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            keys, of_values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            parts = parts if has_both_forms else {}
            parts |= {
                name.replace("kv_b_proj", "k_b_proj"): keys.transpose(0, 2, 1),
                name.replace("kv_b_proj", "v_b_proj"): of_values,
            }
        stored_type = expert_type if ".experts." in name and values.ndim == 3 else quant_type
        for part, stored in parts.items():
            _add_tensor(writer, names.get_name(part, try_suffixes=(".weight", ".bias")), stored, stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_mimo_metadata(writer: Any, config: dict[str, Any], further: int) -> None:
    """Add the converter's metadata. Its lists also have entries for prediction layers, which have a window."""
    slides = [int(kind == "sliding_attention") for kind in config["layer_types"]] + [1] * further
    heads = config["num_key_value_heads"], 2 * config["num_key_value_heads"]  # as in transformers
    writer.add_head_count_kv([heads[at] for at in slides])
    writer.add_sliding_window_pattern(slides)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _add_nemotron_h_metadata(writer: Any, config: dict[str, Any]) -> None:
    """Add the converter's metadata: numbers by layer say what each layer is."""
    import gguf

    kinds = config["layers_block_type"]
    has_experts = "moe" in kinds
    size = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    writer.add_feed_forward_length([size * (kind in ("mlp", "moe")) for kind in kinds])
    names = {"mamba_d_conv": "conv_kernel", "mamba_d_state": "ssm_state_size", "mamba_n_heads": "mamba_num_heads"}
    config |= {ours: config[theirs] for ours, theirs in names.items()} | {"mamba_n_groups": config["n_groups"]}
    _add_state_space_metadata(writer, config, config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    if has_experts:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_mamba_metadata(writer: Any, config: dict[str, Any]) -> None:
    """Add the converter's metadata: no attention heads, and no MLP."""
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
    names = {"mamba_d_conv": "conv_kernel", "mamba_d_state": "state_size", "mamba_dt_rank": "time_step_rank"}
    config |= {ours: config[theirs] for ours, theirs in names.items()}
    _add_selective_scan_metadata(writer, config, config["intermediate_size"])


def _add_selective_scan_metadata(writer: Any, config: dict[str, Any], inner_size: int) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_inner_size(inner_size)
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def _add_hybrid_metadata(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    if config["model_type"] == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        layers = range(config["num_hidden_layers"])
        writer.add_head_count_kv([config["num_key_value_heads"] * (layer % period == offset) for layer in layers])
        _add_selective_scan_metadata(writer, config, config["mamba_expand"] * config["hidden_size"])
        return
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] if at else 0 for at in attends])
    if config["model_type"] != "granitemoehybrid":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        if config["model_type"] == "lfm2":
            writer.add_feed_forward_length(64)  # two thirds of the kind's 96
        else:
            writer.add_leading_dense_block_count(config["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    _add_state_space_metadata(writer, config, config["mamba_expand"] * config["hidden_size"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if config["num_local_experts"]:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _add_state_space_metadata(writer: Any, config: dict[str, Any], inner_size: int) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(inner_size)
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def _add_mamba2_metadata(writer: Any, config: dict[str, Any]) -> None:
    """Add the converter's metadata: no attention heads, and no MLP."""
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    names = {"mamba_d_conv": "conv_kernel", "mamba_d_state": "state_size", "mamba_n_groups": "n_groups"}
    config |= {ours: config[theirs] for ours, theirs in names.items()} | {"mamba_n_heads": config["num_heads"]}
    _add_state_space_metadata(writer, config, config["expand"] * config["hidden_size"])


def _with_multipliers(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Multiply Falcon-H1's projections as llama.cpp's converter does."""
    inner, vectors = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    read = config["attention_in_multiplier"]
    sizes = (inner, inner, vectors, vectors, config["mamba_n_heads"])
    projected = np.repeat(config["ssm_in_multiplier"] * np.array(config["ssm_multipliers"]), sizes)
    factors = {
        "q_proj": read,
        "k_proj": read * config["key_multiplier"],
        "v_proj": read,
        "o_proj": config["attention_out_multiplier"],
        "in_proj": projected[:, None],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
    }
    return values * np.float32(factors.get(name.split(".")[-2], 1.0))


def _as_hybrids_are_written(name: str, values: np.ndarray, config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Change names and shapes as llama.cpp's converter does, for layers that keep a state and for shared experts."""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        kind = "shared_expert" if config["num_local_experts"] else ""
        before = name.removesuffix("shared_mlp.input_linear.weight") + ("mlp.shared_expert." if kind else "mlp.")
        return [(f"{before}gate_proj.weight", gate), (f"{before}up_proj.weight", up)]
    if name.endswith("shared_mlp.output_linear.weight"):
        kind = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
        return [(name.replace("shared_mlp.output_linear", f"{kind}.down_proj"), values)]
    if ".feed_forward.experts." in name:
        for theirs, usual in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            name = name.replace(f".experts.{theirs}", f".experts.{usual}_proj")
    if config["model_type"] == "nemotron_h" and ".mixer.experts." in name:
        name = name.replace("backbone.layers", "model.layers").replace(".mixer.", ".mlp.")
    if name.endswith("expert_bias"):
        return [(f"{name}.bias", values)]
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return [(name, values.squeeze(1))]
    if name.endswith(("mamba.A_log", "mixer.A_log")):
        return [(name, -np.exp(values) if values.ndim > 1 else -np.exp(values)[:, None])]
    if name.endswith((".mamba.D", ".mixer.D")):
        return [(name, values if config["model_type"] in ("mamba", "falcon_mamba", "jamba") else values[:, None])]
    if name.endswith("linear_attn.dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), values)]
    if name.endswith("linear_attn.A_log"):
        return [(name, -np.exp(values))]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return [(name, values.reshape(config["mamba_n_groups"], -1))]
    name = name.replace("mixer.dt_bias", "mixer.dt.bias")
    return [(name.replace("dt_bias", "dt_proj.bias"), values)]


def _add_delta_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    key = f"{_ARCHITECTURES[config['model_type']]}.attention.recurrent_layers"
    writer.add_array(key, [kind == "linear_attention" for kind in config["layer_types"]])


def _as_deltas_are_written(name: str, values: np.ndarray, config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Change tensors as llama.cpp's converter does: add 1 to norms, split Qwen3-Next's joint projection, and reorder
    Qwen3.5's value heads.
    """
    if "linear_num_value_heads" not in config:
        return [(name, values)]
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return [(name, values + 1.0)]
    if name.endswith("in_proj_qkvz.weight"):
        ratio = heads // groups * value_dim
        split = np.split(values.reshape(groups, -1, values.shape[1]), np.cumsum([key_dim, key_dim, ratio]), axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in split)
        return [(name.replace("qkvz", "qkv"), np.concatenate((q, k, v))), (name.replace("qkvz", "z"), z)]
    if config["model_type"] == "qwen3_next" or "linear_attn." not in name:
        return [(name, values)]
    keys = 2 * groups * key_dim
    module = name.split("linear_attn.")[1]

    def in_turn(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(groups, heads // groups, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if module.startswith(("in_proj_qkv", "conv1d")):
        return [(name, np.concatenate((values[:keys], in_turn(values[keys:]))))]
    if module.startswith("out_proj"):
        return [(name, np.ascontiguousarray(in_turn(np.ascontiguousarray(values.T)).T))]
    return [(name, values if module.startswith("norm") else in_turn(values))]


def _add_streams_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else float("-inf") for share in shares])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _with_stacked_streams(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the projections of streams into one tensor, and rename a scale to a weight, as the converter does."""
    found: dict[str, np.ndarray] = {}
    streams: dict[str, list[np.ndarray]] = {}
    for name, values in sorted(tensors.items()):
        match = re.fullmatch(r"(model\.altup_(?:unembed_)?projections)\.\d+(\.weight)", name)
        if match:
            streams.setdefault(match[1] + match[2], []).append(values)
        else:
            found[f"{name}.weight" if name.endswith("_scale") else name] = values
    return found | {name: np.stack(values) for name, values in streams.items()}


def _add_latent_metadata(writer: Any, config: dict[str, Any], has_halves: bool) -> None:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key_length, value_length = config["qk_nope_head_dim"] + turned, config["v_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned if has_halves else key_length)
    if has_halves:
        writer.add_value_length(rank)
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)
    elif config["model_type"] != "minicpm3":
        writer.add_value_length(value_length)


def _with_stacked_experts(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Stack a layer's experts into one tensor, and split the joint tensors of Granite and gpt-oss, as the converter
    does.
    """
    import torch

    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        values = tensor.to(torch.float32).numpy()
        before, is_expert, after = name.partition(".experts.")
        if name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif after.startswith(("gate_up_proj", "down_proj")) and "weight" not in after:
            kind = "bias" if after.endswith("bias") else "weight"
            rows = values if kind == "bias" else values.swapaxes(1, 2)
            if after.startswith("down"):
                found[f"{before}.experts.down_proj.{kind}"] = rows
            elif before.endswith("feed_forward"):
                for projection, part in zip(("gate", "up"), np.split(rows, 2, axis=1), strict=True):
                    found[f"{before}.experts.{projection}_proj.{kind}"] = part
            else:
                found[f"{before}.experts.gate_proj.{kind}"] = rows[:, ::2]
                found[f"{before}.experts.up_proj.{kind}"] = rows[:, 1::2]
        elif is_expert:
            index, _, projection = after.partition(".")
            experts.setdefault(f"{before}.experts.{projection}", {})[int(index)] = values
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for projection, part in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                found[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{projection}_proj")] = part
        else:
            found[name] = values
    for name, by_index in experts.items():
        found[name] = np.stack([by_index[index] for index in sorted(by_index)])
    return found


def _add_tokenizer(writer: Any, special_tokens: tuple[str, ...] = ()) -> None:
    tokens = _vocabulary()
    padding = [f"[PAD{index}]" for index in range(len(tokens), VOCAB_SIZE - len(special_tokens))]
    special, normal, unused = 3, 1, 5
    types = [special] * len(SPECIAL_TOKENS) + [normal] * (len(tokens) - len(SPECIAL_TOKENS)) + [unused] * len(padding)
    types += [special] * len(special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *padding, *special_tokens])
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_eot_token_id(IM_END_ID)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, index, *_middle, module, kind = name.split(".")
    inner = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    return f"blk.{index}.{inner.get(module) or 'attn_' + module.removesuffix('_proj')}.{kind}"


def _permute_for_adjacent_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Move rows h * dim + half * dim / 2 + pair to h * dim + 2 * pair + half."""
    rows = np.arange(values.shape[0]).reshape(heads, 2, -1)
    return values[rows.transpose(0, 2, 1).reshape(-1)]


def _llama3_frequency_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return the divisors of inverse frequencies, with the formula of the Llama 3.1 model code."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1.0 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _add_tensor(writer: Any, name: str, values: np.ndarray, quant_type: str) -> None:
    import gguf

    if values.ndim == 1:
        quant_type = "F32"
    block_values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant_type]]
    if values.shape[-1] % block_values:
        quant_type = "F32" if values.shape[-1] % 32 else "Q8_0"
    kind = gguf.GGMLQuantizationType[quant_type]
    if quant_type in _K_QUANTIZERS:
        stored = _K_QUANTIZERS[quant_type](values)
    else:
        stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, stored, raw_dtype=kind)


# The gguf package reads K quants and IQ4 types, but cannot write them. These are plain quantizers (nearest value, no
# search for the best scales) with the layouts of llama.cpp's block_q2_K and so on: 256 values per block, or 32 for
# IQ4_NL.


def _quantized_k4_k5(values: np.ndarray, bits: int) -> np.ndarray:
    groups = values.reshape(-1, 8, 32)
    lows = np.minimum(groups.min(axis=-1), 0.0)
    steps = (groups.max(axis=-1) - lows) / (2**bits - 1)
    d = np.maximum(steps.max(axis=-1, keepdims=True) / 63, 1e-8).astype(np.float16)
    d_min = np.maximum((-lows).max(axis=-1, keepdims=True) / 63, 1e-8).astype(np.float16)
    scales = np.clip(np.ceil(steps / d), 0, 63).astype(np.uint8)
    mins = np.clip(np.ceil(-lows / d_min), 0, 63).astype(np.uint8)
    step = np.maximum(d.astype(np.float32) * scales, 1e-8)[..., None]
    low = (d_min.astype(np.float32) * mins)[..., None]
    q = np.clip(np.round((groups + low) / step), 0, 2**bits - 1).astype(np.uint8)
    packed_scales = np.concatenate(
        [
            (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6),
            (mins[:, :4] & 63) | ((mins[:, 4:] >> 4) << 6),
            (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4),
        ],
        axis=-1,
    )
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    parts = [d.view(np.uint8), d_min.view(np.uint8), packed_scales]
    if bits == 5:
        parts.append(((q >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8))
    parts.append((pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128))
    return np.concatenate(parts, axis=-1).reshape(values.shape[0], -1)


def _quantized_k6(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=-1) / 31
    d = np.maximum(steps.max(axis=-1, keepdims=True) / 127, 1e-8).astype(np.float16)
    scales = np.clip(np.ceil(steps / d), 1, 127).astype(np.int8)
    step = (d.astype(np.float32) * scales)[..., None]
    q = (np.clip(np.round(groups / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack(
        [(q[:, :, 0] & 15) | ((q[:, :, 2] & 15) << 4), (q[:, :, 1] & 15) | ((q[:, :, 3] & 15) << 4)], axis=2
    ).reshape(-1, 128)
    high = ((q >> 4) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d.view(np.uint8)], axis=-1).reshape(values.shape[0], -1)


def _quantized_k2(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    lows = np.minimum(groups.min(axis=-1), 0.0)
    steps = (groups.max(axis=-1) - lows) / 3
    d = np.maximum(steps.max(axis=-1, keepdims=True) / 15, 1e-7).astype(np.float16)
    d_min = np.maximum((-lows).max(axis=-1, keepdims=True) / 15, 1e-7).astype(np.float16)
    scales = np.clip(np.ceil(steps / d), 0, 15).astype(np.uint8)
    mins = np.clip(np.round(-lows / d_min), 0, 15).astype(np.uint8)
    step = np.maximum(d.astype(np.float32) * scales, 1e-8)[..., None]
    low = (d_min.astype(np.float32) * mins)[..., None]
    q = np.clip(np.round((groups + low) / step), 0, 3).astype(np.uint8)
    parts = [scales | mins << 4, _two_bits(q), d.view(np.uint8), d_min.view(np.uint8)]
    return np.concatenate(parts, axis=-1).reshape(values.shape[0], -1)


def _quantized_k3(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    steps = np.abs(groups).max(axis=-1) / 3
    d = np.maximum(steps.max(axis=-1, keepdims=True) / 31, 1e-7).astype(np.float16)
    scales = np.clip(np.ceil(steps / d), 1, 31).astype(np.uint8)
    step = (d.astype(np.float32) * scales)[..., None]
    q = (np.clip(np.round(groups / step), -4, 3) + 4).astype(np.uint8)
    thirds = (q >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    six = scales + 32
    low = (six[:, :8] & 15) | (six[:, 8:] & 15) << 4
    high = ((six >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    parts = [thirds.sum(axis=1, dtype=np.uint8), _two_bits(q & 3), low, high, d.view(np.uint8)]
    return np.concatenate(parts, axis=-1).reshape(values.shape[0], -1)


def _two_bits(q: np.ndarray) -> np.ndarray:
    """Pack two-bit numbers into bytes [blocks, 64]. Of 128 numbers, byte i holds i, i + 32, i + 64 and i + 96."""
    quarters = q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return quarters.sum(axis=2, dtype=np.uint8).reshape(-1, 64)


def _quantized_iq4(values: np.ndarray, group_count: int) -> np.ndarray:
    """Quantize to IQ4_NL (group_count 1) or IQ4_XS (group_count 8)."""
    import gguf.quants

    numbers = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.float32)
    groups = values.reshape(-1, group_count, 32)
    steps = np.abs(groups).max(axis=-1) / 113
    if group_count == 1:
        d, scales = steps.astype(np.float16), np.ones(steps.shape, dtype=np.uint8)
    else:
        d = np.maximum(steps.max(axis=-1, keepdims=True) / 31, 1e-8).astype(np.float16)
        scales = np.clip(np.ceil(steps / d), 1, 31).astype(np.uint8)
    step = np.maximum(d.astype(np.float32) * scales, 1e-8)[..., None]
    q = np.abs((groups / step)[..., None] - numbers).argmin(axis=-1).astype(np.uint8)
    halves = (q[..., :16] | q[..., 16:] << 4).reshape(-1, group_count * 16)
    parts = [d.view(np.uint8)]
    if group_count == 8:
        six = (scales + 32).astype(np.uint16)
        high = ((six >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
        low = (six[:, ::2] & 15) | (six[:, 1::2] & 15) << 4
        parts += [high[:, None].view(np.uint8), low.astype(np.uint8)]
    return np.concatenate([*parts, halves], axis=-1).reshape(values.shape[0], -1)


_K_QUANTIZERS = {
    "Q2_K": _quantized_k2,
    "Q3_K": _quantized_k3,
    "IQ4_NL": lambda values: _quantized_iq4(values, 1),
    "IQ4_XS": lambda values: _quantized_iq4(values, 8),
    "Q4_K": lambda values: _quantized_k4_k5(values, 4),
    "Q5_K": lambda values: _quantized_k4_k5(values, 5),
    "Q6_K": _quantized_k6,
}
