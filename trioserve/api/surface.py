"""Formats of errors, request ids and keep-alives that differ between APIs on all of their paths.

The path or a header selects the API before anything else of the request is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.response import Response
from trioserve.api.sse import encode, error_event, one_line_json

if TYPE_CHECKING:
    from trioserve.http.exchange import Exchange

__all__ = [
    "ANTHROPIC",
    "LINES_TYPE",
    "LINE_KEEP_ALIVE",
    "MESSAGES_PATH",
    "OLLAMA_PATH",
    "OPENAI",
    "REQUEST_ID_HEADER",
    "THREAD_UNSUPPORTED",
    "MessagesError",
    "OllamaError",
    "OpenAISurface",
    "ResumableSurface",
    "Surface",
    "event",
    "line",
    "own_statuses",
    "surface_of",
]

REQUEST_ID_HEADER = "x-request-id"


class Surface(Protocol):
    """Format of errors and request ids in one API."""

    def id_fields(self, request_id: str) -> list[tuple[str, str]]:
        """Make the header fields that name the request."""
        ...

    def status(self, error: ErrorResponse) -> int: ...

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        """Encode an error as the whole response, in JSON.

        Args:
            request_id: id of the request, for the client's logs.
        """
        ...

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        """Encode an error as the last event of a stream.

        Args:
            request_id: id of the request, for the client's logs.
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


MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"
ID_HEADER = "request-id"
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Error code for a request with `thread`.

It is sent in the body's details, where Anthropic's client libraries look for it.
"""

MessagesErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "timeout_error",
    "conflict_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]

OVERLOADED_STATUS = 529
TYPES: dict[int, MessagesErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


class MessagesErrorDetail(Response):
    """An error: `type` is for programs, `message` for people.

    Attributes:
        details: fields that are not supported. Only for `thread`.
        code: kind of the error, for programs. Only in the last event of a stream that can be resumed.
    """

    type: MessagesErrorType
    message: str
    details: dict[str, Any] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET


class MessagesError(Response, tag_field="type", tag="error"):
    """An error response in Anthropic's format. Also the last event of a stream that failed."""

    error: MessagesErrorDetail
    request_id: str


class AnthropicSurface:
    """Error format of Anthropic's API. The errors are those of OpenAI's API under Anthropic's names.

    Status 503 becomes 529, which clients of Anthropic's API understand as overload.
    """

    def id_fields(self, request_id: str) -> list[tuple[str, str]]:
        return [(REQUEST_ID_HEADER, request_id), (ID_HEADER, request_id)]

    def status(self, error: ErrorResponse) -> int:
        return OVERLOADED_STATUS if error.status == 503 else error.status

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        return encode(self._described(error, request_id))

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        return event("error", self._described(error, request_id))

    def _described(self, error: ErrorResponse, request_id: str) -> MessagesError:
        detail = MessagesErrorDetail(type=error_type(self.status(error)), message=error.placed_message)
        if error.code == THREAD_UNSUPPORTED:
            detail.details = {"error_code": error.code, "unsupported": [error.param]}
        return MessagesError(error=detail, request_id=request_id)


class ResumableSurface(AnthropicSurface):
    """Error format of a stream that can be resumed at another server. The error has a code, by which a router decides
    whether to resume the stream.
    """

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        described = self._described(error, request_id)
        described.error.code = error.code
        return event("error", described)


ANTHROPIC = AnthropicSurface()


def error_type(status: int) -> MessagesErrorType:
    """Return Anthropic's name for errors with this status.

    Args:
        status: HTTP status.
    """
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def event(name: str, value: object) -> bytes:
    """Return one server-sent event.

    Clients read its name from the first line, and `value` repeats the name as its type.

    Args:
        name: Name of the event.
        value: Data of the event.
    """
    return b"event: " + name.encode() + b"\ndata: " + one_line_json(value) + b"\n\n"


def own_statuses(statuses: tuple[int, ...]) -> tuple[int, ...]:
    """Return the statuses as this API sends them: 529 in place of 503.

    Args:
        statuses: HTTP statuses.
    """
    return tuple(OVERLOADED_STATUS if status == 503 else status for status in statuses)


OLLAMA_PATH = "/api/"
LINES_TYPE = "application/x-ndjson"
LINE_KEEP_ALIVE = b" "
"""Keep-alive between two lines. JSON may begin with white space, but an empty line would not be JSON."""


class OllamaError(Response):
    """An error response in Ollama's format. Also the last line of a stream that failed."""

    error: str


class OllamaSurface(OpenAISurface):
    """Error format of Ollama's API: the statuses of OpenAI's API, and the error message as the only field."""

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        return encode(OllamaError(error=error.placed_message))

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        return line(OllamaError(error=error.placed_message))


OLLAMA = OllamaSurface()


def line(value: object) -> bytes:
    """Return one line of a stream.

    Args:
        value: Data of the line.
    """
    return one_line_json(value) + b"\n"


def surface_of(exchange: Exchange) -> Surface:
    """Choose the format of errors and ids, also for unknown paths.

    Args:
        exchange: the request.
    """
    path = exchange.path
    if path.startswith(OLLAMA_PATH):
        return OLLAMA
    if path.startswith(MESSAGES_PATH) and path[len(MESSAGES_PATH) :][:1] in ("", "/"):
        return ANTHROPIC
    return OPENAI if exchange.headers.get(VERSION_HEADER) is None else ANTHROPIC
