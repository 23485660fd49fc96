"""Typed reading of a checkpoint's description (config.json, GGUF metadata). Its content is untrusted."""

from __future__ import annotations

import math
import reprlib
from array import array
from collections.abc import Iterable, Mapping
from typing import TypeGuard, TypeVar

from trioserve.contracts.errors import ModelLoadError

__all__ = ["Fields", "check_apart", "one_line"]

MESSAGE_CHARACTERS_MAX = 600  # the longest message of this code has about 300 characters
_INFINITY = {"__float__": "Infinity"}
WHOLES_MAX = 65_536  # numbers in one field; real fields have one for each layer or each end token

T = TypeVar("T")


class Fields:
    """Named values of one file.

    A missing field and null are equal: they give the default, or ModelLoadError if there is no default.

    Args:
        values: fields of the file.
        source: name of the file or group, for messages.
        spellings: name in the file for a requested name. Names that are not listed are spelled alike.
    """

    def __init__(self, values: Mapping[str, object], source: str, spellings: Mapping[str, str] | None = None) -> None:
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
        """Names of all fields in the file."""
        return tuple(self._values)

    @property
    def asked(self) -> frozenset[str]:
        """Names that were requested so far."""
        return frozenset(self._asked)

    def unread(self) -> dict[str, object]:
        """Return fields that have a value and were not requested.

        The names are those of the file. A name in a group follows the group's name and a dot. An object that was
        requested as a whole counts as read.
        """
        read = {self.spelling(name) for name in self._asked}
        found = {name: value for name, value in self._values.items() if name not in read and value is not None}
        for name, group in self._groups.items():
            found |= {f"{name}.{inner}": value for inner, value in group.unread().items()}
        return found

    def is_null(self, name: str) -> bool:
        """Return True if the file has the field with the value null.

        Args:
            name: requested name.
        """
        self._asked.add(name)
        key = self.spelling(name)
        return key in self._values and self._values[key] is None

    def is_one_of(self, name: str, values: tuple[object, ...]) -> bool:
        """Return True if the field has one of some values.

        Args:
            name: requested name.
            values: the type must be equal, too: 1 is not true.
        """
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
        """Return a list of strings or one string. Return [] if the field is missing.

        Args:
            name: requested name.
        """
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
        """Return one whole number or a list of whole numbers as a tuple. Return () if the field is missing.

        Args:
            name: requested name.
        """
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
        """Return a list of numbers. The field must exist. transformers writes infinity as an object.

        Args:
            name: requested name.
        """
        value = self._value(name)
        found = value if isinstance(value, list | array) else []
        items = [math.inf if item == _INFINITY else item for item in found]
        if not 1 <= len(items) <= WHOLES_MAX or not all(_is_number(item) for item in items):
            raise self.wrong(name, f"a list of 1 to {WHOLES_MAX} numbers")
        return tuple(map(float, items))

    def flags_or(self, name: str, default: T) -> list[bool] | T:
        """Return a list of booleans, or the default for any other value.

        Args:
            name: requested name.
            default: returned for any other value.
        """
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
        """Return the fields of an inner object. Every call returns the same Fields, which records the requested names.

        Args:
            name: requested name.
        """
        value = self.object_or_none(name)
        if value is None:
            return None
        spelled = self.spelling(name)
        if spelled not in self._groups:
            self._groups[spelled] = Fields(value, f"{spelled} in {self._source}")
        return self._groups[spelled]

    def wrong(self, name: str, wanted: str) -> ModelLoadError:
        """Return the error for a wrong value. The caller raises it.

        Args:
            name: requested name.
            wanted: allowed values, the end of a sentence.
        """
        return ModelLoadError(f"{self.spelling(name)} in {self._source} is {self.shown(name)}, but it must be {wanted}")

    def shown(self, name: str) -> str:
        """Return the value in at most 60 characters. The value may be large or deeply nested.

        Args:
            name: requested name.
        """
        shown = reprlib.repr(self._value(name))
        return shown if len(shown) <= 60 else shown[:57] + "..."

    def _required(self, name: str, value: T | None, wanted: str) -> T:
        if value is None:
            raise ModelLoadError(f"{self._source} lacks {self.spelling(name)}, which must be {wanted}")
        return value


def one_line(message: str) -> str:
    """Make a message printable on one line, and limit its length. It may quote a damaged file with line breaks, control
    characters or surrogates.

    Args:
        message: message of an error.
    """
    return "".join(character if character.isprintable() else "?" for character in message)[:MESSAGE_CHARACTERS_MAX]


def check_apart(file_name: str, places: Iterable[tuple[int, int, str]]) -> None:
    """Check that no two tensors of a file share bytes, so that reading them needs no more memory than the file has.

    Args:
        file_name: name for messages.
        places: of each tensor, its first byte, the byte after its last one, and its name.

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
    # JSON numbers have no limit, and 10**400 would break the first division.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
