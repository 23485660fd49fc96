"""Tests that parsing takes linear time for any text of a model, and for text that a client sends as a model's
output.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.json_scanner import JsonScanner, JsonStringDecoder
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.python_literal import PythonLiteral, json_of_python
from trioserve.text.response_parsers.raw_values import json_of_raw
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import WholeCall
from trioserve.text.stop_strings import StopStringFinder

SHORT, GROWTH = 1500, 4
PIECE = 13  # Number of characters per piece.
# seconds. If the longer text takes less, the growth counts as linear. At 1 us per character, the text takes 6 ms.
SECONDS_MIN = 0.03
GROWTH_MAX = 9.0  # Linear growth would be 4, and quadratic growth 16.
TYPES = ("integer", "number", "boolean", "null", "array", "object", "string")
TOOL = OfferedTool(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            **{kind: {"type": kind} for kind in TYPES},
            "maybe": {"type": ["string", "null"]},
            "any": {},
        },
    },
)
UNITS = ("0", "[", "{", '{"a":', " ", "\n", "\\", "'", '"', "</", "```", "<", "1e", "0.0", '"a",', "f(x=", "</a>  ")


def growth(work: Callable[[int], None]) -> float:
    """Return the time for a text that is GROWTH times as long, divided by the time for the original text.

    Return 0 if the longer text takes almost no time.
    """

    def seconds(size: int) -> float:
        began_at = time.process_time()
        work(size)
        return time.process_time() - began_at

    if seconds(SHORT * GROWTH) < SECONDS_MIN:
        return 0
    return min(seconds(SHORT * GROWTH) / max(seconds(SHORT), 1e-6) for _ in range(3))


def feeding(family: str | None, reasoning_family: str | None, head: str, unit: str) -> Callable[[int], None]:
    def work(size: int) -> None:
        parser = make_response_parser(family, reasoning_family, tools=[TOOL])
        text = head + unit * (size // len(unit)) + "x"
        for begin in range(0, len(text), PIECE):
            parser.feed(text[begin : begin + PIECE])
        parser.end()

    return work


def heads_of(family: str) -> list[str]:
    """Return beginnings of calls that end within an argument, for arguments of several types."""
    call_format, written = TOOL_FAMILIES[family].call_format, []
    for name in ("integer", "maybe", "string"):
        value = '"MARK"' if name != "integer" else "77777"
        call = call_format.written([WholeCall("f", f'{{"{name}": {value}}}')])
        written.append(call.partition("MARK" if name != "integer" else "77777")[0])
    return written


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_time_to_parse_calls_of_every_family_is_linear(family: str) -> None:
    slow = []
    openers = [*TOOL_FAMILIES[family].readers, TOOL_FAMILIES[family].call_format.trigger or "["][:2]
    for head in heads_of(family)[:2]:
        slow += [(head, unit) for unit in UNITS[:4] if growth(feeding(family, None, head, unit)) > GROWTH_MAX]
    slow += [("", unit) for unit in openers if growth(feeding(family, None, "", unit)) > GROWTH_MAX]
    assert slow == []


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_time_to_parse_repeated_units_in_every_family_is_linear(family: str) -> None:
    call = TOOL_FAMILIES[family].call_format.written([WholeCall("f", '{"string": "x"}')])
    units = [*UNITS, *TOOL_FAMILIES[family].readers, call, call[:-1], call[: len(call) // 2], call[len(call) // 2 :]]
    heads = ["", "[", '{"name":"f","arguments":{"x":', "[f(x=", *heads_of(family)]
    slow = [(head, unit) for head in heads for unit in units if growth(feeding(family, None, head, unit)) > GROWTH_MAX]
    assert slow == []


@pytest.mark.parametrize("family", sorted(REASONING_FAMILIES))
def test_time_to_parse_reasoning_of_every_family_is_linear(family: str) -> None:
    tags = REASONING_FAMILIES[family].tags
    units = [*tags.opening, *tags.closing, *(tag[:-1] for tag in tags.closing), " ", "\n"]
    slow = [unit for unit in units for head in ("", tags.opening[0]) if growth(feeding(None, family, head, unit)) > 9]
    assert slow == []


@pytest.mark.parametrize("kind", ["integer", "number", "array", "string"])
def test_time_to_convert_raw_values_is_linear(kind: str) -> None:
    def work(size: int, head: str, unit: str) -> None:
        json_of_raw(head + unit * (size // len(unit)) + "x", frozenset([kind]))

    slow = [
        (head, unit)
        for unit in (*UNITS, "1_", "-", "+0", ".0", "True,", "['", '"""')
        for head in ("", "-", "[", '"', "0.")
        if growth(lambda size, h=head, u=unit: work(size, h, u)) > GROWTH_MAX
    ]
    assert slow == []


@pytest.mark.parametrize("new_reader", [JsonScanner, JsonStringDecoder, PythonLiteral])
def test_time_to_scan_values_in_pieces_is_linear(
    new_reader: Callable[[], JsonScanner | JsonStringDecoder | PythonLiteral],
) -> None:
    def work(size: int, unit: str, head: str) -> None:
        reader, text = new_reader(), head + unit * (size // len(unit))
        for begin in range(0, len(text), PIECE):
            reader.scan(text[begin : begin + PIECE], 0)
            reader.take()

    slow = [
        (head, unit)
        for unit in UNITS
        for head in ("", "[", '{"a": "', "'")
        if growth(lambda size, u=unit, h=head: work(size, u, h)) > GROWTH_MAX
    ]
    assert slow == []


def test_time_to_convert_python_literals_is_linear() -> None:
    slow = [unit for unit in UNITS if growth(lambda size, u=unit: str(json_of_python("[" + u * (size // len(u))))) > 9]
    assert slow == []


def test_time_to_find_stop_strings_is_linear() -> None:
    stops = ["a" * 255 + "b", *("a" * count + "c" for count in range(200, 215))]

    def work(size: int, unit: str) -> None:
        finder = StopStringFinder(stops)
        for _ in range(size // len(unit)):
            finder.feed(unit)

    slow = [unit for unit in ("a", "a" * 200 + "d", "ab") if growth(lambda size, u=unit: work(size, u)) > GROWTH_MAX]
    assert slow == []
