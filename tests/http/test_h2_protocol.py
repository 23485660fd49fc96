"""Tests the code that bypasses h2 and hpack. It must produce the same bytes and the same state as these libraries."""

from __future__ import annotations

import copy

import h2.config
import h2.connection
import h2.exceptions
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.http.http2.frames import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from trioserve.http.http2.protocol import initiated_protocol, is_ordinary
from trioserve.http.limits import FrontendLimits


def asked(*, is_whole: bool = True):
    """Return the protocols of a server and a client after a request. If `is_whole`, the request has no body."""
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
    """Return the protocols that `asked` returns, after the head of the response was sent."""
    protocol, client = asked()
    protocol.send_headers(1, [(b":status", b"200")])
    client.receive_data(protocol.data_to_send())
    return protocol, client


@pytest.mark.parametrize("size", [0, 1, 255, 256, 16384])
def test_data_frame_has_the_same_effect_as_h2(size):
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
def test_head_frames_have_the_same_effect_as_h2(value_bytes, end_stream, is_whole):
    (ours, client), (theirs, _) = asked(is_whole=is_whole), asked(is_whole=is_whole)
    fields = [(b":status", b"200"), (b"x-own", b"v" * value_bytes)]
    theirs.send_headers(1, fields, end_stream=end_stream)
    frames = ours.head_frames(1, fields, end_stream=end_stream)
    assert frames == theirs.data_to_send()
    assert states(ours) == states(theirs)
    client.receive_data(frames)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("data", [b"", b"the last"])
def test_end_of_a_response_has_the_same_effect_as_h2(data, is_whole):
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


@pytest.mark.parametrize("response", ["head_frames", "data_frame"])
def test_response_on_a_reset_stream_is_an_error(response):
    protocol, _ = answering()
    protocol.reset_stream(1)
    with pytest.raises(h2.exceptions.StreamClosedError):
        if response == "head_frames":
            protocol.head_frames(1, [(b":status", b"200")], end_stream=False)
        else:
            protocol.data_frame(1, b"", end_stream=True)


def test_response_after_a_connection_error_is_an_error():
    protocol, _ = asked()
    with pytest.raises(h2.exceptions.ProtocolError):
        protocol.receive_data(frame(HEADERS, END_HEADERS, 2, b""))
    with pytest.raises(h2.exceptions.ProtocolError):
        protocol.head_frames(1, [(b":status", b"200")], end_stream=False)


def states(protocol):
    return protocol.state_machine.state, vars(protocol.streams[1].state_machine)


# --- what clients send ---

HEAD = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"test"), (b":path", b"/v1/models")]
NAMES = [name for name, _ in HEAD] + [
    b"accept",
    b"x-own_2",
    b"content-length",
    b"cookie",
    b"host",
    b"te",
    b"connection",
    b"keep-alive",
    b"upgrade",
    b"transfer-encoding",
    b"proxy-connection",
    b":status",
    b":protocol",
    b":own",
    b"",
]
VALUES = [
    b"",
    b"1",
    b"test",
    b"http",
    b"trailers",
    b"CONNECT",
    b"a b",
    b" a",
    b"a\t",
    b"a\n",
    b"a\nx-other\nb",
    b"\xe9",
    b"\0",
]
FIELD = st.tuples(st.sampled_from(NAMES) | st.binary(max_size=3), st.sampled_from(VALUES) | st.binary(max_size=3))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9), FIELD),
        st.tuples(st.just("take"), st.integers(0, 9), st.none()),
        st.tuples(st.just("join"), st.integers(0, 9), st.none()),
    ),
    max_size=3,
)


def changed(changes) -> list[tuple[bytes, bytes]]:
    fields = [*HEAD, (b"accept", b"*/*")]
    for change, index, field in changes:
        if change == "put":
            fields.insert(index, field)
        elif change == "take":
            del fields[index : index + 1]
        elif index + 1 < len(fields):  # The single field contains the text of two fields.
            (name, value), (name_2, value_2) = fields[index : index + 2]
            fields[index : index + 2] = [(name, b"\n".join((value, name_2, value_2)))]
    return fields


class Blocks:
    """Header blocks of a client that uses hpack's dynamic table, correctly or not."""

    def __init__(self) -> None:
        self._encoder = hpack.Encoder()
        self._made: list[bytes] = []

    def of(self, changes, kind: str, number: int) -> bytes:
        if kind in ("again", "earlier") and self._made:
            return self._made[-1 if kind == "again" else number % len(self._made)]
        if kind == "other table":
            self._encoder.header_table_size = number * 40
        fields = changed(changes)
        if kind == "apart":  # The encoder has a new table, as if the client had lost its old table.
            block = copy.deepcopy(self._encoder).encode(fields)
        else:
            block = self._encoder.encode(fields, huffman=number % 2 == 0)
        self._made.append(block)
        return block


HEADS = st.lists(
    st.tuples(
        CHANGES,
        st.sampled_from(["in turn", "in turn", "again", "earlier", "apart", "other table"]),
        st.integers(0, 110),
        st.booleans(),
    ),
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(HEADS)
def test_decoded_heads_equal_those_of_h2_and_hpack(heads):
    blocks = Blocks()
    check([(blocks.of(changes, kind, number), is_whole) for changes, kind, number, is_whole in heads])


ACCEPT = (b"accept", b"*/*")
ALMOST_ORDINARY = {
    "a field twice": [*HEAD[:3], HEAD[0]],
    "a field more than once": [*HEAD, HEAD[0]],
    "a pseudo-header too late": [*HEAD[:3], ACCEPT, HEAD[3]],
    "no path": HEAD[:3],
    "CONNECT": [(b":method", b"CONNECT"), *HEAD[1:]],
    "an empty path": [*HEAD[:3], (b":path", b"")],
    "another host": [*HEAD, (b"host", b"other")],
    "two cookies": [*HEAD, (b"cookie", b"a=b"), ACCEPT, (b"cookie", b"c=d")],
    "a blank first": [*HEAD, (b"accept", b" a")],
    "a blank last": [*HEAD, (b"accept", b"a ")],
    "two lines": [*HEAD, (b"accept", b"a\nb")],
    "two lines that look like a field": [*HEAD, (b"accept", b"a\nx-other\nb")],
    "te": [*HEAD, (b"te", b"gzip")],
    "no name": [*HEAD, (b"", b"a")],
    "upper case": [*HEAD, (b"Accept", b"a")],
    "a colon": [*HEAD, (b"x:y", b"a")],
    **{
        name: [*HEAD, (name.encode(), b"a")]
        for name in ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
    },
}


@pytest.mark.parametrize("head", ALMOST_ORDINARY.values(), ids=ALMOST_ORDINARY.keys())
def test_unusual_request_heads_are_decoded_by_h2(head):
    assert is_ordinary([*HEAD, ACCEPT, (b"x-own_2", b""), (b"x-own_2", b"a b")])
    assert not is_ordinary(head)
    check([(hpack.Encoder().encode(head), True)])


def test_hpack_index_means_the_current_table_entry():
    encoder = hpack.Encoder()
    first = [encoder.encode([*HEAD, (b"x-own", b"1")]) for _ in range(2)]
    second = encoder.encode([*HEAD, (b"x-own", b"2")])
    assert check([(block, True) for block in (*first, first[1])]) == 3
    assert check([(block, True) for block in (*first, second, first[1])]) == 3, (
        "the table has changed, so the index means another field"
    )


def check(blocks) -> int:
    """Compare our decoder with hpack and h2.

    Args:
        blocks: pairs of a header block, and True if its request has no body.

    Returns:
        The number of valid blocks.
    """
    ours, theirs = initiated_protocol(FrontendLimits()), initiated_protocol(FrontendLimits())
    theirs.decoder = hpack.Decoder(max_header_list_size=FrontendLimits().head_bytes_max)
    for protocol in (ours, theirs):
        protocol.receive_data(PREFACE + frame(SETTINGS, 0, 0, b""))
    for number, (block, is_whole) in enumerate(blocks):
        sent = frame(HEADERS, END_HEADERS | (END_STREAM if is_whole else 0), 1 + 2 * number, block)
        outcomes = [outcome(protocol, sent) for protocol in (ours, theirs)]
        assert outcomes[0] == outcomes[1]
        assert ours.data_to_send() == theirs.data_to_send()
        assert ours.decoder.header_table.dynamic_entries == theirs.decoder.header_table.dynamic_entries
        assert ours.decoder.header_table.maxsize == theirs.decoder.header_table.maxsize
        if isinstance(outcomes[0], tuple):
            return number
    return len(blocks)


def outcome(protocol, sent: bytes):
    try:
        return [repr(event) for event in protocol.receive_data(sent)]
    except h2.exceptions.ProtocolError as error:
        # The messages are not compared, because only the messages of hpack repeat the client's bytes.
        return type(error), error.error_code


def test_repeated_header_block_is_not_decoded_again():
    protocol = initiated_protocol(FrontendLimits())
    decoder = protocol.decoder
    block = b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in HEAD)
    assert decoder.decode(block) == HEAD
    assert decoder.decode(bytes(bytearray(block))) is decoder.decode(block)
    large = block + b"\0\1x\x7f\x81\x07" + b"v" * 1024
    assert decoder.decode(large) == decoder.decode(large)
    assert decoder.decode(large) is not decoder.decode(large), "what is remembered has a bound"
    assert not protocol.config.validate_inbound_headers
    assert decoder.decode(block + b"\0\1X\1v") == [*HEAD, (b"X", b"v")]
    assert protocol.config.validate_inbound_headers
