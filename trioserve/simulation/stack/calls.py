"""Tool calls in a simulation of the stack: the output of its model, and the part that clients see.

The texts are stored in parts. So the expected view of a client follows from the number of characters, without parsing.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any, NamedTuple

from trioserve.contracts.request import EngineRequest
from trioserve.testing.byte_tokenizer import END_TOKEN_ID
from trioserve.testing.fake_executor import FakeModel

__all__ = [
    "CALL_BLOCKS",
    "CALL_TEMPLATE",
    "FAMILIES",
    "TEXTS",
    "TOOLS",
    "CallingModel",
    "Shown",
    "drawn_family",
    "drawn_question",
    "message_of",
    "shown_of",
]

STAGE_SHARE, ASK_SHARE = 0.25, 0.6
TOKENS_MAX = 150  # more than the longest text has
CALL_BLOCKS = 36  # additional blocks of a stage, so that such a text fits
CALL_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[-1].content }}"
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
_PROMPT = re.compile(rb"f g text ([0-9]{1,4})")


class _Call(NamedTuple):
    """One call. If `is_whole` is False, the model stops inside of the arguments."""

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
    """Text around the arguments of a call. `opening` shows that a call follows."""

    opening: str
    before_name: str
    behind_name: str
    closing: str  # The call is complete after this.
    behind: str


FAMILIES = {
    "hermes": _Family("<tool_call>", '{"name": "', '", "arguments": ', "}", "</tool_call>"),
    "mistral": _Family("[TOOL_CALLS]", "", "", "", ""),
}


def drawn_family(rng: Random) -> str:
    """Draw the format of the stage's tool calls. Mostly it is "": no request has tools.

    Args:
        rng: source of randomness.
    """
    family = rng.choice(sorted(FAMILIES))
    return family if rng.random() < STAGE_SHARE else ""


def drawn_question(rng: Random) -> tuple[tuple[int, ...], int] | None:
    """Draw a prompt whose response is one of the texts, a different one for each choice.

    Args:
        rng: source of randomness.

    Returns:
        The prompt after the template, and the maximum number of tokens. None: this client has no tools.
    """
    number, tokens_max = rng.randrange(len(TEXTS)), rng.choice((rng.randint(1, TOKENS_MAX), TOKENS_MAX))
    return (tuple(b"f g text %d" % number), tokens_max) if rng.random() < ASK_SHARE else None


def message_of(prompt: tuple[int, ...]) -> str:
    """Return the message that a client writes for a prompt.

    Args:
        prompt: the prompt after the template.
    """
    return bytes(prompt).decode().removeprefix("f g ")


class CallingModel(FakeModel):
    """A model that writes the text of a prompt, and then ends. For other prompts, it is a FakeModel.

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
    """The part of a text that a client must see.

    Attributes:
        content: the content.
        calls: name and arguments of the calls. The last one may be partial.
        is_partial: True if the last call is partial.
    """

    content: str
    calls: tuple[tuple[str, str], ...]
    is_partial: bool

    @property
    def whole_calls(self) -> tuple[tuple[str, str], ...]:
        return self.calls[:-1] if self.is_partial else self.calls


def shown_of(family: str, prompt: tuple[int, ...], seed: int, said: str, *, is_over: bool) -> Shown:
    """Return the part of a text that a client must see.

    Args:
        family: format of tool calls.
        prompt: the prompt.
        seed: seed of the choice.
        said: output so far. Half a character at its end counts as one.
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
        if is_over and not calls and at < len(said) < at + len(marks.opening):  # no part shows that it is a call
            content += said[at:]  # after another call, it is the beginning of the next call, which is left out
        at += len(marks.opening) + len(marks.before_name + part.name + marks.behind_name)
        arguments = said[at : at + len(part.arguments)]
        at += len(part.arguments) + len(marks.closing)
        if arguments:
            calls.append((part.name, arguments))
            is_partial = len(said) < at or not part.is_whole
        at += len(marks.behind)
    return Shown(content, tuple(calls), is_partial)


def _index_of(number: int, seed: int) -> int:
    """Return the index of a text. The seed of a first choice is small, and those of the others are large."""
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
