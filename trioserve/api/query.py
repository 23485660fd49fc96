"""Query fields of a URL, by name, with checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from trioserve.contracts.errors import InvalidRequest

__all__ = ["LIST_FIELDS", "Query"]

FIELDS_MAX = 64
NUMBER_DIGITS_MAX = 16
FLAGS = {"true": True, "1": True, "false": False, "0": False}

LIST_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "after": ("id of the last object of the page before", {"type": "string"}),
    "order": ("order by creation time", {"type": "string", "enum": ["asc", "desc"]}),
}
"""Query fields of every list except `limit`, for the OpenAPI document."""


class Query:
    """Parsed query of a URL. If a field is repeated, its last value counts.

    All methods raise InvalidRequest, which names the field, for a value that is not allowed.

    Args:
        text: query without the question mark.
        defaults: values of fields that the query lacks.

    Raises:
        InvalidRequest: the query has too many fields.
    """

    def __init__(self, text: str, defaults: Mapping[str, str] = {}) -> None:
        try:
            values = parse_qs(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
        except ValueError:
            raise InvalidRequest(f"the query has more than {FIELDS_MAX} fields") from None
        self._values = {**defaults, **{name: given[-1] for name, given in values.items()}}

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self._values.get(name, default)
        if value not in allowed:
            raise InvalidRequest(f"{name} is {value[:40]!r}, allowed are {', '.join(allowed)}", param=name)
        return value

    def seconds(self, name: str, default: float, *, low: float, high: float) -> float:
        text = self._values.get(name)
        if text is None:
            return default
        try:
            value = float(text) if len(text) <= NUMBER_DIGITS_MAX else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise InvalidRequest(f"{name} is {text[:40]!r}, allowed are {low:g} to {high:g} seconds", param=name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        text = self._values.get(name)
        if text is None:
            return default
        if text.lower() not in FLAGS:
            raise InvalidRequest(f"{name} is {text[:40]!r}, allowed are true and false", param=name)
        return FLAGS[text.lower()]

    def number(self, name: str, default: int, *, low: int, high: int) -> int:
        text = self._values.get(name)
        if text is None:
            return default
        is_number = text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX
        if not is_number or not low <= int(text) <= high:
            raise InvalidRequest(f"{name} is {text[:40]!r}, allowed is a number from {low} to {high}", param=name)
        return int(text)
