"""Reads an encoder that transformers or sentence-transformers saved in a directory: config, tensors and pooling."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.pooling import PoolingMethod
from trioserve.model.encoder_config import (
    LAYERS_MAX,
    EncoderActivation,
    EncoderConfig,
    EncoderFamily,
    ModernLayers,
    RotatedLayers,
)
from trioserve.model.layer_config import RopeScaling, RotaryConfig
from trioserve.model.loading.fields import Fields, one_line, unread_names, warn_of_unread
from trioserve.model.loading.hf_config import read_json_list, read_json_object
from trioserve.model.loading.safetensors import INDEX_NAME, stored_tensors
from trioserve.model.loading.stored_tensor import FileTensor, StoredTensor, read_plain
from trioserve.model.number_formats import Dtype, Float32Array, Values, convert, empty_values

__all__ = [
    "ENCODER_CLASSES",
    "EMBEDDING_ENDS",
    "EncoderClass",
    "encoder_shapes",
    "is_unused",
    "outside_name",
    "EncoderDirectory",
    "holds_encoder",
    "opened_encoder",
]


class EncoderClass(NamedTuple):
    """A class of transformers that is an encoder.

    Attributes:
        prefix: prefix of the encoder's tensors, if the class also has other tensors.
        scores_pairs: the class has a head that scores pairs of texts.
        labels_tokens: the class has a head that labels each token.
    """

    family: EncoderFamily
    prefix: str
    scores_pairs: bool = False
    labels_tokens: bool = False


ENCODER_CLASSES = {
    "BertModel": EncoderClass("bert", "bert."),
    "BertForMaskedLM": EncoderClass("bert", "bert."),
    "BertForSequenceClassification": EncoderClass("bert", "bert.", scores_pairs=True),
    "BertForTokenClassification": EncoderClass("bert", "bert.", labels_tokens=True),
    "ErnieModel": EncoderClass("bert", "ernie."),
    "ErnieForMaskedLM": EncoderClass("bert", "ernie."),
    "ErnieForSequenceClassification": EncoderClass("bert", "ernie.", scores_pairs=True),
    "ErnieForTokenClassification": EncoderClass("bert", "ernie.", labels_tokens=True),
    "RobertaModel": EncoderClass("roberta", "roberta."),
    "RobertaForMaskedLM": EncoderClass("roberta", "roberta."),
    "RobertaForSequenceClassification": EncoderClass("roberta", "roberta.", scores_pairs=True),
    "XLMRobertaModel": EncoderClass("roberta", "roberta."),
    "XLMRobertaForMaskedLM": EncoderClass("roberta", "roberta."),
    "XLMRobertaForSequenceClassification": EncoderClass("roberta", "roberta.", scores_pairs=True),
    "GteModel": EncoderClass("gte", "gte."),
    "GteForMaskedLM": EncoderClass("gte", "gte."),
    "GteForSequenceClassification": EncoderClass("gte", "gte.", scores_pairs=True),
    "GteNewModel": EncoderClass("gte", "new."),
    "GteNewForSequenceClassification": EncoderClass("gte", "new.", scores_pairs=True),
    "NewModel": EncoderClass("gte", "new."),
    "NewForSequenceClassification": EncoderClass("gte", "new.", scores_pairs=True),
    "JinaEmbeddingsV3Model": EncoderClass("jina", "roberta."),
    "JinaEmbeddingsV3ForMaskedLM": EncoderClass("jina", "roberta."),
    "ModernBertModel": EncoderClass("modernbert", "model."),
    "ModernBertForMaskedLM": EncoderClass("modernbert", "model."),
    "ModernBertForSequenceClassification": EncoderClass("modernbert", "model.", scores_pairs=True),
    "ModernBertForTokenClassification": EncoderClass("modernbert", "model.", labels_tokens=True),
    "NomicBertModel": EncoderClass("nomic", "nomic_bert."),
    "NomicBertForMaskedLM": EncoderClass("nomic", "nomic_bert."),
    "NomicBertForSequenceClassification": EncoderClass("nomic", "nomic_bert.", scores_pairs=True),
}


class _Naming(NamedTuple):
    """Names of one family's tensors.

    Attributes:
        plain: modules outside of layers.
        layer: prefix before the index of a layer.
        modules: modules of a layer.
        heads: modules of the scoring head. "{prefix}" in a name stands for the prefix of the encoder's tensors.
        unused: prefixes of tensor names. The model's results do not depend on these tensors.
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
    heads={"head_dense": "{prefix}pooler.dense", "head_out": "classifier"},
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
    "nomic": _BERT._replace(
        plain={**_BERT.plain, "norm": "emb_ln"},
        layer="encoder.layers",
        modules={
            "qkv_proj": "attn.Wqkv",
            "o_proj": "attn.out_proj",
            "attention_norm": "norm1",
            "up_proj": "mlp.fc11",
            "gate_proj": "mlp.fc12",
            "down_proj": "mlp.fc2",
            "output_norm": "norm2",
        },
    ),
    "gte": _BERT._replace(
        modules={
            "qkv_proj": "attention.qkv_proj",
            "o_proj": "attention.o_proj",
            "attention_norm": "attn_ln",
            "up_gate_proj": "mlp.up_gate_proj",
            "down_proj": "mlp.down_proj",
            "output_norm": "mlp_ln",
        },
        unused=(*_BERT.unused, "classifier."),
    ),
    "jina": _BERT._replace(
        plain={**_BERT.plain, "norm": "emb_ln"},
        layer="encoder.layers",
        modules={
            "qkv_proj": "mixer.Wqkv",
            "o_proj": "mixer.out_proj",
            "attention_norm": "norm1",
            "up_proj": "mlp.fc1",
            "down_proj": "mlp.fc2",
            "output_norm": "norm2",
        },
    ),
}
# ERNIE adds the embedding of a task to each token. Without a request for another task, it is that of task 0.
TASKS = "embeddings.task_type_embeddings.weight"
EMBEDDING_ENDS = tuple(f"{naming.plain['embed']}.weight" for naming in _NAMINGS.values())


def outside_name(name: str, encoder: EncoderClass, stored: Container[str]) -> str:
    """Return the name of a tensor in the files.

    Args:
        name: name of the tensor in this project.
        encoder: class of the encoder.
        stored: names of all tensors in the files.
    """
    naming = _NAMINGS[encoder.family]
    *layer, module, kind = name.split(".")
    if module in naming.heads:
        return f"{naming.heads[module].format(prefix=encoder.prefix)}.{kind}"
    inner = f"{naming.layer}.{layer[1]}.{naming.modules[module]}.{kind}" if layer else f"{naming.plain[module]}.{kind}"
    # If a file contains only the encoder, names in it have no prefix.
    return inner if inner in stored else encoder.prefix + inner


def is_unused(outside: str, encoder: EncoderClass) -> bool:
    return outside.removeprefix(encoder.prefix).startswith(_NAMINGS[encoder.family].unused)


def encoder_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an encoder, by name.

    Args:
        config: encoder.
    """
    hidden, modern = config.hidden_size, config.modern
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    if config.has_position_table:
        shapes["positions.weight"] = (config.position_count, hidden)
    if modern is None and config.type_count:
        shapes["types.weight"] = (config.type_count, hidden)
    norm_bias = modern is None or modern.norm_bias
    shapes |= _norm("norm", hidden, norm_bias)
    for index in range(config.layer_count):
        for matrix in config.matrices:
            for module, rows in matrix.outputs.items():
                shapes |= _matrix(f"layers.{index}.{module}", rows, matrix.inputs, matrix.has_bias)
        for module in ("attention_norm", "output_norm" if modern is None else "mlp_norm"):
            if modern is None or index or module == "mlp_norm":
                shapes |= _norm(f"layers.{index}.{module}", hidden, norm_bias)
    if modern is not None:
        shapes |= _norm("final_norm", hidden, norm_bias)
    if config.scores_pairs or config.label_count:
        if modern is not None or not config.label_count:
            shapes |= _matrix("head_dense", hidden, hidden, modern is None or modern.head_bias)
        if modern is not None:
            shapes |= _norm("head_norm", hidden, norm_bias)
        shapes |= _matrix("head_out", config.label_count or 1, hidden, True)
    return shapes


def _matrix(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if has_bias else weight


def _norm(name: str, size: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": (size,)}
    return {**weight, f"{name}.bias": (size,)} if has_bias else {**weight}


_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Fields that do not change the results of an encoder, in addition to the fields that fields.py lists.
_NOTES = (
    *("decoder_bias", "deterministic_flash_attn", "directionality", "matryoshka_dimensions", "pooler_fc_size"),
    *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    *("reference_compile", "repad_logits_with_grad", "sbert_ce_default_activation_function"),
    *("sparse_pred_ignore_index", "sparse_prediction", "task_type_vocab_size", "tie_word_embeddings", "use_task_id"),
)
_MODERN_NOTES = (
    *("classifier_pooling", "global_attn_every_n_layers", "layer_norm_eps", "position_embedding_type"),
    "type_vocab_size",
)
# Names of fields in checkpoints of NomicBERT's authors.
_NOMIC_SPELLINGS = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "rope_theta": "rotary_emb_base",
}
# Fields that must have these values, if the config has them.
_ROTATED_CHOICES: dict[str, object] = {
    "causal": False,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "num_experts": 0,
    "pack_qkv": True,
    "parallel_block": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
_ROTATED_NOTES = (
    *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "logn_attention_clip1", "max_trained_positions"),
    *("pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn", "rotary_emb_scale_base"),
    *("rotary_scaling_factor", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj", "unpad_inputs", "use_memory_efficient_attention", "use_xentropy"),
)
_ROTARY_THETAS: dict[EncoderFamily, float] = {"nomic": 1000.0, "gte": 160_000.0, "jina": 20_000.0}
_MODERN_LAYER_TYPES = ("full_attention", "sliding_attention")
_MODERN_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
_MODERN_THETA_NAMES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def holds_encoder(path: Path) -> bool:
    """Return True if a path is a directory with the config of an encoder.

    Args:
        path: any path.

    Raises:
        ModelLoadError: the config is damaged.
    """
    if not (path / "config.json").is_file():
        return False
    if not (any(path.glob("*.safetensors")) or (path / INDEX_NAME).is_file()):
        return False
    fields = Fields(read_json_object(path / "config.json"), "config.json")
    named = fields.strings_or("architectures", None)
    return named is not None and named[:1] != [] and named[0] in ENCODER_CLASSES


def opened_encoder(path: Path) -> EncoderDirectory | None:
    """Open the encoder in a directory.

    Args:
        path: any path.

    Returns:
        The encoder, or None if the path is not a directory with an encoder.

    Raises:
        ModelLoadError: the encoder is damaged or not supported. The message is one sentence that begins with the path.
    """
    try:
        return EncoderDirectory(path) if holds_encoder(path) else None
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {path}: {one_line(str(error))}") from error
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error


class EncoderDirectory:
    """Opened directory of an encoder. The class has the attributes of Checkpoint that are used when an engine is built.

    Opening a directory reads only headers.

    Args:
        directory: directory of the encoder.

    Raises:
        ModelLoadError: the directory does not contain a complete encoder of a supported class.
    """

    gguf_metadata = None

    def __init__(self, directory: Path) -> None:
        stored = stored_tensors(directory)
        self.sampling_defaults: dict[str, float | int] = {}
        self.tokenizer_directory = directory
        self._class = _class_of(directory)
        dtype_names = [tensor.dtype for name, tensor in stored.items() if name.endswith(EMBEDDING_ENDS)]
        self.config = _config(directory, self._class, dtype_names[0] if dtype_names else "float32")
        shapes = encoder_shapes(self.config)
        self._outside = {name: outside_name(name, self._class, stored) for name in shapes}
        for name, shape in shapes.items():
            outside = self._outside[name]
            if outside not in stored:
                raise ModelLoadError(
                    f"the weights lack {outside}, which this encoder needs: the checkpoint is incomplete, fetch it "
                    "again"
                )
            if stored[outside].shape != shape:
                raise ModelLoadError(
                    f"{outside} has shape {list(stored[outside].shape)}, but the config asks for {list(shape)}: "
                    "weights and config do not belong to the same model"
                )
        self._tasks = _tasks(directory, self._class, stored)
        known = {*self._outside.values(), self._tasks}
        unknown = [name for name in stored if name not in known and not is_unused(name, self._class)]
        if unknown:
            raise ModelLoadError(
                f"the weights hold {', '.join(unknown[:3])}, which this encoder does not use: it is a variant that "
                "is not supported"
            )
        self._stored = stored
        self.weight_bytes: int = sum(tensor.byte_count for tensor in self.tensors())

    def tensors(self) -> Iterator[StoredTensor]:
        for name, outside in self._outside.items():
            stored = self._stored[outside]
            read: Callable[[Dtype], Values] = functools.partial(_values, stored)
            if name == "types.weight" and self._tasks is not None:
                read = functools.partial(_with_task, stored, self._stored[self._tasks])
            yield StoredTensor(name, stored.shape, stored.dtype, read, stored.sample)


def _values(stored: FileTensor, wanted: Dtype) -> Values:
    return read_plain(stored.path, stored.offset, stored.shape, stored.dtype, wanted)


def _with_task(types: FileTensor, tasks: FileTensor, wanted: Dtype) -> Values:
    """Return the embeddings of segment types, with the embedding of task 0 added to each."""
    rows = cast(Float32Array, _values(types, "float32")) + cast(Float32Array, _values(tasks, "float32"))[0]
    found = empty_values(types.shape, wanted)
    convert(rows, found)
    return found


def _tasks(directory: Path, encoder: EncoderClass, stored: Container[str]) -> str | None:
    """Return the name of the table of task embeddings. None: the encoder has none."""
    fields = Fields(read_json_object(directory / "config.json"), "config.json")
    if not fields.flag_or("use_task_id", False):
        return None
    name = TASKS if TASKS in stored else encoder.prefix + TASKS
    if name not in stored:
        raise ModelLoadError(f"the weights lack {name}, which use_task_id in config.json asks for")
    return name


def _class_of(directory: Path) -> EncoderClass:
    fields = Fields(read_json_object(directory / "config.json"), "config.json")
    named = fields.strings_or("architectures", None)
    if not named or named[0] not in ENCODER_CLASSES:
        raise ModelLoadError(f"config.json names no encoder; supported are {', '.join(ENCODER_CLASSES)}")
    return ENCODER_CLASSES[named[0]]


def _config(directory: Path, encoder_class: EncoderClass, dtype_name: Dtype) -> EncoderConfig:
    config = read_json_object(directory / "config.json")
    fields = Fields(config, "config.json", _NOMIC_SPELLINGS if "n_embd" in config else None)
    family, is_modern = encoder_class.family, encoder_class.family == "modernbert"
    rotated = None
    if family in _ROTARY_THETAS:
        activation, rotated = _rotated_layers(fields, family)
    else:
        activation = _activation(fields, "hidden_activation" if is_modern else "hidden_act")
    usual = "absolute" if rotated is None else "rope"
    if (kind := fields.text_or("position_embedding_type", usual)) not in (usual, "rotary" if rotated else usual):
        raise ModelLoadError(f"position_embedding_type in config.json is {kind!r}; supported is {usual}")
    if "quantization_config" in fields:
        raise ModelLoadError("config.json has a quantization_config; supported are unquantized safetensors")
    if encoder_class.scores_pairs and _label_count(fields) != 1:
        raise ModelLoadError(
            f"the model gives a text {_label_count(fields)} labels; supported are heads that give one score"
        )
    if fields.flag_or("is_decoder", False):
        raise fields.wrong("is_decoder", "false for an encoder, which sees all tokens of a text")
    position_offset = (fields.whole_or("pad_token_id", 1) or 0) + 1 if family == "roberta" else 0
    position_count = fields.whole("max_position_embeddings")
    # Beyond this number, NomicBERT would compute other frequencies for each length of a text.
    position_count = min(position_count, fields.whole_or("max_trained_positions", position_count))
    method, normalize = _pooling(directory)
    if encoder_class.scores_pairs:
        method = _scored_method(fields) if is_modern else "cls"
    described = EncoderConfig(
        family=family,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        layer_count=fields.whole("num_hidden_layers"),
        head_count=fields.whole("num_attention_heads"),
        position_count=position_count,
        position_offset=position_offset,
        type_count=1 if is_modern else fields.whole_or("type_vocab_size", 2),
        norm_eps=fields.number_or("norm_eps", 1e-5) if is_modern else fields.number_or("layer_norm_eps", 1e-12),
        activation=activation,
        context_tokens_default=_recommended_tokens(directory, position_count - position_offset),
        method=method,
        normalize=normalize,
        scores_pairs=encoder_class.scores_pairs,
        label_count=_label_count(fields) if encoder_class.labels_tokens else 0,
        applies_sigmoid=not _has_identity(fields),
        dtype_name=dtype_name,
        modern=_modern_layers(fields) if is_modern else None,
        rotated=rotated,
    )
    notes = _MODERN_NOTES if is_modern else _ROTATED_NOTES if rotated is not None else ()
    warn_of_unread("config.json", unread_names(fields, _NOTES + notes))
    return described


def _rotated_layers(fields: Fields, family: EncoderFamily) -> tuple[EncoderActivation, RotatedLayers]:
    """Return the activation of the MLP, and how the layers differ from BERT's."""
    for name, wanted in _ROTATED_CHOICES.items():
        if name in fields and not fields.is_one_of(name, (wanted,)):
            raise fields.wrong(name, f"{wanted} for an encoder")
    rotary = _rotary(fields, family)
    if family == "gte":
        activation = _activation(fields, "hidden_act")
        return activation, RotatedLayers(rotary=rotary, gated=("up_gate_proj",), up_bias=False)
    if family == "jina":
        return _activation(fields, "hidden_act"), RotatedLayers(rotary=rotary)
    named = fields.text_or("hidden_act", "silu").replace("swiglu", "silu").replace("geglu", "gelu")
    if named not in _ACTIVATIONS:
        raise fields.wrong("hidden_act", f"swiglu, geglu, {', '.join(_ACTIVATIONS)}")
    layers = RotatedLayers(
        rotary=rotary,
        gated=("up_proj", "gate_proj"),
        attention_bias=fields.flag_or("qkv_proj_bias", False),
        up_bias=fields.flag_or("mlp_fc1_bias", False),
        down_bias=fields.flag_or("mlp_fc2_bias", False),
    )
    return _ACTIVATIONS[named], layers


def _rotary(fields: Fields, family: EncoderFamily) -> RotaryConfig:
    head_dim = fields.whole("hidden_size") // max(fields.whole("num_attention_heads"), 1)
    group = fields.group_or_none("rope_parameters")
    theta = None if group is None else group.number_or("rope_theta", None)
    if theta is None:
        theta = fields.number_or("rope_theta", _ROTARY_THETAS[family])
    scaling = fields.group_or_none("rope_scaling") if group is None else group
    kind = "default" if scaling is None else scaling.text_or("rope_type", scaling.text_or("type", "default"))
    if scaling is None or kind == "default":
        return RotaryConfig(theta=theta, rotated_dims=head_dim)
    if kind != "ntk":
        raise scaling.wrong("rope_type" if "rope_type" in scaling else "type", "default or ntk for an encoder")
    factor = scaling.number("factor")
    if not 1 <= factor <= 2**20:
        raise scaling.wrong("factor", "a number of 1 or more")
    # GTE's authors multiply the base, and then divide each frequency once more.
    return RotaryConfig(
        theta=theta * factor,
        rotated_dims=head_dim,
        scaling=RopeScaling(kind="linear", factor=factor ** (2 / max(head_dim, 1))),
    )


def _activation(fields: Fields, name: str) -> EncoderActivation:
    activation = fields.text_or(name, "gelu")
    if activation not in _ACTIVATIONS:
        raise ModelLoadError(f"{name} in config.json is {activation!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _scored_method(fields: Fields) -> PoolingMethod:
    methods: dict[str, PoolingMethod] = {"cls": "cls", "mean": "mean"}
    method = fields.text_or("classifier_pooling", "cls")
    if method not in methods:
        raise fields.wrong("classifier_pooling", "cls or mean")
    return methods[method]


def _modern_layers(fields: Fields) -> ModernLayers:
    head_dim = fields.whole("hidden_size") // max(fields.whole("num_attention_heads"), 1)
    kinds = _modern_layer_types(fields)
    rotaries = {kind: _modern_rotary(fields, kind, head_dim) for kind in set(kinds)}
    reach = fields.whole_or("local_attention", 128) // 2
    return ModernLayers(
        rotaries=tuple(rotaries[kind] for kind in kinds),
        reaches=tuple(reach if kind == "sliding_attention" else None for kind in kinds),
        attention_bias=fields.flag_or("attention_bias", False),
        mlp_bias=fields.flag_or("mlp_bias", False),
        norm_bias=fields.flag_or("norm_bias", False),
        head_bias=fields.flag_or("classifier_bias", False),
        head_activation=_activation(fields, "classifier_activation"),
    )


def _modern_layer_types(fields: Fields) -> list[str]:
    """Return the attention type of each layer. Older files contain only the distance between full-attention layers."""
    layer_count = fields.whole("num_hidden_layers")
    kinds = fields.strings_or("layer_types", None)
    if kinds is None:
        distance = fields.whole_or("global_attn_every_n_layers", 3)
        if not (distance >= 1 and 1 <= layer_count <= LAYERS_MAX):
            raise ModelLoadError(
                f"global_attn_every_n_layers is {distance} and num_hidden_layers {layer_count}: both must be at least "
                f"1, and the second at most {LAYERS_MAX}"
            )
        return [_MODERN_LAYER_TYPES[index % distance != 0] for index in range(layer_count)]
    unknown = [kind for kind in kinds if kind not in _MODERN_LAYER_TYPES]
    if unknown or len(kinds) != layer_count:
        raise fields.wrong(
            "layer_types", f"one of {' and '.join(_MODERN_LAYER_TYPES)} for each of {layer_count} layers"
        )
    return kinds


def _modern_rotary(fields: Fields, kind: str, head_dim: int) -> RotaryConfig:
    groups = fields.group_or_none("rope_parameters")
    group = None if groups is None else groups.group_or_none(kind)
    scaling = fields.group_or_none("rope_scaling") if group is None else group
    if scaling is not None and scaling.text_or("rope_type", "default") != "default":
        raise scaling.wrong("rope_type", "default for an encoder")
    theta = None if group is None else group.number_or("rope_theta", None)
    if theta is None:
        theta = fields.number_or(_MODERN_THETA_NAMES[kind], _MODERN_THETAS[kind])
    return RotaryConfig(theta=theta, rotated_dims=head_dim)


def _label_count(fields: Fields) -> int:
    labels = fields.object_or_none("id2label")
    return fields.whole_or("num_labels", 2 if labels is None else len(labels))


def _has_identity(fields: Fields) -> bool:
    """Return True if sentence-transformers returns the scores without an activation."""
    group = fields.group_or_none("sentence_transformers")
    named = None if group is None else group.text_or("activation_fn", None)
    named = named or fields.text_or("sbert_ce_default_activation_function", None)
    return named is not None and named.endswith("Identity")


def _recommended_tokens(directory: Path, context_tokens_max: int) -> int:
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return context_tokens_max
    fields = Fields(read_json_object(path), path.name)
    return min(fields.whole_or("max_seq_length", context_tokens_max), context_tokens_max)


def _pooling(directory: Path) -> tuple[PoolingMethod, bool]:
    """Read pooling method and normalization from modules.json. Without this file, return the normalized mean."""
    if not (directory / "modules.json").is_file():
        return "mean", True
    method: PoolingMethod = "mean"
    normalize = False
    for kind, path in _modules(directory):
        if kind == "Pooling":
            method = _pooling_method(directory / path / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelLoadError(f"modules.json has a module {kind}; supported are Transformer, Pooling and Normalize")
    return method, normalize


def _modules(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the class name of each module in modules.json, and the module's folder."""
    for module in read_json_list(directory / "modules.json"):
        fields = Fields(module, "modules.json")
        path = fields.text_or("path", None) or ""
        if path and (Path(path).name != path or "\0" in path):
            raise ModelLoadError(f"modules.json names the folder {path!r}, which is no plain name")
        yield (fields.text_or("type", None) or "").rpartition(".")[2], path


def _pooling_method(path: Path) -> PoolingMethod:
    fields = Fields(read_json_object(path), f"{path.parent.name}/{path.name}")
    modes: dict[str, PoolingMethod | None] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "last",
        "pooling_mode_max_tokens": None,
        "pooling_mode_mean_sqrt_len_tokens": None,
        "pooling_mode_weightedmean_tokens": None,
    }
    chosen = [name for name in modes if fields.flag_or(name, False)]
    method = modes[chosen[0]] if len(chosen) == 1 else None
    if method is None:
        raise ModelLoadError(
            f"{path.parent.name} pools by {', '.join(chosen) or 'nothing'}; supported is one of the mean of all "
            "tokens, the first and the last one"
        )
    return method
