"""Values as server-sent events (the HTML standard, section 9.2); what is the same in all of them is built once."""

from __future__ import annotations

import msgspec

from trioserve.api.error_responses import ErrorResponse
from trioserve.contracts.output import Delta
from trioserve.contracts.weights import WeightVersions

__all__ = [
    "DONE",
    "ChunkWriter",
    "data_event",
    "encode",
    "error_event",
    "one_line_json",
    "resume_field",
    "token_ids_field",
    "transfer_field",
    "versions_field",
]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every reader of events skips."""

DONE = b"data: [DONE]\n\n"
"""The last event of a response that is complete; one that broke off ends without it."""

encode = msgspec.json.Encoder().encode

# JSON leaves these as they are and SSE does not mind, but clients that split lines as Python's str.splitlines does
# would cut an event in two: NEL, LINE SEPARATOR, PARAGRAPH SEPARATOR. They can only stand inside of strings.
_LINE_ENDS = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


class ChunkWriter:
    """The events of one streamed response: the same JSON object each time, but for its choices and usage.

    head: the fields that all chunks share, one at least. null_usage: chunks without usage say `"usage": null`, as
    OpenAI's do when the client asked for usage at the end.
    """

    def __init__(self, head: dict[str, object], *, null_usage: bool) -> None:
        self._head = _one_line(b"data: " + encode(head)[:-1] + b',"choices":[')
        self._end = b',"usage":null}\n\n' if null_usage else b"}\n\n"

    def chunk(self, choice: bytes, *, usage: object = None, fields: bytes = b"") -> bytes:
        """One event. choice: the JSON of the one choice in it, or nothing. usage: anything that becomes a JSON object.
        fields: more JSON fields of the chunk itself, with a comma before each."""
        end = self._end if usage is None else b',"usage":' + encode(usage) + b"}\n\n"
        return self._head + _one_line(choice) + b"]" + fields + end

    def around(self, choice_begin: bytes, choice_end: bytes) -> tuple[bytes, bytes]:
        """What stands before and behind the one value in which most events of a response differ. Both in ASCII."""
        return self._head + choice_begin, choice_end + b"]" + self._end


def transfer_field(delta: Delta) -> bytes:
    """For ChunkWriter.chunk: how another engine gets at the KV of a choice that has ended, if it is held for that."""
    return b"" if delta.kv_transfer is None else b',"kv_transfer_params":' + _one_line(encode(delta.kv_transfer))


def token_ids_field(delta: Delta) -> bytes:
    """Of a choice in an event: which tokens came with it, and which weights sampled them if these were replaced."""
    if not delta.weight_versions:
        return b',"token_ids":' + encode(delta.token_ids)
    versions = _one_line(encode(delta.weight_versions))
    return b',"token_ids":' + encode(delta.token_ids) + b',"weight_versions":' + versions


def versions_field(versions: WeightVersions) -> bytes:
    """Of a choice in the event with which it ends: which weights sampled all of it, if these were replaced."""
    return b',"weight_versions":' + one_line_json(versions) if versions else b""


def resume_field(resume: object) -> bytes:
    """For ChunkWriter.chunk: how a response goes on that was cut off."""
    return b',"resume":' + one_line_json(resume)


def one_line_json(value: object) -> bytes:
    """As it may stand between the two parts of ChunkWriter.around."""
    return _one_line(encode(value))


def error_event(response: ErrorResponse) -> bytes:
    """What a client gets when the response cannot be completed after it began."""
    return data_event(response.body())


def data_event(value: object) -> bytes:
    """An event that is nothing but this value."""
    return b"data: " + one_line_json(value) + b"\n\n"


def _one_line(data: bytes) -> bytes:
    if data.isascii():
        return data
    for character, escape in _LINE_ENDS:
        data = data.replace(character, escape)
    return data
