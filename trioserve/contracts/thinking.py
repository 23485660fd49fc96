"""The thoughts of a response: where they end, and when they have to."""

from __future__ import annotations

import enum

import msgspec

from trioserve.contracts.errors import InvalidRequest

__all__ = ["THINKING_TEXT_CHARACTERS_MAX", "THINKING_TOKENS_MAX", "Thinking", "ThoughtOutcome"]

THINKING_TEXT_CHARACTERS_MAX = 256
THINKING_TOKENS_MAX = 2**31 - 1


class ThoughtOutcome(enum.Enum):
    """Of asking that a request's thought end now."""

    ENDING = "ending"  # its end is written next
    NO_THOUGHT = "no_thought"  # it writes none, or is through with it, or has ended
    UNKNOWN = "unknown"  # no such request lives


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts that can be ended from outside: by a budget, or by hand while the request runs.

    end: the text that ends a thought ("</think>"). begin: the text that begins one, in the last turn of the prompt
    or at the beginning of the response; empty: the response begins inside of a thought. If `end` is the last marker in
    the prompt's last turn, the thought is over.
    tokens_max: the most tokens of thought; then the end is forced. None: as many as the model likes.

    Together with a form that is free until the thought's end: a response that begins without a thought has the form
    from its first token.
    Raises InvalidRequest when a value is out of range.
    """

    end: str
    begin: str = ""
    tokens_max: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.end) <= THINKING_TEXT_CHARACTERS_MAX or len(self.begin) > THINKING_TEXT_CHARACTERS_MAX:
            raise InvalidRequest(
                f"the end of a thought has {len(self.end)} characters and its beginning {len(self.begin)}, allowed are "
                f"1 to {THINKING_TEXT_CHARACTERS_MAX}, and 0 to {THINKING_TEXT_CHARACTERS_MAX}",
                param="thinking",
            )
        if self.tokens_max is not None and not 0 <= self.tokens_max <= THINKING_TOKENS_MAX:
            raise InvalidRequest(
                f"the thinking budget is {self.tokens_max} tokens, allowed is 0 to {THINKING_TOKENS_MAX}",
                param="thinking",
            )
