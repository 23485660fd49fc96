"""Tests of the client side of HTTP/2, against the server side of the library h2."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest

from trioserve.trio_tools.http2_client import ANSWERED_FRAMES_MAX, Http2ClientProtocol
from trioserve.trio_tools.http_client import INTERIM_RESPONSES_MAX, ResponseEnd, ResponseResult

OK = [(":status", "200"), ("x-name", "value")]


class Heard:
    def __init__(self) -> None:
        self.status: int | None = None
        self.fields: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.end: ResponseEnd | None = None

    def on_head(self, status, fields):
        self.status, self.fields = status, fields

    def on_body(self, data):
        self.body += data

    def on_end(self, end):
        assert self.end is None
        self.end = end


class Pair:
    """A client and a server, and the events that the server received."""

    def __init__(self, **windows: int) -> None:
        self.client = Http2ClientProtocol(authority="test", **windows)
        self.server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.events: list[h2.events.Event] = []
        self.server.initiate_connection()
        self.exchange()

    def exchange(self) -> None:
        """Deliver bytes in both directions until neither side has more to send."""
        from_client, from_server = b"", b""
        while True:
            from_client, from_server = self.client.pop_unsent(), self.server.data_to_send()
            if from_client:
                self.events += self.server.receive_data(from_client)
            if from_server:
                self.client.receive(from_server)
            if not from_client and not from_server:
                return

    def ask(self, body: bytes = b"") -> tuple[int, Heard]:
        heard = Heard()
        number = self.client.begin("POST", "/", [], heard, has_body=bool(body))
        if body:
            self.client.send_body(number, body, is_last=True)
        self.exchange()
        return number, heard

    def heard_of(self, kind: type[h2.events.Event]) -> list[h2.events.Event]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_response_may_arrive_in_pieces_of_any_size():
    pair = Pair()
    number, heard = pair.ask(b"body")
    pair.server.send_headers(number, OK)
    pair.server.send_data(number, b"abc", end_stream=True)
    for byte in pair.server.data_to_send():
        pair.client.receive(bytes([byte]))
    assert (heard.status, heard.fields, heard.body) == (200, [(b"x-name", b"value")], b"abc")
    assert heard.end == ResponseEnd(ResponseResult.COMPLETE)
    assert pair.client.stream_count == 0


def test_server_settings_limit_the_streams():
    client = Http2ClientProtocol(authority="test")
    assert not client.is_settled
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 3})
    client.receive(server.data_to_send())
    assert client.is_settled
    assert client.streams_max == 3


def test_http2_request_body_waits_for_flow_control_credit(pair):
    number, _ = pair.ask(b"x" * 100_000)
    assert pair.client.unsent_bytes(number) == 100_000 - 65_535
    assert not pair.heard_of(h2.events.StreamEnded)
    pair.server.acknowledge_received_data(65_535, number)
    pair.exchange()
    assert pair.client.unsent_bytes(number) == 0
    assert len(pair.heard_of(h2.events.StreamEnded)) == 1
    assert sum(len(event.data) for event in pair.heard_of(h2.events.DataReceived)) == 100_000


def test_http2_request_body_may_be_sent_in_parts(pair):
    number = pair.client.begin("POST", "/", [], Heard(), has_body=True)
    for part in (b"a", b"b"):
        pair.client.send_body(number, part, is_last=False)
    pair.exchange()
    assert b"".join(event.data for event in pair.heard_of(h2.events.DataReceived)) == b"ab"
    assert not pair.heard_of(h2.events.StreamEnded)
    pair.client.send_body(number, b"", is_last=True)
    pair.exchange()
    assert pair.heard_of(h2.events.StreamEnded)


def test_end_of_an_early_response_says_that_the_request_was_not_sent(pair):
    number, heard = pair.ask(b"x" * 100_000)
    pair.server.send_headers(number, OK, end_stream=True)
    pair.exchange()
    assert heard.end == ResponseEnd(ResponseResult.COMPLETE, was_request_sent=False)
    pair.client.send_body(number, b"more", is_last=True)  # The response has ended, so this call is ignored.
    pair.exchange()


def test_listener_gets_no_calls_after_a_reset(pair):
    number, heard = pair.ask()
    pair.server.send_headers(number, OK)
    pair.server.send_data(number, b"late")
    assert pair.client.reset(number)
    pair.exchange()
    assert [event.error_code for event in pair.heard_of(h2.events.StreamReset)] == [h2.errors.ErrorCodes.CANCEL]
    assert (heard.status, heard.body, heard.end) == (None, b"", None)
    assert pair.client.reset(number)  # A second reset has no effect.


def test_reset_by_the_server_names_the_error(pair):
    number, heard = pair.ask()
    pair.server.reset_stream(number, h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
    pair.exchange()
    assert heard.end == ResponseEnd(ResponseResult.RESET, "ENHANCE_YOUR_CALM")


def goaway(last_stream_id: int, code: int = 0) -> bytes:
    return b"\0\0\x08\x07\0\0\0\0\0" + last_stream_id.to_bytes(4) + code.to_bytes(4)


def test_streams_before_goaway_continue_and_later_streams_are_unprocessed(pair):
    (seen, seen_heard), (_, late_heard) = pair.ask(), pair.ask()
    pair.client.receive(goaway(seen))
    assert pair.client.goaway == (seen, "NO_ERROR")
    assert late_heard.end == ResponseEnd(ResponseResult.UNPROCESSED, "NO_ERROR")
    assert seen_heard.end is None
    pair.server.send_headers(seen, OK, end_stream=True)
    pair.exchange()
    assert seen_heard.end == ResponseEnd(ResponseResult.COMPLETE)


def test_last_of_several_goaway_frames_counts(pair):
    _, heard = pair.ask()
    pair.client.receive(goaway(2**31 - 1))
    assert heard.end is None
    pair.client.receive(goaway(0, 2))
    assert heard.end == ResponseEnd(ResponseResult.UNPROCESSED, "INTERNAL_ERROR")


def test_client_receives_responses_after_its_goaway(pair):
    number, heard = pair.ask()
    pair.client.send_goaway()
    pair.exchange()
    assert pair.heard_of(h2.events.ConnectionTerminated)
    frames = b"\0\0\1\1\4" + number.to_bytes(4) + b"\x88" + b"\0\0\1\0\1" + number.to_bytes(4) + b"a"
    pair.client.receive(frames)  # The test encodes these frames itself, because h2 sends no frames after a GOAWAY.
    assert (heard.body, heard.end) == (b"a", ResponseEnd(ResponseResult.COMPLETE))


def test_end_of_the_connection_ends_every_response(pair):
    heards = [pair.ask()[1] for _ in range(2)]
    pair.client.receive(b"")
    assert [heard.end for heard in heards] == [ResponseEnd(ResponseResult.DISCONNECTED)] * 2


def test_http2_flow_control_windows_have_the_requested_sizes():
    pair = Pair(window_bytes=100, connection_window_bytes=200_000)
    number, _ = pair.ask()
    assert pair.server.local_flow_control_window(number) == 100
    assert pair.server.outbound_flow_control_window == 200_000


def test_withheld_flow_control_credit_stops_only_one_response():
    pair = Pair(window_bytes=100)
    (number, heard), (other, _) = pair.ask(), pair.ask()
    for one in (number, other):
        pair.server.send_headers(one, OK)
    assert pair.client.withhold_credit(number)
    for one in (number, other):
        pair.server.send_data(one, b"x" * 80)
    pair.exchange()
    assert heard.body == b"x" * 80
    assert pair.server.local_flow_control_window(number) == 20
    assert pair.server.local_flow_control_window(other) == 100
    pair.client.grant_credit(number)
    pair.exchange()
    assert pair.server.local_flow_control_window(number) == 100


@pytest.mark.parametrize("ends", ["reset", "complete"])
def test_connection_gets_withheld_credit_back_when_the_response_ends(ends):
    pair = Pair()
    number, _ = pair.ask()
    pair.server.send_headers(number, OK)
    pair.client.withhold_credit(number)
    pair.server.send_data(number, b"x" * 16_384)
    pair.server.send_data(number, b"x" * 16_384)
    pair.exchange()
    assert pair.server.outbound_flow_control_window == 65_535 - 32_768
    if ends == "reset":
        pair.client.reset(number)
    else:
        pair.server.end_stream(number)
    pair.exchange()
    assert pair.server.outbound_flow_control_window == 65_535


@pytest.mark.parametrize(
    "sent", [b"\0\0\4\0\1\0\0\0\1data", b"\0\x40\1\0\0\0\0\0\1" + bytes(16_385)], ids=["data before a head", "too long"]
)
def test_protocol_errors_of_the_server_are_raised(sent):
    with pytest.raises(h2.exceptions.ProtocolError):
        Http2ClientProtocol(authority="test").receive(sent)


def settings_frame(values) -> bytes:
    payload = b"".join(number.to_bytes(2) + value.to_bytes(4) for number, value in values)
    return len(payload).to_bytes(3) + b"\x04\x00\x00\x00\x00\x00" + payload


def test_unknown_settings_of_the_server_are_not_stored(pair):
    for start in range(9, 65536, 2700):
        pair.client.receive(settings_frame((number, 1) for number in range(start, min(start + 2700, 65536))))
        pair.client.pop_unsent()
    assert len(pair.client._h2.remote_settings) <= 7


def test_header_table_is_limited_to_the_default_size(pair):
    for size in (2**32 - 1, 0) * 50:
        pair.client.receive(settings_frame([(1, size)]))
        pair.client.pop_unsent()
    assert pair.client._h2.encoder.header_table_size <= 4096
    assert len(pair.client._h2.encoder.table_size_changes) <= 2
    pair.ask()
    pair.exchange()  # The server can decode the headers.


@pytest.mark.parametrize("kind", [4, 6])
def test_number_of_unread_answers_to_control_frames_is_limited(pair, kind):
    control = settings_frame([]) if kind == 4 else b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)
    for _ in range(3):
        pair.client.receive(control * 5000)
        pair.client.pop_unsent()
    pair.client.receive(control * ANSWERED_FRAMES_MAX)
    with pytest.raises(h2.exceptions.ProtocolError, match="does not read"):
        pair.client.receive(control)


def test_number_of_interim_responses_is_limited(pair):
    stream_id, _ = pair.ask()
    pair.exchange()
    for _ in range(INTERIM_RESPONSES_MAX):
        pair.server.send_headers(stream_id, [(":status", "103")])
    pair.exchange()
    pair.server.send_headers(stream_id, [(":status", "103")])
    with pytest.raises(h2.exceptions.ProtocolError, match="interim"):
        pair.exchange()
