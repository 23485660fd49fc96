"""Sampling parameters of a request, their ranges, and the token budget of its reasoning.

Only SAMPLING_RANGES defines the ranges.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import msgspec

from trioserve.contracts.arguments import check_count, refuse, shown, to_bool, to_float, to_int, to_items, to_str
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import SpeechRules
from trioserve.contracts.structured_output import StructuredOutput

__all__ = [
    "CHOICES_MAX",
    "CHOOSING_FIELDS",
    "Range",
    "ReasoningOutcome",
    "SAMPLING_RANGES",
    "SamplingParams",
    "THINKING_TEXT_CHARACTERS_MAX",
    "THINKING_TOKENS_MAX",
    "Thinking",
]

THINKING_TEXT_CHARACTERS_MAX = 256
THINKING_TOKENS_MAX = 2**31 - 1


class ReasoningOutcome(enum.Enum):
    """Outcome of a call that ends a request's reasoning."""

    ENDING = "ending"  # The end marker is the next output.
    NO_REASONING = "no_thought"  # The request has no open reasoning, or the request has ended.
    UNKNOWN = "unknown"  # No live request has this id.


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Markers and budget of the reasoning. A token budget, or a call while the request runs, can end the reasoning
    early.

    Structured output may be unrestrained until the reasoning ends (free_until). A response that begins without
    reasoning is then restrained from its first token.

    Attributes:
        end: Text that ends the reasoning ("</think>"). If it is the last marker in the prompt's last turn, the
            reasoning is over.
        begin: Text that begins the reasoning, in the prompt's last turn or at the start of the response. Empty if the
            response begins inside of the reasoning.
        tokens_max: Maximum number of tokens of reasoning. At this limit the server forces the end marker. None: no
            limit.

    Raises:
        InvalidRequest: a value is out of range.
    """

    end: str
    begin: str = ""
    tokens_max: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.end) <= THINKING_TEXT_CHARACTERS_MAX or len(self.begin) > THINKING_TEXT_CHARACTERS_MAX:
            raise InvalidRequest(
                f"the end marker of the reasoning has {len(self.end)} characters and its begin marker "
                f"{len(self.begin)}, allowed are 1 to {THINKING_TEXT_CHARACTERS_MAX} and 0 to "
                f"{THINKING_TEXT_CHARACTERS_MAX}",
                param="thinking",
            )
        if self.tokens_max is not None and not 0 <= self.tokens_max <= THINKING_TOKENS_MAX:
            raise InvalidRequest(
                f"the thinking budget is {self.tokens_max} tokens, allowed is 0 to {THINKING_TOKENS_MAX}",
                param="thinking",
            )


CHOICES_MAX = 128  # Limit of n, as in OpenAI's API. Each choice is one sequence in the batch.
STOP_STRINGS_MAX = 16  # The number is limited because each delta is searched for every stop string.
# The server may hold back this many characters of a response, because they may be the start of a stop string.
STOP_STRING_CHARACTERS_MAX = 256
STOP_TOKENS_MAX = 128
ALLOWED_TOKENS_MAX = 65_536  # The limit is half of a large vocabulary. Each allowed token takes one bit.
BAD_WORDS_MAX = 1024
BAD_WORD_CHARACTERS_MAX = 256
# Limit of the total length of all bad words. Preparing them takes up to a tenth of a second, once per request.
BAD_WORDS_CHARACTERS_MAX = 32_768
LOGIT_BIAS_MAX = 1024  # The number is limited because the entries are copied into the logits at every step.
LOGPROBS_MAX = 20  # OpenAI's API has the same limit of log probabilities.
TEMPERATURE_MAX = 100.0  # At a higher temperature, every distribution is practically uniform.
TOKEN_ID_MAX = 2**31 - 1
# Smaller positive temperatures are raised to this value, because they differ from greedy only by rounding errors.
TEMPERATURE_MIN = 0.01


class Range(msgspec.Struct, frozen=True):
    """Allowed values of a number.

    Attributes:
        low: Smallest value.
        high: Largest value, which is allowed. None for no limit.
        is_low_excluded: True if `low` itself is not allowed.
    """

    low: float
    high: float | None
    is_low_excluded: bool = False

    def holds(self, value: float) -> bool:
        """Return True if the value is in the range. False for NaN.

        Args:
            value: The value to check.
        """
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
"""Range of each number in SamplingParams, by field. For a field with several entries, the range of each entry. For
logit_bias, the range of each bias.
"""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request. Names and meanings are those of OpenAI's API and of vLLM.

    Accepts lists instead of tuples, and numpy's numbers. Stores Python's own types.

    Attributes:
        n: Number of choices.
        temperature: Sampling temperature. 0 for greedy sampling.
        top_p: Keep the most probable tokens up to this total probability.
        top_k: Keep this many of the most probable tokens. 0 or -1 for all.
        min_p: Keep tokens with at least this share of the highest probability.
        presence_penalty: Number that is subtracted once from the logit of each token that the output contains.
        frequency_penalty: Number that is subtracted from a token's logit for each occurrence in the output.
        repetition_penalty: Factor that makes tokens of prompt and output less probable. 1 turns it off.
        seed: Seed of the request. None: the engine draws a seed when the request enters.
        max_tokens: Maximum number of output tokens. None for as many tokens as fit the context.
        clamp_max_tokens: True to reduce max_tokens to the rest of the context. False to refuse the request instead.
        min_tokens: Before this number of output tokens, no end token is sampled and no stop condition applies.
        stop: Strings that end the text. The output includes them only with include_stop_str_in_output.
        stop_token_ids: Tokens that end the output.
        include_stop_str_in_output: True to keep the stop string in the output.
        ignore_eos: True to ignore the model's own end tokens. stop_token_ids still apply.
        skip_special_tokens: True to leave special tokens out of the text.
        logit_bias: Numbers that are added to logits, by token id.
        logprobs: Number of alternatives with log probabilities. 0 for the sampled token only. None for off.
        prompt_logprobs: As logprobs, for the prompt's tokens. A request with prompt_logprobs does not use the prefix
            cache.
        structured: Grammar or schema of the output. The request ends when the output is complete, also with ignore_eos.
        allowed_token_ids: The only tokens that may be sampled. They must include end tokens if the output may end
            early.
        bad_words: Texts that the output must not contain. Each text is tokenized alone, with and without a space before
            it, and these token sequences are not sampled.
        thinking: Markers and budget of the reasoning.
        speech: Rules for the tokens of a transcript, for a model that hears. None for a text.

    Raises:
        InvalidRequest: a value has a wrong type or is out of range. Names the field.
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
    speech: SpeechRules | None = None

    def __post_init__(self) -> None:
        for name, default, convert in _TYPES:
            value = getattr(self, name)
            if value is not default:
                own = convert(name, value)
                if own is not value:
                    msgspec.structs.force_setattr(self, name, own)
                if name in SAMPLING_RANGES and isinstance(own, int | float):
                    _check_range(name, own)
        if 0.0 < self.temperature < TEMPERATURE_MIN:
            msgspec.structs.force_setattr(self, "temperature", TEMPERATURE_MIN)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {shown(self.min_tokens)}, above max_tokens, which is {shown(self.max_tokens)}",
                param="min_tokens",
            )
        for string in self.stop:
            if not 1 <= len(string) <= STOP_STRING_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"a stop string has {len(string)} characters, allowed are 1 to {STOP_STRING_CHARACTERS_MAX}",
                    param="stop",
                )
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


_NOT_CHOOSING = frozenset(
    {
        *("n", "seed", "max_tokens", "clamp_max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("ignore_eos", "skip_special_tokens", "structured", "allowed_token_ids", "bad_words", "thinking", "speech"),
    }
)
CHOOSING_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name not in _NOT_CHOOSING)
"""Fields that a sampler reads to choose a token or to report log probabilities. A new field counts as one of them.

The other fields end the output, shape its text, or reach the sampler in another form: as a seed, as stop token ids, or
as a token mask. Rules of speech need a model that hears, which one process computes.
"""


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
    def check(name: str, value: object) -> object:
        if not isinstance(value, kind):
            refuse(name, value, f"a {kind.__name__}, or None")
        return value

    return check


def _to_logit_bias(name: str, value: object) -> dict[int, float] | None:
    """Return a copy, so that later changes of the caller's dict have no effect."""
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
    "SpeechRules | None": _instance(SpeechRules),
    "dict[int, float] | None": _to_logit_bias,
}
_TYPES = [
    (field.name, field.default, _BY_TYPE[SamplingParams.__annotations__[field.name]])
    for field in msgspec.structs.fields(SamplingParams)
]
"""Name, default and converter of each field. A value that is the default itself is not converted."""


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


def _check_logit_bias(logit_bias: dict[int, float]) -> None:
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id <= TOKEN_ID_MAX:
            raise InvalidRequest(
                f"logit_bias names token id {shown(token_id)}, allowed is 0 to {TOKEN_ID_MAX}", param="logit_bias"
            )
        _check_range("logit_bias", bias)
