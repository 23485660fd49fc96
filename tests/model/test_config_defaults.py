"""Tests that a missing field of config.json gets transformers' default, or that the config is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from msgspec import structs

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.registry import FAMILIES
from trioserve.model.layer_config import AttentionConfig
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import ModelConfig

pytestmark = pytest.mark.slow

# Each of these fields describes tokens or files, or selects the class.
NOT_COMPARED = ("architectures", "model_type", "transformers_version", "dtype", "vision_config", "text_config")
NOT_COMPARED += ("bos_token_id", "eos_token_id", "pad_token_id")
# transformers reads these model classes as Llamas.
OTHERS_CLASSES = ("exaone", "internlm3")
# Classes of families whose first class has another model type.
FURTHER_CLASSES = {"granitemoeshared": "GraniteMoeSharedForCausalLM", "ministral": "MinistralForCausalLM"}


def _config_of(kind: str, tiny_checkpoints: ModuleType) -> tuple[dict[str, Any], Any]:
    """Return the config.json of a tiny checkpoint with all fields written out, and its class in transformers."""
    import transformers

    model_type, changes = {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS}[kind]
    fields = {**tiny_checkpoints._SMALL, **changes}
    if "text_config" in changes:
        fields = {**changes, "text_config": {**tiny_checkpoints._SMALL, **changes["text_config"]}}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    return _written(config, model_type), type(config)


def _written(config: Any, model_type: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    if model_type in FURTHER_CLASSES:
        return {**fields, "architectures": [FURTHER_CLASSES[model_type]]}
    text_type = fields.get("text_config", {}).get("model_type")
    family = next(family for family in FAMILIES if family.model_type == (text_type or model_type))
    fields["architectures"] = [(family.with_images if text_type else family.classes)[0]]
    return fields


def _without_each(fields: dict[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the config without one of its fields, for each field. Fields of inner objects are included."""
    part = fields
    for name in inside:
        part = part[name]
    for name, value in part.items():
        if name in NOT_COMPARED:
            continue
        changed = copy.deepcopy(fields)
        place = changed
        for step in inside:
            place = place[step]
        del place[name]
        yield ".".join((*inside, name)), changed
        if (name == "rope_parameters" and value) or (inside[-1:] == ("rope_parameters",) and isinstance(value, dict)):
            yield from _without_each(fields, (*inside, name))


def _described(fields: dict[str, Any]) -> ModelConfig | str:
    """Return our description of a config, or the error message of its refusal. A missing attention scale is replaced by
    the default, because transformers writes the default into some configs.
    """
    try:
        config = model_config_from(fields, {}, dtype_name="float32")
    except ModelLoadError as error:
        return str(error)
    layers = []
    for layer in config.layers:
        attention = layer.attention
        if isinstance(attention, AttentionConfig) and attention.scale is None:
            attention = structs.replace(attention, scale=attention.head_dim**-0.5)
        layers.append(structs.replace(layer, attention=attention))
    return structs.replace(config, layers=tuple(layers))


def test_missing_field_gets_transformers_default_or_is_refused(tiny_checkpoints: ModuleType) -> None:
    wrong, compared = [], 0
    for kind, (model_type, changes) in {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS}.items():
        if model_type in OTHERS_CLASSES:
            continue
        whole, config_class = _config_of(kind, tiny_checkpoints)
        assert isinstance(_described(whole), ModelConfig), (kind, _described(whole))
        inside = ("text_config",) if "text_config" in changes else ()
        for name, fields in _without_each(whole, inside):
            try:
                filled = _written(config_class.from_dict(copy.deepcopy(fields)), model_type)
            except Exception:
                continue  # transformers refuses such a config, with various exceptions
            ours, theirs = _described(fields), _described(filled)
            if isinstance(ours, str):
                continue  # The config is refused with a message that names the field.
            compared += 1
            if ours != theirs:
                shown = theirs if isinstance(theirs, str) else ""
                wrong.append(f"{kind}: without {name}, for which transformers takes {_found(filled, name)!r} {shown}")
    assert not wrong, "\n".join(wrong)
    assert compared > 1500


def test_configs_of_all_families_cause_no_warning_of_unread_fields(
    tiny_checkpoints: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    warned = []
    for kind in {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS}:
        whole, config_class = _config_of(kind, tiny_checkpoints)
        known = {"architectures", *config_class().to_dict()}  # Tiny checkpoints also have fields of other families.
        model_config_from({name: value for name, value in whole.items() if name in known}, {}, dtype_name="float32")
        own = (record for record in caplog.records if record.name.startswith("trioserve"))
        messages = [record.getMessage() for record in own]
        warned += [f"{kind}: {message}" for message in messages if "index_topk" not in message]
        caplog.clear()
    assert not warned, "\n".join(warned)


def _found(fields: dict[str, Any], name: str) -> object:
    value: Any = fields
    for step in name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.defaults], ids=lambda family: family.name)
def test_null_field_gets_no_default(family: Any) -> None:
    nulls = dict.fromkeys(family.defaults)
    assert family.with_defaults(nulls) == nulls
