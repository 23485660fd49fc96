"""Describes formats of tool calls as pieces of text. Grammars for forced calls are made from these pieces.

Scripts that read calls share a state. Calls and arguments that are written as JSON are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Union

import msgspec

from trioserve.text.response_parsers.json_scanner import JsonScanner, JsonStringDecoder, ScanState
from trioserve.text.response_parsers.offered_tools import ANY_TYPE, OfferedTool, argument_schemas, argument_types
from trioserve.text.response_parsers.python_literal import PythonLiteral
from trioserve.text.response_parsers.scripts import (
    ARGUMENT_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    NotACall,
    PartSink,
    Script,
    TextEnded,
    TextSource,
)
from trioserve.text.response_parts import WholeCall

__all__ = [
    "AnyOf",
    "CallFormat",
    "CallReader",
    "CallReading",
    "JsonOf",
    "Maybe",
    "Piece",
    "RawUntil",
    "arguments_of",
    "json_call",
    "raw_argument_pieces",
    "raw_text",
    "read_arguments",
    "read_calls",
    "read_json",
    "read_opened_array",
    "without_trigger",
]


Piece = Union[str, "JsonOf", "RawUntil", "AnyOf", "Maybe"]  # A piece of type str is fixed text.


class JsonOf(msgspec.Struct, frozen=True):
    """A piece of a call format that matches JSON that a schema accepts.

    Attributes:
        schema: The schema.
        is_strict: True to refuse keywords that a grammar cannot express. False to ignore such keywords.
    """

    schema: Mapping[str, Any]
    is_strict: bool = False


class RawUntil(msgspec.Struct, frozen=True):
    """A piece of a call format that matches any text up to and including the first `stop`.

    Attributes:
        stop: Text with which the match ends.
    """

    stop: str


class AnyOf(msgspec.Struct, frozen=True):
    """A piece of a call format that consists of one of several sequences of pieces.

    Attributes:
        choices: The alternative sequences.
    """

    choices: Sequence[Sequence[Piece]]


class Maybe(msgspec.Struct, frozen=True):
    """A sequence of pieces that may be missing as a whole.

    Attributes:
        pieces: The pieces, in order.
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
        """Return the text that a model of the family writes for calls. "" if there are no calls."""
        if not calls:
            return ""
        texts = [self.write(call) if self.write else self._written(call) for call in calls]
        return self.opening + (self.separator or "").join(texts) + self.closing

    def _written(self, call: WholeCall) -> str:
        pieces = self.call(OfferedTool(name=call.name))
        return "".join(piece if isinstance(piece, str) else call.arguments for piece in pieces)


def arguments_of(tool: OfferedTool) -> JsonOf:
    """Return the piece for all arguments of a tool: an object that its schema accepts."""
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
        tool: Called tool, whose schema determines the order and the types of the arguments.
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
    """Return a value in the notation of formats with tags: a string without quotes, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_KEY_CHARACTERS_MAX: Final = 256
_NAME_KEYS = frozenset(("name", "tool_name"))
_ID_KEYS = frozenset(("id", "tool_call_id"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
# Keys of a tool's definition that never occur in a call. JSON with these keys only shows the tool to the reader.
_SCHEMA_KEYS = frozenset(("description", "strict", "properties", "required"))
# Keys that may come before the name of a call. Any other key shows that the JSON is content, which is then released.
_KEYS_BEFORE_NAME = frozenset(("type", "index", "id", "tool_call_id"))
_BETWEEN_CALLS = re.compile(r"[,;\s]+")


class CallReading:
    """State of a script that reads calls.

    Args:
        source: Text of the response. The script begins at the marker that opens a call, or after the marker.
        sink: Receives the calls.
        tools: Offered tools by name.
    """

    __slots__ = ("sink", "source", "tools")

    def __init__(self, source: TextSource, sink: PartSink, tools: Mapping[str, OfferedTool]) -> None:
        self.source = source
        self.sink = sink
        self.tools = tools

    def end_call(self) -> None:
        """Complete the current call.

        If the text after the call turns out not to be a call, only that later text becomes content.
        """
        self.sink.end_call()
        self.source.mark()

    def end_closed_calls(self) -> None:
        """Complete all closed calls, in the same way as `end_call` completes one call."""
        self.sink.end_closed_calls()
        self.source.mark()


# A CallReader is a script that reads calls after their opening marker. It raises NotACall if the text is not a call,
# and TextEnded if the text ends within a call. Calls that were completed before the exception remain.
CallReader = Callable[[CallReading], Script[None]]


def read_json(
    source: TextSource, scanner: JsonScanner | JsonStringDecoder | PythonLiteral, use: Callable[[str], None]
) -> Script[None]:
    """Read one value, and pass its text to a function piece by piece.

    Args:
        source: The text.
        scanner: Scanner for the kind of value.
        use: Receives each piece.

    Raises:
        NotACall: The text is not a value of this kind.
        TextEnded: The text ends within the value.
    """
    while scanner.state is ScanState.MORE:
        yield from source.need()
        source.at = scanner.scan(source.text, source.at)
        if text := scanner.take():
            use(text)
    if scanner.state is ScanState.BROKEN:
        raise NotACall


def read_arguments(reading: CallReading) -> Script[None]:
    """Read a JSON object as the arguments of the current call.

    Args:
        reading: State of the script.

    Raises:
        NotACall: The text is not a JSON object.
        TextEnded: The text ends within the object.
    """
    yield from read_json(reading.source, JsonScanner("{"), reading.sink.arguments)


class _ArgumentsInString:
    """Reads arguments that the model wrote as JSON text within a JSON string."""

    def __init__(self, use: Callable[[str], None]) -> None:
        self._scanner = JsonScanner("{")
        self._use = use
        self._is_empty = True

    def take_text(self, text: str) -> None:
        at = self._scanner.scan(text, 0)
        if text[at:].strip():
            raise NotACall
        self._is_empty = self._is_empty and not text.strip()
        self._use(self._scanner.take())

    def end(self) -> None:
        if self._is_empty:
            self._use("{}")
        elif self._scanner.state is not ScanState.DONE:
            raise NotACall


class _CallObject:
    """State of a call object whose keys are being read. Arguments reach the sink once the name of the call is known.

    Args:
        reading: State of the script.
        is_bare: True if no marker announced the call, as in _read_call_object.
    """

    def __init__(self, reading: CallReading, *, is_bare: bool) -> None:
        self.reading = reading
        self.is_bare = is_bare
        self.name: str | None = None
        self.call_id: str | None = None
        self.has_arguments = False
        self._held: list[str] = []
        self._held_characters = 0

    def named(self, name: str) -> None:
        if self.name is not None or (self.is_bare and name not in self.reading.tools):
            raise NotACall
        self.name = name
        if self.has_arguments:
            self._begin()

    def begin_arguments(self) -> None:
        if self.has_arguments:
            raise NotACall
        self.has_arguments = True
        if self.name is not None:
            self._begin()

    def arguments(self, text: str) -> None:
        if self.reading.sink.in_call:
            self.reading.sink.arguments(text)
            return
        self._held.append(text)
        self._held_characters += len(text)
        if self._held_characters > ARGUMENT_CHARACTERS_MAX:
            raise NotACall

    def end(self) -> None:
        if self.name is None or (self.is_bare and not self.has_arguments):
            raise NotACall
        if not self.has_arguments:
            self.begin_arguments()
            self.arguments("{}")
        self.reading.end_call()

    def _begin(self) -> None:
        assert self.name is not None
        self.reading.sink.begin_call(self.name, self.call_id)
        if self._held:
            self.reading.sink.arguments("".join(self._held))
            self._held.clear()


def _read_call_object(reading: CallReading, *, is_bare: bool) -> Script[None]:
    """Read the call {"name": ..., "arguments": {...}} with its keys in any order.

    Also accepts "parameters" for "arguments", arguments as JSON in a string, and OpenAI's {"function": {...}} around
    the keys.

    Args:
        is_bare: True if no marker announced the call. Such a call must name an offered tool and have arguments.
    """
    source = reading.source
    call = _CallObject(reading, is_bare=is_bare)
    yield from source.expect("{")
    is_inside = False  # True while the keys within "function": {...} are read.
    while True:
        character = yield from source.need_after_space()
        if character == "}":
            source.at += 1
        else:
            key = yield from _read_string(source, _KEY_CHARACTERS_MAX)
            yield from source.need_after_space()
            yield from source.expect(":")
            character = yield from source.need_after_space()
            if key == "function" and character == "{" and not is_inside and call.name is None:
                is_inside = True
                source.at += 1
                continue
            yield from _read_member(call, key, character)
            character = yield from source.need_after_space()
            source.at += 1
            if character == ",":
                continue
        if character != "}":
            raise NotACall
        if not is_inside:
            call.end()
            return
        is_inside = False
        character = yield from source.need_after_space()
        if character == ",":
            source.at += 1
        elif character != "}":
            raise NotACall


def _read_member(call: _CallObject, key: str, character: str) -> Script[None]:
    """Read the value of one key.

    Args:
        character: First character of the value.
    """
    source = call.reading.source
    if key in _NAME_KEYS or (key == "function" and character == '"'):
        call.named((yield from _read_string(source, NAME_CHARACTERS_MAX)))
    elif key in _ARGUMENT_KEYS:
        call.begin_arguments()
        if character == '"':
            source.at += 1
            inside = _ArgumentsInString(call.arguments)
            yield from read_json(source, JsonStringDecoder(), inside.take_text)
            inside.end()
        elif character == "n":
            yield from source.expect("null")
            call.arguments("{}")
        elif character == "[":  # Some models write an empty array for no arguments.
            source.at += 1
            yield from source.need_after_space()
            yield from source.expect("]")
            call.arguments("{}")
        else:
            yield from read_json(source, JsonScanner("{"), call.arguments)
    elif call.is_bare and (key in _SCHEMA_KEYS or (call.name is None and key not in _KEYS_BEFORE_NAME)):
        raise NotACall
    elif key in _ID_KEYS and character == '"':
        call.call_id = yield from _read_string(source, NAME_CHARACTERS_MAX)
    else:
        yield from read_json(source, JsonScanner(), lambda _text: None)


def _read_string(source: TextSource, characters_max: int) -> Script[str]:
    yield from source.expect('"')
    pieces: list[str] = []
    decoder = JsonStringDecoder()

    def add(text: str) -> None:
        pieces.append(text)
        if sum(map(len, pieces)) > characters_max:
            raise NotACall

    yield from read_json(source, decoder, add)
    return "".join(pieces)


def read_calls(reading: CallReading, *, is_bare: bool) -> Script[None]:
    """Read one call object, an array of call objects, or several call objects with separators between them.

    Commas, semicolons and white space are separators.

    Args:
        reading: State of the script.
        is_bare: True if no marker announced the calls. Each such call must name an offered tool and have arguments.

    Raises:
        NotACall: The text is not a call.
        TextEnded: The text ends within a call.
    """
    source = reading.source
    if (yield from source.need_after_space()) == "[":
        source.at += 1
        yield from read_opened_array(reading, is_bare=is_bare)
    else:
        yield from _read_call_objects(reading, is_bare=is_bare, is_array=False)


def read_opened_array(reading: CallReading, *, is_bare: bool) -> Script[None]:
    """Read the call objects of an array and its closing bracket. The opening bracket was already read.

    The closing bracket may be missing at the end of the text.

    Args:
        reading: State of the script.
        is_bare: True if no marker announced the calls, as in read_calls.

    Raises:
        NotACall: The text is not a call.
        TextEnded: The text ends within a call.
    """
    if (yield from reading.source.need_after_space()) != "{":
        raise NotACall
    yield from _read_call_objects(reading, is_bare=is_bare, is_array=True)


def _read_call_objects(reading: CallReading, *, is_bare: bool, is_array: bool) -> Script[None]:
    source = reading.source
    while True:
        yield from _read_call_object(reading, is_bare=is_bare)
        between = yield from source.take_while(_BETWEEN_CALLS, NAME_CHARACTERS_MAX)
        character = yield from source.peek()
        if is_array and character == "]":
            source.at += 1
            return
        if not character and between.strip():
            raise TextEnded  # The text ended between two calls.
        if character != "{":
            if is_array and character:
                raise NotACall
            source.unread(between)
            return
