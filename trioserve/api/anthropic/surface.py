"""Errors and request ids as clients of Anthropic's API expect them, on the paths of that API and for whoever sends its
version header."""

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
]

MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"
ID_HEADER = "request-id"
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Code of the refusal of `thread`. It is in the body's details, where Anthropic's libraries look for it."""

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
    """The same errors as OpenAI's clients get, under Anthropic's names. 503 becomes 529: the server takes nothing now,
    and that is what clients of that API look for."""

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
    """Of a stream that may go on elsewhere: whoever sees to that goes by the code."""

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        described = self._described(error, request_id)
        described["error"]["code"] = error.code
        return event("error", described)


ANTHROPIC = AnthropicSurface()


def error_type(status: int) -> str:
    """Anthropic's name for errors with this status."""
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def event(name: str, value: object) -> bytes:
    """One event of a stream. Clients go by the name on the first line, which the value repeats as its type."""
    return b"event: " + name.encode() + b"\ndata: " + one_line_json(value) + b"\n\n"
