"""Errors as clients of Ollama's API expect them, and its streams, which are lines of JSON."""

from __future__ import annotations

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.sse import encode, one_line_json
from trioserve.api.surface import OpenAISurface

__all__ = ["LINES_TYPE", "LINE_KEEP_ALIVE", "OLLAMA", "OLLAMA_PATH", "OllamaSurface", "line"]

OLLAMA_PATH = "/api/"
LINES_TYPE = "application/x-ndjson"
LINE_KEEP_ALIVE = b" "
"""Between two lines: JSON may begin with white space, and an empty line would be no JSON."""


class OllamaSurface(OpenAISurface):
    """The same statuses as OpenAI's clients get, and of the error its message."""

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        return encode({"error": error.placed_message})

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        return line({"error": error.placed_message})


OLLAMA = OllamaSurface()


def line(value: object) -> bytes:
    """One line of a stream."""
    return one_line_json(value) + b"\n"
