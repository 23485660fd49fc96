"""Reads typed fields of a checkpoint's description (config.json, GGUF metadata), whose content is untrusted.

A log line names the fields that no code reads. Without this line, no operator would notice a misspelled field, or a
field that is newer than this code.
"""

from __future__ import annotations

import logging
import math
import reprlib
from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import TypeGuard, TypeVar

from trioserve.contracts.errors import ModelLoadError

__all__ = ["IMAGE_NOTES", "IMAGE_PREFIXES", "Fields", "check_apart", "one_line", "unread_names", "warn_of_unread"]

MESSAGE_CHARACTERS_MAX = 600  # The longest message of this code has about 300 characters.
_INFINITY = {"__float__": "Infinity"}
WHOLES_MAX = 65_536  # Limit of numbers in one field. Real fields have one number for each layer or end token.

T = TypeVar("T")


class Fields:
    """Named values of one file.

    A field with the value null counts as missing. For a missing field, the methods return the default. Without a
    default, they raise ModelLoadError.

    Args:
        values: fields of the file.
        source: name of the file or group, for messages.
        spellings: names in the file, by requested name. A name that is not listed is equal in the file.
    """

    def __init__(self, values: Mapping[str, object], source: str, spellings: Mapping[str, str] | None = None) -> None:
        self._values = values
        self._source = source
        self._spellings = spellings or {}
        self._asked: set[str] = set()
        self._groups: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        return self._value(name) is not None

    @property
    def source(self) -> str:
        return self._source

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all fields in the file."""
        return tuple(self._values)

    @property
    def asked(self) -> frozenset[str]:
        """Names that were requested so far."""
        return frozenset(self._asked)

    def unread(self) -> dict[str, object]:
        """Return fields that have a value and were not requested.

        Names are spelled as in the file. A field in a group has a name such as group.field. An object that was
        requested as a whole counts as read.
        """
        read = {self.spelling(name) for name in self._asked}
        found = {name: value for name, value in self._values.items() if name not in read and value is not None}
        for name, group in self._groups.items():
            found |= {f"{name}.{inner}": value for inner, value in group.unread().items()}
        return found

    def is_null(self, name: str) -> bool:
        """Return True if the file has the field with the value null.

        Args:
            name: requested name.
        """
        self._asked.add(name)
        key = self.spelling(name)
        return key in self._values and self._values[key] is None

    def is_list(self, name: str) -> bool:
        """Return True if the field is a list.

        Args:
            name: requested name.
        """
        return isinstance(self._value(name), list)

    def is_one_of(self, name: str, values: tuple[object, ...]) -> bool:
        """Return True if the field has one of the given values.

        Args:
            name: requested name.
            values: values to compare with. Types must also be equal: 1 is not equal to true.
        """
        value = self._value(name)
        return any(value == other and type(value) is type(other) for other in values)

    def spelling(self, name: str) -> str:
        return self._spellings.get(name, name)

    def _value(self, name: str) -> object:
        self._asked.add(name)
        return self._values.get(self.spelling(name))

    def whole(self, name: str) -> int:
        return self._required(name, self.whole_or(name, None), "a whole number")

    def whole_or(self, name: str, default: T) -> int | T:
        value = self._value(name)
        if value is None:
            return default
        if not _is_whole(value):
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        return self._required(name, self.number_or(name, None), "a number")

    def number_or(self, name: str, default: T) -> float | T:
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "a number of ordinary size") from None

    def flag_or(self, name: str, default: bool) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text_or(self, name: str, default: T) -> str | T:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def strings_or_text(self, name: str) -> list[str] | str:
        """Return a list of strings or one string. Return [] if the field is missing.

        Args:
            name: requested name.
        """
        value = self._value(name)
        return value if isinstance(value, str) else self.strings_or(name, [])

    def strings_or(self, name: str, default: T) -> list[str] | T:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return value

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return one whole number or a list of whole numbers as a tuple. Return () if the field is missing.

        Args:
            name: requested name.
        """
        value = self._value(name)
        if value is None:
            return ()
        items = value if isinstance(value, list | array) else [value]
        if len(items) > WHOLES_MAX:
            raise self.wrong(name, f"a list of at most {WHOLES_MAX}")
        if not all(_is_whole(item) for item in items):
            raise self.wrong(name, "a whole number or a list of them")
        return tuple(items)

    def pairs_or(self, name: str, default: T) -> tuple[tuple[int, int], ...] | T:
        value = self._value(name)
        if value is None:
            return default
        wanted = "a list of pairs of whole numbers"
        if not isinstance(value, list):
            raise self.wrong(name, wanted)
        pairs = []
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_whole, pair)):
                raise self.wrong(name, wanted)
            pairs.append((pair[0], pair[1]))
        return tuple(pairs)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers. The field must exist. A number may be an object, as transformers writes infinity.

        Args:
            name: requested name.
        """
        value = self._value(name)
        found = value if isinstance(value, list | array) else []
        items = [math.inf if item == _INFINITY else item for item in found]
        if not 1 <= len(items) <= WHOLES_MAX or not all(_is_number(item) for item in items):
            raise self.wrong(name, f"a list of 1 to {WHOLES_MAX} numbers")
        return tuple(map(float, items))

    def flags_or(self, name: str, default: T) -> list[bool] | T:
        """Return a list of booleans, or the default for any other value.

        Args:
            name: requested name.
            default: returned for any other value.
        """
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(item, bool) for item in value):
            return default
        return list(value)

    def is_object(self, name: str) -> bool:
        return isinstance(self._value(name), dict)

    def object_or_none(self, name: str) -> dict[str, object] | None:
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def group_or_none(self, name: str) -> Fields | None:
        """Return the fields of an inner object. Every call returns the same Fields, which records the requested names.

        Args:
            name: requested name.
        """
        value = self.object_or_none(name)
        if value is None:
            return None
        spelled = self.spelling(name)
        if spelled not in self._groups:
            self._groups[spelled] = Fields(value, f"{spelled} in {self._source}")
        return self._groups[spelled]

    def wrong(self, name: str, wanted: str) -> ModelLoadError:
        """Return the error for a wrong value. The caller raises it.

        Args:
            name: requested name.
            wanted: allowed values, as the last words of the error's sentence.
        """
        return ModelLoadError(f"{self.spelling(name)} in {self._source} is {self.shown(name)}, but it must be {wanted}")

    def shown(self, name: str) -> str:
        """Return the value in at most 60 characters. The value may be large or deeply nested.

        Args:
            name: requested name.
        """
        shown = reprlib.repr(self._value(name))
        return shown if len(shown) <= 60 else shown[:57] + "..."

    def _required(self, name: str, value: T | None, wanted: str) -> T:
        if value is None:
            raise ModelLoadError(f"{self._source} lacks {self.spelling(name)}, which must be {wanted}")
        return value


def one_line(message: str) -> str:
    """Make a message printable on one line, and limit its length.

    The message may quote line breaks, control characters or surrogates from a damaged file.

    Args:
        message: message of an error.
    """
    return "".join(character if character.isprintable() else "?" for character in message)[:MESSAGE_CHARACTERS_MAX]


def check_apart(file_name: str, places: Iterable[tuple[int, int, str]]) -> None:
    """Check that no two tensors of a file share bytes, so that reading them needs no more memory than the file has.

    Args:
        file_name: name for messages.
        places: for each tensor, the offset of its first byte, the offset after its last byte, and its name.

    Raises:
        ModelLoadError: two tensors share bytes.
    """
    last_end, last_name = 0, ""
    for first, end, name in sorted(place for place in places if place[0] < place[1]):
        if first < last_end:
            raise ModelLoadError(
                f"the tensors {last_name[:80]!r} and {name[:80]!r} in {file_name} share bytes: it is damaged, fetch it "
                "again"
            )
        last_end, last_name = end, name


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_whole(value: object) -> TypeGuard[int]:
    # JSON numbers have no limit, and a number such as 10**400 cannot be converted to a float.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


logger = logging.getLogger(__name__)

SHOWN_MAX = 10
NAME_CHARACTERS_MAX = 80

NOTES = frozenset(
    {
        # Fields about files and libraries.
        *("architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "for_llm_compressor"),
        *("language", "license", "model_type", "name_or_path", "quantization_config", "sentence_transformers"),
        *("task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config"),
        *("transformers_version", "unsloth_fixed", "unsloth_version"),
        # tokens
        *("bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id", "pad_token"),
        *("pad_token_id", "prefix", "sep_token_id", "unk_token_id"),
        # Options of transformers that select return values, or save time and memory.
        *("cache_implementation", "chunk_size", "chunk_size_feed_forward", "mamba_chunk_size", "num_logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "return_dict"),
        *("use_bfloat16", "use_cache", "use_flash_attn", "use_mamba_kernels", "use_return_dict"),
        # Fields about prediction layers (MTP). Names of all other fields about them begin with mtp_.
        *("num_mtp_modules", "num_nextn_predict_layers", "use_mtp"),
        # Fields about training. NOTE_ENDINGS lists those about dropout rates.
        *("aux_loss_alpha", "aux_loss_coef", "ep_size", "gradient_checkpointing", "init_method"),
        *(
            "initializer_cutoff_factor",
            "initializer_factor",
            "initializer_range",
            "neftune_noise_alpha",
            "rescale_prenorm_residual",
        ),
        *("router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "seq_aux", "z_loss_coefficient"),
        # Fields about other types of models and output heads. transformers writes them into every config.
        *("add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "id2label", "is_decoder"),
        *("is_encoder_decoder", "label2id", "num_labels", "problem_type", "pruned_heads", "tf_legacy_loss"),
        "tie_encoder_decoder",
        # Sampling parameters. Before generation_config.json existed, config.json contained them.
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
        *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
        *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p"),
        "typical_p",
        # Fields that only models with dense layers or scaled positions need.
        *("intermediate_size", "original_max_position_embeddings"),
    }
)
"""Fields that change nothing in any family, whatever their value, or that are read elsewhere."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "layernorm_full_attention_beta": (1, 1.0),
    "layernorm_linear_attention_beta": (1, 1.0),
    "layernorm_mlp_beta": (1, 1.0),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "normalization_function": ("rmsnorm",),
    "qk_layer_norms": (False,),
    "qk_norm_type": ("per_layer",),
    "rms_norm": (True,),
    "use_bias": (False,),
    "use_gated_activation": (True,),
    "use_mrope": (False,),
    "use_parallel_block": (True,),
    "use_resampler": (False,),
}
"""Fields that change nothing with these values."""

NOTE_ENDINGS = ("_dropout", "_dropout_prob", "_dropout_rate", "_pdrop")
ROPE_NAMES = ("rope_parameters", "rope_scaling")
# Not every type of rope scaling uses all of these fields. The last two fields define positions of images.
ROPE_NOTES = frozenset(
    {
        *("attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "long_factor"),
        *("low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
        *("short_factor", "truncate", "type"),
        *("mrope_interleaved", "mrope_section"),
    }
)
ROPE_LAYERS = ("full_attention", "sliding_attention")  # A model may have only one of these types.

# Fields outside of text_config, in configs of models that read images.
IMAGE_NOTES = (
    *("downsample_ratio", "scale_factor", "text_config", "tie_word_embeddings", "use_reentrant_checkpointing"),
    "vocab_size",
)
IMAGE_PREFIXES = (
    *("audio_", "boa_", "boi_", "eoa_", "eoi_", "image_", "mm_", "multimodal_", "projector_", "spatial_"),
    *("video_", "vision_"),
)


def unread_names(fields: Fields, notes: Collection[str] = (), *, with_images: bool = False) -> list[str]:
    """List the fields that have a value and were not requested. Fields that do not change the computation are omitted.

    Args:
        fields: fields of a config.
        notes: additional fields that do not change the computation.
        with_images: the fields are outside of text_config. Fields of image and audio encoders are then omitted.

    Returns:
        Sorted names. A field in a group has a name such as group.field.
    """
    unread = fields.unread().items()
    return sorted(name for name, value in unread if name not in notes and not _is_note(name, value, with_images))


def warn_of_unread(source: str, names: Iterable[str]) -> None:
    """Log one warning that names fields. Log nothing if there are none.

    Args:
        source: name of the config.
        names: fields that are not read.
    """
    names = list(names)
    if names:
        shown = ", ".join(one_line(name[:NAME_CHARACTERS_MAX]) for name in names[:SHOWN_MAX])
        logger.warning(
            "%s has %d fields that are not read here, and may change what the model computes: %s",
            source,
            len(names),
            shown,
        )


def _is_note(name: str, value: object, with_images: bool) -> bool:
    group, *inside = name.split(".")
    if group in ROPE_NAMES and inside:
        return inside[-1] in ROPE_NOTES or (len(inside) == 1 and inside[0] in ROPE_LAYERS)
    if with_images and group.startswith(IMAGE_PREFIXES):
        return True
    last = (group, *inside)[-1]
    if last in NEUTRAL_VALUES and value in NEUTRAL_VALUES[last]:
        return True
    return group in NOTES or last in NOTES or last.startswith(("_", "mtp_")) or last.endswith(NOTE_ENDINGS)
