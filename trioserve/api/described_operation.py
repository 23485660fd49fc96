"""Descriptions of API operations, from which the OpenAPI document is made. Each API has a table beside its handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trioserve.api.openai.response_types import Error
from trioserve.contracts.sampling import Range

__all__ = ["GENERATES", "READS_BODY", "DescribedOperation"]


class DescribedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one method on a path: its input and its output.

    Attributes:
        summary: one line.
        response: type of the JSON with status 200, or the media type of a response that is not JSON.
        description: further sentences.
        body: type of the request's body. None: no body.
        body_media: media type of the request's body.
        event: type of a stream's events if the body has `"stream": true`.
        named_events: types of a stream's events if the body has `"stream": true` and each event has a name.
        kinds: types of the events of a response that is always a stream.
        line: type of the lines of a stream, which is sent unless the body has `"stream": false`.
        errors: statuses of responses with an error.
        error: type of an error.
        ranges: allowed numbers, by field of the body, or by "Type.field" for a type inside the body.
        refused: fields of the body that must be empty, with the reason.
        not_ready: type of the response with status 503, if it is not an error.
        path_parameter: meaning of the parameter in the path.
        query: meaning and schema of each query parameter.
        takes_deadlines: True: the operation reads the deadline headers.
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
"""Error statuses of all operations that use the engine. READS_BODY has those of all operations with a body."""
