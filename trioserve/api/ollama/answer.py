"""How a response is told in Ollama's API: its lines, the last one with counts and durations, or all of it in one."""

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
"""Content, thought and calls as this path tells them; the index of the first of the calls."""


def chat_piece(content: str, thought: str, calls: Sequence[ToolCall], first_call: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "function": {
                    "index": index,
                    "name": call.name,
                    # As the model wrote it: when the call is complete, that is one JSON object.
                    "arguments": msgspec.Raw(call.arguments.encode() or b"{}"),
                },
            }
            for index, call in enumerate(calls, first_call)
        ]
    return {"message": message}


def text_piece(content: str, thought: str, _calls: Sequence[ToolCall], _first_call: int) -> dict[str, Any]:
    return {"response": content, "thinking": thought} if thought else {"response": content}


def iso_time(unix_seconds: int) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))


def loaded(head: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """The response to a request that asks for nothing."""
    return {**head, **piece("", "", (), 0), "done": True, "done_reason": "load"}


class Answer:
    """One response. head: what all of its lines begin with. told_before: seconds that the response had lasted when it
    began to go on here."""

    def __init__(
        self, head: dict[str, Any], piece: Piece, tokenizer: Tokenizer, *, wants_logprobs: bool, told_before: float = 0
    ) -> None:
        self._head = head
        self._piece = piece
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._told_before = told_before
        self._entered_at = self._begun_at = trio.current_time()
        self._first_at: float | None = None
        self._calls = OpenCalls()
        self._call_count = 0
        self._logprobs: list[TokenLogprob] = []  # of tokens that made no line yet

    def begin(self) -> None:
        """The request runs."""
        self._begun_at = trio.current_time()

    def note(self, _delta: Delta) -> None:
        if self._first_at is None:
            self._first_at = trio.current_time()

    def skip(self, parts: Sequence[ResponsePart], _delta: Delta) -> None:
        """The client has that already."""
        self._call_count += len(self._complete(parts))

    def next(self, parts: Sequence[ResponsePart], delta: Delta) -> dict[str, Any] | None:
        """The line that this delta makes. None: there is nothing to tell yet."""
        self.note(delta)
        self._logprobs += delta.logprobs or ()
        calls = self._complete(parts)
        content = "".join([part.text for part in parts if isinstance(part, ContentText)])
        thought = "".join([part.text for part in parts if isinstance(part, ReasoningText)])
        if not (content or thought or calls):
            return None
        first_call, self._call_count = self._call_count, self._call_count + len(calls)
        told = {**self._head, **self._piece(content, thought, calls, first_call), "done": False}
        return self._with_logprobs(told)

    def end(self, turn: ChatTurn) -> dict[str, Any]:
        """The last line."""
        return self._with_logprobs({**self._head, **self._piece("", "", (), 0), **self._outcome(turn)})

    def whole(self, turn: ChatTurn, choice: CollectedChoice) -> dict[str, Any]:
        self._logprobs = choice.logprobs
        piece = self._piece("".join(choice.contents), choice.reasoning or "", choice.tool_calls, 0)
        return self._with_logprobs({**self._head, **piece, **self._outcome(turn)})

    def _complete(self, parts: Sequence[ResponsePart]) -> list[ToolCall]:
        """The calls that these parts complete."""
        return [call for part in parts if (call := self._calls.take(part)) is not None]

    def _with_logprobs(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._wants_logprobs and self._logprobs:
            told["logprobs"] = chat_logprobs(self._tokenizer, self._logprobs)["content"]
            self._logprobs = []
        return told

    def _outcome(self, turn: ChatTurn) -> dict[str, Any]:
        now = trio.current_time()
        first_at = now if self._first_at is None else self._first_at
        return {
            "done": True,
            "done_reason": "length" if turn.choices[0].finish_reason == "length" else "stop",
            "total_duration": nanoseconds(now - self._entered_at + self._told_before),
            "load_duration": 0,
            "prompt_eval_count": turn.stream.prompt_token_count,
            "prompt_eval_duration": nanoseconds(first_at - self._begun_at),
            "eval_count": turn.stream.completion_token_count,
            "eval_duration": nanoseconds(now - first_at + self._told_before),
        }
