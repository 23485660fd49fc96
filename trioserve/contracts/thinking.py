"""Reasoning of a response: its markers and its token budget."""

from __future__ import annotations

import enum

import msgspec

from trioserve.contracts.errors import InvalidRequest

__all__ = ["THINKING_TEXT_CHARACTERS_MAX", "THINKING_TOKENS_MAX", "Thinking", "ReasoningOutcome"]

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
