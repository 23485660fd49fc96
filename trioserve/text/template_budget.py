"""What one rendering of a chat template may use, and how large a value is. Who charges for what is in
template_costs.py."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, ItemsView, KeysView, Sized, ValuesView

import jinja2
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

__all__ = ["Budget", "TemplateTooCostly", "budget", "json_size", "length", "printed_size"]

STEPS_MAX = 500_000  # rounds of loops; a chat of a thousand messages takes a tenth of it, all of it a second or two
CHARACTERS_MAX = 256_000_000  # read or written by anything that a template does: below a second of copying
VALUE_CHARACTERS_MAX = 16_000_000  # of one value, and of the result: four million tokens, more than any context
MADE_BYTES_MAX = (
    128 * 2**20
)  # of all values that are made, since a template may keep them all; a long chat makes 20 MiB
INTEGER_BITS_MAX = 4096

ITEM_CHARACTERS = 32  # an item of a list is worth so many: about its time and its bytes
PLAIN_REPR_CHARACTERS_MAX = 65_536  # up to here a text is written out to see how long it is with its escapes
ESCAPED_CHARACTERS_MAX = 10  # \U0010ffff


class TemplateTooCostly(jinja2.TemplateError):
    """A template went beyond one of the bounds above."""


class Budget:
    """What one rendering may still use."""

    __slots__ = ("_bytes_left", "_characters_left", "_steps_left")

    def __init__(self) -> None:
        self._steps_left = STEPS_MAX
        self._characters_left = CHARACTERS_MAX
        self._bytes_left = MADE_BYTES_MAX

    def step(self, count: int = 1) -> None:
        self._steps_left -= count
        if self._steps_left < 0:
            raise TemplateTooCostly(f"it takes more than {STEPS_MAX:,} rounds of loops and calls")

    def spend(self, characters: int) -> None:
        """For work that is linear in so many characters."""
        self._characters_left -= characters
        if self._characters_left < 0:
            raise TemplateTooCostly(f"it handles more than {CHARACTERS_MAX:,} characters")

    def make(self, characters: int) -> None:
        """Before a value is made that has at most so many characters."""
        if characters > VALUE_CHARACTERS_MAX:
            raise TemplateTooCostly(f"it makes a value of more than {VALUE_CHARACTERS_MAX:,} characters")
        self.spend(characters)

    def hold(self, byte_count: int) -> None:
        """For memory that the template may keep to its end; before it is taken where that is known."""
        self._bytes_left -= byte_count
        if self._bytes_left < 0:
            raise TemplateTooCostly(f"it makes values of more than {MADE_BYTES_MAX:,} bytes together")

    def hold_value(self, value: object) -> None:
        """For a value that was made. What it holds was paid for before."""
        if isinstance(value, int):
            if value.bit_length() > INTEGER_BITS_MAX:
                raise TemplateTooCostly(f"it makes a number of more than {INTEGER_BITS_MAX:,} bits")
        elif isinstance(value, str | list | tuple | dict):
            self.hold(sys.getsizeof(value))


budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("template_budget")


def length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 1


def printed_size(value: object) -> int:
    """How many characters str(value) has at most, about. A value that holds the same list many times is counted many
    times, as it would be printed and compared: so the count stops at the bound, and raises TemplateTooCostly."""
    return len(value) if isinstance(value, str) else _size(value, _repr_size)


def json_size(value: object, *, escapes_all: bool) -> int:
    """The same of its JSON. escapes_all: what is not ASCII is written as \\uXXXX, twice beyond the basic plane."""
    return _size(value, (lambda text: 12 * len(text)) if escapes_all else _json_text_size)


def _size(value: object, text_size: Callable[[str], int]) -> int:
    size = 0
    waiting = [value]
    while waiting and size <= VALUE_CHARACTERS_MAX:
        item = waiting.pop()
        size += ITEM_CHARACTERS
        if isinstance(item, str):
            size += text_size(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, list | tuple | KeysView | ValuesView | ItemsView):
            size += ITEM_CHARACTERS * len(item)  # all at once: the copy below is as large
            if size <= VALUE_CHARACTERS_MAX:
                waiting.extend(item)
        elif isinstance(item, dict):
            size += 2 * ITEM_CHARACTERS * len(item)
            if size <= VALUE_CHARACTERS_MAX:
                waiting.extend(item.keys())
                waiting.extend(item.values())
        elif isinstance(item, range):
            size += ITEM_CHARACTERS * len(item)  # it is printed short, but sorted and compared at length
        elif isinstance(item, Macro):
            size += 4 * len(item.name)
        elif isinstance(item, Namespace):
            raise TemplateTooCostly("it prints a namespace, whose size is not known")
        elif not isinstance(item, float | Undefined | None):
            size += 256  # some function or object of the sandbox, which prints its type's name
    if size > VALUE_CHARACTERS_MAX:
        # Not only too long to print: comparing two such values, or hashing one, may take for ever.
        raise TemplateTooCostly(f"it makes a value of more than {VALUE_CHARACTERS_MAX:,} characters")
    return size


_WRITTEN_SHORT = ("\n", "\t", "\r")  # as two characters
_CONTROLS = tuple(map(chr, range(0x20)))


def _repr_size(text: str) -> int:
    """Of a text inside of another value, where it is printed with quotes and escapes."""
    if text.isalnum():
        return len(text)
    if len(text) <= PLAIN_REPR_CHARACTERS_MAX:
        return len(repr(text))
    size = len(text) + sum(map(text.count, ("'", "\\", *_WRITTEN_SHORT)))
    for character in _WRITTEN_SHORT:
        text = text.replace(character, " ")
    return size if text.isprintable() else ESCAPED_CHARACTERS_MAX * len(text)


def _json_text_size(text: str) -> int:
    if text.isalnum():
        return len(text)
    return len(text) + text.count('"') + text.count("\\") + (5 * sum(map(text.count, _CONTROLS)))
