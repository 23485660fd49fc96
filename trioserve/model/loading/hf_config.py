"""Reads config.json and generation_config.json, with the field names of transformers 4 and 5."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection
from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.family import MEANINGFUL_FIELDS, Family
from trioserve.model.families.model_fields import ModelFields, is_long
from trioserve.model.families.registry import LANGUAGE_PARTS, family_of_class, family_of_model_type, is_model_type
from trioserve.model.layer_config import RopeScaling
from trioserve.model.loading.fields import IMAGE_NOTES, IMAGE_PREFIXES, Fields, unread_names, warn_of_unread
from trioserve.model.model_config import Dtype, ModelConfig

__all__ = [
    "end_token_ids_from",
    "has_head",
    "model_config_from",
    "named_class",
    "read_json_list",
    "read_json_object",
    "sampling_defaults_from",
    "sees_images",
]

JSON_BYTES_MAX = 64 * 2**20  # The index of the largest known checkpoint has 15 MB.
# Limit of commas and opening brackets. It limits the number of values, of which each needs about 100 bytes. The index
# of the largest known checkpoint has 150,000 values.
JSON_MARKS_MAX = 2**20
# Types of language models in the first files of a family, by their present names.
_OLD_TYPES = {"exaone4_5_text": "exaone4"}


def read_json_object(path: Path) -> dict[str, object]:
    """Read a file that must contain a JSON object.

    Args:
        path: file.

    Raises:
        ModelLoadError: the file contains something else, is too large, or cannot be read.
    """
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} must hold a JSON object, but it is a {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[dict[str, object]]:
    """Read a file that must contain a list of JSON objects.

    Args:
        path: file.

    Raises:
        ModelLoadError: the file contains something else, is too large, or cannot be read.
    """
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelLoadError(f"{path.name} must hold a list of JSON objects")
    return value


def _read_json(path: Path) -> object:
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ModelLoadError(f"{path.name} has {path.stat().st_size} bytes, at most {JSON_BYTES_MAX} are read")
        content = path.read_bytes()
        if (mark_count := sum(map(content.count, (b",", b"[", b"{")))) > JSON_MARKS_MAX:
            raise ModelLoadError(
                f"{path.name} has {mark_count} commas and opening brackets, at most {JSON_MARKS_MAX} are read"
            )
        return json.loads(content)
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} is not valid JSON ({error}): fetch the checkpoint again") from error


def model_config_from(
    config: dict[str, object],
    generation_config: dict[str, object],
    *,
    dtype_name: Dtype,
    context_tokens: int | None = None,
    also_read: Collection[str] = (),
) -> ModelConfig:
    """Create a model's description. A warning names unread fields, except those that do not change the computation.

    Args:
        config: content of config.json.
        generation_config: content of generation_config.json. End tokens of both files are used, because in chat models
            often only one of the files contains them.
        dtype_name: number format of the weights. The config's number format is not reliable.
        context_tokens: see open_checkpoint.
        also_read: fields that the caller reads.

    Raises:
        ModelLoadError: no supported family includes this model.
    """
    family, part = _family(Fields(config, "config.json"))
    thinker = Fields(config, "config.json").object_or_none("thinker_config")
    if part is not None and thinker is not None:  # Qwen's Omni models: the other parts only speak.
        config = {**thinker, "architectures": config.get("architectures")}
    wrapper = LANGUAGE_PARTS.get(named_class(config) or "")
    is_older = "text_config" not in config and family.model_type in (
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "paddleocr_vl_text",
    )
    if is_older or (wrapper is not None and wrapper.field is None):
        config = _nested(config)
    outer = Fields(config, "config.json")
    ends = (*end_token_ids_from(generation_config), *outer.wholes("eos_token_id"))
    source, named = "config.json", config
    if part is not None:
        named = outer.object_or_none(part) or {}
        config, source = _text_config(outer, family, part), f"{part} in config.json"
    config = family.with_defaults(config)
    fields = ModelFields(
        config,
        source,
        rope=functools.partial(_rope, context_tokens),
        eos_token_ids=(*ends, *Fields(config, source).wholes("eos_token_id")),
        dtype_name=dtype_name,
        served_tokens=context_tokens,
        spellings={name: theirs for name, theirs in family.spellings.items() if theirs in config},
    )
    _check_windows(Fields(config, source))
    found = family.config_from(fields)
    notes = {*map(fields.spelling, MEANINGFUL_FIELDS), *family.notes, *also_read}
    if config.get("use_sliding_window") is False:
        notes |= {"sliding_window", "max_window_layers"}
    unread = [name for name in unread_names(fields, notes) if name.partition(".")[0] in named]
    if part is not None:
        unread = [f"{part}.{name}" for name in unread]
    if part is not None and wrapper is None:
        beside = unread_names(outer, IMAGE_NOTES, with_images=True)
        unread += (name for name in beside if not name.startswith(f"{part}."))
    warn_of_unread("config.json", unread)
    return found


def _check_windows(fields: Fields) -> None:
    """Raise ModelLoadError for sliding windows that transformers cannot compute. The family's code would otherwise
    ignore such a window.
    """
    sizes = {"chunked_attention": "attention_chunk_size"}
    if not fields.is_null("use_sliding_window") and fields.flag_or("use_sliding_window", True):
        sizes["sliding_attention"] = "sliding_window"
        # In transformers, a window of 0 means that a token does not even attend to itself.
        if fields.is_one_of("sliding_window", (0,)):
            raise fields.wrong("sliding_window", "at least 1, or null for none")
    layer_types = fields.strings_or("layer_types", [])
    for kind, size in sizes.items():
        if fields.is_null(size) and kind in layer_types:
            raise fields.wrong(size, f"a whole number, since layer_types holds {kind!r}")


def named_class(config: dict[str, object]) -> str | None:
    """Return the first of config.json's architectures, or None.

    Args:
        config: content of config.json.
    """
    named = Fields(config, "config.json").strings_or("architectures", None)
    return named[0] if named else None


def has_head(config: dict[str, object]) -> bool:
    """Return False if config.json names a class without an output head, which computes only embeddings of texts.

    Args:
        config: content of config.json.
    """
    named = named_class(config)
    return named is None or named not in _family(Fields(config, "config.json"))[0].headless_classes


def sees_images(config: dict[str, object]) -> bool:
    """Return True if config.json describes a language model with an image encoder.

    Args:
        config: content of config.json.

    Raises:
        ModelLoadError: the family is not supported.
    """
    return _family(Fields(config, "config.json"))[1] is not None


def _family(fields: Fields) -> tuple[Family, str | None]:
    """Return the family of the language model, and the field that describes it if the model also reads images."""
    named = fields.strings_or("architectures", None)
    if not named:
        return family_of_model_type(fields.text_or("model_type", None)), None
    if (wrapper := LANGUAGE_PARTS.get(named[0])) is not None:
        if wrapper.field is None:
            return family_of_model_type(wrapper.model_type), "text_config"
        part = fields.group_or_none(wrapper.field) or Fields({}, wrapper.field)
        classes = part.strings_or("architectures", None)
        model_type = part.text_or("model_type", None)
        model_type = _OLD_TYPES.get(model_type or "", model_type)
        if classes and (model_type is None or not is_model_type(model_type)):
            return family_of_class(classes[0]), wrapper.field
        return family_of_model_type(model_type or wrapper.model_type), wrapper.field
    texts = fields.group_or_none("text_config")
    family = family_of_class(named[0], None if texts is None else texts.text_or("model_type", None))
    return family, "text_config" if named[0] in family.with_images else None


def _nested(config: dict[str, object]) -> dict[str, object]:
    """Move the fields of the language model into text_config. Some configs have them outside.

    In older configs of Qwen2-VL and Qwen2.5-VL, rope scaling has the type "mrope", which scales nothing: it only
    divides the positions of images.
    """
    texts = {
        name: value
        for name, value in config.items()
        if name not in ("architectures", "model_type") and not name.startswith(IMAGE_PREFIXES)
    }
    scaling = texts.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "mrope":
        texts["rope_scaling"] = {**scaling, "type": "default"}
    return {name: value for name, value in config.items() if name not in texts} | {"text_config": texts}


def _text_config(fields: Fields, family: Family, part: str) -> dict[str, object]:
    described = fields.object_or_none(part)
    # Without text_config, Idefics 3 and SmolVLM use a Llama with a different epsilon.
    if described is None:
        described = {"rms_norm_eps": 1e-5} if family.model_type == "llama" else {}
    model_type = Fields(described, f"{part} in config.json").text_or("model_type", family.model_type)
    if model_type != family.model_type and fields.strings_or("architectures", [""])[0] not in LANGUAGE_PARTS:
        raise ModelLoadError(
            f"the text_config in config.json is of a {model_type}; supported in such a model is {family.model_type}"
        )
    if part != "text_config":
        return {**family.text_defaults, **described}
    outside = {name: fields.flag_or(name, False) for name in ("tie_word_embeddings",) if name in fields}
    return {**family.text_defaults, **described, **outside}  # transformers reads the outer field, too.


def sampling_defaults_from(generation_config: dict[str, object]) -> dict[str, float | int]:
    """Return recommended sampling parameters, with the names of SamplingParams.

    The result's max_tokens is also the upper limit for every request.

    Args:
        generation_config: content of generation_config.json.
    """
    fields = Fields(generation_config, "generation_config.json")
    is_greedy = not fields.flag_or("do_sample", True)
    defaults: dict[str, float | int] = {"temperature": 0.0} if is_greedy else {}
    for name in ("repetition_penalty",) if is_greedy else ("temperature", "top_p", "min_p", "repetition_penalty"):
        if (number := fields.number_or(name, None)) is not None:
            defaults[name] = number
    if not is_greedy and (top_k := fields.whole_or("top_k", None)) is not None:
        defaults["top_k"] = top_k
    if (max_tokens := fields.whole_or("max_new_tokens", None)) is not None:
        defaults["max_tokens"] = max_tokens
    return defaults


def end_token_ids_from(generation_config: dict[str, object]) -> tuple[int, ...]:
    return Fields(generation_config, "generation_config.json").wholes("eos_token_id")


def _rope(
    served_tokens: int | None, fields: ModelFields, layer_type: str | None, theta: float
) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling for one layer type.

    transformers 5 writes all parameters into rope_parameters, with one entry per layer type if there are several types.
    transformers 4 writes rope_theta and rope_scaling, which do not apply to layers with a window.
    """
    context_tokens = fields.whole("max_position_embeddings")
    rope = fields.group_or_none("rope_parameters") or fields.group_or_none("rope_scaling") or Fields({}, "config.json")
    if layer_type == "sliding_attention" and (local := fields.number_or("rope_local_base_freq", None)) is not None:
        theta = local
    elif not fields.is_list("rope_theta"):  # The family of Step-3.5 reads such a list.
        theta = fields.number_or("rope_theta", theta)
    if layer_type is not None and layer_type in rope:
        rope = rope.group_or_none(layer_type) or rope
    elif layer_type == "sliding_attention":
        return rope.number_or("rope_theta", theta), None
    theta = rope.number_or("rope_theta", theta)
    kind = rope.text_or("rope_type", None) or rope.text_or("type", None) or "default"
    # With "dynamic", frequencies only depend on the length of a text that exceeds the config's context length. This
    # server accepts no such text.
    if kind in ("default", "dynamic"):
        return theta, None
    original_name = "original_max_position_embeddings"
    original = rope.whole_or(original_name, fields.whole_or(original_name, context_tokens))
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"), original_context_tokens=original)
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number_or("low_freq_factor", 1.0),
            high_freq_factor=rope.number_or("high_freq_factor", 4.0),
            original_context_tokens=original,
        )
    # Some old configs contain the name "yarn" for longrope, so the field long_factor is checked.
    if kind in ("longrope", "su") or "long_factor" in rope:
        original = fields.whole_or(original_name, original)
        return theta, _longrope(rope, original, context_tokens, served_tokens)
    if kind == "yarn":
        return theta, _yarn(rope, original, context_tokens)
    raise ModelLoadError(
        f"the rope scaling in config.json is {kind!r}; supported are default, linear, dynamic, llama3, yarn and "
        "longrope"
    )


def _longrope(rope: Fields, original: int, context_tokens: int, served_tokens: int | None) -> RopeScaling:
    factor = rope.number_or("factor", None)
    return RopeScaling(
        kind="longrope",
        factor=context_tokens / max(original, 1) if factor is None else factor,
        original_context_tokens=original,
        attention_factor=rope.number_or("attention_factor", None),
        frequency_factors=rope.numbers(
            "long_factor" if is_long(served_tokens, context_tokens, original) else "short_factor"
        ),
    )


def _yarn(rope: Fields, original: int, context_tokens: int) -> RopeScaling:
    factor = rope.number_or("factor", None)
    if factor is None:
        factor = context_tokens / max(original, 1)
    attention_factor = rope.number_or("attention_factor", None)
    mscale, mscale_all_dim = rope.number_or("mscale", None), rope.number_or("mscale_all_dim", None)
    if mscale_all_dim is not None and mscale_all_dim < 0:
        raise rope.wrong("mscale_all_dim", "at least 0")
    if attention_factor is None and mscale and mscale_all_dim and factor > 1.0:
        # DeepSeek's configs contain two scales. The factor is the scale with mscale, divided by that with
        # mscale_all_dim.
        attention_factor = (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all_dim * math.log(factor) + 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_tokens=original,
        attention_factor=attention_factor,
        beta_fast=rope.number_or("beta_fast", 32.0),
        beta_slow=rope.number_or("beta_slow", 1.0),
        rounds_ends=rope.flag_or("truncate", True),
    )
