"""Limits the work and memory of one rendering of a chat template, and measures values for the module template_costs."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, ItemsView, KeysView, Sized, ValuesView

import jinja2
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

__all__ = ["Budget", "TemplateTooCostly", "budget", "json_size", "length", "printed_size"]

# Maximum number of loop iterations. They take 1 to 2 s in total. A chat of 1,000 messages needs a tenth of them.
STEPS_MAX = 500_000
# Maximum number of characters that all operations of a template read or write. Copying them takes less than 1 s.
CHARACTERS_MAX = 256_000_000
# Largest size of one value and of the result. It is about four million tokens, which is more than any context.
VALUE_CHARACTERS_MAX = 16_000_000
# Memory limit for all values together, since a template may keep all of them. A long chat needs 20 MiB.
MADE_BYTES_MAX = 128 * 2**20
INTEGER_BITS_MAX = 4096

ITEM_CHARACTERS = 32  # An item of a list costs as much time and memory as about 32 characters.
PLAIN_REPR_CHARACTERS_MAX = 65_536  # A text up to this length is printed to measure its length with escapes.
ESCAPED_CHARACTERS_MAX = 10  # \U0010ffff


TOO_MANY_CHARACTERS = f"it handles more than {CHARACTERS_MAX:,} characters"


class TemplateTooCostly(jinja2.TemplateError):
    """A template exceeded one of the bounds of this module."""


class Budget:
    """Resources that one rendering may still use."""

    __slots__ = ("_bytes_left", "_characters_left", "_steps_left")

    def __init__(self) -> None:
        self._steps_left = STEPS_MAX
        self._characters_left = CHARACTERS_MAX
        self._bytes_left = MADE_BYTES_MAX

    def step(self, count: int = 1) -> None:
        """Charge iterations of loops.

        Args:
            count: Number of iterations.

        Raises:
            TemplateTooCostly: The budget is used up.
        """
        self._steps_left -= count
        if self._steps_left < 0:
            raise TemplateTooCostly(f"it runs more than {STEPS_MAX:,} loop iterations and calls")

    def spend(self, characters: int) -> None:
        """Charge work whose time is linear in a number of characters.

        Args:
            characters: The number of characters.

        Raises:
            TemplateTooCostly: The budget is used up.
        """
        self._characters_left -= characters
        if self._characters_left < 0:
            raise TemplateTooCostly(TOO_MANY_CHARACTERS)

    def make(self, characters: int) -> None:
        """Charge the creation of one value. Call this before the value is created.

        Args:
            characters: Upper bound of the value's characters.

        Raises:
            TemplateTooCostly: The value is too large, or the budget is used up.
        """
        if characters > VALUE_CHARACTERS_MAX:
            raise TemplateTooCostly(f"it makes a value of more than {VALUE_CHARACTERS_MAX:,} characters")
        self._characters_left -= characters
        if self._characters_left < 0:
            raise TemplateTooCostly(TOO_MANY_CHARACTERS)

    def hold(self, byte_count: int) -> None:
        """Charge memory that the template may keep until its rendering ends.

        Call this before the memory is allocated if its size is known.

        Args:
            byte_count: Bytes of memory.

        Raises:
            TemplateTooCostly: The budget is used up.
        """
        self._bytes_left -= byte_count
        if self._bytes_left < 0:
            raise TemplateTooCostly(f"it makes values of more than {MADE_BYTES_MAX:,} bytes together")

    def hold_value(self, value: object) -> None:
        """Charge the memory of a created value, without the values that it contains, which were charged before.

        Raises:
            TemplateTooCostly: The value is too large a number, or the budget is used up.
        """
        if isinstance(value, int):
            if value.bit_length() > INTEGER_BITS_MAX:
                raise TemplateTooCostly(f"it makes a number of more than {INTEGER_BITS_MAX:,} bits")
        elif isinstance(value, str | list | tuple | dict):
            self.hold(sys.getsizeof(value))


budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("template_budget")


def length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 1


def printed_size(value: object) -> int:
    """Return an approximate upper bound of the length of str(value).

    A list that a value contains several times is counted each time, since it is also printed and compared each time.

    Raises:
        TemplateTooCostly: The size exceeds VALUE_CHARACTERS_MAX.
    """
    return len(value) if isinstance(value, str) else _size(value, _repr_size)


def json_size(value: object, *, escapes_all: bool) -> int:
    r"""Return an approximate upper bound of the length of a value's JSON.

    Args:
        escapes_all: True if characters other than ASCII are written as \uXXXX. Beyond the basic plane, this is two such
            escapes.

    Raises:
        TemplateTooCostly: The size exceeds VALUE_CHARACTERS_MAX.
    """
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
            # The items are counted before the copy below, which takes as much memory.
            size += ITEM_CHARACTERS * len(item)
            if size <= VALUE_CHARACTERS_MAX:
                waiting.extend(item)
        elif isinstance(item, dict):
            size += 2 * ITEM_CHARACTERS * len(item)
            if size <= VALUE_CHARACTERS_MAX:
                waiting.extend(item.keys())
                waiting.extend(item.values())
        elif isinstance(item, range):
            # The printed text of a range is short, but sorting and comparing process all its items.
            size += ITEM_CHARACTERS * len(item)
        elif isinstance(item, Macro):
            size += 4 * len(item.name)
        elif isinstance(item, Namespace):
            raise TemplateTooCostly("it prints a namespace, whose size is not known")
        elif not isinstance(item, float | Undefined | None):
            size += 256  # A function or an object of the sandbox prints the name of its type.
    if size > VALUE_CHARACTERS_MAX:
        # Larger values must not be compared or hashed either, since this could take practically forever.
        raise TemplateTooCostly(f"it makes a value of more than {VALUE_CHARACTERS_MAX:,} characters")
    return size


_WRITTEN_SHORT = ("\n", "\t", "\r")  # Each of these characters is escaped as two characters.
_CONTROLS = tuple(map(chr, range(0x20)))


def _repr_size(text: str) -> int:
    """Return the length of a text with the quotes and escapes that are printed within another value."""
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
