"""What a method on a path takes and gives, as a value. Each API has a table of them, beside its handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trioserve.api.openai.response_types import Error
from trioserve.contracts.sampling import Range

__all__ = ["GENERATES", "READS_BODY", "DescribedOperation"]


class DescribedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """What a method on a path takes and gives.

    response: type of the JSON with status 200, or the media type of what is no JSON. event: the type of a stream's
    events when the body has `"stream": true`; named_events: the types of those of such a stream where each event has a
    name; kinds: the types of those of a stream that is the whole response; line: the type of the lines of a stream that
    comes unless the body has `"stream": false`. errors: statuses that come with an `error`.
    ranges: of the numbers of the body, by field, or by "Type.field" of a type inside of it. refused: its fields that
    must be empty, and why. body_media: media type of the body. path_parameter: what it is. query: what each parameter
    means, and its schema.
    """

    summary: str
    response: type | str
    description: str = ""
    body: type | None = None
    body_media: str = "application/json"
    event: type | None = None
    named_events: tuple[type, ...] = ()
    kinds: tuple[type, ...] = ()
    line: type | None = None
    errors: tuple[int, ...] = (400,)
    error: type = Error
    ranges: Mapping[str, Range] = {}
    refused: Mapping[str, str] = {}
    not_ready: type | None = None
    path_parameter: str = ""
    query: Mapping[str, tuple[str, dict[str, Any]]] = {}
    takes_deadlines: bool = False


READS_BODY = (400, 408, 413, 415, 429, 503)
GENERATES = (*READS_BODY, 404, 500, 504)
"""Statuses of errors that come from any operation with a body, and from any that asks the engine."""
