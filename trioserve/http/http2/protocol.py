"""How h2 is set up for a server of ours, and how its request headers become a request's head."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
from h2.connection import ConnectionInputs
from h2.settings import SettingCodes, Settings
from h2.stream import StreamInputs

from trioserve.http.headers import Headers
from trioserve.http.http2.fields import FieldDecoder, FieldEncoder
from trioserve.http.http2.frames import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, frame
from trioserve.http.limits import FrontendLimits
from trioserve.http.message_head import RequestHead, split_target

__all__ = ["H2Protocol", "initiated_protocol", "request_head"]

CONNECTION_WINDOW_BYTES = 1024 * 1024  # bytes on their way to us; what is held of them, the streams' windows bound


class H2Protocol(h2.connection.H2Connection):
    MAX_CLOSED_STREAMS = 4096  # remembered to tell late frames from wrong ones; h2's 65,536 are megabytes a connection

    def window_of(self, stream_id: int) -> int:
        """What local_flow_control_window says of a stream whose head was sent."""
        return min(self.outbound_flow_control_window, self.streams[stream_id].outbound_flow_control_window)

    def head_frames(self, stream_id: int, fields: list[tuple[bytes, bytes]], *, end_stream: bool) -> bytes:
        """What send_headers makes of the final head of a response: the state machines are asked, and the frames are
        made by hand. The caller sends it after whatever data_to_send has."""
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
        """What send_data(stream_id, data) makes, without the way through h2's state machines, which DATA that does not
        end its stream leaves as they are: that way is most of what an event costs. The caller keeps to the windows and
        the frame size, sends it after whatever data_to_send has, and only on a stream whose head was sent.
        """
        stream = self.streams[stream_id]
        if end_stream:
            stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        byte_count = len(data)
        stream.outbound_flow_control_window -= byte_count
        self.outbound_flow_control_window -= byte_count
        return frame(DATA, END_STREAM if end_stream else 0, stream_id, data)


def initiated_protocol(limits: FrontendLimits) -> H2Protocol:
    """h2's connection with our settings, ready to be sent."""
    config = h2.config.H2Configuration(
        client_side=False,
        header_encoding=None,
        validate_outbound_headers=False,  # done by encode_fields, for every protocol
        normalize_outbound_headers=False,
    )
    protocol = H2Protocol(config)
    protocol.encoder = FieldEncoder()  # type: ignore[assignment]
    protocol.decoder = FieldDecoder(config, list_bytes_max=limits.head_bytes_max, fields_max=limits.fields_max)
    settings: dict[SettingCodes, int] = {
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
        SettingCodes.MAX_HEADER_LIST_SIZE: limits.head_bytes_max,
    }
    protocol.local_settings = Settings(client=False, initial_values=settings)
    protocol.initiate_connection()
    # h2 ends a connection that opens too many streams. We refuse the stream alone (RFC 9113, 5.1.2), so h2 has to let
    # them pass.
    settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 2**31 - 1
    protocol.local_settings = Settings(client=False, initial_values=settings)
    protocol.increment_flow_control_window(CONNECTION_WINDOW_BYTES - protocol.inbound_flow_control_window)
    return protocol


def request_head(event: h2.events.RequestReceived, peer: str) -> RequestHead:
    """h2 has checked the fields; ":authority" takes the place of "host" (RFC 9113, 8.3.1)."""
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
    return RequestHead(
        method=pseudo[b":method"],
        path=path,
        query=query,
        headers=Headers(fields),
        http_version="2",
        peer=peer,
    )
