"""Responses in Ollama's format: a stream of lines whose last line has counts and durations, or one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.api.openai.logprobs import chat_logprobs
from trioserve.api.turn.turn_choice import CollectedChoice, OpenCalls, ToolCall
from trioserve.text.response_parts import ContentText, ReasoningText, ResponsePart

if TYPE_CHECKING:
    from trioserve.api.turn.chat_turn import ChatTurn
    from trioserve.contracts.events import TokenLogprob
    from trioserve.contracts.output import Delta
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["Answer", "Piece", "chat_piece", "iso_time", "loaded", "nanoseconds", "text_piece"]

NANOSECONDS = 1_000_000_000

Piece = Callable[[str, str, Sequence[ToolCall], int], dict[str, Any]]
"""Function that returns the fields for content, reasoning and tool calls.

The last argument is the index of the first call.
"""


def chat_piece(content: str, reasoning: str, calls: Sequence[ToolCall], first_call: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "function": {
                    "index": index,
                    "name": call.name,
                    # The arguments are the text of the model. In a complete call, they are one JSON object.
                    "arguments": msgspec.Raw(call.arguments.encode() or b"{}"),
                },
            }
            for index, call in enumerate(calls, first_call)
        ]
    return {"message": message}


def text_piece(content: str, reasoning: str, _calls: Sequence[ToolCall], _first_call: int) -> dict[str, Any]:
    return {"response": content, "thinking": reasoning} if reasoning else {"response": content}


def iso_time(unix_seconds: int) -> str:
    """Return a time in ISO 8601 format.

    Args:
        unix_seconds: Unix time in seconds.
    """
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))


def loaded(head: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the response to a request without a prompt.

    Args:
        head: First fields of the response.
        piece: Makes the fields for content.
    """
    return {**head, **piece("", "", (), 0), "done": True, "done_reason": "load"}


class Answer:
    """One response.

    Args:
        head: First fields of each line.
        piece: Makes the fields for content, reasoning and calls.
        tokenizer: Tokenizer of the model.
        wants_logprobs: The client asked for log probabilities.
        earlier_seconds: For a resumed response: time since the response began at another server. Otherwise 0.
    """

    def __init__(
        self,
        head: dict[str, Any],
        piece: Piece,
        tokenizer: Tokenizer,
        *,
        wants_logprobs: bool,
        earlier_seconds: float = 0,
    ) -> None:
        self._head = head
        self._piece = piece
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._earlier_seconds = earlier_seconds
        self._entered_at = self._begun_at = trio.current_time()
        self._first_at: float | None = None
        self._calls = OpenCalls()
        self._call_count = 0
        self._logprobs: list[TokenLogprob] = []  # The log probabilities of tokens that no line contains yet.

    def begin(self) -> None:
        """Record the time at which the request began to run."""
        self._begun_at = trio.current_time()

    def note(self, _delta: Delta) -> None:
        """Record the time of the first token.

        Args:
            _delta: Not used.
        """
        if self._first_at is None:
            self._first_at = trio.current_time()

    def skip(self, parts: Sequence[ResponsePart], _delta: Delta) -> None:
        """Count the tool calls in the known output of a resumed response.

        Args:
            parts: Parts that the client has.
        """
        self._call_count += len(self._complete(parts))

    def next(self, parts: Sequence[ResponsePart], delta: Delta) -> dict[str, Any] | None:
        """Return the line for a delta, or None if the delta has nothing to send yet.

        Args:
            parts: Parts that the turn made of the delta.
            delta: The delta.
        """
        self.note(delta)
        self._logprobs += delta.logprobs or ()
        calls = self._complete(parts)
        content = "".join([part.text for part in parts if isinstance(part, ContentText)])
        reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningText)])
        if not (content or reasoning or calls):
            return None
        first_call, self._call_count = self._call_count, self._call_count + len(calls)
        fields = {**self._head, **self._piece(content, reasoning, calls, first_call), "done": False}
        return self._with_logprobs(fields)

    def end(self, turn: ChatTurn) -> dict[str, Any]:
        """Return the last line.

        Args:
            turn: The turn, which has ended.
        """
        return self._with_logprobs({**self._head, **self._piece("", "", (), 0), **self._outcome(turn)})

    def whole(self, turn: ChatTurn, choice: CollectedChoice) -> dict[str, Any]:
        self._logprobs = choice.logprobs
        piece = self._piece("".join(choice.contents), choice.reasoning or "", choice.tool_calls, 0)
        return self._with_logprobs({**self._head, **piece, **self._outcome(turn)})

    def _complete(self, parts: Sequence[ResponsePart]) -> list[ToolCall]:
        """Return the tool calls that these parts complete."""
        return [call for part in parts if (call := self._calls.take(part)) is not None]

    def _with_logprobs(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self._wants_logprobs and self._logprobs:
            fields["logprobs"] = chat_logprobs(self._tokenizer, self._logprobs)["content"]
            self._logprobs = []
        return fields

    def _outcome(self, turn: ChatTurn) -> dict[str, Any]:
        now = trio.current_time()
        first_at = now if self._first_at is None else self._first_at
        return {
            "done": True,
            "done_reason": "length" if turn.choices[0].finish_reason == "length" else "stop",
            "total_duration": nanoseconds(now - self._entered_at + self._earlier_seconds),
            "load_duration": 0,
            "prompt_eval_count": turn.stream.prompt_token_count,
            "prompt_eval_duration": nanoseconds(first_at - self._begun_at),
            "eval_count": turn.stream.completion_token_count,
            "eval_duration": nanoseconds(now - first_at + self._earlier_seconds),
        }
