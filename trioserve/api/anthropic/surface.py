"""Error format and request ids of Anthropic's API.

Used on the paths of that API, and for clients that send its version header.
"""

from __future__ import annotations

from typing import Any

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.sse import encode, one_line_json
from trioserve.api.surface import REQUEST_ID_HEADER

__all__ = [
    "ANTHROPIC",
    "MESSAGES_PATH",
    "THREAD_UNSUPPORTED",
    "VERSION_HEADER",
    "AnthropicSurface",
    "ResumableSurface",
    "error_type",
    "event",
    "own_statuses",
]

MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"
ID_HEADER = "request-id"
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Error code for a request with `thread`.

It is sent in the body's details, where Anthropic's client libraries look for it.
"""

OVERLOADED_STATUS = 529
TYPES = {
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

    def _described(self, error: ErrorResponse, request_id: str) -> dict[str, Any]:
        kind = error_type(self.status(error))
        described: dict[str, Any] = {"type": kind, "message": error.placed_message}
        if error.code == THREAD_UNSUPPORTED:
            described["details"] = {"error_code": error.code, "unsupported": [error.param]}
        return {"type": "error", "error": described, "request_id": request_id}


class ResumableSurface(AnthropicSurface):
    """Error format of a stream that can be resumed at another server. A router decides by the error code."""

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        described = self._described(error, request_id)
        described["error"]["code"] = error.code
        return event("error", described)


ANTHROPIC = AnthropicSurface()


def error_type(status: int) -> str:
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
