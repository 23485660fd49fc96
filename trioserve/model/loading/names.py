"""Maps the names of a model's tensors in this project to their names, shapes and positions in files.

"Our name" is the name of a tensor in this project: "embed.weight", "layers.{i}.{module}.weight" or ".bias",
"norm.weight", "lm_head.weight" (missing if the embedding is also the head). The names of a few tensors, such as
"layers.{i}.router.score_bias", end differently. A format lists these names completely among its modules.

Matrices are [out, in]. Rotary embeddings pair dimension j with j + head_dim / 2, as in transformers. If not all
dimensions of a head are rotated, the first dimensions of both halves are paired.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from msgspec import structs

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.family import Naming
from trioserve.model.families.registry import family_named
from trioserve.model.layer_config import (
    XIELU_NUMBERS,
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    KVAttention,
    LatentAttentionConfig,
    LayerConfig,
    LightningConfig,
    MlpConfig,
    NormKind,
    Recurrent,
    RotaryConfig,
    SelectiveScanConfig,
    SharedBlock,
    ShortConvConfig,
    StateSpaceConfig,
)
from trioserve.model.model_config import LAYERS_MAX, ModelConfig, StreamsConfig
from trioserve.model.number_formats import Dtype, Float32Array, Values, convert, empty_values

__all__ = [
    "GGUF",
    "NUMBERED",
    "TRANSFORMERS",
    "Format",
    "FurtherLayers",
    "Shape",
    "TensorPlace",
    "as_saved",
    "match_tensors",
    "outside_name",
    "tensor_places",
    "tensor_shapes",
]

logger = logging.getLogger(__name__)

FURTHER_LAYERS = ("mtp.", "model.mtp.", "model.mtp_layers.")  # Prefixes of prediction layers in some families.
NUMBERED = ("experts", "adapters", "heads", "streams")
"""Parts of our names that precede the index of an expert, of an adapter, of a head or of a stream."""
Shape = tuple[int, ...]
AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class Format:
    """Naming of tensors in one file format.

    Attributes:
        modules: usual name of each module in the files, by our name.
        layers: prefix before the index of a layer.
        naming_of: function that returns the unusual names of a family, given ModelConfig.family.
        joint: name of a tensor that, in some files, contains both k_b_proj and v_b_proj, head by head.
        has_log_rates: rates of state spaces are stored as the logarithm of their absolute values.
    """

    modules: Mapping[str, str]
    layers: str
    naming_of: Callable[[str], Naming]
    joint: str
    has_log_rates: bool


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Describes where a file contains the values of one tensor, and how they are converted.

    Attributes:
        name: name of the tensor in the file.
        shape: shape of the values after they are read.
        stored_shape: shape of the stored rows that contain the values. None: equal to `shape`.
        first_row: index of the first stored row in the file's tensor.
        is_transposed: the columns of the stored matrix are the rows of the result.
        order: int64, row i of the result is row order[i] of the stored rows. None keeps the order.
        transposed_count: the rows consist of this number of matrices, and each is transposed. 0: none is transposed.
        offset: number that is added to the values.
        is_log: the result is -exp of the stored values.
        is_unit: rows are divided by their length.
        factors: float32, factor of each row of the result.
    """

    name: str
    shape: Shape
    stored_shape: Shape | None = None
    first_row: int = 0
    is_transposed: bool = False
    order: npt.NDArray[np.int64] | None = None
    transposed_count: int = 0
    offset: float = 0.0
    is_log: bool = False
    is_unit: bool = False
    factors: npt.NDArray[np.float32] | None = None

    @property
    def has_whole_rows(self) -> bool:
        """True if rows of the result are unchanged rows of the file. Quantized blocks can then be used unchanged."""
        return not (self.is_transposed or self.transposed_count or self.is_unit) and self.factors is None

    @property
    def rows_shape(self) -> Shape:
        """Shape of the stored rows that must be read."""
        return self.shape if self.stored_shape is None else self.stored_shape

    @property
    def is_changed(self) -> bool:
        """True if the result's values differ from the file's values."""
        return bool(self.offset) or self.is_log or self.is_unit or self.factors is not None

    @property
    def has_parts(self) -> bool:
        """True for a matrix whose rows are consecutive in the file, in the right order and unchanged."""
        is_moved = self.stored_shape is not None or self.order is not None or not self.has_whole_rows
        return len(self.shape) == 2 and not is_moved and not self.is_changed

    def part(self, first_row: int, row_count: int) -> TensorPlace:
        """Return the description of some rows. `has_parts` must be True.

        Args:
            first_row: index of the first row in this tensor.
            row_count: number of rows.
        """
        assert self.has_parts, "single rows of this tensor cannot be read"
        return replace(self, shape=(row_count, self.shape[1]), first_row=self.first_row + first_row)

    def read(self, read: Callable[[Dtype], Values], wanted: Dtype) -> Values:
        """Return the values of the tensor.

        Args:
            read: function that returns the stored rows in a given number format.
            wanted: number format of the result.
        """
        if not self.is_changed:
            return self.ordered(read(wanted))
        values = self.multiplied(self.ordered(cast(Float32Array, read("float32")))) + np.float32(self.offset)
        if self.is_log:
            values = -np.exp(values)
        if self.is_unit:
            values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
        result = empty_values(self.shape, wanted)
        convert(values, result)
        return result

    def multiplied(self, rows: Float32Array) -> Float32Array:
        """Multiply rows with the factors, if there are any.

        Args:
            rows: float32 rows in the order of the result.
        """
        if self.factors is None:
            return rows
        return cast(Float32Array, rows * self.factors.reshape(-1, *(1,) * (rows.ndim - 1)))

    def ordered(self, rows: AnyArray) -> AnyArray:
        ordered = self.in_order(rows.T if self.is_transposed else rows)
        if not self.transposed_count:
            return ordered
        matrices = ordered.reshape(self.transposed_count, -1, ordered.shape[1]).swapaxes(1, 2)
        return cast(AnyArray, np.ascontiguousarray(matrices).reshape(self.shape))

    def in_order(self, rows: AnyArray) -> AnyArray:
        """Return rows in the order of the result, without transposing them.

        Args:
            rows: stored rows.
        """
        return rows if self.order is None else cast(AnyArray, np.ascontiguousarray(rows[self.order]))


TRANSFORMERS = Format(
    {
        "embed": "model.embed_tokens",
        "embed_norm": "model.embed_norm",
        "norm": "model.norm",
        "lm_head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "q_a_proj": "self_attn.q_a_proj",
        "q_a_norm": "self_attn.q_a_layernorm",
        "q_b_proj": "self_attn.q_b_proj",
        "kv_a_proj": "self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "self_attn.kv_a_layernorm",
        "k_b_proj": "self_attn.k_b_proj",
        "v_b_proj": "self_attn.v_b_proj",
        "index_q_proj": "self_attn.indexer.wq_b",
        "index_k_proj": "self_attn.indexer.wk",
        "index_k_norm": "self_attn.indexer.k_norm",
        "index_weight_proj": "self_attn.indexer.weights_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
        "gate_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "down_proj": "mlp.down_proj",
        "router": "mlp.gate",
        "router.score_bias": "mlp.gate.e_score_correction_bias",
        "experts.gate_proj": "mlp.experts.{expert}.gate_proj",
        "experts.up_proj": "mlp.experts.{expert}.up_proj",
        "experts.down_proj": "mlp.experts.{expert}.down_proj",
        "shared.gate_proj": "mlp.shared_expert.gate_proj",
        "shared.up_proj": "mlp.shared_expert.up_proj",
        "shared.down_proj": "mlp.shared_expert.down_proj",
        "shared_gate": "mlp.shared_expert_gate",
        "in_proj": "mamba.in_proj",
        "conv": "mamba.conv1d",
        "out_proj": "mamba.out_proj",
        "gate_norm": "mamba.norm",
        "selection_proj": "mamba.x_proj",
        "time_step_proj": "mamba.dt_proj",
        "time_step_norm": "mamba.dt_layernorm",
        "b_norm": "mamba.b_layernorm",
        "c_norm": "mamba.c_layernorm",
        "state.rates": "mamba.A_log",
        "state.skips": "mamba.D",
        "state.time_step_bias": "mamba.dt_bias",
        "q_gate_proj": "self_attn.q_proj",
        "delta_qkv": "linear_attn.in_proj_qkv",
        "delta_gate": "linear_attn.in_proj_z",
        "delta_decay": "linear_attn.in_proj_a",
        "delta_share": "linear_attn.in_proj_b",
        **{f"xielu.{number}": f"mlp.act_fn.{number}" for number in XIELU_NUMBERS},
        **{f"cross_{part}_proj": f"encoder_attn.{part}_proj" for part in "qkv"},
        "cross_o_proj": "encoder_attn.out_proj",
        "cross_norm": "encoder_attn_layer_norm",
        "laurel_in": "laurel.linear_left",
        "laurel_out": "laurel.linear_right",
        "laurel_norm": "laurel.post_laurel_norm",
        "streams.in_proj": "model.altup_projections.{stream}",
        "streams.out_proj": "model.altup_unembed_projections.{stream}",
        "streams.scale": "altup.correct_output_scale",
        "layer.scale": "layer_scalar",
        "stream_router": "altup.modality_router",
        "stream_router_norm": "altup.router_norm",
        "stream_prediction": "altup.prediction_coefs",
        "stream_correction": "altup.correction_coefs",
        "layer_inputs.embed": "model.embed_tokens_per_layer",
        "layer_inputs.proj": "model.per_layer_model_projection",
        "layer_inputs.norm": "model.per_layer_projection_norm",
        "input_gate": "per_layer_input_gate",
        "input_proj": "per_layer_projection",
        "input_norm": "post_per_layer_input_norm",
    },
    "model.layers",
    lambda family: family_named(family).transformers,
    "self_attn.kv_b_proj",
    has_log_rates=True,
)
GGUF = Format(
    {
        "embed": "token_embd",
        "embed_norm": "token_embd_norm",
        "positions": "position_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "attention_norm": "attn_norm",
        "attention_output_norm": "post_attention_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "q_a_proj": "attn_q_a",
        "q_a_norm": "attn_q_a_norm",
        "q_b_proj": "attn_q_b",
        "kv_a_proj": "attn_kv_a_mqa",
        "kv_a_norm": "attn_kv_a_norm",
        "k_b_proj": "attn_k_b",
        "v_b_proj": "attn_v_b",
        "index_q_proj": "indexer.attn_q_b",
        "index_k_proj": "indexer.attn_k",
        "index_k_norm": "indexer.k_norm",
        "index_weight_proj": "indexer.proj",
        "mlp_norm": "ffn_norm",
        "mlp_output_norm": "post_ffw_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "router": "ffn_gate_inp",
        "router.score_bias": "exp_probs_b.bias",
        "experts.gate_proj": "ffn_gate_exps",
        "experts.up_proj": "ffn_up_exps",
        "experts.down_proj": "ffn_down_exps",
        "shared.gate_proj": "ffn_gate_shexp",
        "shared.up_proj": "ffn_up_shexp",
        "shared.down_proj": "ffn_down_shexp",
        "shared_gate": "ffn_gate_inp_shexp",
        "sinks": "attn_sinks",
        "in_proj": "ssm_in",
        "conv": "ssm_conv1d",
        "out_proj": "ssm_out",
        "gate_norm": "ssm_norm",
        "selection_proj": "ssm_x",
        "time_step_proj": "ssm_dt",
        "time_step_norm": "ssm_dt_norm",
        "b_norm": "ssm_b_norm",
        "c_norm": "ssm_c_norm",
        "state.rates": "ssm_a",
        "state.skips": "ssm_d",
        "state.time_step_bias": "ssm_dt.bias",
        "q_gate_proj": "attn_q",
        "delta_qkv": "attn_qkv",
        "delta_gate": "attn_gate",
        "delta_decay": "ssm_alpha",
        "delta_share": "ssm_beta",
        "laurel_in": "laurel_l",
        "laurel_out": "laurel_r",
        "laurel_norm": "laurel_post_norm",
        "streams.in_proj": "altup_proj",
        "streams.out_proj": "altup_unembd_proj",
        "streams.scale": "altup_correct_scale.weight",
        "layer.scale": "layer_output_scale.weight",
        "stream_router": "altup_router",
        "stream_router_norm": "altup_router_norm",
        "stream_prediction": "altup_predict_coef",
        "stream_correction": "altup_correct_coef",
        "layer_inputs.embed": "per_layer_token_embd",
        "layer_inputs.proj": "per_layer_model_proj",
        "layer_inputs.norm": "per_layer_proj_norm",
        "input_gate": "inp_gate",
        "input_proj": "proj",
        "input_norm": "post_norm",
    },
    "blk",
    lambda family: family_named(family).gguf or Naming(),
    "attn_kv_b",
    has_log_rates=False,
)


class FurtherLayers:
    """Prediction layers (MTP) that follow a model's layers in a checkpoint.

    Args:
        config: model.
        format: naming of tensors in the files.
        count: number of prediction layers in the file's description. 0: none.
    """

    def __init__(self, config: ModelConfig, format: Format, count: int) -> None:
        naming = format.naming_of(config.family)
        first = config.layer_count // naming.sublayers
        prefix = naming.layers or format.layers
        self._prefixes = tuple(f"{prefix}.{index}." for index in range(first, first + min(count, LAYERS_MAX)))
        self._tensor_count = 0

    @property
    def first_prefix(self) -> str | None:
        """Prefix of the first prediction layer's tensors in the file. None: there is no prediction layer."""
        return self._prefixes[0] if self._prefixes else None

    def has(self, name: str) -> bool:
        """Return True if a tensor belongs to a prediction layer, and count the tensor for the log line.

        Args:
            name: name in the file.
        """
        is_theirs = name.startswith((*self._prefixes, *FURTHER_LAYERS))
        self._tensor_count += is_theirs
        return is_theirs

    def log_unused(self) -> None:
        """Log how many tensors belong to prediction layers (MTP), which the engine does not use. Log nothing for 0."""
        if self._tensor_count:
            logger.info("layers that predict further tokens are not used tensors=%d", self._tensor_count)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a model, by our name, in the order in which a forward pass uses them.

    Args:
        config: whole model, or the model of one rank or stage.
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_count, hidden)}
    if config.position_rows:
        shapes["positions.weight"] = (config.position_rows, hidden)
    if config.has_embedding_norm:
        shapes |= dict(_norm_shapes("embed_norm", hidden, config.norm))
    if config.relative is not None:
        shapes["relative.weight"] = (config.relative.bucket_count, config.heads.head_count)
    streams = config.streams
    if streams is not None:
        inputs = config.layer_count * streams.input_size
        shapes["layer_inputs.embed.weight"] = (streams.input_vocab_size, inputs)
        shapes["layer_inputs.proj.weight"] = (inputs, hidden)
        shapes["layer_inputs.norm.weight"] = (streams.input_size,)
        shapes |= {f"streams.{index}.in_proj.weight": (hidden, hidden) for index in range(streams.count - 1)}
    for index, layer in enumerate(config.layers):
        if layer.block is not None:
            shapes |= _hybrid_shapes(index, layer, layer.block, hidden, config.norm)
            continue
        experts = range(0) if layer.experts is None else config.experts_of(index)
        for module, shape in _layer_shapes(layer, hidden, experts, config.norm):
            shapes[f"layers.{index}.{module}"] = shape
        for module, shape in () if streams is None else _stream_shapes(streams, hidden):
            shapes[f"layers.{index}.{module}"] = shape
        for module, shape in () if config.cross is None else _cross_shapes(layer.attention, hidden, config.norm):
            shapes[f"layers.{index}.{module}"] = shape
    if streams is not None:
        shapes |= {f"streams.{index}.out_proj.weight": (hidden, hidden) for index in range(streams.count - 1)}
    if config.has_last_norm:
        shapes |= dict(_norm_shapes("norm", hidden, config.norm))
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_count, hidden)
    if config.has_head_bias:
        shapes["lm_head.bias"] = (config.vocab_count,)
    return shapes


def _norm_shapes(module: str, size: int, kind: NormKind) -> list[tuple[str, Shape]]:
    kinds = {"layer_biased": ("weight", "bias"), "layer_bare": ()}.get(kind, ("weight",))
    return [(f"{module}.{each}", (size,)) for each in kinds]


def _cross_shapes(attention: object, hidden: int, norm: NormKind) -> Iterator[tuple[str, Shape]]:
    """Yield the shapes of one layer's tensors of cross attention, which has the heads and biases of self-attention."""
    assert isinstance(attention, AttentionConfig), "checked by ModelConfig"
    yield from _norm_shapes("cross_norm", hidden, norm)
    for module, rows, columns, has_bias in _attention_matrices(attention, hidden):
        yield f"cross_{module}.weight", (rows, columns)
        if has_bias:
            yield f"cross_{module}.bias", (rows,)


def _stream_shapes(streams: StreamsConfig, hidden: int) -> list[tuple[str, Shape]]:
    """Return the shapes of one layer's tensors that combine the streams of the hidden state, and of its input."""
    inputs: list[tuple[str, Shape]] = [
        ("input_gate.weight", (streams.input_size, hidden)),
        ("input_proj.weight", (hidden, streams.input_size)),
        ("input_norm.weight", (hidden,)),
    ]
    if streams.count == 1:
        return inputs
    return [
        ("stream_router_norm.weight", (hidden,)),
        ("stream_router.weight", (streams.count, hidden)),
        ("stream_prediction.weight", (streams.count**2, streams.count)),
        ("stream_correction.weight", (streams.count, streams.count)),
        *inputs,
        ("streams.scale", (hidden,)),
    ]


def _layer_shapes(layer: LayerConfig, hidden: int, experts: range, norm: NormKind) -> list[tuple[str, Shape]]:
    attention = layer.attention
    norms: list[tuple[str, int]] = []
    inputs = [("attention_norm", hidden)] * layer.has_attention_norm + [("mlp_norm", hidden)] * layer.has_mlp_norm
    norms += [("attention_output_norm", hidden)] if layer.has_output_norms else []
    norms += [("mlp_output_norm", hidden)] if layer.has_mlp_output_norm else []
    if isinstance(attention, LatentAttentionConfig):
        norms += [] if attention.query_rank is None else [("q_a_norm", attention.query_rank)]
        norms += [("kv_a_norm", attention.latent_dim)]
    elif isinstance(attention, AttentionConfig):
        sizes = (attention.query_size, attention.key_size)
        if attention.qk_norm == "head":
            sizes = (attention.head_dim, attention.head_dim)
        if attention.qk_norm == "head":
            inputs += [("q_norm", sizes[0])] + [("k_norm", sizes[1])] * (attention.kv_from is None)
        elif attention.qk_norm == "each":
            parts = (("q", attention.head_count), ("k", attention.kv_head_count))
            norms += [
                (f"heads.{head}.{part}_norm", attention.head_dim) for part, count in parts for head in range(count)
            ]
        elif attention.qk_norm not in ("none", "unit"):
            norms += [("q_norm", sizes[0])] + [("k_norm", sizes[1])] * (attention.kv_from is None)
    norms += [("laurel_norm", hidden)] if layer.laurel_rank else []
    if isinstance(layer.mlp, ExpertsConfig) and layer.mlp.has_own_norms:
        modules = ("router_norm", "experts_norm", "experts_output_norm", "shared_output_norm")
        norms += [(module, hidden) for module in modules]
    recurrent = layer.recurrent
    if isinstance(recurrent, StateSpaceConfig) and recurrent.norm != "none":
        norms += [("gate_norm", recurrent.inner_size)]
    if isinstance(recurrent, DeltaNetConfig):
        norms += [("gate_norm", recurrent.head_dim)]
    if isinstance(recurrent, LightningConfig):
        norms += [("gate_norm", recurrent.inner_size)]
    if isinstance(recurrent, SelectiveScanConfig) and recurrent.norm == "weighted":
        norms += zip(("time_step_norm", "b_norm", "c_norm"), recurrent.selected_sizes, strict=True)
    shapes = [shape for module, size in inputs for shape in _norm_shapes(module, size, norm)]
    shapes += [(f"{module}.weight", (size,)) for module, size in norms]
    if isinstance(attention, LatentAttentionConfig) and attention.indexer is not None:
        shapes += _norm_shapes("index_k_norm", attention.indexer.head_dim, "layer_biased")
    if isinstance(recurrent, StateSpaceConfig):
        shapes += [(f"state.{name}", (recurrent.head_count,)) for name in ("rates", "skips", "time_step_bias")]
    if isinstance(recurrent, DeltaNetConfig):
        shapes += [("state.rates", (recurrent.head_count,)), ("state.time_step_bias", (recurrent.decay_count,))]
    if isinstance(recurrent, SelectiveScanConfig):
        channels = (recurrent.channel_count,)
        shapes += [("state.rates", (*channels, recurrent.vector_size)), ("state.skips", channels)]
        shapes.append(("state.time_step_bias", channels))
    if layer.experts is not None and layer.experts.has_score_bias:
        shapes.append(("router.score_bias", (layer.experts.choice_count,)))
    if isinstance(layer.mlp, ExpertsConfig) and layer.mlp.has_own_norms:
        shapes.append(("router.expert_scale", (layer.mlp.expert_count,)))
    if isinstance(layer.mlp, MlpConfig) and layer.mlp.activation == "xielu":
        shapes += [(f"xielu.{number}", (1,)) for number in XIELU_NUMBERS]
    if layer.laurel_rank:
        shapes += [
            ("laurel_in.weight", (layer.laurel_rank, hidden)),
            ("laurel_out.weight", (hidden, layer.laurel_rank)),
        ]
    for module, rows, columns, has_bias in (
        *(_attention_matrices(attention, hidden) if isinstance(attention, KVAttention) else ()),
        *(() if recurrent is None else _recurrent_matrices(recurrent, hidden)),
        *(() if layer.mlp is None else _mlp_matrices(layer.mlp, hidden, experts)),
        *(() if layer.shortcut is None else _mlp_matrices(layer.shortcut, hidden, experts)),
    ):
        shapes.append((f"{module}.weight", (rows, columns)))
        if has_bias:
            shapes.append((f"{module}.bias", (rows,)))
    if layer.has_scale:
        shapes.append(("layer.scale", (1,)))
    if isinstance(attention, AttentionConfig) and attention.has_sinks:
        shapes.append(("sinks.weight", (attention.head_count,)))
    return shapes


def _hybrid_shapes(index: int, layer: LayerConfig, block: SharedBlock, hidden: int, norm: NormKind) -> dict[str, Shape]:
    """Return the shapes of one layer's tensors by our names. The first layer with a shared block has its weights."""
    shapes: dict[str, Shape] = {}
    if block.first == index:
        plain = dict(_layer_shapes(LayerConfig(attention=layer.attention, mlp=layer.mlp), hidden, range(0), norm))
        plain |= {f"{part}_proj.weight": (plain[f"{part}_proj.weight"][0], 2 * hidden) for part in "qkv"}
        plain["attention_norm.weight"] = (2 * hidden,)
        shapes |= {f"layers.{index}.block.{module}": shape for module, shape in plain.items()}
    for name, (inputs, outputs) in block.adapters(layer, hidden).items():
        adapter = f"layers.{block.first}.adapters.{block.use}.{name}"
        shapes |= {f"{adapter}_a.weight": (block.rank, inputs), f"{adapter}_b.weight": (outputs, block.rank)}
    shapes[f"layers.{index}.block_proj.weight"] = (hidden, hidden)
    own = _layer_shapes(LayerConfig(attention=layer.beside, mlp=None), hidden, range(0), norm)
    return shapes | {f"layers.{index}.hybrid.{module}": shape for module, shape in own}


def _attention_matrices(
    attention: AttentionConfig | LatentAttentionConfig, hidden: int
) -> Iterator[tuple[str, int, int, bool]]:
    """Yield name, rows, columns, and True if there is a bias, for each matrix."""
    if isinstance(attention, LatentAttentionConfig):
        yield from _latent_matrices(attention, hidden)
        return
    yield "q_proj", attention.query_size, hidden, attention.has_bias
    if attention.has_gate:
        yield "q_gate_proj", attention.gate_size, hidden, attention.has_bias
    if attention.kv_from is None:
        yield "k_proj", attention.key_size, hidden, attention.has_bias and attention.has_key_bias
        yield "v_proj", attention.value_size, hidden, attention.has_bias
    yield "o_proj", hidden, attention.attended_size, attention.has_output_bias


def _recurrent_matrices(mixer: Recurrent, hidden: int) -> Iterator[tuple[str, int, int, bool]]:
    """Yield name, rows, columns, and True if there is a bias, for each matrix."""
    if isinstance(mixer, DeltaNetConfig):
        for module, size in mixer.input_sizes.items():
            yield module, size, hidden, False
        for module, size in mixer.latent_sizes.items():
            yield module, size, mixer.rank, False
        for module, size in mixer.conv_sizes.items():
            yield module, size, mixer.kernel_size, False
        yield "out_proj", hidden, mixer.inner_size, False
        return
    if isinstance(mixer, LightningConfig):
        yield "lightning_qkv", 3 * mixer.inner_size, hidden, False
        yield "lightning_gate", mixer.inner_size, hidden, False
        yield "out_proj", hidden, mixer.inner_size, False
        return
    has_conv_bias = mixer.has_bias if isinstance(mixer, ShortConvConfig) else mixer.has_conv_bias
    yield "in_proj", mixer.projected_size, hidden, mixer.has_bias
    yield "conv", mixer.convolved_size, mixer.kernel_size, has_conv_bias
    if isinstance(mixer, SelectiveScanConfig):
        yield "selection_proj", sum(mixer.selected_sizes), mixer.channel_count, False
        yield "time_step_proj", mixer.channel_count, mixer.rank, False
    yield "out_proj", hidden, mixer.inner_size, mixer.has_bias


def _latent_matrices(attention: LatentAttentionConfig, hidden: int) -> Iterator[tuple[str, int, int, bool]]:
    rank, queries = attention.query_rank, attention.query_size
    if rank is None:
        yield "q_proj", queries, hidden, False
    else:
        yield "q_a_proj", rank, hidden, False
        yield "q_b_proj", queries, rank, False
    yield "kv_a_proj", attention.entry_dim, hidden, False
    # Each head has two matrices: one projects its queries to the latents, one the latents to its values.
    yield "k_b_proj", attention.head_count * attention.latent_dim, attention.plain_dim, False
    yield "v_b_proj", attention.value_size, attention.latent_dim, False
    yield "o_proj", hidden, attention.value_size, False
    if attention.indexer is not None and rank is not None:
        yield "index_q_proj", attention.indexer.head_count * attention.indexer.head_dim, rank, False
        yield "index_k_proj", attention.indexer.head_dim, hidden, False
        yield "index_weight_proj", attention.indexer.head_count, hidden, False


def _mlp_matrices(mlp: MlpConfig | ExpertsConfig, hidden: int, experts: range) -> Iterator[tuple[str, int, int, bool]]:
    """Yield name, rows, columns, and True if there is a bias, for each matrix."""

    def gated(
        prefix: str, middle: int, has_bias: bool = False, has_gate: bool = True
    ) -> Iterator[tuple[str, int, int, bool]]:
        if has_gate:
            yield f"{prefix}gate_proj", middle, hidden, has_bias
        yield f"{prefix}up_proj", middle, hidden, has_bias
        yield f"{prefix}down_proj", hidden, middle, has_bias

    if isinstance(mlp, MlpConfig):
        yield from gated("", mlp.intermediate_size, mlp.has_bias, mlp.has_gate)
        return
    yield "router", mlp.choice_count, hidden, mlp.has_router_bias
    for expert in experts:
        yield from gated(f"experts.{expert}.", mlp.intermediate_size, mlp.has_bias, mlp.has_gate)
    if mlp.shared_size:
        yield from gated("shared.", mlp.shared_size, has_gate=mlp.has_gate)
    if mlp.has_shared_gate:
        yield "shared_gate", 1, hidden, False


def outside_name(name: str, family: str, format: Format, *, is_joint: bool = False) -> str:
    """Return the name of a tensor in files.

    Args:
        name: our name.
        family: family of the model.
        format: naming of tensors in the files.
        is_joint: return the name of the joint tensor that contains the tensor, see Format.
    """
    *path, kind = name.split(".")
    naming = format.naming_of(family)
    layer, sublayer = "", 0
    if path[0] == "layers":
        index, sublayer = divmod(int(path[1]), naming.sublayers)
        layer = f"{naming.layers or format.layers}.{index}."
    if is_joint:
        joint = naming.modules.get("kv_b_proj", format.joint).format(sublayer=sublayer)
        return f"{layer}{joint}.{kind}"
    item = path[3] if path[2:3] in (["experts"], ["adapters"], ["heads"]) else ""
    stream = path[1] if path[0] == "streams" else ""
    module = _module(path)
    if whole := naming.modules.get(f"{module}.{kind}") or format.modules.get(f"{module}.{kind}"):
        return f"{layer}{whole}"
    usual = naming.modules.get(module) or format.modules[module]
    return f"{layer}{usual.format(expert=item, use=item, head=item, stream=stream, sublayer=sublayer)}.{kind}"


def _module(path: list[str]) -> str:
    """Return the module of a tensor, without the indexes of a layer, an expert, an adapter, a head or a stream.

    Args:
        path: components of our name, which are separated by dots, without the last one.
    """
    path = path[2:] if path[0] == "layers" else path
    return ".".join(path[:1] + path[2:] if path[0] in NUMBERED else path)


def tensor_places(
    config: ModelConfig, format: Format, found: Collection[str] = ()
) -> tuple[dict[str, TensorPlace], dict[str, Shape]]:
    """Return a TensorPlace for every tensor of a model.

    Args:
        config: model.
        format: naming of tensors in the files.
        found: names of the files' tensors. They are needed for tensors that can be stored in several layouts.

    Returns:
        Places by our names, and the expected shapes of the files' tensors by the files' names.
    """
    places: dict[str, TensorPlace] = {}
    shapes: dict[str, Shape] = {}
    # For each tensor of the file that contains several tensors, our names of these tensors. The key is the file's name
    # and the module's group.
    shared: dict[str, list[str]] = {}
    for name, shape in tensor_shapes(config).items():
        outside = outside_name(name, config.family, format)
        if (place := _mixed_place(config, name, shape, format, found)) is not None:
            places[name] = place
            shapes[place.name] = place.rows_shape
            continue
        before = shapes.get(outside, (0, *shape[1:]))
        places[name] = _place(config, name, TensorPlace(outside, shape, first_row=before[0]), format)
        shapes[outside] = (before[0] + shape[0], *shape[1:])
        if _is_rearranged(name, format.naming_of(config.family)):
            shared.setdefault(f"{outside} {name.rpartition('.')[0].rpartition('.')[0]}", []).append(name)
    for names in shared.values():
        places |= _rearranged(names, places, format.naming_of(config.family))
    for place in places.values():
        if place.is_transposed:
            shapes[place.name] = (math.prod(shapes[place.name]) // place.rows_shape[1], place.rows_shape[1])
    return places, shapes


def as_saved(config: ModelConfig, found: Mapping[str, Shape]) -> ModelConfig:
    """Return the config with the family whose names and shapes a checkpoint's tensors have.

    Args:
        config: model.
        found: shapes of the files' tensors, by the files' names in transformers' format.
    """
    other = family_named(config.family).saved_as
    if other is None:
        return config
    saved = structs.replace(config, family=other)
    _, shapes = tensor_places(saved, TRANSFORMERS, found)
    fits = all(name in found and _holds(found[name], shape) for name, shape in shapes.items())
    return saved if fits else config


def match_tensors(
    config: ModelConfig, found: Mapping[str, Shape], format: Format, *, ignored: Callable[[str], bool]
) -> dict[str, TensorPlace]:
    """Return the TensorPlace of every tensor of a model, by our name, and check the files' tensors.

    Args:
        config: model.
        found: shapes of the files' tensors, by the files' names.
        format: naming of tensors in the files.
        ignored: function that returns True for a tensor that is not needed and can be ignored.

    Raises:
        ModelLoadError: a tensor is missing or unknown, or its shape does not match the config. Unknown tensors are not
            ignored, because the model would probably compute wrong results.
    """
    places, shapes = tensor_places(config, format, found)
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ModelLoadError(
            f"the weights lack {_listed(missing)}, which {config.family} with this config needs: "
            "the checkpoint is incomplete, fetch it again"
        )
    for name, shape in shapes.items():
        if not _holds(found[name], shape):
            raise ModelLoadError(
                f"{name} has shape {list(found[name])}, but the config asks for {list(shape)}: "
                "weights and config do not belong to the same model"
            )
    unread = _unread(config, format)
    unknown = [name for name in found if name not in shapes and name not in unread and not ignored(name)]
    if unknown:
        raise ModelLoadError(
            f"the weights hold {_listed(unknown)}, which {config.family} with this config does not use: "
            "weights and config do not belong to the same model, or it is a variant that is not supported"
        )
    return places


def _unread(config: ModelConfig, format: Format) -> set[str]:
    """Return names of unused tensors. The family lists some of them. Some files have key and value tensors for layers
    that use another layer's keys and values, matrices of experts that return their input, or a copy of a shared block
    for each layer with this block.
    """
    naming = format.naming_of(config.family)
    prefix = naming.layers or format.layers
    unread = {f"{prefix}.{index}.{name}" for index in range(config.layer_count) for name in naming.unread}
    layers = [index for index, other in enumerate(config.kv_layers) if index != other]
    modules = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight")
    names = [f"layers.{index}.{module}" for index in layers for module in modules]
    for index, layer in enumerate(config.layers):
        for expert in () if (mlp := layer.experts) is None else range(mlp.expert_count, mlp.choice_count):
            names += [f"layers.{index}.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
    for index, layer in enumerate(config.layers):
        if layer.block is not None and layer.block.first != index:
            first = f"layers.{layer.block.first}."
            owned = (name for name in tensor_shapes(config) if name.startswith((f"{first}block.", f"{first}adapters.")))
            names += [f"layers.{index}.{name.removeprefix(first)}" for name in owned]
    return unread.union(outside_name(name, config.family, format) for name in names)


def _mixed_place(
    config: ModelConfig, name: str, shape: Shape, format: Format, found: Collection[str]
) -> TensorPlace | None:
    """Return the place of a tensor whose rows alternate with the rows of another tensor, or are a part of them.

    Args:
        found: see tensor_places.

    Returns:
        The TensorPlace, or None for a tensor with its own rows.
    """
    module = name.split(".")[-2]
    outside, naming = outside_name(name, config.family, format), format.naming_of(config.family)
    if module in ("k_b_proj", "v_b_proj") and outside not in found:
        return _part_of_joint(config, name, shape, format)
    if module in naming.grouped:
        place, mixer = TensorPlace(outside, shape), config.layers[int(name.split(".")[1])].attention
        if isinstance(mixer, AttentionConfig):
            return _part_of_heads(mixer, module, place, naming)
        return _part_of_groups(config, module, place)
    if module not in ("q_proj", "q_gate_proj", "v_proj"):
        return None
    attention = config.layers[int(name.split(".")[1])].attention
    if module == "v_proj":
        assert isinstance(attention, AttentionConfig), "latent attention has no such tensor"
        keys = outside_name(name.replace("v_proj", "k_proj"), config.family, format)
        return TensorPlace(keys, shape) if attention.has_values_of_keys else None
    if not isinstance(attention, AttentionConfig) or not attention.has_gate or "q_gate_proj" in naming.modules:
        return None
    order = np.arange(attention.head_dim)
    if module == "q_proj":
        turned = _order(attention, module, naming.pairs_adjacent)
        order = order if turned is None else turned
    else:
        order = order + attention.head_dim
    heads = np.arange(0, 2 * attention.query_size, 2 * attention.head_dim)
    rows = (heads[:, None] + order).reshape(-1)
    return TensorPlace(outside, shape, stored_shape=(2 * shape[0], *shape[1:]), order=rows)


def _part_of_groups(config: ModelConfig, module: str, place: TensorPlace) -> TensorPlace:
    """Return the TensorPlace of a tensor in a joint tensor that is ordered by groups of heads.

    For each group, the joint tensor has the rows of q, k, v and z, or the rows of delta_share and delta_decay.

    Args:
        place: name and shape of the tensor.
    """
    delta = next(layer.attention for layer in config.layers if isinstance(layer.attention, DeltaNetConfig))
    heads = delta.head_count // delta.group_count
    parts = {"q": delta.vector_size, "k": delta.vector_size, "v": heads * delta.head_dim, "z": heads * delta.head_dim}
    wanted = {"delta_qkv": ("q", "k", "v"), "delta_gate": ("z",)}
    if module in ("delta_decay", "delta_share"):
        parts = {"b": heads, "a": heads}
        wanted = {"delta_decay": ("a",), "delta_share": ("b",)}
    rows = np.arange(delta.group_count * sum(parts.values())).reshape(delta.group_count, -1)
    split = dict(zip(parts, np.split(rows, np.cumsum(list(parts.values()))[:-1], axis=1), strict=True))
    order = np.concatenate([split[part].reshape(-1) for part in wanted[module]])
    return replace(place, stored_shape=(rows.size, *place.shape[1:]), order=order)


def _part_of_heads(attention: AttentionConfig, module: str, place: TensorPlace, naming: Naming) -> TensorPlace:
    """Return the TensorPlace of queries, keys or values in a joint tensor. For each key/value head, this tensor has the
    rows of its query heads, of the key and of the value.
    """
    group, dim = attention.head_count // attention.kv_head_count, attention.head_dim
    heads = np.arange(attention.kv_head_count * (group + 2) * dim).reshape(-1, group + 2, dim)
    if naming.shards:
        queries, values, keys = heads.reshape(naming.shards, 3, -1).swapaxes(0, 1).reshape(3, -1, 1, dim)
        heads = np.concatenate((queries, keys, values), axis=1)
    own = heads[:, {"q_proj": slice(group), "k_proj": slice(group, group + 1)}.get(module, slice(group + 1, None))]
    order = None if module == "v_proj" else _order(attention, module, naming.pairs_adjacent)
    rows = (own if order is None else own[..., order]).reshape(-1)
    return replace(place, stored_shape=(heads.size, *place.shape[1:]), order=rows)


def _part_of_joint(config: ModelConfig, name: str, shape: Shape, format: Format) -> TensorPlace:
    """Return the TensorPlace of k_b_proj or v_b_proj in their joint tensor. For each head, this tensor has the rows for
    keys, then the rows for values.
    """
    attention = config.layers[int(name.split(".")[1])].attention
    assert isinstance(attention, LatentAttentionConfig), "only latent attention has such tensors"
    sizes = attention.plain_dim, attention.value_dim
    rows = np.arange(attention.head_count * sum(sizes)).reshape(attention.head_count, -1)
    is_key = name.split(".")[-2] == "k_b_proj"
    return TensorPlace(
        outside_name(name, config.family, format, is_joint=True),
        shape,
        order=(rows[:, : sizes[0]] if is_key else rows[:, sizes[0] :]).reshape(-1),
        stored_shape=(rows.size, attention.latent_dim),
        transposed_count=attention.head_count if is_key else 0,
    )


def _holds(found: Shape, wanted: Shape) -> bool:
    """Return True if a tensor with a stored shape can be read as a tensor with the wanted shape.

    Matrices of all experts may be stored as one tensor with an additional dimension. A matrix with one row may be
    stored as a vector. A vector that consists of one vector per head may be stored as a matrix.
    """
    is_same = found == wanted or wanted[-1:] == found[-1:] or len(wanted) == 1
    return math.prod(found) == math.prod(wanted) and is_same


def _place(config: ModelConfig, name: str, place: TensorPlace, format: Format) -> TensorPlace:
    """Add row order, offset, logarithm and factors to a place."""
    naming = format.naming_of(config.family)
    path = name.split(".")
    layer, module = path[1] if path[0] == "layers" else None, path[-2]
    if module.endswith("norm") and module != "gate_norm" and path[-1] == "weight" and naming.norm_offset:
        place = replace(place, offset=naming.norm_offset)
    if name == "lm_head.weight" and config.has_unit_head:
        place = replace(place, is_unit=True)
    if name.endswith(".state.rates"):
        place = replace(place, is_log=format.has_log_rates)
    for found in config.row_factors:
        if layer is not None and name == f"layers.{layer}.{found.name}":
            rows, factors = zip(*found.parts, strict=True)
            place = replace(place, factors=np.repeat(np.array(factors, dtype=np.float32), rows))
    if layer is not None and module in ("q_proj", "k_proj", "q_norm", "k_norm", "q_b_proj", "kv_a_proj"):
        attention = config.layers[int(layer)].attention
        assert isinstance(attention, KVAttention), "only attention has queries and keys"
        order = _order(attention, module, naming.pairs_adjacent)
        if order is not None:
            heads = np.arange(0, place.shape[0], order.size)
            place = replace(place, order=(heads[:, None] + order).reshape(-1))
    return place


def _is_rearranged(name: str, naming: Naming) -> bool:
    *path, kind = name.split(".")
    module = _module(path)
    return module in naming.alternating or (module in naming.turned and kind == "weight")


def _rearranged(names: list[str], places: Mapping[str, TensorPlace], naming: Naming) -> dict[str, TensorPlace]:
    """Return the TensorPlaces of tensors that are stored in one tensor, consecutively or with alternating rows.

    Args:
        names: our names.
    """
    module = _module(names[0].split(".")[:-1])
    first, *inputs = places[names[0]].shape
    is_transposed = bool(inputs) and module in naming.turned
    total, start = first * len(names), places[names[0]].first_row
    stored_shape = (inputs[0], total) if is_transposed else (total, *inputs)
    first_row = start * math.prod(inputs) // math.prod(stored_shape[1:])
    found: dict[str, TensorPlace] = {}
    for index, name in enumerate(names):
        rows = np.arange(first)
        order = rows * len(names) + index if module in naming.alternating else rows + index * first
        found[name] = replace(
            places[name], stored_shape=stored_shape, first_row=first_row, is_transposed=is_transposed, order=order
        )
    return found


def _order(
    attention: AttentionConfig | LatentAttentionConfig, module: str, pairs_adjacent: bool
) -> npt.NDArray[np.int64] | None:
    """Return the order of rows in which the rows of rotated pairs are half a head apart. The order is that of one
    head, or of all rows.
    """
    if isinstance(attention, AttentionConfig):
        return _head_order(attention.rotary, attention.head_dim, pairs_adjacent)
    turned = _head_order(attention.rotary, attention.turned_dim, pairs_adjacent)
    if turned is None:
        return None
    before = attention.latent_dim if module == "kv_a_proj" else attention.plain_dim
    return np.concatenate((np.arange(before), before + turned))


def _head_order(rotary: RotaryConfig | None, head_dim: int, pairs_adjacent: bool) -> npt.NDArray[np.int64] | None:
    """Return an order of a head's dimensions in which the two members of a rotated pair are half a head apart.

    If only some dimensions are rotated, they come first in each half.

    Returns:
        int64 [head_dim], or None if the order does not change.
    """
    # Without rotation, every order is correct, as long as queries and keys have the same order.
    rotated = head_dim if rotary is None else rotary.rotated_dims
    pairs, half = rotated // 2, head_dim // 2
    if not pairs_adjacent and pairs == half:
        return None
    rest = np.arange(2 * pairs, head_dim)
    first, second = np.arange(pairs), np.arange(pairs, 2 * pairs)
    if pairs_adjacent:
        first, second = 2 * first, 2 * first + 1
    return np.concatenate((first, rest[: half - pairs], second, rest[half - pairs :]))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
