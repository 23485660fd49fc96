"""Tests of the client side of HTTP/1.1: the bytes that are sent, and the order of responses."""

from __future__ import annotations

import h11
import pytest

from trioserve.trio_tools.http_client import INTERIM_RESPONSES_MAX, Http1ClientProtocol, ResponseEnd, ResponseResult

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
COMPLETE = ResponseEnd(ResponseResult.COMPLETE)


class Heard:
    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self.end: ResponseEnd | None = None

    def on_head(self, status, fields):
        self.status = status

    def on_body(self, data):
        self.body += data

    def on_end(self, end):
        assert self.end is None
        self.end = end


@pytest.fixture
def client() -> Http1ClientProtocol:
    return Http1ClientProtocol(authority="test")


def ask(client: Http1ClientProtocol) -> Heard:
    heard = Heard()
    client.begin("GET", "/", [], heard, has_body=False)
    return heard


def test_request_is_sent_piece_by_piece(client):
    number = client.begin("POST", "/path", [("content-length", "4")], Heard(), has_body=True)
    client.send_body(number, b"bo", is_last=False)
    assert client.pop_unsent() == b"POST /path HTTP/1.1\r\nhost: test\r\ncontent-length: 4\r\n\r\nbo"
    client.send_body(number, b"dy", is_last=True)
    assert client.pop_unsent() == b"dy"
    assert client.pop_unsent() == b""
    assert client.waiting_count == 1


def test_responses_match_requests_in_order(client):
    heards = [ask(client) for _ in range(3)]
    for byte in OK + b"a" + OK + b"b" + OK:
        client.receive(bytes([byte]))
    client.receive(b"")
    assert [heard.body for heard in heards] == [b"a", b"b", b""]
    assert [heard.end for heard in heards] == [COMPLETE, COMPLETE, ResponseEnd(ResponseResult.DISCONNECTED)]
    assert client.waiting_count == 0


def test_several_responses_may_arrive_at_once(client):
    heards = [ask(client) for _ in range(2)]
    client.receive(OK + b"a" + OK + b"b")
    assert [heard.body for heard in heards] == [b"a", b"b"]


def test_response_without_length_ends_with_the_connection(client):
    heard = ask(client)
    client.receive(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    assert heard.end is None
    client.receive(b"")
    assert (heard.body, heard.end) == (b"all of it", COMPLETE)


def test_end_of_an_early_response_says_that_the_request_was_not_sent(client):
    heard = Heard()
    number = client.begin("POST", "/", [("content-length", "4")], heard, has_body=True)
    client.send_body(number, b"bo", is_last=False)
    client.receive(OK + b"a")
    assert heard.end == ResponseEnd(ResponseResult.COMPLETE, was_request_sent=False)
    client.pop_unsent()
    client.send_body(number, b"dy", is_last=True)  # The response has ended, so this call is ignored.
    assert client.pop_unsent() == b""


def test_informational_responses_are_only_counted(client):
    heard = ask(client)
    client.receive(b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"a")
    assert (heard.status, heard.body, client.informational_count) == (200, b"a", 1)


def test_http1_client_supports_neither_reset_nor_credit(client):
    ask(client)
    assert not client.reset(1)
    assert not client.withhold_credit(1)
    assert client.unsent_bytes(1) == 0


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", OK + b"aHTTP/1.1 200 OK"])
def test_protocol_errors_of_the_server_are_raised(client, sent):
    ask(client)
    with pytest.raises(h11.RemoteProtocolError):
        client.receive(sent)


def test_number_of_interim_responses_is_limited(client):
    ask(client)
    client.receive(b"HTTP/1.1 103 Early Hints\r\n\r\n" * INTERIM_RESPONSES_MAX)
    with pytest.raises(h11.RemoteProtocolError, match="interim"):
        client.receive(b"HTTP/1.1 100 Continue\r\n\r\n")
