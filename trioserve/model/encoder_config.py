"""What an encoder is made of: a model like BERT, which sees all tokens of a text at once and continues none.

How it is found in a directory is settled in loading/encoder_directory.py.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.pooling import PoolingMethod
from trioserve.model.model_config import RotaryConfig
from trioserve.model.number_formats import Dtype

__all__ = ["LAYERS_MAX", "EncoderActivation", "EncoderConfig", "EncoderFamily", "ModernLayers"]

EncoderFamily = Literal["bert", "roberta", "modernbert"]
EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]

# A damaged config must not make us ask torch for a petabyte.
LAYERS_MAX = 1_024
HEADS_MAX = 4_096
DIMENSION_MAX = 2**24


class ModernLayers(msgspec.Struct, frozen=True, kw_only=True):
    """How ModernBERT's layers (arXiv 2412.13663) differ from BERT's: norms come before attention and MLP, and behind
    the last layer; an MLP has a gate; and positions turn queries and keys.

    rotaries, reaches: one for each layer. A reach of N sees N tokens to either side; None sees all. What has biases is
    said of each kind of part; head_activation: of the head that scores.
    """

    rotaries: tuple[RotaryConfig, ...]
    reaches: tuple[int | None, ...]
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    head_activation: EncoderActivation = "gelu"


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """position_offset: the row of the table of positions that the first token has; type_count: kinds of segments.
    modern: None has BERT's layers, and tables of positions and segments; ModernBERT has neither table.

    context_tokens_max: tokens of a text, as far as there are positions. context_tokens_default: as many as its makers
    recommend. method, normalize: how they make a vector, or what the head that scores reads. scores_pairs: there is a
    head that gives a pair of texts a number, and applies_sigmoid: which is then brought between 0 and 1.
    """

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    position_count: int
    position_offset: int
    type_count: int
    norm_eps: float
    activation: EncoderActivation
    context_tokens_default: int
    method: PoolingMethod = "mean"
    normalize: bool = True
    scores_pairs: bool = False
    applies_sigmoid: bool = True
    dtype_name: Dtype = "float32"
    modern: ModernLayers | None = None

    def __post_init__(self) -> None:
        for name, largest in (
            ("vocab_size", DIMENSION_MAX),
            ("hidden_size", DIMENSION_MAX),
            ("intermediate_size", DIMENSION_MAX),
            ("layer_count", LAYERS_MAX),
            ("head_count", HEADS_MAX),
            ("position_count", DIMENSION_MAX),
            ("type_count", DIMENSION_MAX),
        ):
            value = getattr(self, name)
            if not 1 <= value <= largest:
                raise ModelLoadError(
                    f"{name} is {value}, allowed is 1 to {largest}: the checkpoint's config is damaged"
                )
        if self.hidden_size % self.head_count:
            raise ModelLoadError(
                f"hidden_size {self.hidden_size} is no multiple of the {self.head_count} attention heads: "
                "the checkpoint's config is damaged"
            )
        if not 0 <= self.position_offset < self.position_count:
            raise ModelLoadError(
                f"positions begin at {self.position_offset}, but there are {self.position_count}: "
                "the checkpoint's config is damaged"
            )
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ModelLoadError(f"layer_norm_eps is {self.norm_eps}, but it must be a positive number")
        if self.modern is not None:
            _check_modern(self.modern)
        if self.context_tokens_default < 1:
            raise ModelLoadError(f"max_seq_length is {self.context_tokens_default}, but it must be at least 1")

    @property
    def context_tokens_max(self) -> int:
        return self.position_count - self.position_offset

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.head_count

    @property
    def layer_weight_count(self) -> int:
        """Of the matrices of all layers."""
        mlp = (2 if self.modern is None else 3) * self.intermediate_size
        return self.layer_count * self.hidden_size * (4 * self.hidden_size + mlp)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: it ends no text."""
        return ()


def _check_modern(layers: ModernLayers) -> None:
    for reach in layers.reaches:
        if reach is not None and not 1 <= reach <= DIMENSION_MAX:
            raise ModelLoadError(
                f"local_attention // 2 is {reach}, allowed is 1 to {DIMENSION_MAX}: the checkpoint's config is damaged"
            )
