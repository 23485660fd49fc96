"""One choice of a chat with tools, as its client receives it, with the rules for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trioserve.simulation.stack.calls import Shown, shown_of
from trioserve.simulation.stack.http_text import text_of
from trioserve.testing.byte_tokenizer import END_TOKEN_ID

__all__ = ["CallChoice"]


class CallChoice:
    """One choice, as far as it has been received.

    Args:
        name: name for error texts.
        tokens: the reference's tokens for this prompt and seed.
        family: format of tool calls.
        prompt: the prompt.
        seed: seed of the choice.
        ids: ids of the tool calls of all choices of the response.

    Attributes:
        content: received content.
        calls: name and joined arguments of each received tool call.
        shown_tokens: received token ids. None: none were requested.
        finish_reason: why the choice ended. None: it has not.
    """

    def __init__(
        self, name: str, tokens: Sequence[int], family: str, prompt: tuple[int, ...], seed: int, ids: set[str]
    ) -> None:
        self.name = name
        self.tokens = tuple(tokens)
        self.content = ""
        self.calls: list[list[str]] = []
        self.shown_tokens: list[int] | None = None
        self.finish_reason: str | None = None
        self._ids = ids
        self._is_message = False
        self._family, self._prompt, self._seed = family, prompt, seed

    def take(self, choice: Any) -> None:
        assert self.finish_reason is None, f"{self.name}: {choice} after its end"
        self.finish_reason = choice["finish_reason"]
        if "token_ids" in choice:
            self.shown_tokens = [*(self.shown_tokens or ()), *choice["token_ids"]]
        self._is_message = "message" in choice
        part = choice["message"] if self._is_message else choice["delta"]
        assert part or choice.get("token_ids") or self.finish_reason, f"{self.name}: {choice} says nothing"
        self.content += part.get("content") or ""
        for index, call in enumerate(part.get("tool_calls", ())):
            function = call["function"]
            assert self._is_message or call["index"] in (len(self.calls) - 1, len(self.calls)), (
                f"{self.name}: {call} after {len(self.calls)} calls"
            )
            if self._is_message or call["index"] == len(self.calls):
                assert call.get("id"), f"{self.name}: call {index} begins without an id: {call}"
                assert call["id"] not in self._ids, f"{self.name}: {call} has the id of another call"
                assert call["type"] == "function", f"{self.name}: {call}"
                self._ids.add(call["id"])
                self.calls.append([function["name"], function["arguments"]])
            else:
                assert "id" not in call, f"{self.name}: {call} begins the call that is open"
                assert "name" not in function, f"{self.name}: {call} names the call that is open"
                self.calls[-1][1] += function["arguments"]

    def check_complete(self) -> None:
        shown = self._shown(len(self.tokens), is_over=True)
        is_ended = self.tokens[-1] == END_TOKEN_ID
        end = "length" if not is_ended else "tool_calls" if shown.calls and not shown.is_partial else "stop"
        assert self.finish_reason == end, f"{self.name}: ended with {self.finish_reason} instead of {end}: {shown}"
        assert self.shown_tokens in (None, list(self.tokens)), f"{self.name}: {self.shown_tokens} of {self.tokens}"
        calls = shown.whole_calls if self._is_message else shown.calls
        assert (self.content, self._calls()) == (shown.content, calls), (
            f"{self.name}: {self.content!r} and {self._calls()} instead of {shown}"
        )
        for name, arguments in shown.whole_calls:
            assert isinstance(json.loads(arguments), dict), f"{self.name}: {name} is called with {arguments}"

    def check_prefix(self) -> None:
        if self.finish_reason is not None:
            self.check_complete()
            return
        shown_tokens = self.shown_tokens
        assert shown_tokens is None or tuple(shown_tokens) == self.tokens[: len(shown_tokens)], (
            f"{self.name}: {shown_tokens} of {self.tokens}"
        )
        # An aborted client gets the text that was held back, and then the error.
        counts = range(len(self.tokens) + 1)
        shown = [self._shown(count, is_over=is_over) for count in counts for is_over in (False, True)]
        beginnings = {(one.content, one.calls) for one in shown}
        # A name is sent alone, before the arguments begin.
        beginnings |= {
            (one.content, (*one.calls[:-1], (one.calls[-1][0], "")))
            for one in shown
            if one.calls and len(one.calls[-1][1]) == 1
        }
        seen = (self.content, self._calls())
        assert seen in beginnings, f"{self.name}: {seen} is no beginning of {shown[-1]}"

    def _calls(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, arguments) for name, arguments in self.calls)

    def _shown(self, count: int, *, is_over: bool) -> Shown:
        content_tokens = [token for token in self.tokens[:count] if token != END_TOKEN_ID]
        return shown_of(
            self._family, self._prompt, self._seed, text_of(content_tokens, is_whole=is_over), is_over=is_over
        )
