"""Streams that are lines of JSON, which those of Ollama's API are, and what else its bodies say in their own way.

An endpoint is asked for such a stream as events with ids, so that it can go on elsewhere; its client gets lines.
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
"""Whoever sends one of them gets events."""
_DATA = b"data: "
_ERROR = b'{"error"'


class _Named(msgspec.Struct):
    name: str | None = None


class _Failed(msgspec.Struct):
    error: dict[str, Any] | str


def ollama_body(path: str, raw: bytes, body: RoutedBody, served: list[str]) -> RoutedBody:
    """What a router reads of a body, as the bodies of other APIs say it: streamed if it does not say otherwise, and the
    model by the name that it has here. served: all of these."""
    if not path.startswith(OLLAMA_PATH):
        return body
    model = body.model
    if model is None and path == "/api/show":  # which has an older name for it
        model = decode_body(raw, _Named).name
    stream = body.stream is not False if path in LINE_PATHS else None
    return msgspec.structs.replace(body, model=untagged(model, served), stream=stream)


def wants_lines(path: str, headers: Headers) -> bool:
    """Whether the client of a streamed response gets lines."""
    return path in LINE_PATHS and not any(headers.get(name) for name in EVENT_HEADERS)


class ClientLines(ClientEvents):
    """The values of events, a line each."""

    takes_all = False
    keep_alive = LINE_KEEP_ALIVE

    def of(self, events: bytes) -> bytes:
        """Where there are only comments, what keeps the connection alive."""
        values = [found[len(_DATA) :] for found in events.split(b"\n") if found.startswith(_DATA)]
        return b"".join(map(_line, values)) or self.keep_alive

    def last(self, events: bytes) -> bytes:
        return self.of(events) if events else b""

    def head(self, headers: HeaderFields) -> HeaderFields:
        return [(name, LINES_TYPE if name == "content-type" else value) for name, value in headers]


def _line(value: bytes) -> bytes:
    if value.startswith(_ERROR):  # in the shape that says what a router has to know
        error = msgspec.json.decode(value, type=_Failed).error
        if isinstance(error, dict):
            return line({"error": error.get("message")})
    return value + b"\n"


class LineSplitter:
    """Lines of an endpoint that makes them itself, out of bytes cut anywhere: whole, so that one can be added at any
    moment."""

    def __init__(self) -> None:
        self._held = bytearray()  # nothing, or a line's beginning that is not blank

    def feed(self, piece: bytes) -> bytes:
        """What is whole now, with the spaces behind it. Raises EndpointLost for a line of more than EVENT_BYTES_MAX."""
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
        """The response has ended: what is left of it."""
        return bytes(self._held)
