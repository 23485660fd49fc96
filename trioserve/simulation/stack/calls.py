"""Tool calls in a simulation of the stack: the output of its model, and the tool calls that a client must receive.

Each text is stored as a list of contents and calls. So the expected deltas of a client follow from the number of
characters so far, without a parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from trioserve.contracts.request import EngineRequest
from trioserve.simulation.stack.forms import text_of
from trioserve.testing.byte_tokenizer import END_TOKEN_ID
from trioserve.testing.fake_executor import FakeModel

__all__ = [
    "CALL_BLOCKS",
    "CALL_TEMPLATE",
    "FAMILIES",
    "TEXTS",
    "TOOLS",
    "CallChoice",
    "CallingModel",
    "Shown",
    "drawn_family",
    "drawn_question",
    "message_of",
    "shown_of",
]

STAGE_SHARE, ASK_SHARE = 0.25, 0.6
TOKENS_MAX = 150  # more tokens than the longest text has
CALL_BLOCKS = 36  # number of additional blocks of a stage, so that the longest text fits
CALL_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}"
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
_PROMPT = re.compile(rb"f g text ([0-9]{1,4})")


class _Call(NamedTuple):
    """One tool call in a text. If `is_whole` is False, the model stops inside of the arguments."""

    name: str
    arguments: str
    is_whole: bool = True


TEXTS: tuple[tuple[str | _Call, ...], ...] = (
    (_Call("f", r'{"a": "x\n\u00e9\\"}'),),
    ("Well, é!", _Call("g", "{}")),
    (_Call("f", r'{"b": [1, "\""]}'), _Call("g", '{"c": "é"}')),
    ("There is nothing to call.",),
    (_Call("g", r'{"d": "\ud83d\ude00"}'), _Call("f", r'{"a": "\tz', is_whole=False)),
    (_Call("g", '{"e": {"e": null}}'), "That is all."),
    ("Look:", _Call("f", '{"a": "y', is_whole=False)),
)


class _Family(NamedTuple):
    """Text before, between and after the name and the arguments of a call in one format of tool calls."""

    opening: str
    before_name: str
    behind_name: str
    closing: str  # After this text, the call is complete.
    behind: str


FAMILIES = {
    "hermes": _Family("<tool_call>", '{"name": "', '", "arguments": ', "}", "</tool_call>"),
    "mistral": _Family("[TOOL_CALLS]", "", "", "", ""),
}


def drawn_family(rng: Random) -> str:
    """Draw the format of the stage's tool calls. In most stages, no request has tools, and the format is "".

    Args:
        rng: source of randomness.
    """
    family = rng.choice(sorted(FAMILIES))
    return family if rng.random() < STAGE_SHARE else ""


def drawn_question(rng: Random) -> tuple[tuple[int, ...], int] | None:
    """Draw a prompt for which the model writes one of the texts. Different choices get different texts.

    Args:
        rng: source of randomness.

    Returns:
        The prompt as the template renders it, and the maximum number of tokens. None: the client has no tools.
    """
    number, tokens_max = rng.randrange(len(TEXTS)), rng.choice((rng.randint(1, TOKENS_MAX), TOKENS_MAX))
    return (tuple(b"f g text %d" % number), tokens_max) if rng.random() < ASK_SHARE else None


def message_of(prompt: tuple[int, ...]) -> str:
    """Return the user message from which the template makes a prompt.

    Args:
        prompt: the prompt as the template renders it.
    """
    return bytes(prompt).decode().removeprefix("f g ")


class CallingModel(FakeModel):
    """A model that writes the text that a prompt names, and then ends. For other prompts, it behaves as a FakeModel.

    Args:
        family: format of tool calls.
        vocab_size: number of token ids.
    """

    def __init__(self, family: str, *, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size)
        self._texts = [_written(family, text).encode() for text in TEXTS]

    def next_token_id(self, request: EngineRequest, tokens: Any, digest: int) -> int:
        prompt = request.prompt_token_ids
        asked = None if END_TOKEN_ID in prompt else _PROMPT.fullmatch(bytes(prompt))
        if asked is None:
            return super().next_token_id(request, tokens, digest)
        text = self._texts[_index_of(int(asked[1]), request.seed)]
        position = len(tokens) - len(prompt)
        return text[position] if position < len(text) else END_TOKEN_ID


class Shown(NamedTuple):
    """The content and the tool calls that a client must have received so far.

    Attributes:
        content: the content.
        calls: name and arguments of each call. The last call may be partial.
        is_partial: True if the last call is partial.
    """

    content: str
    calls: tuple[tuple[str, str], ...]
    is_partial: bool

    @property
    def whole_calls(self) -> tuple[tuple[str, str], ...]:
        return self.calls[:-1] if self.is_partial else self.calls


def shown_of(family: str, prompt: tuple[int, ...], seed: int, said: str, *, is_over: bool) -> Shown:
    """Return the content and the tool calls that a client must have received.

    Args:
        family: format of tool calls.
        prompt: prompt for which the model wrote the response.
        seed: seed of the choice.
        said: output so far. An incomplete character at its end counts as one character.
        is_over: True if no more output comes.
    """
    asked = _PROMPT.fullmatch(bytes(prompt))
    assert asked is not None
    marks = FAMILIES[family]
    calls: list[tuple[str, str]] = []
    content, is_partial, at = "", False, 0
    for part in TEXTS[_index_of(int(asked[1]), seed)]:
        if isinstance(part, str):
            content += said[at : at + len(part)]
            at += len(part)
            continue
        # The output ends inside of an incomplete opening, so it counts as content.
        if is_over and not calls and at < len(said) < at + len(marks.opening):
            content += said[at:]  # After another call, an incomplete opening is left out.
        at += len(marks.opening) + len(marks.before_name + part.name + marks.behind_name)
        arguments = said[at : at + len(part.arguments)]
        at += len(part.arguments) + len(marks.closing)
        if arguments:
            calls.append((part.name, arguments))
            is_partial = len(said) < at or not part.is_whole
        at += len(marks.behind)
    return Shown(content, tuple(calls), is_partial)


def _index_of(number: int, seed: int) -> int:
    """Return the index of the text that a choice writes."""
    return (number + (seed >> 40)) % len(TEXTS)


def _written(family: str, text: tuple[str | _Call, ...]) -> str:
    marks = FAMILIES[family]
    written = ""
    for part in text:
        if isinstance(part, str):
            written += part
            continue
        written += marks.opening + marks.before_name + part.name + marks.behind_name + part.arguments
        written += marks.closing + marks.behind if part.is_whole else ""
    return written


class CallChoice:
    """The part of one choice that the client has received.

    Args:
        name: name for error texts.
        tokens: the reference's tokens for this prompt and seed.
        family: format of tool calls.
        prompt: prompt of the request, which determines the response.
        seed: seed of the choice.
        ids: ids of the tool calls of all choices of the response.

    Attributes:
        content: received content.
        calls: name and arguments of each received tool call.
        shown_tokens: received token ids. None: the request does not ask for token ids.
        finish_reason: finish reason of the choice. None: the choice has not ended.
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
        assert part or choice.get("token_ids") or self.finish_reason, f"{self.name}: {choice} has no output"
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
        # The client of an aborted request gets the text that was held back, and then the error.
        counts = range(len(self.tokens) + 1)
        shown = [self._shown(count, is_over=is_over) for count in counts for is_over in (False, True)]
        beginnings = {(one.content, one.calls) for one in shown}
        # A delta may contain only the name of a call, before any arguments.
        beginnings |= {
            (one.content, (*one.calls[:-1], (one.calls[-1][0], "")))
            for one in shown
            if one.calls and len(one.calls[-1][1]) == 1
        }
        seen = (self.content, self._calls())
        assert seen in beginnings, f"{self.name}: {seen} is not a beginning of {shown[-1]}"

    def _calls(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, arguments) for name, arguments in self.calls)

    def _shown(self, count: int, *, is_over: bool) -> Shown:
        content_tokens = [token for token in self.tokens[:count] if token != END_TOKEN_ID]
        return shown_of(
            self._family, self._prompt, self._seed, text_of(content_tokens, is_whole=is_over), is_over=is_over
        )
