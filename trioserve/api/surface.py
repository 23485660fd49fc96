"""How an API words what goes for all of its paths: the id of a request in its response, and errors. A path, or what
its client says of itself, tells which API it is, before anything else of the request is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trioserve.api.sse import encode, error_event

if TYPE_CHECKING:
    from trioserve.api.error_responses import ErrorResponse

__all__ = ["OPENAI", "REQUEST_ID_HEADER", "OpenAISurface", "Surface"]

REQUEST_ID_HEADER = "x-request-id"


class Surface(Protocol):
    """request_id: of the request that is answered."""

    def id_fields(self, request_id: str) -> list[tuple[str, str]]:
        """The header fields that name the request."""
        ...

    def status(self, error: ErrorResponse) -> int: ...

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        """JSON: the whole response."""
        ...

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        """The last event of a stream that breaks off."""
        ...


class OpenAISurface:
    """The one that holds wherever no other does."""

    def id_fields(self, request_id: str) -> list[tuple[str, str]]:
        return [(REQUEST_ID_HEADER, request_id)]

    def status(self, error: ErrorResponse) -> int:
        return error.status

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        return encode(error.body())

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        return error_event(error)


OPENAI = OpenAISurface()
