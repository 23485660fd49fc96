"""Streams of JSON lines, as Ollama's API has them, and other peculiarities of its bodies.

The router asks the endpoint for server-sent events with ids, so that the stream can resume elsewhere. The client gets
lines.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trioserve.api.ollama.models import untagged
from trioserve.api.ollama.surface import LINE_KEEP_ALIVE, LINES_TYPE, OLLAMA_PATH, line
from trioserve.api.openai.request_types import decode_body
from trioserve.contracts.errors import EndpointLost
from trioserve.http.exchange import HeaderFields
from trioserve.http.headers import Headers
from trioserve.proxy.event_splitter import EVENT_BYTES_MAX
from trioserve.proxy.peers.client_events import ClientEvents
from trioserve.proxy.routed_body import RoutedBody

__all__ = ["ClientLines", "LineSplitter", "ollama_body", "wants_lines"]

LINE_PATHS = frozenset({"/api/chat", "/api/generate"})
EVENT_HEADERS = ("x-trioserve-resumable", "x-detach-timeout")
"""A client that sends one of these headers gets events instead of lines."""
_DATA = b"data: "
_ERROR = b'{"error"'


class _Named(msgspec.Struct):
    name: str | None = None


class _Failed(msgspec.Struct):
    error: dict[str, Any] | str


def ollama_body(path: str, raw: bytes, body: RoutedBody, served: list[str]) -> RoutedBody:
    """Complete the fields of a body of Ollama's API, as other APIs would have them.

    A stream is the default there, and a model name may have a tag.

    Args:
        path: Path of the request. Bodies of other APIs are returned unchanged.
        raw: Bytes of the body.
        body: Fields that the router has read from `raw`.
        served: All model names of the router.
    """
    if not path.startswith(OLLAMA_PATH):
        return body
    model = body.model
    if model is None and path == "/api/show":  # older field name of this path
        model = decode_body(raw, _Named).name
    stream = body.stream is not False if path in LINE_PATHS else None
    return msgspec.structs.replace(body, model=untagged(model, served), stream=stream)


def wants_lines(path: str, headers: Headers) -> bool:
    """Return True if the client gets lines when the response is streamed.

    Args:
        path: Path of the request.
        headers: Headers of the request.
    """
    return path in LINE_PATHS and not any(headers.get(name) for name in EVENT_HEADERS)


class ClientLines(ClientEvents):
    """Converter from events to lines: each line is the data of one event."""

    takes_all = False
    keep_alive = LINE_KEEP_ALIVE

    def convert(self, events: bytes) -> bytes:
        """Convert complete events to lines.

        Args:
            events: Complete events.

        Returns:
            Lines. A blank that keeps the connection alive if there are only comments.
        """
        values = [found[len(_DATA) :] for found in events.split(b"\n") if found.startswith(_DATA)]
        return b"".join(map(_line, values)) or self.keep_alive

    def last(self, events: bytes) -> bytes:
        """Convert the last events of a stream to lines.

        Args:
            events: Complete events, or nothing.
        """
        return self.convert(events) if events else b""

    def head(self, headers: HeaderFields) -> HeaderFields:
        return [(name, LINES_TYPE if name == "content-type" else value) for name, value in headers]


def _line(value: bytes) -> bytes:
    if value.startswith(_ERROR):  # converted here: within the router, errors need the shape of the other APIs
        error = msgspec.json.decode(value, type=_Failed).error
        if isinstance(error, dict):
            return line({"error": error.get("message")})
    return value + b"\n"


class LineSplitter:
    """Splitter that cuts the stream of an endpoint that sends lines itself into complete lines.

    The router can insert a line of its own after complete lines at any time.
    """

    def __init__(self) -> None:
        self._held = bytearray()  # empty, or the beginning of a line that is not blank

    def feed(self, piece: bytes) -> bytes:
        """Add bytes and return the lines that are complete now.

        Args:
            piece: Bytes that follow the previous piece.

        Returns:
            Complete lines with the white space after them.

        Raises:
            EndpointLost: A line is longer than EVENT_BYTES_MAX.
        """
        held = len(self._held)
        self._held += piece
        end = self._held.rfind(b"\n", held) + 1
        if (end or not held) and not self._held[end:].strip():
            end = len(self._held)
        if len(self._held) - end > EVENT_BYTES_MAX:
            raise EndpointLost(f"the endpoint sent a line of more than {EVENT_BYTES_MAX} bytes")
        whole = bytes(self._held[:end])
        del self._held[:end]
        return whole

    def end(self) -> bytes:
        """Return the bytes that are left when the response has ended."""
        return bytes(self._held)
