"""Describes formats of tool calls as pieces of text. Grammars for forced calls are made from these pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import msgspec

from trioserve.text.response_parsers.offered_tools import ANY_TYPE, OfferedTool, argument_schemas, argument_types
from trioserve.text.response_parts import WholeCall

__all__ = [
    "AnyOf",
    "CallFormat",
    "JsonOf",
    "Maybe",
    "Piece",
    "RawUntil",
    "arguments_of",
    "json_call",
    "raw_argument_pieces",
    "raw_text",
    "without_trigger",
]

Piece = Union[str, "JsonOf", "RawUntil", "AnyOf", "Maybe"]  # A piece of type str is fixed text.


class JsonOf(msgspec.Struct, frozen=True):
    """A piece that matches JSON that a schema accepts.

    Attributes:
        schema: The schema.
        is_strict: True to refuse keywords that a grammar cannot express. False to ignore such keywords.
    """

    schema: Mapping[str, Any]
    is_strict: bool = False


class RawUntil(msgspec.Struct, frozen=True):
    """A piece that matches any text up to and including the first `stop`.

    Attributes:
        stop: The text that ends the piece.
    """

    stop: str


class AnyOf(msgspec.Struct, frozen=True):
    """A piece that consists of one of several sequences of pieces.

    Attributes:
        choices: The sequences.
    """

    choices: Sequence[Sequence[Piece]]


class Maybe(msgspec.Struct, frozen=True):
    """A piece that consists of optional pieces.

    Attributes:
        pieces: The pieces.
    """

    pieces: Sequence[Piece]


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format in which one family writes calls.

    Attributes:
        call: Returns the pieces of one call of a tool.
        opening: Text before the first call of a response.
        closing: Text after the last call of a response.
        separator: Text between two calls. None if a response has at most one call.
        trigger: First text of `opening`, or of each call if `opening` is empty. A call follows every trigger in a
            response. Empty if no text announces calls, or if content is written with special tokens, too. Without a
            trigger, no grammar covers a response that may also have content.
        before: Pieces that may precede `opening` in a response.
        write: Writes one call as text. None to join the pieces of `call`, with the call's arguments as JSON.
    """

    call: Callable[[OfferedTool], Sequence[Piece]]
    opening: str = ""
    closing: str = ""
    separator: str | None = ""
    trigger: str = ""
    before: Sequence[Piece] = ()
    write: Callable[[WholeCall], str] | None = None

    def written(self, calls: Sequence[WholeCall]) -> str:
        """Return the text that a model of the family writes for calls. "" if there are no calls.

        Args:
            calls: The calls.
        """
        if not calls:
            return ""
        texts = [self.write(call) if self.write else self._written(call) for call in calls]
        return self.opening + (self.separator or "").join(texts) + self.closing

    def _written(self, call: WholeCall) -> str:
        pieces = self.call(OfferedTool(name=call.name))
        return "".join(piece if isinstance(piece, str) else call.arguments for piece in pieces)


def arguments_of(tool: OfferedTool) -> JsonOf:
    """Return the piece for all arguments of a tool: an object that its schema accepts.

    Args:
        tool: The tool.
    """
    schema = dict(tool.parameters or {})
    if "$ref" not in schema:
        schema.setdefault("type", "object")
    return JsonOf(schema, tool.strict)


def json_call(
    *, before: str = "", after: str = "", arguments_key: str = "arguments"
) -> Callable[[OfferedTool], Sequence[Piece]]:
    """Return the format of calls as {"name": ..., "arguments": {...}}.

    Args:
        before: Text before the object.
        after: Text after the object.
        arguments_key: Key of the arguments.

    Returns:
        A function for CallFormat.call.
    """

    def call(tool: OfferedTool) -> Sequence[Piece]:
        head = f'{before}{{"name": {json.dumps(tool.name)}, {json.dumps(arguments_key)}: '
        return (head, arguments_of(tool), "}" + after)

    return call


def without_trigger(pieces: Sequence[Piece], trigger: str) -> list[Piece]:
    """Return the pieces of a call without the trigger with which they begin.

    Args:
        pieces: The pieces. The first begins with the trigger.
        trigger: The trigger.
    """
    first, *rest = pieces
    assert isinstance(first, str)
    assert first.startswith(trigger)
    return [first[len(trigger) :], *rest]


def raw_argument_pieces(
    tool: OfferedTool, begin: Callable[[str, bool], str], end: str, *, says_text: bool
) -> list[Piece]:
    """Return the pieces of a call's arguments for formats that write each argument between tags.

    A string is written without quotes, and any other value as JSON. Arguments are in the order of the schema.

    Args:
        tool: The tool.
        begin: Returns the text before a value. Its arguments are the argument's name, and True for a string.
        end: Text after a value.
        says_text: True if the text before a value shows whether the value is a string. If False, an argument that may
            be a string is written as a string.
    """
    required = (tool.parameters or {}).get("required")
    pieces: list[Piece] = []
    for name in argument_schemas(tool):
        value, is_text = _raw_value_pieces(tool, name, end, says_text=says_text)
        argument = [begin(name, is_text), *value]
        pieces += argument if isinstance(required, list) and name in required else [Maybe(argument)]
    return pieces


def _raw_value_pieces(tool: OfferedTool, name: str, end: str, *, says_text: bool) -> tuple[list[Piece], bool]:
    root = tool.parameters or {}
    schema = argument_schemas(tool)[name]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return [AnyOf([[value] for value in values]), end], True
    types = argument_types(tool, name) or ANY_TYPE
    if types == frozenset(("string",)) or ("string" in types and not says_text):
        return [RawUntil(end)], True
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return [JsonOf({**schema, **shared}, tool.strict), end], False


def raw_text(value: object) -> str:
    """Return a value in the notation of formats with tags: a string without quotes, any other value as JSON.

    Args:
        value: The value.
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
