"""Setup of the h2 library for the server, faster encoding of frames, and conversion of request headers.

HPACK (RFC 7541) has an encoder for responses without a dynamic table, and a decoder for requests with bounded work.
Most fields of a response are short or change each time, such as the request id and the length. A dynamic table would
save about forty bytes per response, but would take a fifth of the response's CPU time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
from h2.connection import ConnectionInputs
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from h2.stream import StreamInputs
from hpack.exceptions import InvalidTableSizeError
from hpack.hpack import encode_integer
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable, table_entry_size

from trioserve.http.counters import ConnectionRefusal
from trioserve.http.exchange import Headers, RequestHead, split_target
from trioserve.http.http2.frames import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, Flood, frame
from trioserve.http.limits import FrontendLimits

__all__ = [
    "FieldDecoder",
    "FieldEncoder",
    "H2Protocol",
    "error_code_of",
    "initiated_protocol",
    "is_ordinary",
    "refusal_of",
    "request_head",
]


# First bits of a representation (RFC 7541): indexed field (6.1), literal without indexing (6.2.2), and
# table size update (6.3).
INDEXED, NAMED, NO_TABLE = 0x80, 0x00, 0x20
# The decoder remembers the last block only up to this size in bytes. A typical block has a few hundred bytes, and fewer
# once its fields are in the table.
REMEMBERED_BYTES_MAX = 1024
# At most this number of updates is allowed at the start of a block. An encoder needs two (RFC 7541, 4.2).
SIZE_UPDATES_MAX = 4
# An integer has at most this number of bytes after its prefix. These bytes can express more than 32 bits.
INTEGER_BYTES_MAX = 5
_FIELD_INDEXES = {field: index for index, field in enumerate(HeaderTable.STATIC_TABLE, start=1)}
_NAME_INDEXES: dict[bytes, int] = {}
for _index, (_name, _value) in enumerate(HeaderTable.STATIC_TABLE, start=1):
    _NAME_INDEXES.setdefault(_name, _index)

# The pattern matches the fields of an ordinary request, where a line feed follows each name and each value. h2 accepts
# more requests than this pattern.
_ORDINARY = re.compile(
    rb"(?:(?::method\n(?!CONNECT\n)|:scheme\n|:authority\n|:path\n)[!-~]+\n){4}"
    rb"(?:(?!(?:connection|cookie|host|keep-alive|proxy-connection|te|transfer-encoding|upgrade)\n)[-_0-9a-z]+\n"
    rb"(?:[!-~](?:[ -~]*[!-~])?)?\n)*"
)


class FieldDecoder(hpack.Decoder):
    """A replacement for hpack's Decoder with linear time and a bounded number of fields.

    hpack copies the rest of a block for each field, so its time grows with the square of the block size. It also
    accepts any number of fields and of table size updates.

    Two shortcuts save time. If a block equals the last block, and the last block did not change the table, the last
    result is used again. If the fields match the pattern of ordinary fields, they are valid. Then `config` is set so
    that h2 does not check each character.

    Args:
        config: configuration of h2's connection.
        list_bytes_max: maximum size of a list of fields in bytes, as in RFC 9113, 6.5.2.
        fields_max: maximum number of fields in a block.
    """

    def __init__(self, config: h2.config.H2Configuration, *, list_bytes_max: int, fields_max: int) -> None:
        super().__init__(max_header_list_size=list_bytes_max)
        self._config = config
        self._fields_max = fields_max
        self._block: bytes | None = None  # The last block, if decoding this block did not change the table.
        self._fields: list[hpack.HeaderTuple] = []

    def decode(self, data: bytes, raw: bool = True) -> list[hpack.HeaderTuple]:
        if data == self._block:
            return self._fields
        self._block = None
        entries = self.header_table.dynamic_entries.copy()
        fields = self._read_block(data)
        self._assert_valid_table_size()
        self._set_validation(not is_ordinary(fields))
        if len(data) <= REMEMBERED_BYTES_MAX and self.header_table.dynamic_entries == entries:
            self._block, self._fields = data, fields
        return fields

    def _read_block(self, data: bytes) -> list[hpack.HeaderTuple]:
        """Decode a block into fields of bytes, as h2 expects them. Raise an HPACKError if the block is malformed."""
        table = self.header_table
        fields: list[hpack.HeaderTuple] = []
        list_bytes = position = size_update_count = 0
        while position < len(data):
            first = data[position]
            if first & 0x80:  # The byte begins an indexed field (RFC 7541, 6.1).
                index, position = _read_integer(data, position, 7)
                field = hpack.HeaderTuple(*table.get_by_index(index))
            elif first & 0xE0 == NO_TABLE:  # The byte begins a table size update (RFC 7541, 6.3).
                size, position = _read_integer(data, position, 5)
                size_update_count += 1
                if fields or size_update_count > SIZE_UPDATES_MAX:
                    raise hpack.HPACKDecodingError("the size of the table changes after a field, or too often")
                if size > self.max_allowed_table_size:
                    raise InvalidTableSizeError("a table size update is larger than allowed")
                self.header_table_size = size
                continue
            else:  # The byte begins a literal value, whose name is literal or in the table (RFC 7541, 6.2).
                index, position = _read_integer(data, position, 6 if first & 0x40 else 4)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, position = _read_text(data, position)
                value, position = _read_text(data, position)
                if first & 0x40:
                    table.add(name, value)
                kind = hpack.NeverIndexedHeaderTuple if first & 0x50 == 0x10 else hpack.HeaderTuple
                field = kind(name, value)
            fields.append(field)
            list_bytes += table_entry_size(field[0], field[1])
            if list_bytes > self.max_header_list_size or len(fields) > self._fields_max:
                raise hpack.OversizedHeaderListError(
                    f"the header fields are too many or too long: at most {self._fields_max} are allowed, and "
                    f"{self.max_header_list_size} bytes"
                )
        return fields

    def _set_validation(self, is_needed: bool) -> None:
        if self._config.validate_inbound_headers is not is_needed:
            self._config.validate_inbound_headers = self._config.normalize_inbound_headers = is_needed


def _read_integer(data: bytes, position: int, prefix_bits: int) -> tuple[int, int]:
    """Decode an integer (RFC 7541, 5.1). Return the integer and the position after it."""
    try:
        mask = (1 << prefix_bits) - 1
        value = data[position] & mask
        position += 1
        if value < mask:
            return value, position
        for shift in range(0, 7 * INTEGER_BYTES_MAX, 7):
            following = data[position]
            position += 1
            value += (following & 0x7F) << shift
            if following < 0x80:
                return value, position
    except IndexError:
        raise hpack.HPACKDecodingError("the block ends within a number") from None
    raise hpack.HPACKDecodingError("a number has too many bytes")


def _read_text(data: bytes, position: int) -> tuple[bytes, int]:
    """Decode a string (RFC 7541, 5.2). Return the string and the position after it."""
    if position >= len(data):
        raise hpack.HPACKDecodingError("the block ends before a string")
    is_huffman = data[position] & 0x80
    byte_count, position = _read_integer(data, position, 7)
    end = position + byte_count
    if end > len(data):
        raise hpack.HPACKDecodingError("the block ends within a string")
    text = data[position:end]
    return _plain_text(text) if is_huffman else text, end


_huffman_steps: dict[int, tuple[int, bytes]] = {}
"""A cache of Huffman decoding steps for whole bytes, built from hpack's table for half bytes.

The key is the state and the byte, the value is the next state and the decoded symbols. The cache has at most 65,536
entries, which are computed when first needed. Decoding is four times as fast as with hpack's own loop."""
_HUFFMAN_ENDS = 1 << 8  # The flag marks a state in which a string may end.


def _plain_text(coded: bytes) -> bytes:
    """Decode a Huffman-coded string (RFC 7541, 5.2)."""
    parts = []
    state = _HUFFMAN_ENDS
    steps = _huffman_steps
    for byte in coded:
        key = (state & 0xFF) << 8 | byte
        step = steps.get(key)
        if step is None:
            step = steps[key] = _huffman_step(state & 0xFF, byte)
        state, symbols = step
        parts.append(symbols)
    if not state & _HUFFMAN_ENDS:
        raise hpack.HPACKDecodingError("a Huffman-coded string ends within a symbol")
    return b"".join(parts)


def _huffman_step(state: int, byte: int) -> tuple[int, bytes]:
    symbols = bytearray()
    flags = 0
    for half in (byte >> 4, byte & 0xF):
        state, flags, symbol = HUFFMAN_TABLE[state * 16 + half]
        if flags & HUFFMAN_FAIL:
            raise hpack.HPACKDecodingError("a Huffman-coded string has a symbol that is not allowed")
        if flags & HUFFMAN_EMIT_SYMBOL:
            symbols.append(symbol)
    return state | (_HUFFMAN_ENDS if flags & HUFFMAN_COMPLETE else 0), bytes(symbols)


def is_ordinary(fields: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether the fields are those of an ordinary request, which h2 would accept without a change.

    Args:
        fields: names and values, in order.
    """
    text = b"".join([b"%b\n%b\n" % field for field in fields])
    return (
        _ORDINARY.fullmatch(text) is not None
        and text.count(b"\n") == 2 * len(fields)
        and len({name for name, _ in fields[:4]}) == 4
    )


class FieldEncoder:
    """A replacement for hpack's Encoder, which uses no dynamic table.

    The first block sets the table size to 0. After that, the client may change the table size at any time without
    effect (RFC 7541, 4.2).

    Attributes:
        header_table_size: the table size that the client offers. h2 sets this attribute, but the encoder does not use
            it.
    """

    def __init__(self) -> None:
        self.header_table_size = 0
        self._has_begun = False

    def encode(self, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts = [] if self._has_begun else [bytes((NO_TABLE,))]
        self._has_begun = True
        for name, value in fields:
            index = _FIELD_INDEXES.get((name, value))
            if index is not None:
                parts.append(bytes((INDEXED | index,)))
            else:
                parts.append(_name_part(name) + _length(value) + value)
        return b"".join(parts)


@functools.lru_cache(maxsize=1000)
def _name_part(name: bytes) -> bytes:
    """Encode the name of a literal field without indexing. Huffman coding would cost more than it saves."""
    index = _NAME_INDEXES.get(name)
    if index is not None:
        return _integer(index, 4, NAMED)
    return bytes((NAMED,)) + _length(name) + name


def _length(text: bytes) -> bytes:
    return bytes((len(text),)) if len(text) < 127 else _integer(len(text), 7, 0)


def _integer(value: int, prefix_bits: int, first_bits: int) -> bytes:
    encoded = encode_integer(value, prefix_bits)
    encoded[0] |= first_bits
    return bytes(encoded)


def error_code_of(error: h2.exceptions.ProtocolError) -> ErrorCodes:
    """Return the error code of the GOAWAY for a protocol error.

    h2 gives no error code for header blocks that cannot be decoded, so this error is recognised by its cause.

    Args:
        error: the error that h2 or FrameGate raised.
    """
    if isinstance(error.__cause__, hpack.HPACKError) and not isinstance(error, h2.exceptions.DenialOfServiceError):
        return ErrorCodes.COMPRESSION_ERROR
    return ErrorCodes(error.error_code)


def refusal_of(error: h2.exceptions.ProtocolError) -> ConnectionRefusal:
    if isinstance(error, Flood):
        return error.reason
    if isinstance(error, h2.exceptions.DenialOfServiceError):
        return ConnectionRefusal.HEAD_TOO_LARGE  # h2 raises this error only for a decoded head that is too large.
    if isinstance(error, h2.exceptions.FrameTooLargeError):
        return ConnectionRefusal.FRAME_TOO_LARGE
    return ConnectionRefusal.MALFORMED


# At most this number of request bytes may be in flight on one connection. The windows of the streams limit the bytes
# that are held in memory.
CONNECTION_WINDOW_BYTES = 1024 * 1024


class H2Protocol(h2.connection.H2Connection):
    """h2's connection, extended with a faster encoding of the frames of responses."""

    # Closed streams are remembered to accept late frames for them. h2's default of 65,536 streams would need megabytes
    # per connection.
    MAX_CLOSED_STREAMS = 4096

    def window_of(self, stream_id: int) -> int:
        """Return the bytes that a stream may send now, as h2's local_flow_control_window does.

        Args:
            stream_id: a stream whose head was sent.
        """
        return min(self.outbound_flow_control_window, self.streams[stream_id].outbound_flow_control_window)

    def head_frames(self, stream_id: int, fields: list[tuple[bytes, bytes]], *, end_stream: bool) -> bytes:
        """Encode the head of a response, as h2's send_headers does.

        This method uses h2's state machines, but builds the frames directly. The caller must send data_to_send() before
        these frames.

        Args:
            stream_id: the stream of the request.
            fields: names and values of pseudo-fields and header fields.
            end_stream: True if the response has no body.
        """
        self.state_machine.process_input(ConnectionInputs.SEND_HEADERS)
        stream = self.streams[stream_id].state_machine
        stream.process_input(StreamInputs.SEND_HEADERS)
        block = self.encoder.encode(fields)
        if end_stream:
            stream.process_input(StreamInputs.SEND_END_STREAM)
        kind, flags = HEADERS, END_STREAM if end_stream else 0
        frames = bytearray()
        size_max = self.max_outbound_frame_size
        while len(block) > size_max:
            frames += frame(kind, flags, stream_id, block[:size_max])
            kind, flags, block = CONTINUATION, 0, block[size_max:]
        return bytes(frames) + frame(kind, flags | END_HEADERS, stream_id, block)

    def data_frame(self, stream_id: int, data: bytes, *, end_stream: bool = False) -> bytes:
        """Encode a DATA frame, as h2's send_data does.

        h2's state machines would be most of the cost of an event. DATA changes their state only if it ends the stream,
        so other DATA bypasses them. The caller must respect the windows and the frame size, and must send
        data_to_send() before the frame.

        Args:
            stream_id: a stream whose head was sent.
            data: bytes of the body.
            end_stream: True if these are the last bytes of the body.
        """
        stream = self.streams[stream_id]
        if end_stream:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        byte_count = len(data)
        stream.outbound_flow_control_window -= byte_count
        self.outbound_flow_control_window -= byte_count
        return frame(DATA, END_STREAM if end_stream else 0, stream_id, data)


def initiated_protocol(limits: FrontendLimits) -> H2Protocol:
    """Make an h2 connection for a server, with its first SETTINGS frame ready to be sent.

    Args:
        limits: limits of the server, some of which become settings of the connection.
    """
    config = h2.config.H2Configuration(
        client_side=False,
        header_encoding=None,
        validate_outbound_headers=False,  # The function encode_fields validates the fields, for all protocols.
        normalize_outbound_headers=False,
    )
    protocol = H2Protocol(config)
    protocol.encoder = FieldEncoder()  # type: ignore[assignment]
    protocol.decoder = FieldDecoder(config, list_bytes_max=limits.head_bytes_max, fields_max=limits.fields_max)
    settings: dict[SettingCodes, int] = {
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
        SettingCodes.MAX_HEADER_LIST_SIZE: limits.head_bytes_max,
        SettingCodes.ENABLE_CONNECT_PROTOCOL: 1,  # Clients may open websockets (RFC 8441).
    }
    protocol.local_settings = Settings(client=False, initial_values=settings)
    protocol.initiate_connection()
    # h2 would end a connection that opens too many streams. The server refuses only the stream (RFC 9113, 5.1.2), so h2
    # must accept the stream.
    settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 2**31 - 1
    protocol.local_settings = Settings(client=False, initial_values=settings)
    protocol.increment_flow_control_window(CONNECTION_WINDOW_BYTES - protocol.inbound_flow_control_window)
    return protocol


def request_head(event: h2.events.RequestReceived, peer: str) -> RequestHead:
    """Convert a request from h2, which has checked the fields. ":authority" becomes "host" if "host" is missing (RFC
    9113, 8.3.1). A CONNECT that opens a websocket (RFC 8441) becomes a GET, as on HTTP/1.1.

    Args:
        event: the event from h2.
        peer: the client's address.
    """
    pseudo: dict[bytes, str] = {}
    fields = []
    for name, value in event.headers or ():
        if name.startswith(b":"):
            pseudo[bytes(name)] = value.decode("latin-1")
        else:
            fields.append((name.decode("latin-1"), value.decode("latin-1")))
    authority = pseudo.get(b":authority")
    if authority is not None and not any(name == "host" for name, _ in fields):
        fields.insert(0, ("host", authority))
    path, query = split_target(pseudo.get(b":path", authority or ""))
    is_websocket = pseudo[b":method"] == "CONNECT" and pseudo.get(b":protocol") == "websocket"
    return RequestHead(
        method="GET" if is_websocket else pseudo[b":method"],
        path=path,
        query=query,
        headers=Headers(fields),
        http_version="2",
        peer=peer,
        is_websocket=is_websocket,
    )
