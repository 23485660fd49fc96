"""Setup of the h2 library for the server, faster encoding of frames, and conversion of request headers."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
from h2.connection import ConnectionInputs
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from h2.stream import StreamInputs

from trioserve.http.counters import ConnectionRefusal
from trioserve.http.exchange import Headers
from trioserve.http.http2.fields import FieldDecoder, FieldEncoder
from trioserve.http.http2.frames import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, Flood, frame
from trioserve.http.limits import FrontendLimits
from trioserve.http.message_head import RequestHead, split_target

__all__ = ["H2Protocol", "error_code_of", "initiated_protocol", "refusal_of", "request_head"]


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
