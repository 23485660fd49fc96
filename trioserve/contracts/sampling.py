"""How the next token is chosen and when to stop. The ranges are checked here and nowhere else."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import InvalidRequest

__all__ = ["SamplingParams"]

CHOICES_MAX = 64  # n; each choice is a sequence of its own and takes a seat in the batch
STOP_STRINGS_MAX = 16  # every one is searched for in every delta
STOP_STRING_CHARACTERS_MAX = 256  # this much text may have to be held back from the client
STOP_TOKENS_MAX = 128
LOGIT_BIAS_MAX = 1024  # entries are copied into the logits at every step
LOGPROBS_MAX = 20  # as in OpenAI's API
TEMPERATURE_MAX = 100.0  # above this every distribution is flat in practice
TEMPERATURE_MIN = 0.01  # a positive temperature below this is greedy in all but rounding; it is raised to this


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling. Names and meanings are those of OpenAI's API and of vLLM.

    temperature: 0 is greedy. top_k: 0 or -1 is off. seed: None draws one when the request is made.
    max_tokens: None means as many as fit the context. min_tokens: until then no end token is sampled, no stop counts.
    logprobs: None is off; N also gives the N most probable alternatives (0: only the chosen token's).
    prompt_logprobs: the same for the prompt's own tokens; such a request does not use the prefix cache.
    stop: strings that end the text; they are not part of it unless include_stop_str_in_output.
    ignore_eos: the model's own end tokens do not stop the request; stop_token_ids still do.
    Raises InvalidRequest, naming the field, when a value is out of range.
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
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _in_range("n", self.n, 1, CHOICES_MAX)
        _in_range("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        if 0.0 < self.temperature < TEMPERATURE_MIN:
            msgspec.structs.force_setattr(self, "temperature", TEMPERATURE_MIN)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, but it must be above 0 and at most 1: 1 keeps every token", param="top_p")
        if self.top_k < -1:
            raise InvalidRequest(f"top_k is {self.top_k}, allowed is 1 or more, or 0 for off", param="top_k")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens is {self.max_tokens}, allowed is 0 or more", param="max_tokens")
        if self.min_tokens < 0:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, allowed is 0 or more", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}", param="min_tokens"
            )
        _check_stop(self.stop)
        if len(self.stop_token_ids) > STOP_TOKENS_MAX:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} entries, at most {STOP_TOKENS_MAX} are allowed",
                param="stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, LOGPROBS_MAX)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_MAX)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN, too
        raise InvalidRequest(f"{name} is {value}, allowed is {low} to {high}", param=name)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > STOP_STRINGS_MAX:
        raise InvalidRequest(f"stop has {len(stop)} strings, at most {STOP_STRINGS_MAX} are allowed", param="stop")
    for string in stop:
        if not 1 <= len(string) <= STOP_STRING_CHARACTERS_MAX:
            raise InvalidRequest(
                f"a stop string has {len(string)} characters, allowed are 1 to {STOP_STRING_CHARACTERS_MAX}",
                param="stop",
            )


def _check_logit_bias(logit_bias: dict[int, float]) -> None:
    if len(logit_bias) > LOGIT_BIAS_MAX:
        raise InvalidRequest(
            f"logit_bias has {len(logit_bias)} entries, at most {LOGIT_BIAS_MAX} are allowed", param="logit_bias"
        )
    for token_id, bias in logit_bias.items():
        _in_range("logit_bias", token_id, 0, 2**31 - 1)
        _in_range("logit_bias", bias, -100.0, 100.0)
