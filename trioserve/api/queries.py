"""Query fields of a URL as a mapping, with checks."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.http.exchange import Exchange

__all__ = ["number_in", "query_of"]

FIELDS_MAX = 64


def query_of(exchange: Exchange) -> dict[str, str]:
    """Parse the query of a request. If a field is repeated, its last value counts.

    Args:
        exchange: the request.

    Raises:
        InvalidRequest: the query has too many fields.
    """
    try:
        values = parse_qs(exchange.query, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError:
        raise InvalidRequest(f"the query has more than {FIELDS_MAX} fields") from None
    return {name: given[-1] for name, given in values.items()}


def number_in(query: dict[str, str], name: str, default: int, *, low: int, high: int) -> int:
    """Read a whole number from a query.

    Args:
        query: parsed query.
        name: name of the field.
        default: result if the field is missing.
        low: lowest allowed number.
        high: highest allowed number.

    Raises:
        InvalidRequest: the value is not a number in the range.
    """
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and low <= int(text) <= high):
        raise InvalidRequest(f"{name} is {text[:40]!r}, allowed is a number from {low} to {high}", param=name)
    return int(text)
