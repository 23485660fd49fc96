"""Tensors of an encoder: their shapes, and their names in transformers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from trioserve.model.encoder_config import EncoderConfig, EncoderFamily

__all__ = ["ENCODER_CLASSES", "EMBEDDING_ENDS", "EncoderClass", "encoder_shapes", "is_unused", "outside_name"]


class EncoderClass(NamedTuple):
    """A class of transformers that is an encoder.

    Attributes:
        prefix: prefix of the encoder's own tensors, if the class has further ones.
        scores_pairs: the class has a head that scores pairs of texts.
    """

    family: EncoderFamily
    prefix: str
    scores_pairs: bool = False


ENCODER_CLASSES = {
    "BertModel": EncoderClass("bert", "bert."),
    "BertForSequenceClassification": EncoderClass("bert", "bert.", scores_pairs=True),
    "RobertaModel": EncoderClass("roberta", "roberta."),
    "RobertaForSequenceClassification": EncoderClass("roberta", "roberta.", scores_pairs=True),
    "XLMRobertaModel": EncoderClass("roberta", "roberta."),
    "XLMRobertaForSequenceClassification": EncoderClass("roberta", "roberta.", scores_pairs=True),
    "ModernBertModel": EncoderClass("modernbert", "model."),
    "ModernBertForMaskedLM": EncoderClass("modernbert", "model."),
    "ModernBertForSequenceClassification": EncoderClass("modernbert", "model.", scores_pairs=True),
}


class _Naming(NamedTuple):
    """Names of one family's tensors.

    Attributes:
        plain: modules outside of layers.
        layer: prefix before the index of a layer.
        modules: modules of a layer.
        heads: modules of the scoring head, which have no prefix.
        unused: beginnings of names of tensors that no vector depends on.
    """

    plain: Mapping[str, str]
    layer: str
    modules: Mapping[str, str]
    heads: Mapping[str, str]
    unused: tuple[str, ...]


_BERT = _Naming(
    plain={
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    },
    layer="encoder.layer",
    modules={
        "q_proj": "attention.self.query",
        "k_proj": "attention.self.key",
        "v_proj": "attention.self.value",
        "o_proj": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up_proj": "intermediate.dense",
        "down_proj": "output.dense",
        "output_norm": "output.LayerNorm",
    },
    heads={"head_dense": "bert.pooler.dense", "head_out": "classifier"},
    unused=("pooler.dense.", "cls.", "lm_head."),
)
_NAMINGS: dict[EncoderFamily, _Naming] = {
    "bert": _BERT,
    "roberta": _BERT._replace(heads={"head_dense": "classifier.dense", "head_out": "classifier.out_proj"}),
    "modernbert": _Naming(
        plain={
            "embed": "embeddings.tok_embeddings",
            "norm": "embeddings.norm",
            "final_norm": "final_norm",
        },
        layer="layers",
        modules={
            "attention_norm": "attn_norm",
            "qkv_proj": "attn.Wqkv",
            "o_proj": "attn.Wo",
            "mlp_norm": "mlp_norm",
            "gate_up_proj": "mlp.Wi",
            "down_proj": "mlp.Wo",
        },
        heads={"head_dense": "head.dense", "head_norm": "head.norm", "head_out": "classifier"},
        unused=("head.", "decoder."),
    ),
}
EMBEDDING_ENDS = tuple(f"{naming.plain['embed']}.weight" for naming in _NAMINGS.values())


def outside_name(name: str, encoder: EncoderClass, stored: Container[str]) -> str:
    """Return the name of a tensor in the files.

    Args:
        name: our name.
        encoder: class of the encoder.
        stored: all names in the files.
    """
    naming = _NAMINGS[encoder.family]
    *layer, module, kind = name.split(".")
    if module in naming.heads:
        return f"{naming.heads[module]}.{kind}"
    inner = f"{naming.layer}.{layer[1]}.{naming.modules[module]}.{kind}" if layer else f"{naming.plain[module]}.{kind}"
    # A file of the bare encoder has no prefix.
    return inner if inner in stored else encoder.prefix + inner


def is_unused(outside: str, encoder: EncoderClass) -> bool:
    return outside.removeprefix(encoder.prefix).startswith(_NAMINGS[encoder.family].unused)


def encoder_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an encoder, by our name, in the order of computing.

    Args:
        config: encoder.
    """
    hidden, modern = config.hidden_size, config.modern
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    if modern is None:
        shapes["positions.weight"] = (config.position_count, hidden)
        shapes["types.weight"] = (config.type_count, hidden)
    norm_bias = modern is None or modern.norm_bias
    shapes |= _norm("norm", hidden, norm_bias)
    for index in range(config.layer_count):
        shapes |= _bert_layer(config, index) if modern is None else _modern_layer(config, index)
    if modern is not None:
        shapes |= _norm("final_norm", hidden, norm_bias)
    if config.scores_pairs:
        shapes |= _matrix("head_dense", hidden, hidden, modern is None or modern.head_bias)
        if modern is not None:
            shapes |= _norm("head_norm", hidden, norm_bias)
        shapes |= _matrix("head_out", 1, hidden, True)
    return shapes


def _bert_layer(config: EncoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    hidden, middle = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}
    for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
        shapes |= _matrix(f"layers.{index}.{module}", hidden, hidden, True)
    shapes |= _matrix(f"layers.{index}.up_proj", middle, hidden, True)
    shapes |= _matrix(f"layers.{index}.down_proj", hidden, middle, True)
    for module in ("attention_norm", "output_norm"):
        shapes |= _norm(f"layers.{index}.{module}", hidden, True)
    return shapes


def _modern_layer(config: EncoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    modern, hidden, middle = config.modern, config.hidden_size, config.intermediate_size
    assert modern is not None, "a ModernBERT layer in another model"
    shapes: dict[str, tuple[int, ...]] = {}
    if index:
        shapes |= _norm(f"layers.{index}.attention_norm", hidden, modern.norm_bias)
    shapes |= _matrix(f"layers.{index}.qkv_proj", 3 * hidden, hidden, modern.attention_bias)
    shapes |= _matrix(f"layers.{index}.o_proj", hidden, hidden, modern.attention_bias)
    shapes |= _norm(f"layers.{index}.mlp_norm", hidden, modern.norm_bias)
    shapes |= _matrix(f"layers.{index}.gate_up_proj", 2 * middle, hidden, modern.mlp_bias)
    shapes |= _matrix(f"layers.{index}.down_proj", hidden, middle, modern.mlp_bias)
    return shapes


def _matrix(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if has_bias else weight


def _norm(name: str, size: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": (size,)}
    return {**weight, f"{name}.bias": (size,)} if has_bias else {**weight}
