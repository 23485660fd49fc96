"""Calls as <invoke name="..."> with <parameter name="...">value</parameter> in it.

DeepSeek writes these tags as DSML, with a mark before each tag name. MiniMax writes the tags without a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from trioserve.text.response_parsers.call_format import (
    CallFormat,
    CallReader,
    CallReading,
    Piece,
    raw_argument_pieces,
    raw_text,
)
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.raw_values import Closing, RawArguments, read_raw_value
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script
from trioserve.text.response_parts import WholeCall

__all__ = ["DSML", "DSML_SPACED", "MINIMAX", "InvokeTags", "invoke_calls", "invoke_format"]

_ATTRIBUTES = re.compile(r'name="([^"]*)"(?:\s+string="(true|false)")?\s*(/?)')


class InvokeTags(msgspec.Struct, frozen=True, kw_only=True):
    """Tags of one variant.

    Attributes:
        mark: Text before the name of each tag.
        around: Names of the tag around all calls. Current models write the first name.
        around_mark: Text before the name of the tag around all calls. None to use `mark`.
        says_text: True if each parameter has an attribute that shows whether its value is a string. If False, the
            tool's schema decides.
        trims_lines: True if one line break at each end of a value belongs to the tags.
    """

    mark: str
    around: tuple[str, ...]
    around_mark: str | None = None
    says_text: bool = False
    trims_lines: bool = False

    def opening(self, name: str) -> str:
        return f"<{self.mark}{name}"

    def closing(self, name: str) -> str:
        return f"</{self.mark}{name}>"

    def around_opening(self, name: str) -> str:
        return f"<{self.around_mark if self.around_mark is not None else self.mark}{name}>"

    def around_closing(self, name: str) -> str:
        return f"</{self.around_mark if self.around_mark is not None else self.mark}{name}>"


DSML = InvokeTags(mark="\uff5cDSML\uff5c", around=("function_calls", "tool_calls"), says_text=True)
DSML_SPACED = InvokeTags(mark="\uff5cDSML\uff5c ", around=("calls",), says_text=True)
MINIMAX = InvokeTags(mark="", around=("tool_call",), around_mark="minimax:", trims_lines=True)


def invoke_calls(tags: InvokeTags, around: str) -> CallReader:
    """Return the script that reads calls. The tag around all calls was already read.

    Args:
        tags: Tags of the variant.
        around: Name of the tag around the calls.
    """
    invoke, parameter = tags.opening("invoke"), tags.opening("parameter")
    invoke_end, around_end = tags.closing("invoke"), tags.around_closing(around)
    closings = (Closing(tag=tags.closing("parameter"), followed_by=(parameter, invoke_end)),)

    def read(reading: CallReading) -> Script[None]:
        source = reading.source
        is_first = True
        while (yield from source.skip_space()) or is_first:
            yield from source.need()
            if (yield from source.take_whole((around_end,))):
                return
            if not (yield from source.take_whole((invoke,))):
                raise NotACall
            yield from read_invoke(reading)
            is_first = False

    def read_invoke(reading: CallReading) -> Script[None]:
        source = reading.source
        attributes, _ = yield from source.take_until((">",), NAME_CHARACTERS_MAX)
        found = _ATTRIBUTES.fullmatch(attributes.strip())
        if found is None:
            raise NotACall
        reading.sink.begin_call(found[1])
        arguments = RawArguments(reading, found[1], unknown_is_text=True)
        while not found[3]:
            yield from source.need_after_space()
            if (yield from source.take_whole((invoke_end,))):
                break
            if not (yield from source.take_whole((parameter,))):
                raise NotACall
            yield from read_parameter(reading, arguments)
        arguments.end()
        reading.end_call()

    def read_parameter(reading: CallReading, arguments: RawArguments) -> Script[None]:
        source = reading.source
        attributes, _ = yield from source.take_until((">",), NAME_CHARACTERS_MAX)
        found = _ATTRIBUTES.fullmatch(attributes.strip())
        if found is None or found[3]:
            raise NotACall
        arguments.key(found[1], is_text=found[2] == "true" if found[2] else None)
        yield from read_raw_value(source, closings, arguments.text, trims_lines=tags.trims_lines)
        arguments.end_value()

    return read


def invoke_format(tags: InvokeTags, around: str) -> CallFormat:
    parameter_end = tags.closing("parameter") + "\n"
    # The line break after a call is part of the call, since a grammar cannot distinguish it from the line break before
    # a closing tag.
    end = tags.closing("invoke") + "\n"

    def begin(name: str, is_text: bool) -> str:
        says = f' string="{"true" if is_text else "false"}"' if tags.says_text else ""
        return f'{tags.opening("parameter")} name="{name}"{says}>'

    def written_value(value: object) -> str:
        text = raw_text(value)
        needs_lines = tags.trims_lines and (text.startswith("\n") or text.endswith("\n"))
        return f"\n{text}\n" if needs_lines else text

    def head(name: str) -> str:
        return f'{tags.opening("invoke")} name="{name}">\n'

    def call(tool: OfferedTool) -> Sequence[Piece]:
        pieces = raw_argument_pieces(tool, begin, parameter_end, says_text=tags.says_text)
        return (head(tool.name), *pieces, end)

    def write(call: WholeCall) -> str:
        values = "".join(
            begin(name, isinstance(value, str)) + written_value(value) + parameter_end
            for name, value in json.loads(call.arguments).items()
        )
        return head(call.name) + values + end

    opening = tags.around_opening(around)
    return CallFormat(
        call=call,
        write=write,
        opening=opening + "\n",
        closing=tags.around_closing(around),
        trigger=opening,
    )
