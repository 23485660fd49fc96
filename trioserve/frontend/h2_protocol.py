"""How h2 is set up for a server of ours, and how its request headers become a request's head."""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes, Settings

from trioserve.frontend.h2_fields import FieldEncoder
from trioserve.frontend.headers import Headers
from trioserve.frontend.limits import FrontendLimits
from trioserve.frontend.message_head import RequestHead, split_target

__all__ = ["H2Protocol", "initiated_protocol", "request_head"]

DATA_HEAD = struct.Struct(">HBBBL")  # length, DATA, no flags, stream (RFC 9113, 4.1)
CONNECTION_WINDOW_BYTES = 1024 * 1024  # bytes on their way to us; what is held of them, the streams' windows bound


class H2Protocol(h2.connection.H2Connection):
    MAX_CLOSED_STREAMS = 4096  # remembered to tell late frames from wrong ones; h2's 65,536 are megabytes a connection

    def window_of(self, stream_id: int) -> int:
        """What local_flow_control_window says of a stream whose head was sent."""
        return min(self.outbound_flow_control_window, self.streams[stream_id].outbound_flow_control_window)

    def data_frame(self, stream_id: int, data: bytes) -> bytes:
        """What send_data(stream_id, data) makes, without the way through h2's state machines, which DATA that does not
        end its stream leaves as they are: that way is most of what an event costs. The caller keeps to the windows and
        the frame size, sends it after whatever data_to_send has, and only on a stream whose head was sent.
        """
        byte_count = len(data)
        self.streams[stream_id].outbound_flow_control_window -= byte_count
        self.outbound_flow_control_window -= byte_count
        return DATA_HEAD.pack(byte_count >> 8, byte_count & 0xFF, 0, 0, stream_id) + data


def initiated_protocol(limits: FrontendLimits) -> H2Protocol:
    """h2's connection with our settings, ready to be sent."""
    protocol = H2Protocol(
        h2.config.H2Configuration(
            client_side=False,
            header_encoding=None,
            validate_outbound_headers=False,  # done by encode_fields, for every protocol
            normalize_outbound_headers=False,
        )
    )
    protocol.encoder = FieldEncoder()  # type: ignore[assignment]
    settings: dict[SettingCodes, int] = {
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
        SettingCodes.MAX_HEADER_LIST_SIZE: limits.head_bytes_max,
    }
    protocol.local_settings = Settings(client=False, initial_values=settings)
    protocol.decoder.max_header_list_size = limits.head_bytes_max
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
