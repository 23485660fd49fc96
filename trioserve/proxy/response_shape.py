"""What an inference server answers, told apart from what anything else at its address answers. Waits for nothing.

Another program may have taken an endpoint's address, or stand before it: a web server, a captive portal, a gateway. It
answers fast, so a router that believed it would send it most of the traffic. An answer that no OpenAI-compatible server
sends is a fault of the endpoint (InvalidAnswer), and its client never sees it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost

__all__ = ["EventCheck", "InvalidAnswer", "check_begin", "check_head", "check_line", "check_whole", "is_error"]

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"
LINES_TYPE = "application/x-ndjson"

_CHOICES = ("choices",)
_DATA = ("data",)
# A response has one of these fields. What is not here has no field that all servers send.
_FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": _CHOICES,
    "/v1/completions": _CHOICES,
    "/v1/messages": ("content",),
    "/v1/responses": ("output", "output_text", "status"),
    "/v1/embeddings": _DATA,
    "/v1/images/generations": _DATA,
    "/v1/images/edits": _DATA,
    "/v1/score": _DATA,
    "/tokenize": ("tokens", "count"),
    "/detokenize": ("prompt", "text"),
}
_CHOICE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_LAST_TYPES = {
    "/v1/messages": frozenset({"message_stop", "error"}),
    "/v1/responses": frozenset({"response.completed", "response.incomplete", "response.failed", "error"}),
}
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
_EVENT_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class InvalidAnswer(EndpointLost):
    """An endpoint answered with what no inference server sends.

    Args:
        reason: in a word, as metrics have it.
    """

    def __init__(self, id: EndpointId, reason: str, said: str) -> None:
        super().__init__(f'the endpoint "{id}" sent what no inference server sends: {said}')
        self.reason = reason


def is_error(content_type: str | None, said: bytes) -> bool:
    """Whether this is an error as OpenAI's, Anthropic's, Ollama's, vLLM's or FastAPI's servers word them."""
    if not (content_type or JSON_TYPE).startswith(JSON_TYPE):
        return False
    try:
        body = msgspec.json.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if not isinstance(body, dict):
        return False
    is_list = isinstance(body.get("detail"), list)  # FastAPI's of a field; its "Not Found" is a string
    return (
        is_list or body.get("object") == "error" or (isinstance(body.get("error"), dict | str) and bool(body["error"]))
    )


def check_head(id: EndpointId, status: int, content_type: str | None) -> None:
    """Check status and type of a response that is no error. Raises InvalidAnswer."""
    if 300 <= status < 400:
        raise InvalidAnswer(id, "redirect", f"a redirect, status {status}")
    if status in (204, 205):
        raise InvalidAnswer(id, "empty", f"nothing, status {status}")
    kind = (content_type or JSON_TYPE).partition(";")[0].strip().lower()
    if kind not in (JSON_TYPE, EVENTS_TYPE, LINES_TYPE):
        raise InvalidAnswer(id, "content_type", f"a response of the type {kind[:80]!r}")


def check_whole(id: EndpointId, path: str, said: bytes) -> None:
    """Check a whole response that is no error. Raises InvalidAnswer."""
    if not said.strip():
        raise InvalidAnswer(id, "empty", "an empty response")
    try:
        fields = msgspec.json.decode(said, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            msgspec.json.decode(said)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidAnswer(id, "not_json", f"{said[:80]!r}, which is no JSON") from None
        if path in _FIELDS:
            raise InvalidAnswer(id, "shape", "JSON that is no object") from None
        return
    wanted = _FIELDS.get(path)
    if wanted is not None and not any(name in fields for name in wanted):
        raise InvalidAnswer(id, "shape", f"an object without {' or '.join(wanted)}")


def check_begin(id: EndpointId, said: bytes) -> None:
    """Check the first bytes of a response that is too large to be kept. Raises InvalidAnswer."""
    if not said.lstrip().startswith((b"{", b"[")):
        raise InvalidAnswer(id, "not_json", f"{said[:80]!r}, which is no JSON")


class _Line(msgspec.Struct):
    done: bool = False


def check_line(id: EndpointId, line: bytes) -> bool:
    """Check one line of Ollama's streams. Returns whether it is the last one. Raises InvalidAnswer."""
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
    """Checks the events of one streamed response.

    Args:
        path: of the request.

    is_over: an event has come with which such a stream ends.
    """

    def __init__(self, id: EndpointId, path: str) -> None:
        self.is_over = False
        self._id = id
        self._needs_choices = path in _CHOICE_PATHS
        self._last_types = _LAST_TYPES.get(path)

    @property
    def must_end(self) -> bool:
        """Whether streams of this path end with an event that says so."""
        return self._needs_choices or self._last_types is not None

    def check(self, events: bytes) -> None:
        """Check whole events. Raises InvalidAnswer."""
        data = b""
        for line in events.splitlines():
            if line.startswith(b"data:"):
                data += line[5:]
            elif not line:
                if data:
                    self._check_data(data)
                    data = b""
            elif not line.startswith(_EVENT_FIELDS):
                raise InvalidAnswer(self._id, "event", f"{line[:80]!r} among its events")
        if data:
            self._check_data(data)

    def _check_data(self, data: bytes) -> None:
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if data.strip() != b"[DONE]":
                raise InvalidAnswer(self._id, "event", f"{data[:80]!r} as an event") from None
            self.is_over = True
            return
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
