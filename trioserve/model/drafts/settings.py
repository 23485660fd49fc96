"""Checks the options of speculative decoding (--speculative-ngram, -model and -config)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.model.settings import ModelSettings, QuantizationName

__all__ = ["DRAFT_TOKENS_MAX", "DraftSettings", "draft_settings"]

FLAG = "--speculative-config"
EXAMPLE = '{"model": "NAME", "num_speculative_tokens": 4}'
# With one known token, a sequence has 16 rows per step. Computing more rows costs about as much time as it saves.
DRAFT_TOKENS_MAX = 15

MTP = "mtp"
MTP_METHODS = (MTP, "deepseek_mtp", "glm4_moe_mtp")  # Older versions of vLLM use the longer names.
IGNORED = frozenset({"prompt_lookup_max", "prompt_lookup_min", "disable_padded_drafter_batch"})
"""Keys of vLLM that have no meaning here, or whose values are found automatically."""


class DraftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options of speculative decoding.

    Attributes:
        source: "text" copies draft tokens from the request's own tokens. "model" uses a draft model or a head: its
            files define which of the two. "mtp" uses the target model's own prediction layer.
        token_count: largest number of draft tokens of a request in one step, 1 to DRAFT_TOKENS_MAX.
        model: name of the draft model. None for the sources "text" and "mtp".
        revision: revision of the draft model. None for the default revision.
        quantization: how the draft model's weights are stored in memory.
        ignored: keys of vLLM that have no effect in this server, for a log line.
    """

    source: Literal["text", "model", "mtp"]
    token_count: int
    model: str | None = None
    revision: str | None = None
    quantization: QuantizationName = "auto"
    ignored: tuple[str, ...] = ()

    def settings_of_draft(self, settings: ModelSettings) -> ModelSettings:
        """Return the settings with which the draft model is computed.

        Args:
            settings: settings of the target model.
        """
        return msgspec.structs.replace(
            settings,
            quantization=self.quantization,
            context_tokens_max=None,
            draft_tokens=0,
            max_lora_graph_rank=0,  # The draft model has no adapters.
        )


def draft_settings(
    *, ngram: int, model: str | None, token_count: int, quantization: str, given: str | Mapping[str, Any] | None
) -> DraftSettings | None:
    """Check the options of speculative decoding.

    Args:
        ngram: number of draft tokens per step that are copied from the request's own tokens. 0 disables them.
        model: name of a draft model, "mtp", or None.
        token_count: number of draft tokens of `model` per step.
        quantization: how the weights of `model` are stored in memory.
        given: JSON object in vLLM's format or its decoded value, or None. It excludes `ngram` and `model`.

    Returns:
        The settings, or None if there is no speculative decoding.

    Raises:
        StartupError: options contradict each other or a value is not allowed.
    """
    if given is not None:
        if ngram or model is not None:
            raise StartupError(
                f"{FLAG} already names the source of draft tokens: remove --speculative-ngram and --speculative-model"
            )
        return _from_config(_fields(given))
    if model is not None:
        if ngram:
            raise StartupError("--speculative-model and --speculative-ngram were both given: remove one of them")
        source: Literal["model", "mtp"] = "mtp" if model == MTP else "model"
        name = None if source == "mtp" else model
        return DraftSettings(
            source=source, token_count=token_count, model=name, quantization=_quantization(quantization)
        )
    return DraftSettings(source="text", token_count=ngram) if ngram else None


def _from_config(fields: dict[str, Any]) -> DraftSettings:
    method, model = fields.pop("method", None), fields.pop("model", None)
    count = fields.pop("num_speculative_tokens", None)
    if type(count) is not int or not 1 <= count <= DRAFT_TOKENS_MAX:
        raise StartupError(
            f"num_speculative_tokens in {FLAG} is {count!r}, allowed is 1 to {DRAFT_TOKENS_MAX}, as in {EXAMPLE}"
        )
    ignored = tuple(sorted(IGNORED & fields.keys()))
    for name in ignored:
        del fields[name]
    if model in ("ngram", "[ngram]"):  # Older versions of vLLM use these names.
        method, model = "ngram", None
    if method == "ngram":
        _nothing_else(fields)
        return DraftSettings(source="text", token_count=count, ignored=ignored)
    if method not in (None, "draft_model", "eagle3", *MTP_METHODS):
        raise StartupError(f'method in {FLAG} is {method!r}, allowed is "draft_model", "eagle3", "mtp" or "ngram"')
    is_own = method in MTP_METHODS or (method is None and model == MTP)
    if is_own and model not in (None, MTP):
        raise StartupError(f'{FLAG} has method {method!r}, which uses the model\'s own layer: remove "model"')
    if not is_own and (not isinstance(model, str) or not model):
        raise StartupError(f'{FLAG} has no "model": add one, as in {EXAMPLE}')
    devices = fields.pop("draft_tensor_parallel_size", 1)
    if devices != 1:
        raise StartupError(
            f"draft_tensor_parallel_size in {FLAG} is {devices!r}, but the draft model runs on one device: remove it"
        )
    revision, quantization = fields.pop("revision", None), fields.pop("quantization", None)
    _nothing_else(fields)
    if revision is not None and not isinstance(revision, str):
        raise StartupError(f"revision in {FLAG} is {revision!r}, but it must be a string")
    return DraftSettings(
        source="mtp" if is_own else "model",
        token_count=count,
        model=None if is_own else model,
        revision=revision,
        quantization=_quantization("auto" if quantization is None else quantization),
        ignored=ignored,
    )


def _fields(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given, str):
        return dict(given)
    try:
        fields = msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        raise StartupError(f"{FLAG} is not JSON ({error}): give an object, such as {EXAMPLE}") from None
    if not isinstance(fields, dict):
        raise StartupError(f"{FLAG} is not a JSON object: give one, such as {EXAMPLE}")
    return fields


def _nothing_else(fields: Mapping[str, Any]) -> None:
    if fields:
        raise StartupError(f"{FLAG} has {', '.join(sorted(fields))}, which is not supported: remove it")


def _quantization(name: object) -> QuantizationName:
    if name not in get_args(QuantizationName):
        raise StartupError(
            f"the quantization of the draft model is {name!r}, allowed is one of "
            f"{', '.join(get_args(QuantizationName))}"
        )
    return name  # type: ignore[return-value]  # checked above
