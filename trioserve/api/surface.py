"""Formats that differ between APIs on all of their paths: header fields of the request id, and errors.

The path or a header selects the API before anything else of the request is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trioserve.api.sse import encode, error_event

if TYPE_CHECKING:
    from trioserve.api.error_responses import ErrorResponse

__all__ = ["OPENAI", "REQUEST_ID_HEADER", "OpenAISurface", "Surface"]

REQUEST_ID_HEADER = "x-request-id"


class Surface(Protocol):
    """Format of errors and request ids in one API."""

    def id_fields(self, request_id: str) -> list[tuple[str, str]]:
        """Make the header fields that name the request.

        Args:
            request_id: id of the request.
        """
        ...

    def status(self, error: ErrorResponse) -> int: ...

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        """Encode an error as the whole response, in JSON.

        Args:
            error: the error.
            request_id: id of the request.
        """
        ...

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        """Encode an error as the last event of a stream.

        Args:
            error: the error.
            request_id: id of the request.
        """
        ...


class OpenAISurface:
    """Format of OpenAI's API, which is the default."""

    def id_fields(self, request_id: str) -> list[tuple[str, str]]:
        return [(REQUEST_ID_HEADER, request_id)]

    def status(self, error: ErrorResponse) -> int:
        return error.status

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        return encode(error.body())

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        return error_event(error)


OPENAI = OpenAISurface()
