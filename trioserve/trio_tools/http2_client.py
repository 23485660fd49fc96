"""Client side of HTTP/2 on h2, without I/O: requests, resets, flow control, and servers that send GOAWAY.

The client gives credit (a window update) for received data at once, unless its caller withholds credit. The server may
be hostile, so this client limits everything that it stores for a server.

Unknown settings are removed from the SETTINGS frames of a peer (RFC 9113, 6.5). h2 stores every identifier that a peer
sends, and iterates over all of them for each later SETTINGS frame. So our servers and clients first pass a peer's
SETTINGS through `known_settings`.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame

from trioserve.trio_tools.http_client import (
    INTERIM_RESPONSES_MAX,
    Fields,
    ResponseEnd,
    ResponseListener,
    ResponseResult,
)

__all__ = ["Goaway", "HEADER_TABLE_BYTES_MAX", "Http2ClientProtocol", "known_settings"]


HEADER_TABLE_SIZE = 0x1
# Settings of RFC 9113, section 6.5.2, and SETTINGS_ENABLE_CONNECT_PROTOCOL (RFC 8441). A receiver ignores
# all other settings.
_KNOWN = frozenset({HEADER_TABLE_SIZE, 0x2, 0x3, 0x4, 0x5, 0x6, 0x8})
HEADER_TABLE_BYTES_MAX = 4096
"""Maximum size of the header table that our encoders use, in bytes: HTTP/2's default. The peer may offer any size.
hpack's encoder would fill a table of that size, and search all of it for each field.
"""
_SETTING = struct.Struct(">HI")


def known_settings(payload: bytes) -> bytes:
    """Return the payload of a SETTINGS frame without unknown identifiers. Each known identifier appears once, with its
    last value.

    Args:
        payload: Payload of a frame without the ACK flag. If its length is not a multiple of 6, it is returned
            unchanged, and h2 reports the error.

    Returns:
        The payload, with at most seven settings. SETTINGS_HEADER_TABLE_SIZE is reduced to HEADER_TABLE_BYTES_MAX.
    """
    if len(payload) % _SETTING.size:
        return payload
    kept: dict[int, int] = {}
    for identifier, value in _SETTING.iter_unpack(payload):
        if identifier in _KNOWN:
            kept[identifier] = value
    if HEADER_TABLE_SIZE in kept:
        kept[HEADER_TABLE_SIZE] = min(kept[HEADER_TABLE_SIZE], HEADER_TABLE_BYTES_MAX)
    return b"".join(_SETTING.pack(identifier, value) for identifier, value in kept.items())


DEFAULT_WINDOW_BYTES = 65_535  # RFC 9113, section 6.9.2, defines this initial window.
FRAME_HEADER_BYTES = 9
FRAME_BYTES_MAX = 16_384  # This is the default of HTTP/2. This client does not raise it.
SETTINGS, PING, GOAWAY = 0x04, 0x06, 0x07
ACK = 0x1
ANSWERED_FRAMES_MAX = 10_000
"""Maximum number of PING and SETTINGS frames that a server may send between two writes of this client. The replies are
stored until the next write.
"""


class Goaway(NamedTuple):
    """The server accepts no further requests. Streams up to last_stream_id continue."""

    last_stream_id: int
    error: str


class Http2ClientProtocol:
    """An HttpClientProtocol. A request's number is its stream id.

    Args:
        authority: Value of :authority.
        scheme: Value of :scheme.
        window_bytes: Bytes of one response that the server may send before it gets credit.
        connection_window_bytes: Bytes of all responses together that the server may send before it gets credit.

    Attributes:
        is_settled: True once the server's first SETTINGS arrived.
        streams_max: Number of streams that the server allows at the same time. Until its SETTINGS arrive, a default
            value.
        goaway: The latest GOAWAY, or None if there was none.
    """

    def __init__(
        self,
        *,
        authority: str,
        scheme: str = "http",
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        connection_window_bytes: int = DEFAULT_WINDOW_BYTES,
    ) -> None:
        self.is_settled = False
        self.goaway: Goaway | None = None
        self._pseudo = [(":scheme", scheme), (":authority", authority)]
        self._h2 = _H2Connection(h2.config.H2Configuration(client_side=True))
        codes = h2.settings.SettingCodes
        values = {codes.ENABLE_PUSH: 0, codes.INITIAL_WINDOW_SIZE: window_bytes}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=values)
        self._h2.initiate_connection()
        if connection_window_bytes > DEFAULT_WINDOW_BYTES:
            self._h2.increment_flow_control_window(connection_window_bytes - DEFAULT_WINDOW_BYTES)
        self.streams_max: int = self._h2.remote_settings.max_concurrent_streams
        self._frames = _FrameSplitter()
        self._streams: dict[int, _Stream] = {}
        self._goaway_bytes = b""

    @property
    def stream_count(self) -> int:
        """Return the number of requests whose response has not ended."""
        return len(self._streams)

    def begin(self, method: str, path: str, fields: Fields, listener: ResponseListener, *, has_body: bool) -> int:
        stream_id = self._h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), *self._pseudo]
        self._h2.send_headers(stream_id, [*pseudo, *fields], end_stream=not has_body)
        self._streams[stream_id] = _Stream(listener, is_sent=not has_body)
        return stream_id

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.unsent = memoryview(bytes(stream.unsent) + data) if stream.unsent else memoryview(data)
        stream.ends = is_last
        if is_last and not stream.unsent:
            self._h2.end_stream(number)
            stream.is_sent = True
        self._send_within_windows(number, stream)

    def unsent_bytes(self, number: int) -> int:
        stream = self._streams.get(number)
        return 0 if stream is None else len(stream.unsent)

    def reset(self, number: int) -> bool:
        self._forget(number)
        with contextlib.suppress(h2.exceptions.ProtocolError):  # The stream or the connection has already ended.
            self._h2.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
        return True

    def withhold_credit(self, number: int) -> bool:
        stream = self._streams.get(number)
        if stream is not None and stream.withheld_bytes is None:
            stream.withheld_bytes = 0
        return True

    def grant_one_byte(self, number: int) -> None:
        """Let the server send one more byte of a response whose credit is withheld. Does nothing if the response has
        ended.

        Args:
            number: Number of the request.
        """
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self._h2.increment_flow_control_window(1, number)

    def grant_credit(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is not None and stream.withheld_bytes is not None:
            byte_count, stream.withheld_bytes = stream.withheld_bytes, None
            self._h2.acknowledge_received_data(byte_count, number)

    def send_goaway(self) -> None:
        """Send GOAWAY. Running requests continue: a GOAWAY of a client concerns only streams that the server opened,
        and the server opens none.
        """
        # Encode the frame without h2, which would accept no further frames after its own GOAWAY.
        self._goaway_bytes += hyperframe.frame.GoAwayFrame(0).serialize()

    def receive(self, data: bytes) -> None:
        if not data:
            for stream_id in list(self._streams):
                self._end(stream_id, ResponseResult.DISCONNECTED, "")
            return
        for event in self._h2.receive_data(self._frames.feed(data)):
            self._handle(event)
        changes = self._h2.encoder.table_size_changes
        if len(changes) > 2:  # Only the smallest and the last change must be sent (RFC 7541, section 4.2).
            self._h2.encoder.table_size_changes = [min(changes), changes[-1]]
        goaway = self._frames.goaway
        if goaway is not None and goaway is not self.goaway:
            self.goaway = goaway
            unseen = [stream_id for stream_id in self._streams if stream_id > goaway.last_stream_id]
            for stream_id in unseen:
                self._end(stream_id, ResponseResult.UNPROCESSED, goaway.error)

    def pop_unsent(self) -> bytes:
        unsent = self._h2.data_to_send()
        self._frames.answered_count = 0
        if self._goaway_bytes:
            unsent, self._goaway_bytes = unsent + self._goaway_bytes, b""
        return unsent

    def _handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            stream_id, byte_count = event.stream_id, event.flow_controlled_length or 0
            stream = self._streams.get(stream_id)
            if stream is None:
                self._h2.acknowledge_received_data(byte_count, stream_id)
                return
            if stream.withheld_bytes is None:
                self._h2.acknowledge_received_data(byte_count, stream_id)
            else:
                stream.withheld_bytes += byte_count
            if event.data:
                stream.listener.on_body(event.data)
        elif isinstance(event, h2.events.StreamEnded):
            self._end(event.stream_id, ResponseResult.COMPLETE, "")
        elif isinstance(event, h2.events.ResponseReceived):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                fields = list(event.headers or ())
                _name, status = fields.pop(0)  # h2 has checked that the first field is `:status`.
                stream.listener.on_head(int(status), fields)
        elif isinstance(event, h2.events.InformationalResponseReceived):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.interim_count += 1
                if stream.interim_count > INTERIM_RESPONSES_MAX:
                    raise h2.exceptions.ProtocolError(f"more than {INTERIM_RESPONSES_MAX} interim responses came")
        elif isinstance(event, h2.events.StreamReset):
            self._end(event.stream_id, ResponseResult.RESET, _error_name(event.error_code))
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self.is_settled = True
            self.streams_max = self._h2.remote_settings.max_concurrent_streams
            self._send_all_within_windows()
        elif isinstance(event, h2.events.WindowUpdated):
            self._send_all_within_windows()

    def _send_all_within_windows(self) -> None:
        for stream_id, stream in self._streams.items():
            self._send_within_windows(stream_id, stream)

    def _send_within_windows(self, stream_id: int, stream: _Stream) -> None:
        while stream.unsent:
            window = self._h2.local_flow_control_window(stream_id)
            size = min(window, self._h2.max_outbound_frame_size, len(stream.unsent))
            if size <= 0:
                return
            piece, stream.unsent = stream.unsent[:size], stream.unsent[size:]
            stream.is_sent = stream.ends and not stream.unsent
            self._h2.send_data(stream_id, bytes(piece), end_stream=stream.is_sent)

    def _end(self, stream_id: int, result: ResponseResult, error: str) -> None:
        stream = self._forget(stream_id)
        if stream is not None:
            stream.listener.on_end(ResponseEnd(result, error, stream.is_sent))

    def _forget(self, stream_id: int) -> _Stream | None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.withheld_bytes:
            with contextlib.suppress(h2.exceptions.ProtocolError):  # The connection has already ended.
                # Give this credit back to the connection, because other streams need it.
                self._h2.acknowledge_received_data(stream.withheld_bytes, stream_id)
        return stream


class _Stream:
    """State of one request.

    Attributes:
        listener: Receives the response.
        interim_count: Number of heads with a status of 1xx so far.
        unsent: Bytes of the body that wait for the server's windows.
        ends: True if no bytes of the body follow after `unsent`.
        is_sent: True if the whole request was sent.
        withheld_bytes: Number of received bytes for which no credit was given. None if credit is given at once.
    """

    __slots__ = ("ends", "interim_count", "is_sent", "listener", "unsent", "withheld_bytes")

    def __init__(self, listener: ResponseListener, *, is_sent: bool) -> None:
        self.listener = listener
        self.interim_count = 0
        self.unsent = memoryview(b"")
        self.ends = is_sent
        self.is_sent = is_sent
        self.withheld_bytes: int | None = None


class _H2Connection(h2.connection.H2Connection):
    # h2 remembers closed streams, to distinguish late frames from invalid frames. Its default of 65,536 takes
    # megabytes.
    MAX_CLOSED_STREAMS = 4096


class _FrameSplitter:
    """Splits received bytes into complete frames for h2.

    The splitter removes GOAWAY, because h2 refuses every frame after a GOAWAY. But a server that stops gracefully first
    finishes its streams (RFC 9113, 6.8). The splitter also removes unknown settings, which h2 would store without
    limit.

    Attributes:
        goaway: The latest GOAWAY, or None if there was none.
        answered_count: Number of frames since the last write that h2 answers.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.goaway: Goaway | None = None
        self.answered_count = 0

    def feed(self, piece: bytes) -> bytes:
        """Add received bytes, and return the frames that are now complete. A frame that is too long is returned
        unchanged, and h2 refuses it.

        Args:
            piece: Received bytes.

        Raises:
            ProtocolError: the server sends PING or SETTINGS faster than it reads the replies to them.
        """
        buffer = self._rest + piece
        kept: list[bytes] = []
        position, kept_to = 0, 0
        while len(buffer) - position >= FRAME_HEADER_BYTES:
            length = int.from_bytes(buffer[position : position + 3])
            kind, flags = buffer[position + 3], buffer[position + 4]
            payload_at = position + FRAME_HEADER_BYTES
            end = payload_at + length
            if length > FRAME_BYTES_MAX:
                position = len(buffer)
                continue
            if end > len(buffer):
                break
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.answered_count += 1
                if self.answered_count > ANSWERED_FRAMES_MAX:
                    raise h2.exceptions.ProtocolError("the server does not read the answers to its control frames")
            if kind == GOAWAY and length >= 8:
                kept.append(buffer[kept_to:position])
                code = int.from_bytes(buffer[payload_at + 4 : payload_at + 8])
                last_stream_id = int.from_bytes(buffer[payload_at : payload_at + 4]) & 0x7FFF_FFFF
                self.goaway = Goaway(last_stream_id, _error_name(code))
                kept_to = end
            elif kind == SETTINGS and length and not flags & ACK:
                kept.append(buffer[kept_to:position])
                payload = known_settings(buffer[payload_at:end])
                kept.append(len(payload).to_bytes(3) + buffer[position + 3 : payload_at] + payload)
                kept_to = end
            position = end
        self._rest = buffer[position:]
        kept.append(buffer[kept_to:position])
        return b"".join(kept)


def _error_name(code: int | None) -> str:
    try:
        return h2.errors.ErrorCodes(code or 0).name
    except ValueError:
        return f"error {code}"
