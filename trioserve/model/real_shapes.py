"""Descriptions of real models, without weights. The time of a step depends only on a model's shapes."""

from __future__ import annotations

from trioserve.model.layer_config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    QkNorm,
    RopeScaling,
    RotaryConfig,
)
from trioserve.model.model_config import ModelConfig

__all__ = ["SHAPES", "TINY"]


QK_NORMS: dict[str, QkNorm] = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "row"}


def _shape(
    family: str,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layer_count: int,
    head_count: int,
    kv_head_count: int,
    head_dim: int,
    rope_theta: float,
    context_tokens_max: int,
    rms_norm_eps: float = 1e-5,
    rope_scaling: RopeScaling | None = None,
    is_tied: bool = False,
    expert_count: int = 0,
    experts_per_token: int = 0,
    normalizes: bool = False,
) -> ModelConfig:
    layer = LayerConfig(
        attention=AttentionConfig(
            head_count=head_count,
            kv_head_count=kv_head_count,
            head_dim=head_dim,
            rotary=RotaryConfig(theta=rope_theta, rotated_dims=head_dim, scaling=rope_scaling),
            qk_norm=QK_NORMS.get(family, "none"),
        ),
        mlp=MlpConfig(intermediate_size=intermediate_size)
        if not expert_count
        else ExpertsConfig(
            expert_count=expert_count,
            experts_per_token=experts_per_token,
            intermediate_size=intermediate_size,
            normalizes=normalizes,
        ),
    )
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * layer_count,
        context_tokens_max=context_tokens_max,
        norm_eps=rms_norm_eps,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_ids=(),
        dtype_name="bfloat16",
    )


TINY = "tiny"  # A small shape for experiments, which is not a real model's.
# The numbers come from the config.json of each model.
SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": _shape(
        "llama",
        vocab_size=128_256,
        hidden_size=2_048,
        intermediate_size=8_192,
        layer_count=16,
        head_count=32,
        kv_head_count=8,
        head_dim=64,
        rope_theta=500_000.0,
        context_tokens_max=131_072,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0),
        is_tied=True,
    ),
    "llama-3.1-8b": _shape(
        "llama",
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        layer_count=32,
        head_count=32,
        kv_head_count=8,
        head_dim=128,
        rope_theta=500_000.0,
        context_tokens_max=131_072,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0),
    ),
    "qwen3-8b": _shape(
        "qwen3",
        vocab_size=151_936,
        hidden_size=4_096,
        intermediate_size=12_288,
        layer_count=36,
        head_count=32,
        kv_head_count=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        context_tokens_max=40_960,
        rms_norm_eps=1e-6,
    ),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe",
        vocab_size=151_936,
        hidden_size=2_048,
        intermediate_size=768,
        layer_count=48,
        head_count=32,
        kv_head_count=4,
        head_dim=128,
        rope_theta=1_000_000.0,
        context_tokens_max=40_960,
        rms_norm_eps=1e-6,
        expert_count=128,
        experts_per_token=8,
        normalizes=True,
    ),
    "olmoe-1b-7b": _shape(
        "olmoe",
        vocab_size=50_304,
        hidden_size=2_048,
        intermediate_size=1_024,
        layer_count=16,
        head_count=16,
        kv_head_count=16,
        head_dim=128,
        rope_theta=10_000.0,
        context_tokens_max=4_096,
        expert_count=64,
        experts_per_token=8,
    ),
    TINY: _shape(
        "llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        layer_count=2,
        head_count=4,
        kv_head_count=2,
        head_dim=16,
        rope_theta=10_000.0,
        context_tokens_max=40_960,
    ),
}
