"""What goes past h2 is what it would have made of it, and leaves its books as it leaves them."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.exceptions
import pytest

from trioserve.frontend.h2_frames import END_HEADERS, HEADERS, frame
from trioserve.frontend.h2_protocol import initiated_protocol
from trioserve.frontend.limits import FrontendLimits


def asked(*, is_whole: bool = True):
    """A server's protocol with one stream, to be answered."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(
        1, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "test")], end_stream=is_whole
    )
    protocol = initiated_protocol(FrontendLimits())
    protocol.receive_data(client.data_to_send())
    client.receive_data(protocol.data_to_send())
    return protocol, client


def answering():
    """The same, and the head of the answer was sent."""
    protocol, client = asked()
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


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("end_stream", [False, True])
@pytest.mark.parametrize("value_bytes", [1, 16_300, 16_384, 40_000])
def test_a_head_is_the_same_bytes_and_the_same_state(value_bytes, end_stream, is_whole):
    (ours, client), (theirs, _) = asked(is_whole=is_whole), asked(is_whole=is_whole)
    fields = [(b":status", b"200"), (b"x-own", b"v" * value_bytes)]
    theirs.send_headers(1, fields, end_stream=end_stream)
    frames = ours.head_frames(1, fields, end_stream=end_stream)
    assert frames == theirs.data_to_send()
    assert states(ours) == states(theirs)
    client.receive_data(frames)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("data", [b"", b"the last"])
def test_the_end_of_an_answer_is_the_same_bytes_and_the_same_state(data, is_whole):
    (ours, client), (theirs, _) = asked(is_whole=is_whole), asked(is_whole=is_whole)
    for protocol in (ours, theirs):
        protocol.send_headers(1, [(b":status", b"200")])
    client.receive_data(ours.data_to_send() and theirs.data_to_send())
    theirs.send_data(1, data, end_stream=True)
    end = ours.data_frame(1, data, end_stream=True)
    assert end == theirs.data_to_send()
    assert states(ours) == states(theirs)
    assert ours.outbound_flow_control_window == theirs.outbound_flow_control_window
    client.receive_data(end)


@pytest.mark.parametrize("answer", ["head_frames", "data_frame"])
def test_a_stream_that_was_reset_is_not_answered(answer):
    protocol, _ = answering()
    protocol.reset_stream(1)
    with pytest.raises(h2.exceptions.StreamClosedError):
        if answer == "head_frames":
            protocol.head_frames(1, [(b":status", b"200")], end_stream=False)
        else:
            protocol.data_frame(1, b"", end_stream=True)


def test_nothing_is_answered_after_an_error_of_the_connection():
    protocol, _ = asked()
    with pytest.raises(h2.exceptions.ProtocolError):
        protocol.receive_data(frame(HEADERS, END_HEADERS, 2, b""))
    with pytest.raises(h2.exceptions.ProtocolError):
        protocol.head_frames(1, [(b":status", b"200")], end_stream=False)


def states(protocol):
    return protocol.state_machine.state, vars(protocol.streams[1].state_machine)
