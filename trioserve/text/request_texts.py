"""Finds control tokens in the texts of a chat that come from the request, and copies the chat with replaced texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt

__all__ = ["TokenPattern", "in_slices", "RequestTexts", "has_character_in"]

# One call searches this many characters in at most 3 ms. Other threads can run between two calls.
SLICE_CHARACTERS = 65_536


class TokenPattern:
    """Searches texts for tokens.

    The search finds the first token in the text. If several tokens begin at the same character, the search finds the
    longest of them. It continues after the found token.

    Args:
        tokens: The tokens, none empty.

    Cost: 1 to 50 ns per character, however many tokens there are.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._length_max = max(map(len, tokens), default=0)
        self._pattern: re.Pattern[str] | None = None
        try:
            self._pattern = re.compile(_alternatives(set(tokens))) if tokens else None
        except (RecursionError, re.error):  # Thousands of tokens may be prefixes of each other.
            self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Iterate over the tokens in a text, in order."""
        begin = 0
        while self._pattern is not None and begin < len(text):
            end = begin + SLICE_CHARACTERS
            begin = end
            for found in self._pattern.finditer(text, end - SLICE_CHARACTERS, end + self._length_max - 1):
                if found.start() >= end:
                    break
                yield found
                begin = max(end, found.end())

    def tokens_in(self, text: str) -> list[str]:
        return [found[0] for found in self.find(text)]

    def replaced(self, text: str, replacement: Callable[[str], str]) -> str:
        """Return a text with each token replaced.

        Args:
            replacement: Returns the new text for a token.
        """
        pieces: list[str] = []
        end = 0
        for found in self.find(text):
            pieces += (text[end : found.start()], replacement(found[0]))
            end = found.end()
        return "".join((*pieces, text[end:])) if pieces else text


def in_slices(text: str) -> Iterator[str]:
    """Iterate over a text in slices of SLICE_CHARACTERS characters."""
    for begin in range(0, len(text), SLICE_CHARACTERS):
        yield text[begin : begin + SLICE_CHARACTERS]


def _alternatives(words: set[str]) -> str:
    """Return a pattern that matches any of the words. It contains a common prefix of several words only once.

    This makes the pattern fast, since thousands of words may begin with `<`.
    """
    begin = os.path.commonprefix(list(words))  # noqa: RUF071 # the common prefix of texts, not of paths
    rests = {word[len(begin) :] for word in words}
    by_letter: dict[str, set[str]] = {}
    for rest in rests - {""}:
        by_letter.setdefault(rest[0], set()).add(rest)
    branches = "|".join(_alternatives(by_letter[letter]) for letter in sorted(by_letter))
    if not branches:
        return re.escape(begin)
    return f"{re.escape(begin)}(?:{branches}){'?' if '' in rests else ''}"


# These are names from OpenAI's API and JSON Schema. Templates search for these names, so they are never replaced, even
# if they contain a part of a control token.
_API_KEYS = frozenset(
    (
        "role",
        "content",
        "name",
        "type",
        "text",
        "function",
        "tool_calls",
        "tool_call_id",
        "id",
        "index",
        "arguments",
        "reasoning",
        "reasoning_content",
        "description",
        "parameters",
        "properties",
        "required",
        "strict",
        "enum",
        "const",
        "default",
        "items",
        "title",
        "anyOf",
        "oneOf",
        "allOf",
        "format",
        "additionalProperties",
        "minimum",
        "maximum",
        "minItems",
        "maxItems",
    )
)
# fmt: on
_API_TYPES = frozenset(
    ("text", "refusal", "image", "function", "object", "array", "string", "number", "integer", "boolean", "null")
)


class RequestTexts:
    """Replaces parts of a chat's texts that may be part of a control token.

    A text may contain a whole control token. A text may also form a control token together with adjacent text, which
    comes from the template or from another text.

    Args:
        tokens: Control tokens that the rendered chat has.
        pattern: Finds these tokens, and possibly others.
        exempt: Tokens that are not replaced in the content of the assistant's messages.
        substitutions: Pairs of old and new text. The template replaces old by new text.

    Attributes:
        tokens: The control tokens.
        has_whole: True if one of the texts processed so far has a whole token.

    Cost: a scan of each text. The cost does not depend on the number of tokens.
    """

    def __init__(
        self,
        tokens: Collection[str],
        pattern: TokenPattern,
        *,
        exempt: Collection[str],
        substitutions: Collection[tuple[str, str]] = (),
    ) -> None:
        self.tokens = frozenset(tokens)
        self.has_whole = False

        self._pattern = pattern
        self._exempt = frozenset(exempt)
        self._substitutions = tuple(substitutions)
        self._replaced: Callable[[str], str] = _hidden
        self._beside: Mapping[str, str] = {}
        self._begins = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._ends = frozenset(token[begin:] for token in tokens for begin in range(1, len(token)))
        self._first_letters = frozenset(token[0] for token in tokens)
        self._last_letters = frozenset(token[-1] for token in tokens)
        self._joined = "\n".join(tokens)
        self._length_max = max(map(len, tokens))

    def replacing(self, replaced: Callable[[str], str], beside: Mapping[str, str]) -> RequestTexts:
        """Return a copy with other replacements.

        Args:
            replaced: Returns the replacement for a token or a part of a token.
            beside: Replacements for whole tokens, which take precedence over `replaced`.
        """
        texts = copy(self)
        texts._replaced, texts._beside = replaced, beside
        return texts

    def are_risky(self, prompt: ChatPrompt) -> bool:
        """Return True if `replaced_in` would change any text of a chat.

        Args:
            prompt: The chat.
        """
        return self.replaced_in(prompt, arguments_are_text=False) is not prompt

    def replaced_in(self, prompt: ChatPrompt, *, arguments_are_text: bool) -> ChatPrompt:
        """Return a copy of the chat with its texts replaced, or the chat itself if there is nothing to replace.

        Args:
            prompt: The chat.
            arguments_are_text: True if the template expects the arguments of calls as JSON text.

        Raises:
            InvalidRequest: The chat is nested too deeply.
        """
        try:
            messages = _each(prompt.messages, lambda message: self._message(message, arguments_are_text))
            tools = self._value(prompt.tools)
            arguments = self._named(prompt.template_arguments)
        except RecursionError:
            raise InvalidRequest("the messages or tools are nested too deeply", param="messages") from None
        if messages is prompt.messages and tools is prompt.tools and arguments is prompt.template_arguments:
            return prompt
        return msgspec.structs.replace(prompt, messages=messages, tools=tools, template_arguments=arguments)

    def _message(self, message: Any, arguments_are_text: bool) -> Any:
        if not isinstance(message, dict):
            return message

        def replaced(key: str, value: Any) -> Any:
            if key == "role":  # A role needs no replacement, since ChatTemplate allows only known roles.
                return value
            if key == "tool_calls" and isinstance(value, list):
                return _each(value, lambda call: self._call(call, arguments_are_text))
            if key == "content" and message.get("role") == "assistant":
                return self._value(value, self._exempt)
            return self._value(value)

        changed = {key: new for key, value in message.items() if (new := replaced(key, value)) is not value}
        if any(self._key(key) is not key for key in message):
            return {self._key(key): changed.get(key, value) for key, value in message.items()}
        return {**message, **changed} if changed else message

    def _call(self, call: Any, arguments_are_text: bool) -> Any:
        """Replace texts in a tool call.

        Arguments that will be parsed later are parsed before the replacement, since JSON escapes may hide a token.
        """
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            return self._value(call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str) or arguments_are_text:
            return self._value(call)
        try:
            parsed = json.loads(arguments)
        except ValueError:  # The arguments are empty, or prepared_messages will refuse them.
            return self._value(call)
        rest = {key: value for key, value in call.items() if key != "function"}
        named = {key: value for key, value in function.items() if key != "arguments"}
        new, new_rest, new_named = self._value(parsed), self._values(rest), self._values(named)
        if new is parsed and new_rest is rest and new_named is named:
            return call
        return {**new_rest, "function": {**new_named, "arguments": arguments if new is parsed else new}}

    def _value(self, value: Any, exempt: Collection[str] = ()) -> Any:
        if isinstance(value, str):
            return self._text(value, exempt)
        if isinstance(value, list | tuple):
            return _each(value, lambda item: self._value(item, exempt))
        if not isinstance(value, dict):
            return value
        changed = {key: new for key, inner in value.items() if (new := self._field(key, inner, exempt)) is not inner}
        if any(self._key(key) is not key for key in value):
            return {self._key(key): changed.get(key, inner) for key, inner in value.items()}
        return {**value, **changed} if changed else value

    def _field(self, key: Any, value: Any, exempt: Collection[str] = ()) -> Any:
        if key == "type" and isinstance(value, str) and value in _API_TYPES:
            return value
        return self._value(value, exempt)

    def _named(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Replace whole tokens in template arguments.

        Parts of tokens are not replaced, since the template may compare an argument with a word.
        """
        wholes = copy(self)
        wholes._begins = wholes._ends = frozenset()
        wholes._joined = ""
        new = wholes._values(arguments)
        self.has_whole = wholes.has_whole
        return new

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Replace texts in the values of an object whose keys come from the API or the template."""
        changed = {key: new for key, value in values.items() if (new := self._field(key, value)) is not value}
        return {**values, **changed} if changed else values

    def _key(self, key: Any) -> Any:
        return self._text(key, ()) if isinstance(key, str) and key not in _API_KEYS else key

    def _text(self, text: str, exempt: Collection[str]) -> str:
        new = self._parts_replaced(text, exempt)
        if new != text:
            return new
        substituted = text
        for old, written in self._substitutions:
            substituted = substituted.replace(old, written)
        if substituted != text and self._parts_replaced(substituted, exempt) != substituted:
            return self._replaced(text)
        return text

    def _parts_replaced(self, text: str, exempt: Collection[str]) -> str:
        new = self._wholes_replaced(text, exempt)
        core = new.strip()
        if not core:
            return new
        if len(core) < self._length_max and core in self._joined and core not in self.tokens:
            return new.replace(core, self._replaced(core))
        if begin := self._open_end(core):
            cut = new.rindex(begin)
            new = new[:cut] + self._replaced(begin) + new[cut + len(begin) :]
        if end := self._open_begin(core):
            new = new.replace(end, self._replaced(end), 1)
        return new

    def _wholes_replaced(self, text: str, exempt: Collection[str] = ()) -> str:
        def replaced(token: str) -> str:
            if token not in self.tokens or token in exempt:
                return token
            self.has_whole = True
            return self._beside.get(token) or self._replaced(token)

        return self._pattern.replaced(text, replaced)

    def _open_end(self, text: str) -> str:
        """Return the longest suffix of the text that is a proper prefix of a token."""
        last = text[1 - self._length_max :]
        if self._first_letters.isdisjoint(last):
            return ""
        return next((last[at:] for at in range(len(last)) if last[at:] in self._begins), "")

    def _open_begin(self, text: str) -> str:
        """Return the longest prefix of the text that is a proper suffix of a token."""
        first = text[: self._length_max - 1]
        if self._last_letters.isdisjoint(first):
            return ""
        return next((first[:end] for end in range(len(first), 0, -1) if first[:end] in self._ends), "")


def has_character_in(prompt: ChatPrompt, first: str, last: str) -> bool:
    """Return True if a text of the chat has a character in a range.

    Args:
        prompt: The chat.
        first: First character of the range.
        last: Last character of the range.
    """
    letters = re.compile(f"[{first}-{last}]")
    waiting: list[Iterable[Any]] = [(prompt.messages, prompt.tools, prompt.template_arguments, prompt.chat_template)]
    while waiting:
        for value in waiting.pop():
            if isinstance(value, str):
                if not value.isascii() and any(map(letters.search, in_slices(value))):
                    return True
            elif isinstance(value, dict):
                waiting += (value.keys(), value.values())
            elif isinstance(value, list | tuple):
                waiting.append(value)
    return False


def _hidden(text: str) -> str:
    return "\0" * len(text)


def _each(items: Any, replaced: Callable[[Any], Any]) -> Any:
    new = [replaced(item) for item in items]
    return items if all(map(_is_same, new, items)) else new


def _is_same(one: object, other: object) -> bool:
    return one is other
