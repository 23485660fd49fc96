"""Checks of values that a program passes to the API.

Each function returns a value of the declared type, or raises InvalidRequest that names the parameter. Numbers of other
libraries (numpy) become Python's own int and float, because the values later cross threads and reach hashes and
kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import NoReturn, SupportsFloat, SupportsIndex, TypeGuard

from trioserve.contracts.errors import InvalidRequest

__all__ = [
    "check_count",
    "check_flags",
    "check_texts",
    "closest_name",
    "is_list",
    "refuse",
    "shown",
    "to_bool",
    "to_float",
    "to_int",
    "to_items",
    "to_str",
]

SHOWN_CHARACTERS_MAX = 80


def shown(value: object) -> str:
    """Return a short text of a value for an error message. Never raises.

    Args:
        value: Any object. Its repr is cut after SHOWN_CHARACTERS_MAX characters, or replaced by "..." if repr raises.
    """
    try:
        text = repr(value)
    except Exception:  # repr() failed. The message then names only the type.
        text = "..."
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}..."


def refuse(param: str, value: object, allowed: str, *, verb: str = "is") -> NoReturn:
    """Raise InvalidRequest for a value that is not allowed.

    Args:
        param: Name of the parameter, in the caller's spelling.
        value: The received value.
        allowed: Description of the allowed values.
        verb: "is", or "holds" if the value is one entry of a list.
    """
    raise InvalidRequest(f"{param} {verb} {shown(value)} ({type(value).__name__}), allowed is {allowed}", param=param)


def to_int(param: str, value: object, allowed: str = "a whole number (int)", *, verb: str = "is") -> int:
    """Return the value as an int. Accepts numpy's ints, but no bool.

    Args:
        param: Name of the parameter for the error message.
        value: The received value.
        allowed: Description of the allowed values for the error message.
        verb: "is", or "holds" for one entry of a list.

    Raises:
        InvalidRequest: the value is not a whole number.
    """
    if type(value) is int:
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:  # The value is, for example, an array with several numbers.
            pass
    refuse(param, value, allowed, verb=verb)


def to_float(param: str, value: object, allowed: str = "a number (float)", *, verb: str = "is") -> float:
    """Return the value as a float. Accepts ints and numpy's numbers, but no bool.

    Args:
        param: Name of the parameter for the error message.
        value: The received value.
        allowed: Description of the allowed values for the error message.
        verb: "is", or "holds" for one entry of a list.

    Raises:
        InvalidRequest: the value is not a number.
    """
    if type(value) is float:
        return value
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    refuse(param, value, allowed, verb=verb)


def to_str(param: str, value: object, allowed: str = "a text (str)", *, verb: str = "is") -> str:
    """Return the value if it is a str.

    Args:
        param: Name of the parameter for the error message.
        value: The received value.
        allowed: Description of the allowed values for the error message.
        verb: "is", or "holds" for one entry of a list.

    Raises:
        InvalidRequest: the value is not a str.
    """
    if isinstance(value, str):
        return value
    refuse(param, value, allowed, verb=verb)


def to_bool(param: str, value: object) -> bool:
    """Return the value if it is True or False.

    Args:
        param: Name of the parameter for the error message.
        value: The received value.

    Raises:
        InvalidRequest: the value is not a bool.
    """
    if isinstance(value, bool):
        return value
    refuse(param, value, "True or False (bool)")


def check_flags(**values: object) -> None:
    """Check that each value is True or False.

    Args:
        values: The received values by parameter.

    Raises:
        InvalidRequest: a value is not a bool.
    """
    for param, value in values.items():
        if not isinstance(value, bool):
            to_bool(param, value)


def check_texts(**values: object) -> None:
    """Check that each value is a text or None.

    Args:
        values: The received values by parameter.

    Raises:
        InvalidRequest: a value is neither a str nor None.
    """
    for param, value in values.items():
        if not (value is None or isinstance(value, str)):
            to_str(param, value, "a text (str), or None")


def to_items(param: str, value: object, allowed: str, *, count_max: int) -> tuple[object, ...]:
    """Return the items of a tuple, a list, or a similar sequence of another library.

    Args:
        param: Name of the parameter for the error message.
        value: The received value. A str, a dict and a set are refused, see is_list.
        allowed: Description of the allowed values for the error message.
        count_max: Maximum number of items. The items of a longer list are not read.

    Raises:
        InvalidRequest: the value is not a list, or has too many items.
    """
    if not is_list(value):
        refuse(param, value, allowed)
    check_count(param, value, count_max)
    return tuple(value)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return True if the value is an ordered collection with a length.

    Args:
        value: Any object. The result is False for text, bytes, dicts, sets, and arrays without a dimension.
    """
    is_other = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)
    if is_other or not isinstance(value, Sized) or not isinstance(value, Iterable):
        return False
    try:
        len(value)
    except TypeError:  # A numpy array without a dimension has __len__, but calling __len__ raises TypeError.
        return False
    return True


def check_count(param: str, value: Sized, count_max: int) -> None:
    """Check that a value has at most count_max entries.

    Args:
        param: Name of the parameter for the error message.
        value: The received value.
        count_max: Maximum number of entries.

    Raises:
        InvalidRequest: the value has more entries.
    """
    if len(value) > count_max:
        raise InvalidRequest(f"{param} has {len(value)} entries, at most {count_max} are allowed", param=param)


# Minimum similarity, from 0 to 1. A name with every fourth letter wrong is found, and unrelated names are not.
LIKENESS_MIN = 0.7


def closest_name(written: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a written name.

    Ignores upper and lower case, and treats - and _ as equal.

    Args:
        written: The misspelled name.
        known: Valid names.

    Returns:
        The similar name, or None if no name is similar.
    """
    import difflib  # difflib is imported late, because only errors need this module.

    spelled = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(written), spelled, n=1, cutoff=LIKENESS_MIN)
    return spelled[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")
