"""How the next token is chosen and when to stop. The ranges are written and checked here; who describes them reads
SAMPLING_RANGES."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from trioserve.contracts.arguments import check_count, refuse, shown, to_bool, to_float, to_int, to_items, to_str
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.contracts.thinking import Thinking

__all__ = ["CHOICES_MAX", "SAMPLING_RANGES", "Range", "SamplingParams"]

CHOICES_MAX = 128  # n, as in OpenAI's API; each choice is a sequence of its own and takes a place in the batch
STOP_STRINGS_MAX = 16  # every one is searched for in every delta
STOP_STRING_CHARACTERS_MAX = 256  # this much text may have to be held back from the client
STOP_TOKENS_MAX = 128
ALLOWED_TOKENS_MAX = 65_536  # a bit each; half of a large vocabulary
BAD_WORDS_MAX = 1024
BAD_WORD_CHARACTERS_MAX = 256
BAD_WORDS_CHARACTERS_MAX = 32_768  # of all together; a tenth of a second to prepare, once for each request
LOGIT_BIAS_MAX = 1024  # entries are copied into the logits at every step
LOGPROBS_MAX = 20  # as in OpenAI's API
TEMPERATURE_MAX = 100.0  # above this every distribution is flat in practice
TOKEN_ID_MAX = 2**31 - 1
TEMPERATURE_MIN = 0.01  # a positive temperature below this is greedy in all but rounding; it is raised to this


class Range(msgspec.Struct, frozen=True):
    """low to high, both allowed, but low only if not is_low_excluded. high is None: as large as one likes."""

    low: float
    high: float | None
    is_low_excluded: bool = False

    def holds(self, value: float) -> bool:
        """False for NaN."""
        is_above = value > self.low if self.is_low_excluded else value >= self.low
        return is_above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low} or more"
        return f"above {self.low}, up to {self.high}" if self.is_low_excluded else f"{self.low} to {self.high}"


SAMPLING_RANGES = {
    "n": Range(1, CHOICES_MAX),
    "temperature": Range(0.0, TEMPERATURE_MAX),
    "top_p": Range(0.0, 1.0, is_low_excluded=True),
    "top_k": Range(-1, None),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.01, 100.0),
    "seed": Range(-(2**63), 2**64 - 1),
    "max_tokens": Range(0, None),
    "min_tokens": Range(0, None),
    "stop_token_ids": Range(0, TOKEN_ID_MAX),
    "allowed_token_ids": Range(0, TOKEN_ID_MAX),
    "logit_bias": Range(-100.0, 100.0),
    "logprobs": Range(0, LOGPROBS_MAX),
    "prompt_logprobs": Range(0, LOGPROBS_MAX),
}
"""Of every number in SamplingParams, by field; of each entry where the field has several (of logit_bias, each bias)."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling. Names and meanings are those of OpenAI's API and of vLLM.

    Numbers may be those of numpy, and lists are as good as tuples; Python's own are kept.

    temperature: 0 is greedy. top_k: 0 or -1 is off. seed: None draws one when the request is made.
    max_tokens: None means as many as fit the context. clamp_max_tokens: if max_tokens do not fit beside the prompt, as
    many tokens as fit are allowed; without it the request is refused.
    min_tokens: until then no end token is sampled, no stop counts.
    logprobs: None is off; N also gives the N most probable alternatives (0: only the chosen token's).
    prompt_logprobs: the same for the prompt's own tokens; such a request does not use the prefix cache.
    stop: strings that end the text; they are not part of it unless include_stop_str_in_output.
    ignore_eos: the model's own end tokens do not stop the request; stop_token_ids still do.
    structured: the form that the response is to have. Where it is complete the request ends, also with ignore_eos.
    allowed_token_ids: no others come, end tokens neither. bad_words: these texts are not written; each is compared as
    the tokens that it has by itself, and behind a space. thinking: where thoughts end, and when they have to.
    Raises InvalidRequest, naming the field, when a value is of another type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    clamp_max_tokens: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        for name, default, taken in _TYPES:
            value = getattr(self, name)
            if value is not default:
                own = taken(name, value)
                if own is not value:
                    msgspec.structs.force_setattr(self, name, own)
        for name in SAMPLING_RANGES:
            value = getattr(self, name)
            if isinstance(value, int | float):
                _check_range(name, value)
        if 0.0 < self.temperature < TEMPERATURE_MIN:
            msgspec.structs.force_setattr(self, "temperature", TEMPERATURE_MIN)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {shown(self.min_tokens)}, above max_tokens, which is {shown(self.max_tokens)}",
                param="min_tokens",
            )
        _check_stop(self.stop)
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id)
        if self.allowed_token_ids is not None:
            _check_allowed(self.allowed_token_ids)
        for word in self.bad_words:
            if not 1 <= len(word) <= BAD_WORD_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"bad_words holds a text of {len(word)} characters, allowed are 1 to {BAD_WORD_CHARACTERS_MAX}",
                    param="bad_words",
                )
        if (count := sum(map(len, self.bad_words))) > BAD_WORDS_CHARACTERS_MAX:
            raise InvalidRequest(
                f"bad_words holds texts of {count} characters, allowed are {BAD_WORDS_CHARACTERS_MAX} in all: send "
                "fewer or shorter ones",
                param="bad_words",
            )
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias)


def _to_stop(name: str, value: object) -> tuple[str, ...]:
    allowed = "a tuple of texts (str)"
    items = to_items(name, value, allowed, count_max=BAD_WORDS_MAX if name == "bad_words" else STOP_STRINGS_MAX)
    return tuple(to_str(name, item, allowed, verb="holds") for item in items)


def _to_token_ids(name: str, value: object) -> tuple[int, ...]:
    allowed = "a tuple of token ids (int)"
    items = to_items(name, value, allowed, count_max=STOP_TOKENS_MAX)
    return tuple(to_int(name, item, allowed, verb="holds") for item in items)


def _to_allowed(name: str, value: object) -> tuple[int, ...] | None:
    allowed = "a tuple of token ids (int), or None"
    items = to_items(name, value, allowed, count_max=ALLOWED_TOKENS_MAX)
    return tuple(to_int(name, item, allowed, verb="holds") for item in items)


def _instance(kind: type) -> Callable[[str, object], object]:
    def taken(name: str, value: object) -> object:
        if not isinstance(value, kind):
            refuse(name, value, f"a {kind.__name__}, or None")
        return value

    return taken


def _to_logit_bias(name: str, value: object) -> dict[int, float] | None:
    """A copy: what the caller does with its own later changes nothing here."""
    allowed = "a dict of token ids (int) and numbers (float)"
    if not isinstance(value, Mapping):
        refuse(name, value, allowed)
    check_count(name, value, LOGIT_BIAS_MAX)
    return {
        to_int(name, token_id, allowed, verb="holds"): to_float(name, bias, allowed, verb="holds")
        for token_id, bias in value.items()
    }


_BY_TYPE: dict[str, Callable[[str, object], object]] = {
    "int": to_int,
    "int | None": to_int,
    "float": to_float,
    "bool": to_bool,
    "tuple[str, ...]": _to_stop,
    "tuple[int, ...]": _to_token_ids,
    "tuple[int, ...] | None": _to_allowed,
    "StructuredOutput | None": _instance(StructuredOutput),
    "Thinking | None": _instance(Thinking),
    "dict[int, float] | None": _to_logit_bias,
}
_TYPES = [
    (field.name, field.default, _BY_TYPE[SamplingParams.__annotations__[field.name]])
    for field in msgspec.structs.fields(SamplingParams)
]
"""Of each field its name, its default, which is not looked at again, and what makes a value of its type."""


def _check_range(name: str, value: float) -> None:
    allowed = SAMPLING_RANGES[name]
    if not allowed.holds(value):
        raise InvalidRequest(f"{name} is {shown(value)}, allowed is {allowed}", param=name)


def _check_allowed(token_ids: tuple[int, ...]) -> None:
    if not token_ids:
        raise InvalidRequest(
            "allowed_token_ids is empty: name at least one token id, or leave it out", param="allowed_token_ids"
        )
    for token_id in (min(token_ids), max(token_ids)):
        _check_range("allowed_token_ids", token_id)


def _check_stop(stop: tuple[str, ...]) -> None:
    for string in stop:
        if not 1 <= len(string) <= STOP_STRING_CHARACTERS_MAX:
            raise InvalidRequest(
                f"a stop string has {len(string)} characters, allowed are 1 to {STOP_STRING_CHARACTERS_MAX}",
                param="stop",
            )


def _check_logit_bias(logit_bias: dict[int, float]) -> None:
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id <= TOKEN_ID_MAX:
            raise InvalidRequest(
                f"logit_bias names token id {shown(token_id)}, allowed is 0 to {TOKEN_ID_MAX}", param="logit_bias"
            )
        _check_range("logit_bias", bias)
