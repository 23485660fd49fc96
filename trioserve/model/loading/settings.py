"""What an operator wants of loading, as checked values: which sampling counts where a request says nothing
(--generation-config, --override-generation-config), and which adapters there are at the start (--lora-modules)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.spelling import closest_name

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
"""What a generation_config.json says of sampling, and the names that SamplingParams has for it. The same as in vLLM."""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """is_neutral: what the checkpoint recommends does not count. directory: whose generation_config.json counts instead
    of the checkpoint's; None: the checkpoint's own. override: by the names of SamplingParams, above either."""

    is_neutral: bool = False
    directory: Path | None = None
    override: Mapping[str, float | int] = msgspec.field(default_factory=dict)


class LoraModule(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that is loaded at the start. base_model_name: whose it is, for people."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(given: Iterable[str]) -> tuple[LoraModule, ...]:
    """given: each "name=path", or JSON with the fields of a LoraModule. Raises StartupError."""
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
    """source: auto, vllm or a directory. override: JSON, or what it stands for. Raises StartupError."""
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
    for name, wish in value.items():
        if name not in GENERATION_FIELDS:
            closest = closest_name(str(name), GENERATION_FIELDS)
            hint = f"did you mean {closest}?" if closest else f"there are: {', '.join(GENERATION_FIELDS)}"
            raise StartupError(f"{FLAG} has {name!r}, which it does not take: {hint}")
        if wish is not None:
            fields[GENERATION_FIELDS[name]] = wish
    try:
        msgspec.convert(fields, SamplingParams)
    except (InvalidRequest, msgspec.ValidationError) as error:
        raise StartupError(f"{FLAG}: {error}") from None
    return fields
