"""What a model is made of: its dimensions, biases, rotary positions and end tokens, checked once.

How they are found in config.json or in GGUF metadata is settled in loading/hf_config.py and loading/gguf_config.py.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from trioserve.contracts.errors import ModelLoadError

__all__ = ["ARCHITECTURES", "Architecture", "Dtype", "ModelConfig", "RopeScaling"]

Dtype = Literal["bfloat16", "float16", "float32"]
Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3")

# A damaged header must not make us build a tuple with a billion layers or ask torch for a petabyte. The largest models
# of these families have 126 layers, 128 heads and dimensions below 200,000.
LAYERS_MAX = 1_024
HEADS_MAX = 4_096
DIMENSION_MAX = 2**24
CONTEXT_TOKENS_MAX = 2**31 - 1  # positions are int32 in the step tensors


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are changed to reach a longer context.

    linear: every inverse frequency is divided by factor.
    llama3: low frequencies are divided by factor, high ones stay, between them it blends (low_freq_factor,
    high_freq_factor, original_context_tokens; as in Llama 3.1). Where the file carries the result instead,
    frequency_factors has one number for each of the head_dim / 2 inverse frequencies, each is divided by its number,
    and no other field counts.
    yarn: YaRN (arXiv 2309.00071) with beta_fast and beta_slow; cosine and sine are multiplied by attention_factor,
    and None means 0.1 * ln(factor) + 1. The ends of the blended range are rounded outwards to whole indices.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    frequency_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _positive_number("rope scaling factor", self.factor)
        _positive_number("rope scaling low_freq_factor", self.low_freq_factor)
        _positive_number("rope scaling high_freq_factor", self.high_freq_factor)
        _count("rope scaling original_max_position_embeddings", self.original_context_tokens, CONTEXT_TOKENS_MAX)
        _positive_number("rope scaling beta_fast", self.beta_fast)
        _positive_number("rope scaling beta_slow", self.beta_slow)
        if self.attention_factor is not None:
            _positive_number("rope scaling attention_factor", self.attention_factor)
        if self.kind == "llama3" and self.frequency_factors is None and self.low_freq_factor >= self.high_freq_factor:
            raise ModelLoadError(
                f"rope scaling low_freq_factor is {self.low_freq_factor}, which must be below high_freq_factor "
                f"({self.high_freq_factor}): correct the checkpoint's config"
            )
        for value in self.frequency_factors or ():
            _positive_number("a rope frequency factor", value)

    def context_tokens(self, context_tokens: int) -> int:
        """How far the model reaches when its config names context_tokens.

        linear: the config names the length before scaling. yarn: it names one or the other. llama3: the scaled one.
        """
        if self.kind == "linear":
            return int(context_tokens * self.factor)
        if self.kind == "yarn":
            return max(context_tokens, int(self.original_context_tokens * self.factor))
        return context_tokens


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only model of the Llama or Qwen family.

    attention_bias: q, k and v projections have a bias; attention_output_bias: so has o; mlp_bias: gate, up and down.
    qk_norm: queries and keys are RMS-normed per head before rotation.
    sliding_windows: one per layer; None sees every earlier position, N sees the last N positions, its own included.
    dtype_name: "bfloat16", "float16" or "float32", what the checkpoint stores; "bfloat16" for a quantized one.
    Raises ModelLoadError, naming the field, when the values cannot belong together.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    context_tokens_max: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype_name: Dtype

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"the model's architecture is {self.architecture!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        _count("vocab_size", self.vocab_size, DIMENSION_MAX)
        _count("hidden_size", self.hidden_size, DIMENSION_MAX)
        _count("intermediate_size", self.intermediate_size, DIMENSION_MAX)
        _count("layer_count", self.layer_count, LAYERS_MAX)
        _count("head_count", self.head_count, HEADS_MAX)
        _count("kv_head_count", self.kv_head_count, HEADS_MAX)
        _count("head_dim", self.head_dim, DIMENSION_MAX)
        _count("context_tokens_max", self.context_tokens_max, CONTEXT_TOKENS_MAX)
        _positive_number("rms_norm_eps", self.rms_norm_eps)
        _positive_number("rope_theta", self.rope_theta)
        if self.head_count % self.kv_head_count:
            raise ModelLoadError(
                f"head_count is {self.head_count} and kv_head_count {self.kv_head_count}, but each key/value head must "
                "serve the same number of heads: the checkpoint's config is damaged"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"head_dim is {self.head_dim}, but rotary positions need an even one: "
                "the checkpoint's config is damaged"
            )
        if len(self.sliding_windows) != self.layer_count:
            raise ModelLoadError(
                f"sliding windows are given for {len(self.sliding_windows)} layers, the model has {self.layer_count}: "
                "the checkpoint's config is damaged"
            )
        for window in self.sliding_windows:
            if window is not None:
                _count("sliding_window", window, CONTEXT_TOKENS_MAX)
        factors = self.rope_scaling.frequency_factors if self.rope_scaling else None
        if factors is not None and len(factors) != self.head_dim // 2:
            raise ModelLoadError(
                f"the checkpoint has {len(factors)} rope frequency factors, but head_dim {self.head_dim} needs "
                f"{self.head_dim // 2}: the file is damaged"
            )
        for token_id in (self.bos_token_id, *self.eos_token_ids):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(
                    f"a special token id is {token_id}, but the vocabulary has {self.vocab_size} tokens: "
                    "the checkpoint's config is damaged"
                )
        if self.dtype_name not in ("bfloat16", "float16", "float32"):
            raise ModelLoadError(
                f"the checkpoint stores {self.dtype_name}; supported are bfloat16, float16 and float32"
            )


def _count(name: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise ModelLoadError(f"{name} is {value}, allowed is 1 to {largest}: the checkpoint's config is damaged")


def _positive_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ModelLoadError(f"{name} is {value}, but it must be a positive number: the checkpoint's config is damaged")
