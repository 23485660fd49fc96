"""How a call of a tool is written, as a form: pieces from which a grammar is made that a model cannot leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import msgspec

from trioserve.text.joined_response import WholeCall
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.schema_types import ANY_TYPE, argument_schemas, argument_types

__all__ = [
    "AnyOf",
    "CallForm",
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

Piece = Union[str, "JsonOf", "RawUntil", "AnyOf", "Maybe"]  # a text stands for itself


class JsonOf(msgspec.Struct, frozen=True):
    """JSON that the schema accepts. is_strict: what a grammar cannot express of it is an error, and not left out."""

    schema: Mapping[str, Any]
    is_strict: bool = False


class RawUntil(msgspec.Struct, frozen=True):
    """Any text up to the first `stop`, and that."""

    stop: str


class AnyOf(msgspec.Struct, frozen=True):
    choices: Sequence[Sequence[Piece]]


class Maybe(msgspec.Struct, frozen=True):
    pieces: Sequence[Piece]


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """A family's. call: the pieces of one call of a tool. opening, closing: around all calls of a response. separator:
    between two of them; None: there is only one in a response. trigger: what opening begins with, or else every call:
    where it comes, a call follows. Empty: nothing tells that, or the rest of a response has special tokens, too, as
    channels are, so that no grammar of text is one of it. before: what a response may have before all of it.
    write: one call as text; None: as `call` has it, with the arguments' JSON."""

    call: Callable[[OfferedTool], Sequence[Piece]]
    opening: str = ""
    closing: str = ""
    separator: str | None = ""
    trigger: str = ""
    before: Sequence[Piece] = ()
    write: Callable[[WholeCall], str] | None = None

    def written(self, calls: Sequence[WholeCall]) -> str:
        """What a model of the family would have written to make these calls; "" for none."""
        if not calls:
            return ""
        texts = [self.write(call) if self.write else self._written(call) for call in calls]
        return self.opening + (self.separator or "").join(texts) + self.closing

    def _written(self, call: WholeCall) -> str:
        pieces = self.call(OfferedTool(name=call.name))
        return "".join(piece if isinstance(piece, str) else call.arguments for piece in pieces)


def arguments_of(tool: OfferedTool) -> JsonOf:
    """An object, as the tool's schema has it."""
    schema = dict(tool.parameters or {})
    if "$ref" not in schema:
        schema.setdefault("type", "object")
    return JsonOf(schema, tool.strict)


def json_call(
    *, before: str = "", after: str = "", arguments_key: str = "arguments"
) -> Callable[[OfferedTool], Sequence[Piece]]:
    """{"name": ..., "arguments": {...}}, with texts before and after it."""

    def call(tool: OfferedTool) -> Sequence[Piece]:
        head = f'{before}{{"name": {json.dumps(tool.name)}, {json.dumps(arguments_key)}: '
        return (head, arguments_of(tool), "}" + after)

    return call


def without_trigger(pieces: Sequence[Piece], trigger: str) -> list[Piece]:
    """pieces: of a form that begins with the trigger."""
    first, *rest = pieces
    assert isinstance(first, str)
    assert first.startswith(trigger)
    return [first[len(trigger) :], *rest]


def raw_argument_pieces(
    tool: OfferedTool, begin: Callable[[str, bool], str], end: str, *, says_text: bool
) -> list[Piece]:
    """Each argument between its texts, in the schema's order: a text as it is, anything else as JSON. begin: what
    stands before a value, by the argument's name and by whether it is a text. says_text: that tells a text from JSON;
    otherwise what may be a text is one."""
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
    """A value as such families write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
