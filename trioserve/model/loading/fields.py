"""Typed reading of a checkpoint's own description (config.json, GGUF metadata), which anybody may have written."""

from __future__ import annotations

import math
import reprlib
from array import array
from collections.abc import Iterable, Mapping
from typing import TypeGuard, TypeVar

from trioserve.contracts.errors import ModelLoadError

__all__ = ["Fields", "check_apart", "one_line"]

MESSAGE_CHARACTERS_MAX = 600  # our own longest is about 300
_INFINITY = {"__float__": "Infinity"}
WHOLES_MAX = 65_536  # in one field; real ones have one for each layer or each end token

T = TypeVar("T")


class Fields:
    """Named values of one file. A missing one and null are the same: the default, or ModelLoadError without one."""

    def __init__(self, values: Mapping[str, object], source: str, spellings: Mapping[str, str] | None = None) -> None:
        """spellings: by the name that is asked for, the one that the file has; others are the same."""
        self._values = values
        self._source = source
        self._spellings = spellings or {}
        self._asked: set[str] = set()
        self._groups: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        return self._value(name) is not None

    @property
    def source(self) -> str:
        return self._source

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that the file has."""
        return tuple(self._values)

    @property
    def asked(self) -> frozenset[str]:
        """The names that somebody has asked for."""
        return frozenset(self._asked)

    def unread(self) -> dict[str, object]:
        """Return the fields that have a value and that nobody has asked for.

        The names are those of the file. A name in a group follows the group's and a dot. An object that was asked for
        as a whole counts as read.
        """
        read = {self.spelling(name) for name in self._asked}
        found = {name: value for name, value in self._values.items() if name not in read and value is not None}
        for name, group in self._groups.items():
            found |= {f"{name}.{inner}": value for inner, value in group.unread().items()}
        return found

    def is_null(self, name: str) -> bool:
        """Whether the file has the field, and null in it."""
        self._asked.add(name)
        key = self.spelling(name)
        return key in self._values and self._values[key] is None

    def is_one_of(self, name: str, values: tuple[object, ...]) -> bool:
        """Whether the field has one of these values, of the same type: 1 is not true."""
        value = self._value(name)
        return any(value == other and type(value) is type(other) for other in values)

    def spelling(self, name: str) -> str:
        return self._spellings.get(name, name)

    def _value(self, name: str) -> object:
        self._asked.add(name)
        return self._values.get(self.spelling(name))

    def whole(self, name: str) -> int:
        return self._required(name, self.whole_or(name, None), "a whole number")

    def whole_or(self, name: str, default: T) -> int | T:
        value = self._value(name)
        if value is None:
            return default
        if not _is_whole(value):
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        return self._required(name, self.number_or(name, None), "a number")

    def number_or(self, name: str, default: T) -> float | T:
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(name, "a number of ordinary size") from None

    def flag_or(self, name: str, default: bool) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text_or(self, name: str, default: T) -> str | T:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def strings_or_text(self, name: str) -> list[str] | str:
        """A list of strings, or one; nothing when the field is missing."""
        value = self._value(name)
        return value if isinstance(value, str) else self.strings_or(name, [])

    def strings_or(self, name: str, default: T) -> list[str] | T:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return value

    def wholes(self, name: str) -> tuple[int, ...]:
        """One whole number or a list of them; nothing when the field is missing."""
        value = self._value(name)
        if value is None:
            return ()
        items = value if isinstance(value, list | array) else [value]
        if len(items) > WHOLES_MAX:
            raise self.wrong(name, f"a list of at most {WHOLES_MAX}")
        if not all(_is_whole(item) for item in items):
            raise self.wrong(name, "a whole number or a list of them")
        return tuple(items)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of them. transformers writes infinity down as an object."""
        value = self._value(name)
        found = value if isinstance(value, list | array) else []
        items = [math.inf if item == _INFINITY else item for item in found]
        if not 1 <= len(items) <= WHOLES_MAX or not all(_is_number(item) for item in items):
            raise self.wrong(name, f"a list of 1 to {WHOLES_MAX} numbers")
        return tuple(map(float, items))

    def flags_or(self, name: str, default: T) -> list[bool] | T:
        """A list of them; anything else is the default."""
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(item, bool) for item in value):
            return default
        return list(value)

    def object_or_none(self, name: str) -> dict[str, object] | None:
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def group_or_none(self, name: str) -> Fields | None:
        """The fields of an object inside this one: the same ones each time, so that they know who asked for what."""
        value = self.object_or_none(name)
        if value is None:
            return None
        spelled = self.spelling(name)
        if spelled not in self._groups:
            self._groups[spelled] = Fields(value, f"{spelled} in {self._source}")
        return self._groups[spelled]

    def wrong(self, name: str, wanted: str) -> ModelLoadError:
        """The error for a value of the wrong kind, to be raised."""
        return ModelLoadError(f"{self.spelling(name)} in {self._source} is {self.shown(name)}, but it must be {wanted}")

    def shown(self, name: str) -> str:
        """The value in a few characters: it may be large, or nested as deep as a file may be."""
        shown = reprlib.repr(self._value(name))
        return shown if len(shown) <= 60 else shown[:57] + "..."

    def _required(self, name: str, value: T | None, wanted: str) -> T:
        if value is None:
            raise ModelLoadError(f"{self._source} lacks {self.spelling(name)}, which must be {wanted}")
        return value


def one_line(message: str) -> str:
    """It may quote a damaged file, and so hold anything: line breaks, control characters, halves of characters."""
    return "".join(character if character.isprintable() else "?" for character in message)[:MESSAGE_CHARACTERS_MAX]


def check_apart(file_name: str, places: Iterable[tuple[int, int, str]]) -> None:
    """Check that no two tensors of a file share bytes, so that reading them takes no more memory than the file has.

    Args:
        places: of each tensor, its first byte, the byte behind its last one, and its name.

    Raises:
        ModelLoadError: two tensors share bytes.
    """
    last_end, last_name = 0, ""
    for first, end, name in sorted(place for place in places if place[0] < place[1]):
        if first < last_end:
            raise ModelLoadError(
                f"the tensors {last_name[:80]!r} and {name[:80]!r} in {file_name} share bytes: it is damaged, fetch it "
                "again"
            )
        last_end, last_name = end, name


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_whole(value: object) -> TypeGuard[int]:
    # JSON numbers have no end, and 10**400 would break the first division.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
