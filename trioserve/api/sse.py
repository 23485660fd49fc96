"""Server-sent events (HTML standard, section 9.2). Parts that all events of a response share are encoded once."""

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
"""A comment, which readers of events skip."""

DONE = b"data: [DONE]\n\n"
"""The last event of a complete response. A response that failed ends without it."""

encode = msgspec.json.Encoder().encode

# NEL, LINE SEPARATOR and PARAGRAPH SEPARATOR may be unescaped in JSON and in SSE. But clients that split lines like
# Python's str.splitlines would split an event in two. These characters occur only inside strings.
_LINE_ENDS = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


class ChunkWriter:
    """Writes the events of one streamed response: JSON objects that differ only in their choices and usage.

    Args:
        head: struct or dict of the fields that all chunks share, at least one.
        null_usage: True: chunks without usage have `"usage": null`, as OpenAI's have if the client asked for usage.
    """

    def __init__(self, head: object, *, null_usage: bool) -> None:
        self._head = _one_line(b"data: " + encode(head)[:-1] + b',"choices":[')
        self._end = b',"usage":null}\n\n' if null_usage else b"}\n\n"

    def chunk(self, choice: bytes, *, usage: object = None, fields: bytes = b"") -> bytes:
        """Write one event.

        Args:
            choice: JSON of the event's choice. Empty: no choice.
            usage: value that msgspec encodes as a JSON object. None: no usage.
            fields: JSON of further fields of the chunk, with a comma before each.
        """
        end = self._end if usage is None else b',"usage":' + encode(usage) + b"}\n\n"
        return self._head + _one_line(choice) + b"]" + fields + end

    def around(self, choice_begin: bytes, choice_end: bytes) -> tuple[bytes, bytes]:
        """Return the bytes before and after the one value in which most events of a response differ.

        Args:
            choice_begin: JSON of the choice before the value, in ASCII.
            choice_end: JSON of the choice after the value, in ASCII.
        """
        return self._head + choice_begin, choice_end + b"]" + self._end


def transfer_field(delta: Delta) -> bytes:
    """Encode the field `kv_transfer_params` of a chunk, with which another engine reads the KV of the choice.

    Args:
        delta: last delta of a choice.

    Returns:
        The field with a leading comma. Empty if no blocks are held for another engine.
    """
    return b"" if delta.kv_transfer is None else b',"kv_transfer_params":' + _one_line(encode(delta.kv_transfer))


def token_ids_field(delta: Delta) -> bytes:
    """Encode the field `token_ids` of a choice, and the field `weight_versions` if weights were replaced.

    Args:
        delta: output of the choice.

    Returns:
        The fields with a leading comma.
    """
    if not delta.weight_versions:
        return b',"token_ids":' + encode(delta.token_ids)
    versions = _one_line(encode(delta.weight_versions))
    return b',"token_ids":' + encode(delta.token_ids) + b',"weight_versions":' + versions


def versions_field(versions: WeightVersions) -> bytes:
    """Encode the field `weight_versions` of a choice's last event, which covers all tokens of the choice.

    Args:
        versions: runs of weight versions. Empty if the weights were never replaced.

    Returns:
        The field with a leading comma. Empty without versions.
    """
    return b',"weight_versions":' + one_line_json(versions) if versions else b""


def resume_field(resume: object) -> bytes:
    """Encode the field `resume` of a chunk, with which the client can resume an aborted response.

    Args:
        resume: value that the client sends as `resume` in its next request.

    Returns:
        The field with a leading comma.
    """
    return b',"resume":' + one_line_json(resume)


def one_line_json(value: object) -> bytes:
    """Encode a value as JSON without line ends of any kind.

    Args:
        value: anything that msgspec can encode.
    """
    data = encode(value)
    return data if data.isascii() else _one_line(data)


def error_event(response: ErrorResponse) -> bytes:
    """Make the last event of a response that failed after it began.

    Args:
        response: the error.
    """
    return data_event(response.body())


def data_event(value: object) -> bytes:
    """Make an event whose data is one JSON value.

    Args:
        value: anything that msgspec can encode.
    """
    return b"data: " + one_line_json(value) + b"\n\n"


def _one_line(data: bytes) -> bytes:
    if data.isascii():
        return data
    for character, escape in _LINE_ENDS:
        data = data.replace(character, escape)
    return data
