"""Reads the encoder of a checkpoint whose decoder attends to the encoder's rows: its config, its tensors, and how it
reads sound or text. The checkpoint's decoder is read like any other model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.media import AudioProcessing, SoundProcessing
from trioserve.contracts.prompt import TextProcessing
from trioserve.model.layer_config import DIMENSION_MAX, HEADS_MAX, Activation, MlpConfig, check_count
from trioserve.model.loading.fields import Fields, unread_names, warn_of_unread
from trioserve.model.loading.hf_config import read_json_object
from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, FileTensor, StoredTensor
from trioserve.model.model_config import LAYERS_MAX, ModelConfig, RelativePositions
from trioserve.model.vision.family import VisionConfig

__all__ = [
    "TOWER_PREFIX",
    "EncoderPart",
    "RowEncoderConfig",
    "SoundConfig",
    "encoder_shapes",
    "is_encoder_tensor",
    "read_audio_flamingo",
    "read_qwen2_audio",
    "read_voxtral",
]

ENCODER_PREFIX = "model.encoder."
T5_PREFIX = "encoder."
TOWER_PREFIX = "audio_tower."
MEL_BINS_MAX = 1024
FLAMINGO_WINDOWS_MAX = 20  # The model was trained with ten minutes of sound.
WINDOWS_MAX = 2**20  # The limit of seconds is far below it.
POSITION_FIRST = 2  # Row of the first position in BART's tables.
# Fields of a sound encoder that change nothing without training.
_SOUND_NOTES = (
    "dropout",
    "encoder_layerdrop",
    "init_std",
    "layerdrop",
    "num_hidden_layers",
    "scale_embedding",
    "vocab_size",
)
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Names of T5's tensors, by those of BART. Its layers are blocks of two parts.
_T5_NAMES = {
    **{f"self_attn.{part}_proj": f"layer.0.SelfAttention.{part}" for part in "qkv"},
    "self_attn.out_proj": "layer.0.SelfAttention.o",
    "self_attn_layer_norm": "layer.0.layer_norm",
    "fc1": "layer.1.DenseReluDense.wi",
    "fc1_gate": "layer.1.DenseReluDense.wi_0",
    "fc1_up": "layer.1.DenseReluDense.wi_1",
    "fc2": "layer.1.DenseReluDense.wo",
    "final_layer_norm": "layer.1.layer_norm",
}


class RowEncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of an encoder whose layers attend to all rows, and whose rows a decoder attends to.

    The encoder of sound has two convolutions over mel spectra, of which the second one halves their number. The encoder
    of a text has the decoder's embeddings.

    Attributes:
        mel_bins: mel bands of a spectrum. 0: the encoder reads texts.
        head_dim: numbers of a head.
        rows_max: most rows of one input. An encoder of sound always computes this number.
        position_rows: rows of the table of positions. 0: there is no table.
        position_first: row of the first position in this table.
        embedding_scale: factor of embeddings.
        has_embedding_norm: embeddings are normalized.
        norm: LayerNorm with weights and biases, or RMS norm with weights.
        normalizes_sums: norms follow the residual sums, see LayerConfig.
        has_last_norm: the last layer's output is normalized.
        has_bias: matrices have biases.
        has_key_bias: if has_bias is set, the projection to keys has one, too.
        has_gate: the MLP has a gate.
        scale: factor of query times key. None means 1 / sqrt(head_dim).
        relative: biases of attention scores by distance. None: there are none.

    Raises:
        ModelLoadError: a number is out of range. The message names it.
    """

    mel_bins: int = 0
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    head_dim: int
    rows_max: int
    position_rows: int
    position_first: int = 0
    embedding_scale: float = 1.0
    has_embedding_norm: bool = False
    activation: Activation
    norm: Literal["layer_biased", "rms"] = "layer_biased"
    norm_eps: float = 1e-5
    normalizes_sums: bool = False
    has_last_norm: bool = True
    has_bias: bool = True
    has_key_bias: bool = True
    has_gate: bool = False
    scale: float | None = None
    relative: RelativePositions | None = None

    def __post_init__(self) -> None:
        check_count("num_mel_bins", self.mel_bins, MEL_BINS_MAX, 0)
        check_count("encoder_ffn_dim", self.intermediate_size, DIMENSION_MAX)
        check_count("encoder_layers", self.layer_count, LAYERS_MAX)
        check_count("encoder_attention_heads", self.head_count, HEADS_MAX)
        check_count("the size of the encoder's heads", self.head_dim, DIMENSION_MAX)

    @property
    def query_size(self) -> int:
        return self.head_count * self.head_dim


class SoundConfig(VisionConfig, frozen=True, kw_only=True, tag="sound"):
    """Config of a language model's encoder of sounds: Whisper's encoder for each window, and a projection.

    Attributes:
        encoder: Whisper's encoder.
        joined_rows: rows of the encoder that the projection reads as one. 1: the mean of each two rows is one row, and
            rows of the silence after a sound are neither attended to nor read.
        projection: linear layers of the projection. Between two, there is GELU.
        has_bias: these layers have biases.
    """

    encoder: RowEncoderConfig
    joined_rows: int
    projection: tuple[str, ...]
    has_bias: bool

    layers_prefix: ClassVar[str] = f"{TOWER_PREFIX}layers."

    def shapes(self) -> dict[str, Shape]:
        shapes = {TOWER_PREFIX + name: shape for name, shape in encoder_shapes(self.encoder).items()}
        inputs = self.encoder.hidden_size * self.joined_rows
        for name in self.projection:
            shapes[f"multi_modal_projector.{name}.weight"] = (self.output_size, inputs)
            if self.has_bias:
                shapes[f"multi_modal_projector.{name}.bias"] = (self.output_size,)
            inputs = self.output_size
        return shapes


def read_qwen2_audio(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[SoundConfig, SoundProcessing]:
    """Read the config files of Qwen2-Audio (arXiv 2407.10759), which hears one window of a sound.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    token_id = outer.whole_or("audio_token_index", outer.whole_or("audio_token_id", 151_646))
    config = _sound_config(outer, texts, projection=("linear",), has_bias=True)
    return config, _sound_processing(directory, config, token_id, "<|AUDIO|>", windows_max=1)


def read_audio_flamingo(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[SoundConfig, SoundProcessing]:
    """Read the config files of Audio Flamingo 3 (arXiv 2507.08128), which hears each window of a sound alone.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    has_bias = outer.flag_or("projector_bias", True)
    config = _sound_config(outer, texts, projection=("linear_1", "linear_2"), has_bias=has_bias)
    token_id = outer.whole_or("audio_token_id", 151_669)
    return config, _sound_processing(directory, config, token_id, "<sound>", windows_max=FLAMINGO_WINDOWS_MAX)


def read_voxtral(directory: Path, outer: Fields, texts: ModelConfig) -> tuple[SoundConfig, SoundProcessing]:
    """Read the config files of Voxtral (arXiv 2507.13264), which also hears the silence that fills a window.

    Args:
        directory: checkpoint directory.
        outer: fields of config.json.
        texts: config of the language model.
    """
    config = _sound_config(outer, texts, joined_rows=4, projection=("linear_1", "linear_2"), has_bias=False)
    if config.encoder.intermediate_size != 4 * config.encoder.hidden_size:
        raise ModelLoadError(
            f"audio_config has intermediate_size {config.encoder.intermediate_size}, it must be four times its "
            f"hidden_size ({config.encoder.hidden_size}): the checkpoint's config is damaged"
        )
    token_id = outer.whole_or("audio_token_id", 24)
    return config, _sound_processing(directory, config, token_id, "[AUDIO]", windows_max=WINDOWS_MAX)


def _sound_config(
    outer: Fields, texts: ModelConfig, *, joined_rows: int = 1, projection: tuple[str, ...], has_bias: bool
) -> SoundConfig:
    fields = outer.group_or_none("audio_config")
    if fields is None:
        raise ModelLoadError("config.json has no audio_config: fetch the checkpoint again")
    if outer.text_or("projector_hidden_act", "gelu") != "gelu":
        raise outer.wrong("projector_hidden_act", "gelu")

    def number(name: str, other: str, default: int) -> int:
        return fields.whole_or(name, fields.whole_or(other, default))

    hidden, heads = number("d_model", "hidden_size", 1280), number("encoder_attention_heads", "num_attention_heads", 20)
    rows = fields.whole_or("max_source_positions", 1500)
    check_count("max_source_positions", rows, 2**16)
    mel_bins = fields.whole_or("num_mel_bins", 128)
    check_count("num_mel_bins", mel_bins, MEL_BINS_MAX)
    joins = max(2, joined_rows)
    if rows % joins:
        raise fields.wrong("max_source_positions", f"a multiple of {joins}")
    encoder = RowEncoderConfig(
        mel_bins=mel_bins,
        hidden_size=hidden,
        intermediate_size=number("encoder_ffn_dim", "intermediate_size", 5120),
        layer_count=number("encoder_layers", "num_hidden_layers", 32),
        head_count=heads,
        head_dim=_head_dim(hidden, heads),
        rows_max=rows,
        position_rows=rows,
        activation=_activation(fields, "activation_function"),
        has_key_bias=False,
    )
    warn_of_unread("audio_config in config.json", unread_names(fields, _SOUND_NOTES))
    return SoundConfig(
        encoder=encoder,
        joined_rows=joined_rows,
        projection=projection,
        has_bias=has_bias,
        output_size=texts.hidden_size,
    )


def _sound_processing(
    directory: Path, config: SoundConfig, token_id: int, row_token: str, *, windows_max: int
) -> SoundProcessing:
    window_rows = config.encoder.rows_max // config.joined_rows if config.joined_rows > 1 else None
    return SoundProcessing(
        **_spectrogram(directory, config.encoder),
        windows="apart" if window_rows is None else "filled",
        embedding_size=config.output_size,
        audio_token_id=token_id,
        row_token=row_token,
        window_rows=window_rows,
        windows_max=windows_max,
    )


class EncoderPart:
    """Opened encoder of a checkpoint. Opening reads only small files.

    Args:
        directory: checkpoint directory.
        config: content of config.json.
        texts: config of the decoder.
        stored: every tensor of the checkpoint, by its name in the files. None: the weights are not on this machine.

    Attributes:
        processing: how the model reads sound or text.

    Raises:
        ModelLoadError: files are missing or damaged, or tensors and config do not match.
    """

    def __init__(
        self, directory: Path, config: Mapping[str, object], texts: ModelConfig, stored: Mapping[str, FileTensor] | None
    ) -> None:
        fields = Fields(config, "config.json")
        self.processing: AudioProcessing | TextProcessing
        if texts.family == "whisper":
            self.config = _audio_config(fields, texts)
            self.processing = _processing(directory, fields, self.config, texts)
        else:
            self.config = _t5_config(fields, texts) if _is_t5(texts.family) else _bart_config(fields, texts)
            self.processing = _text_processing(directory, fields, texts)
        self._stored: dict[str, FileTensor] = {}
        if stored is not None:
            named = {_file_name(name, texts.family): name for name in encoder_shapes(self.config)}
            self._stored = _placed(stored, encoder_shapes(self.config), named)
        self.files = tuple(dict.fromkeys(tensor.path for tensor in self._stored.values()))
        self.weight_bytes = sum(tensor.byte_count for tensor in self._stored.values())

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield every tensor, with the names of encoder_shapes."""
        for name, tensor in self._stored.items():
            yield tensor.stored(name, TensorPlace(name, tensor.shape))


def is_encoder_tensor(name: str) -> bool:
    """Return True if a tensor of a model with cross attention belongs to the encoder.

    Args:
        name: name in the files.
    """
    return name.startswith((ENCODER_PREFIX, T5_PREFIX))


def encoder_shapes(config: RowEncoderConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of an encoder, by BART's names without ENCODER_PREFIX.

    Args:
        config: encoder.
    """
    hidden, middle, inner = config.hidden_size, config.intermediate_size, config.query_size
    shapes: dict[str, Shape] = {}

    def add_norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm == "layer_biased":
            shapes[f"{name}.bias"] = (hidden,)

    if config.mel_bins:
        shapes |= {"conv1.weight": (hidden, config.mel_bins, 3), "conv1.bias": (hidden,)}
        shapes |= {"conv2.weight": (hidden, hidden, 3), "conv2.bias": (hidden,)}
    if config.position_rows:
        shapes["embed_positions.weight"] = (config.position_rows, hidden)
    if config.has_embedding_norm:
        add_norm("layernorm_embedding")
    if config.relative is not None:
        shapes["relative.weight"] = (config.relative.bucket_count, config.head_count)
    for index in range(config.layer_count):
        for module, rows, columns in (
            *((f"self_attn.{name}_proj", inner, hidden) for name in ("q", "k", "v")),
            ("self_attn.out_proj", hidden, inner),
            *((name, middle, hidden) for name in (("fc1_gate", "fc1_up") if config.has_gate else ("fc1",))),
            ("fc2", hidden, middle),
        ):
            shapes[f"layers.{index}.{module}.weight"] = (rows, columns)
            if config.has_bias and (config.has_key_bias or module != "self_attn.k_proj"):
                shapes[f"layers.{index}.{module}.bias"] = (rows,)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            add_norm(f"layers.{index}.{norm}")
    if config.has_last_norm:
        add_norm("layer_norm")
    return shapes


def _is_t5(family: str) -> bool:
    return family.startswith("t5")


def _file_name(name: str, family: str) -> str:
    """Return the name of an encoder's tensor in the files of transformers.

    Args:
        name: name of encoder_shapes.
        family: family of the decoder.
    """
    if not _is_t5(family):
        return ENCODER_PREFIX + name
    if name == "relative.weight":
        return f"{T5_PREFIX}block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    if name == "layer_norm.weight":
        return f"{T5_PREFIX}final_layer_norm.weight"
    _, index, module = name.removesuffix(".weight").split(".", 2)
    return f"{T5_PREFIX}block.{index}.{_T5_NAMES[module]}.weight"


def _placed(
    stored: Mapping[str, FileTensor], shapes: Mapping[str, Shape], named: Mapping[str, str]
) -> dict[str, FileTensor]:
    """Return the encoder's tensors by the names of encoder_shapes, and check them.

    Args:
        stored: every tensor of the checkpoint, by its name in the files.
        shapes: shapes by the names of encoder_shapes.
        named: names of encoder_shapes by names in the files.
    """
    for name in stored:
        # Some files store the embedding of texts once more. The decoder reads it.
        if is_encoder_tensor(name) and name not in named and not name.endswith("encoder.embed_tokens.weight"):
            raise ModelLoadError(
                f"the weights hold {name[:80]}, which the config does not have: weights and config do not belong to "
                "the same model"
            )
    placed = {}
    for outside, name in named.items():
        tensor, shape = stored.get(outside), shapes[name]
        if tensor is None:
            raise ModelLoadError(f"the weights lack {outside}: the checkpoint is incomplete")
        if tensor.shape != shape or tensor.storage not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{outside} is {tensor.storage} with shape {list(tensor.shape)}; the config asks for {list(shape)}, "
                f"and the encoder must be stored as {', '.join(PLAIN_DTYPES)}"
            )
        placed[name] = tensor
    return placed


def _activation(fields: Fields, name: str) -> Activation:
    activation = fields.text_or(name, "gelu")
    if activation not in _ACTIVATIONS:
        raise fields.wrong(name, " or ".join(_ACTIVATIONS))
    return _ACTIVATIONS[activation]


def _head_dim(hidden_size: int, head_count: int) -> int:
    if head_count < 1 or hidden_size % head_count:
        raise ModelLoadError(
            f"encoder_attention_heads is {head_count}, which must divide d_model ({hidden_size}): the checkpoint's "
            "config is damaged"
        )
    return hidden_size // head_count


def _bart_config(fields: Fields, texts: ModelConfig) -> RowEncoderConfig:
    """Read BART's encoder, whose options are those of its decoder."""
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    heads = fields.whole_or("encoder_attention_heads", 16)
    return RowEncoderConfig(
        hidden_size=texts.hidden_size,
        intermediate_size=fields.whole_or("encoder_ffn_dim", 4096),
        layer_count=fields.whole_or("encoder_layers", 12),
        head_count=heads,
        head_dim=_head_dim(texts.hidden_size, heads),
        rows_max=texts.cross.rows_max,
        position_rows=texts.cross.rows_max + POSITION_FIRST,
        position_first=POSITION_FIRST,
        embedding_scale=math.sqrt(texts.hidden_size) if fields.flag_or("scale_embedding", False) else 1.0,
        has_embedding_norm=True,
        activation=_activation(fields, "activation_function"),
        normalizes_sums=texts.layers[0].normalizes_sums,
        has_last_norm=texts.has_last_norm,
    )


def _t5_config(fields: Fields, texts: ModelConfig) -> RowEncoderConfig:
    """Read T5's encoder, whose options are those of its decoder."""
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    mlp = texts.layers[0].mlp
    assert isinstance(mlp, MlpConfig), "T5 has no experts"
    assert mlp.activation != "xielu", "read from the same table"
    return RowEncoderConfig(
        hidden_size=texts.hidden_size,
        intermediate_size=mlp.intermediate_size,
        layer_count=fields.whole_or("num_layers", 6),
        head_count=texts.heads.head_count,
        head_dim=texts.heads.head_dim,
        rows_max=texts.cross.rows_max,
        position_rows=0,
        activation=mlp.activation,
        norm="rms",
        norm_eps=texts.norm_eps,
        has_bias=False,
        has_gate=mlp.has_gate,
        scale=1.0,
        relative=texts.relative,
    )


def _text_processing(directory: Path, outer: Fields, texts: ModelConfig) -> TextProcessing:
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    path = directory / "generation_config.json"
    generation = Fields(read_json_object(path) if path.is_file() else {}, path.name)

    def token_id(name: str) -> int | None:
        return generation.whole_or(name, outer.whole_or(name, None))

    start = token_id("decoder_start_token_id")
    if start is None:
        raise ModelLoadError(
            "the checkpoint's configs have no decoder_start_token_id, with which the decoder begins: add it to "
            "generation_config.json"
        )
    forced = token_id("forced_bos_token_id")
    start_ids = (start,) if forced is None else (start, forced)
    for number in start_ids:
        if not 0 <= number < texts.vocab_size:
            raise ModelLoadError(
                f"the checkpoint's configs begin the decoder with token {number}, but the vocabulary has "
                f"{texts.vocab_size} tokens: the files do not belong to the same model"
            )
    return TextProcessing(
        rows_max=texts.cross.rows_max,
        tokens_max=texts.cross.tokens_max,
        embedding_size=texts.hidden_size,
        start_ids=start_ids,
    )


def _audio_config(fields: Fields, texts: ModelConfig) -> RowEncoderConfig:
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    heads = fields.whole_or("encoder_attention_heads", 6)
    mel_bins = fields.whole_or("num_mel_bins", 80)
    check_count("num_mel_bins", mel_bins, MEL_BINS_MAX)
    return RowEncoderConfig(
        mel_bins=mel_bins,
        hidden_size=texts.hidden_size,
        intermediate_size=fields.whole_or("encoder_ffn_dim", 1536),
        layer_count=fields.whole_or("encoder_layers", 4),
        head_count=heads,
        head_dim=_head_dim(texts.hidden_size, heads),
        rows_max=texts.cross.rows_max,
        position_rows=texts.cross.rows_max,
        activation=_activation(fields, "activation_function"),
        has_key_bias=False,
    )


def _processing(directory: Path, outer: Fields, config: RowEncoderConfig, texts: ModelConfig) -> AudioProcessing:
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    generation = Fields(_object(directory, "generation_config.json"), "generation_config.json")
    if "no_timestamps_token_id" not in generation:
        raise ModelLoadError(
            "generation_config.json has no no_timestamps_token_id, which names the model's special tokens: fetch the "
            "checkpoint again"
        )
    no_timestamps = generation.whole("no_timestamps_token_id")
    languages = _ids(generation, "lang_to_id")
    tasks = _ids(generation, "task_to_id")
    found = AudioProcessing(
        **_spectrogram(directory, config),
        row_count=config.rows_max,
        embedding_size=config.hidden_size,
        tokens_max=texts.cross.tokens_max,
        start_id=generation.whole_or("decoder_start_token_id", outer.whole_or("decoder_start_token_id", 50_257)),
        end_id=texts.eos_token_ids[0] if texts.eos_token_ids else no_timestamps,
        transcribe_id=tasks.get("transcribe"),
        translate_id=tasks.get("translate"),
        no_timestamps_id=no_timestamps,
        # In all vocabularies of Whisper, these tokens precede the token that turns timestamps off.
        previous_id=generation.whole_or("prev_sot_token_id", no_timestamps - 2),
        no_speech_id=no_timestamps - 1,
        languages=languages,
        suppressed_ids=generation.wholes("suppress_tokens"),
        begin_suppressed_ids=generation.wholes("begin_suppress_tokens"),
        first_timestamp_max=generation.whole_or("max_initial_timestamp_index", None),
    )
    _check_ids(found, texts.vocab_size)
    return found


def _spectrogram(directory: Path, config: RowEncoderConfig) -> dict[str, Any]:
    """Return the fields of Spectrogram, except `windows`."""
    sound = _processor_fields(directory)
    rate, hop, seconds = (
        sound.whole_or(name, usual)
        for name, usual in (("sampling_rate", 16_000), ("hop_length", 160), ("chunk_length", 30))
    )
    fft_size, mel_bins = sound.whole_or("n_fft", 400), sound.whole_or("feature_size", 80)
    for name, number in (("sampling_rate", rate), ("hop_length", hop), ("chunk_length", seconds), ("n_fft", fft_size)):
        check_count(name, number, 2**20)
    if mel_bins != config.mel_bins:
        raise sound.wrong("feature_size", f"{config.mel_bins}, which is num_mel_bins in config.json")
    if seconds * rate != 2 * config.rows_max * hop:
        raise ModelLoadError(
            f"{seconds} s of {rate} samples have {seconds * rate // hop} spectra of {hop} samples each, but the "
            f"encoder has positions for {2 * config.rows_max}: the checkpoint's files do not belong to the same model"
        )
    return {
        "sample_rate": rate,
        "mel_bins": mel_bins,
        "fft_size": fft_size,
        "hop_length": hop,
        "window_seconds": seconds,
        "frame_count": 2 * config.rows_max,
    }


def _check_ids(found: AudioProcessing, vocab_size: int) -> None:
    for name, numbers in {
        "decoder_start_token_id": (found.start_id,),
        "eos_token_id": (found.end_id,),
        "no_timestamps_token_id": (found.no_timestamps_id, found.no_speech_id),
        "prev_sot_token_id": (found.previous_id,),
        "task_to_id": (found.transcribe_id or 0, found.translate_id or 0),
        "lang_to_id": tuple(found.languages.values()),
        "suppress_tokens": found.suppressed_ids,
        "begin_suppress_tokens": found.begin_suppressed_ids,
    }.items():
        for number in numbers:
            if not 0 <= number < vocab_size:
                raise ModelLoadError(
                    f"{name} in the checkpoint's configs names token {number}, but the vocabulary has {vocab_size} "
                    "tokens: the files do not belong to the same model"
                )


def _ids(generation: Fields, name: str) -> dict[str, int]:
    """Return token ids by name, without the marks of a special token: <|en|> becomes en."""
    fields = generation.group_or_none(name)
    if fields is None:
        return {}
    return {key.removeprefix("<|").removesuffix("|>"): fields.whole(key) for key in fields.names}


def _processor_fields(directory: Path) -> Fields:
    if (directory / "preprocessor_config.json").is_file():
        return Fields(_object(directory, "preprocessor_config.json"), "preprocessor_config.json")
    # transformers 5 writes the processor's parts into one file.
    inner = Fields(_object(directory, "processor_config.json"), "processor_config.json")
    return inner.group_or_none("feature_extractor") or inner


def _object(directory: Path, name: str) -> dict[str, object]:
    if not (directory / name).is_file():
        raise ModelLoadError(f"the directory has no {name}, which a speech model needs: fetch the checkpoint again")
    return read_json_object(directory / name)
