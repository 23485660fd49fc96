"""Error format and streams of Ollama's API. A stream has one line of JSON for each piece."""

from __future__ import annotations

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.sse import encode, one_line_json
from trioserve.api.surface import OpenAISurface

__all__ = ["LINES_TYPE", "LINE_KEEP_ALIVE", "OLLAMA", "OLLAMA_PATH", "OllamaSurface", "line"]

OLLAMA_PATH = "/api/"
LINES_TYPE = "application/x-ndjson"
LINE_KEEP_ALIVE = b" "
"""Keep-alive between two lines. JSON may begin with white space, but an empty line would not be JSON."""


class OllamaSurface(OpenAISurface):
    """Error format of Ollama's API: the statuses of OpenAI's API, and the error message as the only field."""

    def body(self, error: ErrorResponse, request_id: str) -> bytes:
        return encode({"error": error.placed_message})

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        return line({"error": error.placed_message})


OLLAMA = OllamaSurface()


def line(value: object) -> bytes:
    """Return one line of a stream.

    Args:
        value: Data of the line.
    """
    return one_line_json(value) + b"\n"
