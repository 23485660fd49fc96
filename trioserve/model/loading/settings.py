"""Checks the options for sampling defaults (--generation-config, --override-generation-config) and for adapters that
are loaded at start (--lora-modules).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.sampling import SamplingParams

__all__ = ["GENERATION_FIELDS", "GenerationSettings", "LoraModule", "generation_settings", "lora_modules"]

FLAG = "--override-generation-config"
LORA_EXAMPLE = """write it like sql=/adapters/sql, or like {"name": "sql", "path": "/adapters/sql"}"""
EXAMPLE = '{"temperature": 0.5, "top_p": 0.9}'

GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling fields of generation_config.json, and their names in SamplingParams. The list is vLLM's."""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the sampling defaults.

    Attributes:
        is_neutral: ignore the checkpoint's recommendations.
        directory: directory whose generation_config.json replaces the checkpoint's. None: use the checkpoint's file.
        override: values that replace values from files, with the names of SamplingParams.
    """

    is_neutral: bool = False
    directory: Path | None = None
    override: Mapping[str, float | int] = msgspec.field(default_factory=dict)


class LoraModule(msgspec.Struct, frozen=True, kw_only=True):
    """Adapter that is loaded at start.

    Attributes:
        name: name that requests use.
        path: directory of the adapter.
        base_model_name: name of the adapter's model, which is only shown to users.
    """

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(given: Iterable[str]) -> tuple[LoraModule, ...]:
    """Parse the values of --lora-modules.

    Args:
        given: values, of which each is "name=path", or JSON with the fields of LoraModule.

    Raises:
        StartupError: a value is wrong, or a name occurs twice.
    """
    modules: dict[str, LoraModule] = {}
    for text in given:
        try:
            if text.lstrip().startswith("{"):
                module = msgspec.json.decode(text, type=LoraModule)
            else:
                name, equals, path = text.partition("=")
                module = LoraModule(name=name, path=path) if equals else LoraModule(name="", path="")
        except msgspec.DecodeError as error:
            raise StartupError(f"--lora-modules {text!r}: {error}; {LORA_EXAMPLE}") from None
        if not module.name or not module.path:
            raise StartupError(f"--lora-modules {text!r} has no name and path: {LORA_EXAMPLE}")
        if module.name in modules:
            raise StartupError(f"--lora-modules names {module.name!r} twice")
        modules[module.name] = module
    return tuple(modules.values())


def generation_settings(source: str, override: str | Mapping[str, Any] | None) -> GenerationSettings:
    """Parse --generation-config and --override-generation-config.

    Args:
        source: auto, vllm or a directory.
        override: JSON string, its decoded value, or None.

    Raises:
        StartupError: a value is wrong.
    """
    fields = _override(override)
    if source in ("auto", "vllm"):
        return GenerationSettings(is_neutral=source == "vllm", override=fields)
    return GenerationSettings(directory=Path(source), override=fields)


def _override(given: str | Mapping[str, Any] | None) -> dict[str, float | int]:
    if given is None:
        return {}
    value: object = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise StartupError(f"{FLAG} is no JSON ({error}): write it like {EXAMPLE}") from None
    if not isinstance(value, Mapping):
        raise StartupError(f"{FLAG} is {value!r}, it must be an object like {EXAMPLE}")
    fields: dict[str, float | int] = {}
    for name, requested in value.items():
        if name not in GENERATION_FIELDS:
            closest = closest_name(str(name), GENERATION_FIELDS)
            hint = f"did you mean {closest}?" if closest else f"there are: {', '.join(GENERATION_FIELDS)}"
            raise StartupError(f"{FLAG} has {name!r}, which it does not accept: {hint}")
        if requested is not None:
            fields[GENERATION_FIELDS[name]] = requested
    try:
        msgspec.convert(fields, SamplingParams)
    except (InvalidRequest, msgspec.ValidationError) as error:
        raise StartupError(f"{FLAG}: {error}") from None
    return fields
