"""Frames that are built past h2 are the frames that h2 builds, and leave its books as h2 leaves them."""

from __future__ import annotations

import h2.config
import h2.connection
import pytest

from trioserve.frontend.h2_protocol import initiated_protocol
from trioserve.frontend.limits import FrontendLimits


def answering():
    """A server's protocol with one stream whose head was sent."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(
        1, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "test")], end_stream=True
    )
    protocol = initiated_protocol(FrontendLimits())
    protocol.receive_data(client.data_to_send())
    protocol.send_headers(1, [(b":status", b"200")])
    client.receive_data(protocol.data_to_send())
    return protocol, client


@pytest.mark.parametrize("size", [0, 1, 255, 256, 16384])
def test_the_same_bytes_and_the_same_windows(size):
    (ours, client), (theirs, _) = answering(), answering()
    data = bytes(size)
    for _ in range(2):
        theirs.send_data(1, data)
        frame = ours.data_frame(1, data)
        assert frame == theirs.data_to_send()
        assert ours.local_flow_control_window(1) == theirs.local_flow_control_window(1)
        assert ours.outbound_flow_control_window == theirs.outbound_flow_control_window
        assert [event.data for event in client.receive_data(frame)] == [data]
    assert ours.data_to_send() == b""
    ours.end_stream(1)
    assert ours.data_to_send()
