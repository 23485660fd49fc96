"""Description of an encoder: a model like BERT, in which each token of a text attends to all tokens of the text.

loading/encoder_directory.py creates the description from the files of a directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.pooling import PoolingMethod
from trioserve.model.layer_config import RotaryConfig
from trioserve.model.number_formats import Dtype

__all__ = [
    "LAYERS_MAX",
    "EncoderActivation",
    "EncoderConfig",
    "EncoderFamily",
    "LayerMatrices",
    "Matrix",
    "ModernLayers",
    "RotatedLayers",
]

EncoderFamily = Literal["bert", "roberta", "modernbert", "nomic", "gte", "jina"]
EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]

# A damaged config must not make torch allocate a petabyte.
LAYERS_MAX = 1_024
HEADS_MAX = 4_096
LABELS_MAX = 65_536
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


class RotatedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between BERT's layers and those of NomicBERT (arXiv 2402.01613), GTE (arXiv 2407.19669) and Jina v3
    (arXiv 2409.10173).

    Queries and keys are rotated by their positions, so there is no table of positions. One matrix computes queries,
    keys and values.

    Attributes:
        rotary: parameters of the rotary embedding.
        gated: modules of the MLP's two inputs, the gate last. One module: it has the rows of both. Empty: there is no
            gate.
        attention_bias: matrices of attention have biases.
        up_bias: the MLP's first matrix has a bias.
        down_bias: the MLP's last matrix has a bias.
    """

    rotary: RotaryConfig
    gated: tuple[str, ...] = ()
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True


class Matrix(NamedTuple):
    """Modules of a layer that one product computes.

    Attributes:
        outputs: rows of each module, by its name.
        inputs: columns.
        has_bias: the modules have biases.
    """

    outputs: Mapping[str, int]
    inputs: int
    has_bias: bool


class LayerMatrices(NamedTuple):
    """Matrices of a layer: of queries, keys and values, of attention's output, and of the MLP."""

    qkv: Matrix
    output: Matrix
    up: Matrix
    down: Matrix


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
        label_count: labels of the model's head that labels each token. 0: there is no such head.
        applies_sigmoid: the score is passed through a sigmoid.
        modern: description of ModernBERT's layers, which have no table of segments. None: the layers are BERT's.
        rotated: differences of the layers from BERT's. None: there are none.

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
    label_count: int = 0
    applies_sigmoid: bool = True
    dtype_name: Dtype = "float32"
    modern: ModernLayers | None = None
    rotated: RotatedLayers | None = None

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
            value, least = getattr(self, name), int(name != "type_count" or self.rotated is None)
            if not least <= value <= largest:
                raise ModelLoadError(
                    f"{name} is {value}, allowed is {least} to {largest}: the checkpoint's config is damaged"
                )
        if not 0 <= self.label_count <= LABELS_MAX:
            raise ModelLoadError(
                f"num_labels is {self.label_count}, allowed is 1 to {LABELS_MAX}: the checkpoint's config is damaged"
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
        return self.layer_count * sum(matrix.inputs * sum(matrix.outputs.values()) for matrix in self.matrices)

    @property
    def has_position_table(self) -> bool:
        """True if a table of the checkpoint has an embedding for each position."""
        return self.modern is None and self.rotated is None

    @property
    def matrices(self) -> LayerMatrices:
        """Matrices of each layer."""
        hidden, middle, modern, rotated = self.hidden_size, self.intermediate_size, self.modern, self.rotated
        qkv, up = {"qkv_proj": 3 * hidden}, {"up_proj": middle}
        attention_bias = up_bias = down_bias = True
        if modern is not None:
            up = {"gate_up_proj": 2 * middle}
            attention_bias, up_bias, down_bias = modern.attention_bias, modern.mlp_bias, modern.mlp_bias
        elif rotated is None:
            qkv = {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden}
        else:
            up = {name: 2 * middle // len(rotated.gated) for name in rotated.gated} or up
            attention_bias, up_bias, down_bias = rotated.attention_bias, rotated.up_bias, rotated.down_bias
        return LayerMatrices(
            Matrix(qkv, hidden, attention_bias),
            Matrix({"o_proj": hidden}, hidden, attention_bias),
            Matrix(up, hidden, up_bias),
            Matrix({"down_proj": hidden}, middle, down_bias),
        )

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
