"""Base of the types of JSON responses.

A handler builds the type that its operation declares, so the OpenAPI document describes the JSON that the server
encodes. Streamed events may be assembled from bytes where that is faster. Tests compare those events with their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["Listing", "Response", "encoded_value"]


class Response(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all response types, which forbids fields without a description."""


class Listing(Response, tag_field="object", tag="list"):
    """A list whose items other servers may have made."""

    data: Sequence[object]


def encoded_value(json: bytes) -> Any:
    """Return the value of a field that is encoded already. Only an encoder can read it.

    Args:
        json: JSON of the field's type.
    """
    return msgspec.Raw(json)
