"""Values that a program hands over: each has the type that its parameter says, or is refused by name.

Whole numbers and numbers of other libraries become Python's own, since what is kept travels far: to other threads, into
hashes, into kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import NoReturn, SupportsFloat, SupportsIndex, TypeGuard

from trioserve.contracts.errors import InvalidRequest

__all__ = ["check_count", "is_list", "refuse", "shown", "to_bool", "to_float", "to_int", "to_items", "to_str"]

SHOWN_CHARACTERS_MAX = 80


def shown(value: object) -> str:
    """A value in a message: short, whatever it is, also where it cannot be written at all."""
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, or a class of somebody else's; its type is told in any case
        text = "..."
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."


def refuse(param: str, value: object, allowed: str, *, verb: str = "is") -> NoReturn:
    """Raises InvalidRequest that says what came and what is allowed. verb: "holds" for one entry of several."""
    raise InvalidRequest(f"{param} {verb} {shown(value)} ({type(value).__name__}), allowed is {allowed}", param=param)


def to_int(param: str, value: object, allowed: str = "a whole number (int)", *, verb: str = "is") -> int:
    """The value as an int; numpy's ints are taken, a bool is not. Raises InvalidRequest."""
    if type(value) is int:
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:  # such as an array of several
            pass
    refuse(param, value, allowed, verb=verb)


def to_float(param: str, value: object, allowed: str = "a number (float)", *, verb: str = "is") -> float:
    """The value as a float; ints and numpy's numbers are taken, a bool is not. Raises InvalidRequest."""
    if type(value) is float:
        return value
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    refuse(param, value, allowed, verb=verb)


def to_str(param: str, value: object, allowed: str = "a text (str)", *, verb: str = "is") -> str:
    """Raises InvalidRequest for anything but a str."""
    if isinstance(value, str):
        return value
    refuse(param, value, allowed, verb=verb)


def to_bool(param: str, value: object) -> bool:
    """Raises InvalidRequest for anything but True and False."""
    if isinstance(value, bool):
        return value
    refuse(param, value, "True or False (bool)")


def to_items(param: str, value: object, allowed: str, *, count_max: int) -> tuple[object, ...]:
    """What a tuple or a list holds, also another library's; a text is one value and not several, and what has no order
    or no length is no list. Nothing is looked at of one that holds too many. Raises InvalidRequest."""
    if not is_list(value):
        refuse(param, value, allowed)
    check_count(param, value, count_max)
    return tuple(value)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether it holds several in an order, and knows how many: no text, no dict, no array without a dimension."""
    is_other = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)
    if is_other or not isinstance(value, Sized) or not isinstance(value, Iterable):
        return False
    try:
        len(value)
    except TypeError:  # such an array has the method all the same
        return False
    return True


def check_count(param: str, value: Sized, count_max: int) -> None:
    """Raises InvalidRequest for more entries than count_max."""
    if len(value) > count_max:
        raise InvalidRequest(f"{param} has {len(value)} entries, at most {count_max} are allowed", param=param)
