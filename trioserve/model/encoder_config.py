"""Description of an encoder: a model like BERT, in which each token of a text attends to all tokens of the text.

loading/encoder_directory.py creates the description from the files of a directory.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.pooling import PoolingMethod
from trioserve.model.layer_config import RotaryConfig
from trioserve.model.number_formats import Dtype

__all__ = ["LAYERS_MAX", "EncoderActivation", "EncoderConfig", "EncoderFamily", "ModernLayers"]

EncoderFamily = Literal["bert", "roberta", "modernbert"]
EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]

# A damaged config must not make torch allocate a petabyte.
LAYERS_MAX = 1_024
HEADS_MAX = 4_096
DIMENSION_MAX = 2**24


class ModernLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between ModernBERT's layers (arXiv 2412.13663) and BERT's.

    Norms come before attention and MLP, and after the last layer. The MLP has a gate. Queries and keys are rotated by
    their positions.

    Attributes:
        rotaries: parameters of the rotary embedding, for each layer.
        reaches: for each layer, the number of tokens on either side that a token attends to. None: all tokens.
        attention_bias: matrices of attention have biases.
        mlp_bias: matrices of MLPs have biases.
        norm_bias: norms have biases.
        head_bias: the first matrix of the scoring head has a bias.
        head_activation: activation of the scoring head.
    """

    rotaries: tuple[RotaryConfig, ...]
    reaches: tuple[int | None, ...]
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    head_activation: EncoderActivation = "gelu"


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one encoder.

    Attributes:
        position_count: rows of the position table.
        position_offset: row of the position table for the first token.
        type_count: number of segment types.
        context_tokens_default: longest text that the model's authors recommend, in tokens.
        method: pooling of rows into a vector, or into the input of the scoring head.
        normalize: scale vectors to length 1.
        scores_pairs: the model has a head that scores a pair of texts.
        applies_sigmoid: the score is passed through a sigmoid.
        modern: description of ModernBERT's layers. None means BERT's layers. Only BERT has tables of positions and
            segments.

    Raises:
        ModelLoadError: values contradict each other. The message names the field.
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
        """Number of weights in the matrices of all layers."""
        mlp = (2 if self.modern is None else 3) * self.intermediate_size
        return self.layer_count * self.hidden_size * (4 * self.hidden_size + mlp)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens, of which an encoder has none."""
        return ()


def _check_modern(layers: ModernLayers) -> None:
    for reach in layers.reaches:
        if reach is not None and not 1 <= reach <= DIMENSION_MAX:
            raise ModelLoadError(
                f"local_attention // 2 is {reach}, allowed is 1 to {DIMENSION_MAX}: the checkpoint's config is damaged"
            )
