"""How a call of a tool is written, as a form: pieces from which a grammar is made that a model cannot leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import msgspec

from trioserve.text.joined_response import WholeCall
from trioserve.text.response_parsers.offered_tools import OfferedTool

__all__ = ["AnyOf", "CallForm", "JsonOf", "Maybe", "Piece", "RawUntil", "arguments_of", "json_call", "without_trigger"]

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
    where it comes, a call follows. Empty: nothing tells that. before: what a response may have before all of it.
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
