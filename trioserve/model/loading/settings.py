"""Which sampling counts where a request says nothing, as an operator wants it: --generation-config and
--override-generation-config as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.spelling import closest_name

__all__ = ["GENERATION_FIELDS", "GenerationSettings", "generation_settings"]

FLAG = "--override-generation-config"
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
