"""Checks that a response comes from an inference server. This module performs no I/O.

Another program may use the address of an endpoint, or may be a proxy in front of the endpoint. Examples are a web
server, a captive portal and a gateway. Such a program responds fast, so the router would send most of the traffic to
it. Therefore a response that no OpenAI-compatible server sends counts as a failure of the endpoint (InvalidAnswer), and
the client never gets it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost

__all__ = [
    "EventCheck",
    "InvalidAnswer",
    "check_begin",
    "check_head",
    "check_line",
    "check_whole",
    "is_error",
    "is_plain_text",
]

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"
LINES_TYPE = "application/x-ndjson"

_CHOICES = ("choices",)
_DATA = ("data",)
# Each response has at least one of these fields. For a path that is not listed, there is no field that all servers
# send.
_FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": _CHOICES,
    "/v1/completions": _CHOICES,
    "/v1/messages": ("content",),
    "/v1/responses": ("output", "output_text", "status"),
    "/v1/embeddings": _DATA,
    "/pooling": _DATA,
    "/v1/images/generations": _DATA,
    "/v1/images/edits": _DATA,
    "/v1/score": _DATA,
    "/tokenize": ("tokens", "count"),
    "/detokenize": ("prompt", "text"),
}
_TEXT_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
_FIELDS |= dict.fromkeys(_TEXT_PATHS, ("text",))
_CHOICE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_LAST_TYPES = {
    "/v1/messages": frozenset({"message_stop", "error"}),
    "/v1/responses": frozenset({"response.completed", "response.incomplete", "response.failed", "error"}),
}
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
_EVENT_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class InvalidAnswer(EndpointLost):
    """An endpoint sent a response that no inference server sends.

    Args:
        id: Endpoint that sent the response.
        reason: Kind of the fault in one word, for metrics.
        said: Description of the response, for the message.
    """

    def __init__(self, id: EndpointId, reason: str, said: str) -> None:
        super().__init__(f'the endpoint "{id}" sent a response that no inference server sends: {said}')
        self.reason = reason


def is_error(content_type: str | None, said: bytes) -> bool:
    """Return True if a body is an error in the format of OpenAI, Anthropic, Ollama, vLLM or FastAPI.

    Args:
        content_type: Header of the response. None counts as JSON.
        said: Body of the response.
    """
    if not (content_type or JSON_TYPE).startswith(JSON_TYPE):
        return False
    try:
        body = msgspec.json.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if not isinstance(body, dict):
        return False
    # FastAPI's error about a field has a list. Its "Not Found" error has a string.
    is_list = isinstance(body.get("detail"), list)
    return (
        is_list or body.get("object") == "error" or (isinstance(body.get("error"), dict | str) and bool(body["error"]))
    )


def is_plain_text(path: str, content_type: str | None) -> bool:
    """Return True if a response is plain text, and inference servers send such responses for this path.

    Args:
        path: Path of the request.
        content_type: Header of the response.
    """
    return path in _TEXT_PATHS and (content_type or "").lower().startswith("text/")


def check_head(id: EndpointId, status: int, content_type: str | None, *, path: str = "") -> None:
    """Check the status and content type of a response that is not an error.

    Args:
        id: Endpoint that sent the response.
        status: HTTP status.
        content_type: Header of the response. None counts as JSON.
        path: Path of the request.

    Raises:
        InvalidAnswer: An inference server would not send this head.
    """
    if 300 <= status < 400:
        raise InvalidAnswer(id, "redirect", f"a redirect, status {status}")
    if status in (204, 205):
        raise InvalidAnswer(id, "empty", f"no body, status {status}")
    kind = (content_type or JSON_TYPE).partition(";")[0].strip().lower()
    if kind not in (JSON_TYPE, EVENTS_TYPE, LINES_TYPE) and not is_plain_text(path, kind):
        raise InvalidAnswer(id, "content_type", f"a response of the type {kind[:80]!r}")


def check_whole(id: EndpointId, path: str, said: bytes) -> None:
    """Check a complete response that is not an error.

    Args:
        id: Endpoint that sent the response.
        path: Path of the request.
        said: Body of the response.

    Raises:
        InvalidAnswer: The body is not JSON, or lacks the fields of this path.
    """
    if not said.strip():
        raise InvalidAnswer(id, "empty", "an empty response")
    try:
        fields = msgspec.json.decode(said, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            msgspec.json.decode(said)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidAnswer(id, "not_json", f"{said[:80]!r}, which is not JSON") from None
        if path in _FIELDS:
            raise InvalidAnswer(id, "shape", "JSON that is not an object") from None
        return
    wanted = _FIELDS.get(path)
    if wanted is not None and not any(name in fields for name in wanted):
        raise InvalidAnswer(id, "shape", f"an object without {' or '.join(wanted)}")


def check_begin(id: EndpointId, said: bytes) -> None:
    """Check the first bytes of a response that is too large to check completely.

    Args:
        id: Endpoint that sent the response.
        said: First bytes of the body.

    Raises:
        InvalidAnswer: The bytes do not begin a JSON object or list.
    """
    if not said.lstrip().startswith((b"{", b"[")):
        raise InvalidAnswer(id, "not_json", f"{said[:80]!r}, which is not JSON")


class _Line(msgspec.Struct):
    done: bool = False


def check_line(id: EndpointId, line: bytes) -> bool:
    """Check one line of a stream of Ollama's API.

    Args:
        id: Endpoint that sent the line.
        line: JSON text.

    Returns:
        True if it is the last line of the stream.

    Raises:
        InvalidAnswer: The line is not JSON.
    """
    try:
        return msgspec.json.decode(line, type=_Line).done or b'"error"' in line
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidAnswer(id, "event", f"{line[:80]!r} as a line of a stream") from None


class _Event(msgspec.Struct):
    choices: msgspec.Raw | UnsetType = UNSET
    type: Any = UNSET
    error: msgspec.Raw | UnsetType = UNSET


_decode_event = msgspec.json.Decoder(_Event).decode


class EventCheck:
    """Check of the events of one streamed response.

    Args:
        id: Endpoint that sends the response.
        path: Path of the request.

    Attributes:
        is_over: True after an event that ends a stream of this path.
    """

    def __init__(self, id: EndpointId, path: str) -> None:
        self.is_over = False
        self._id = id
        self._needs_choices = path in _CHOICE_PATHS
        self._last_types = _LAST_TYPES.get(path)

    @property
    def must_end(self) -> bool:
        """True if streams of this path have a special last event."""
        return self._needs_choices or self._last_types is not None

    def check(self, events: bytes) -> None:
        """Check events.

        Args:
            events: Complete events.

        Raises:
            InvalidAnswer: An inference server would not send these events.
        """
        data = b""
        for line in (*events.splitlines(), b""):
            if line.startswith(b"data:"):
                data += line[5:]
                continue
            if line:
                if not line.startswith(_EVENT_FIELDS):
                    raise InvalidAnswer(self._id, "event", f"{line[:80]!r} among the events")
                continue
            if not data:
                continue
            # An event with data ends here.
            try:
                event = _decode_event(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                if data.strip() != b"[DONE]":
                    raise InvalidAnswer(self._id, "event", f"{data[:80]!r} as an event") from None
                self.is_over = True
            else:
                if event.error is not UNSET and bytes(event.error) != b"null":
                    self.is_over = True
                elif self._needs_choices:
                    if event.choices is UNSET:
                        raise InvalidAnswer(self._id, "shape", f"an event without choices: {data[:80]!r}")
                    self.is_over = self.is_over or _FINISHED.search(event.choices) is not None
                elif self._last_types is not None:
                    if event.type is UNSET:
                        raise InvalidAnswer(self._id, "shape", f"an event without a type: {data[:80]!r}")
                    self.is_over = self.is_over or event.type in self._last_types
            data = b""
