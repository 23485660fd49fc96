"""Reads the audio encoder of a checkpoint: its config, its preparation of sound, and its tensors. The checkpoint's
decoder is read like any other model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.media import AudioProcessing
from trioserve.model.layer_config import DIMENSION_MAX, HEADS_MAX, Activation, check_count
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.hf_config import read_json_object
from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.stored_tensor import PLAIN_DTYPES, FileTensor, StoredTensor
from trioserve.model.model_config import LAYERS_MAX, ModelConfig

__all__ = ["ENCODER_PREFIX", "AudioConfig", "AudioPart", "audio_shapes"]

ENCODER_PREFIX = "model.encoder."
MEL_BINS_MAX = 1024
_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}


class AudioConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of Whisper's encoder: two convolutions over mel spectra, of which the second one halves their number, then
    layers with attention over all rows.

    Raises:
        ModelLoadError: a number is out of range. The message names it.
    """

    mel_bins: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    row_count: int
    activation: Activation

    def __post_init__(self) -> None:
        check_count("num_mel_bins", self.mel_bins, MEL_BINS_MAX)
        check_count("encoder_ffn_dim", self.intermediate_size, DIMENSION_MAX)
        check_count("encoder_layers", self.layer_count, LAYERS_MAX)
        check_count("encoder_attention_heads", self.head_count, HEADS_MAX)
        if self.hidden_size % self.head_count:
            raise ModelLoadError(
                f"encoder_attention_heads is {self.head_count}, which must divide d_model ({self.hidden_size}): the "
                "checkpoint's config is damaged"
            )


class AudioPart:
    """Opened audio encoder of a checkpoint. Opening reads only small files.

    Args:
        directory: checkpoint directory.
        config: content of config.json.
        texts: config of the decoder.
        stored: every tensor of the checkpoint, by its name in the files. None: the weights are not on this machine.

    Raises:
        ModelLoadError: files are missing or damaged, or tensors and config do not match.
    """

    def __init__(
        self, directory: Path, config: Mapping[str, object], texts: ModelConfig, stored: Mapping[str, FileTensor] | None
    ) -> None:
        self.config = _audio_config(Fields(config, "config.json"), texts)
        self.processing = _processing(directory, Fields(config, "config.json"), self.config, texts)
        self._stored: dict[str, FileTensor] = {}
        if stored is not None:
            self._stored = _placed(stored, audio_shapes(self.config))
        self.files = tuple(dict.fromkeys(tensor.path for tensor in self._stored.values()))
        self.weight_bytes = sum(tensor.byte_count for tensor in self._stored.values())

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield every tensor, with the names of audio_shapes."""
        for name, tensor in self._stored.items():
            yield tensor.stored(name, TensorPlace(name, tensor.shape))


def audio_shapes(config: AudioConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of an audio encoder, by its name in the files without ENCODER_PREFIX.

    Args:
        config: audio encoder.
    """
    hidden, middle = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "conv1.weight": (hidden, config.mel_bins, 3),
        "conv1.bias": (hidden,),
        "conv2.weight": (hidden, hidden, 3),
        "conv2.bias": (hidden,),
        "embed_positions.weight": (config.row_count, hidden),
    }
    for index in range(config.layer_count):
        for module, rows, columns in (
            *((f"self_attn.{name}_proj", hidden, hidden) for name in ("q", "k", "v", "out")),
            ("fc1", middle, hidden),
            ("fc2", hidden, middle),
        ):
            shapes[f"layers.{index}.{module}.weight"] = (rows, columns)
            if module != "self_attn.k_proj":
                shapes[f"layers.{index}.{module}.bias"] = (rows,)
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes[f"layers.{index}.{norm}.weight"] = shapes[f"layers.{index}.{norm}.bias"] = (hidden,)
    shapes["layer_norm.weight"] = shapes["layer_norm.bias"] = (hidden,)
    return shapes


def _placed(stored: Mapping[str, FileTensor], shapes: Mapping[str, Shape]) -> dict[str, FileTensor]:
    found = {
        name.removeprefix(ENCODER_PREFIX): tensor for name, tensor in stored.items() if name.startswith(ENCODER_PREFIX)
    }
    for name in found:
        if name not in shapes:
            raise ModelLoadError(
                f"the weights hold {ENCODER_PREFIX}{name[:80]}, which the config does not have: weights and config do "
                "not belong to the same model"
            )
    placed = {}
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            raise ModelLoadError(f"the weights lack {ENCODER_PREFIX}{name}: the checkpoint is incomplete")
        if tensor.shape != shape or tensor.storage not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{ENCODER_PREFIX}{name} is {tensor.storage} with shape {list(tensor.shape)}; the config asks for "
                f"{list(shape)}, and the audio encoder must be stored as {', '.join(PLAIN_DTYPES)}"
            )
        placed[name] = tensor
    return placed


def _audio_config(fields: Fields, texts: ModelConfig) -> AudioConfig:
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    activation = fields.text_or("activation_function", "gelu")
    if activation not in _ACTIVATIONS:
        raise fields.wrong("activation_function", " or ".join(_ACTIVATIONS))
    return AudioConfig(
        mel_bins=fields.whole_or("num_mel_bins", 80),
        hidden_size=texts.hidden_size,
        intermediate_size=fields.whole_or("encoder_ffn_dim", 1536),
        layer_count=fields.whole_or("encoder_layers", 4),
        head_count=fields.whole_or("encoder_attention_heads", 6),
        row_count=texts.cross.row_count,
        activation=_ACTIVATIONS[activation],
    )


def _processing(directory: Path, outer: Fields, config: AudioConfig, texts: ModelConfig) -> AudioProcessing:
    assert texts.cross is not None, "the decoder attends to the encoder's rows"
    sound = _processor_fields(directory)
    generation = Fields(_object(directory, "generation_config.json"), "generation_config.json")
    rate, hop, seconds = (
        sound.whole_or(name, usual)
        for name, usual in (("sampling_rate", 16_000), ("hop_length", 160), ("chunk_length", 30))
    )
    fft_size, mel_bins = sound.whole_or("n_fft", 400), sound.whole_or("feature_size", 80)
    for name, number in (("sampling_rate", rate), ("hop_length", hop), ("chunk_length", seconds), ("n_fft", fft_size)):
        check_count(name, number, 2**20)
    if mel_bins != config.mel_bins:
        raise sound.wrong("feature_size", f"{config.mel_bins}, which is num_mel_bins in config.json")
    if seconds * rate != 2 * config.row_count * hop:
        raise ModelLoadError(
            f"{seconds} s of {rate} samples have {seconds * rate // hop} spectra of {hop} samples each, but the "
            f"encoder has positions for {2 * config.row_count}: the checkpoint's files do not belong to the same model"
        )
    if "no_timestamps_token_id" not in generation:
        raise ModelLoadError(
            "generation_config.json has no no_timestamps_token_id, which names the model's special tokens: fetch the "
            "checkpoint again"
        )
    no_timestamps = generation.whole("no_timestamps_token_id")
    languages = _ids(generation, "lang_to_id")
    tasks = _ids(generation, "task_to_id")
    found = AudioProcessing(
        sample_rate=rate,
        mel_bins=mel_bins,
        fft_size=fft_size,
        hop_length=hop,
        window_seconds=seconds,
        frame_count=2 * config.row_count,
        row_count=config.row_count,
        prompt_positions=texts.cross.first_position,
        embedding_size=config.hidden_size,
        tokens_max=texts.context_tokens_max - texts.cross.first_position,
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
