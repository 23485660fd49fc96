"""Tests HTTP/1.1 without I/O: the fast path and h11 read equal requests and write equal responses."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import RequestHead
from trioserve.http.http1.protocol import CHUNKS_A_PIECE_MAX, DROPPED_PIECES_MAX, BadHead, H1Protocol

FIELDS = [(b"content-type", b"text/plain")]
PLAIN = b"POST /a?b HTTP/1.1\r\nhost: test\r\ncontent-length: 5\r\n\r\nhello"
# The fast path does not read these requests: `Expect`, HTTP/1.0, chunks, and `Connection: close`.
EXPECTING = PLAIN.replace(b"host", b"expect: 100-continue\r\nhost")
OLD = PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")
CHUNKED = b"POST /a?b HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
CLOSING = PLAIN.replace(b"host", b"connection: close\r\nhost")
BODILESS = b"GET /a?b HTTP/1.1\r\nhost: test\r\n\r\n"


def protocol() -> H1Protocol:
    return H1Protocol(peer="test", head_bytes_max=4096, fields_max=256)


def read_request(http: H1Protocol, sent: bytes, piece_bytes: int) -> tuple[RequestHead, bytes]:
    """Feed the bytes in pieces while the protocol needs more, then feed the rest. Return head and body."""
    pieces = [sent[start : start + piece_bytes] for start in range(0, len(sent), piece_bytes)]
    while (head := http.next_request()) is None:
        http.receive(pieces.pop(0))
    http.begin_body(head)
    body = b""
    while (piece := http.next_body_piece()) is not None:
        body += piece
        if not piece:
            http.receive(pieces.pop(0))
    for piece in pieces:
        http.receive(piece)
    return head, body


@pytest.mark.parametrize("piece_bytes", [1, 7, 60, 1000])
@pytest.mark.parametrize("sent", [PLAIN, EXPECTING, OLD, CHUNKED, CLOSING, BODILESS])
def test_http1_request_is_read_from_pieces_of_any_size(sent, piece_bytes):
    http = protocol()
    assert not http.request_begun
    head, body = read_request(http, sent, piece_bytes)
    assert (head.path, head.query, head.headers.get("host"), head.peer) == ("/a", "b", "test", "test")
    assert (head.method, body) == (("GET", b"") if sent is BODILESS else ("POST", b"hello"))
    assert http.request_ended
    assert http.held_bytes == 0


@pytest.mark.parametrize("first", [PLAIN, CHUNKED, BODILESS, EXPECTING])
@pytest.mark.parametrize("second", [PLAIN, CHUNKED, BODILESS, EXPECTING])
@pytest.mark.parametrize("is_ordinary", [True, False], ids=["by hand", "by h11"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_consecutive_requests_may_use_different_parsers(first, second, is_ordinary, is_streamed):
    """Both requests arrive in one read."""
    http = protocol()
    http.receive(first + second + PLAIN)
    for sent in (first, second):
        head, body = read_request(http, b"", 1)
        assert (head.method, body) == (("GET", b"") if sent is BODILESS else ("POST", b"hello"))
        if is_streamed:
            response = http.start_response(200, FIELDS, is_ordinary=is_ordinary, is_http_1_1=True)
            response += http.send_data(b"one") + http.end_response(b"two")
            lines, _, rest = response.partition(b"\r\n\r\n")
            assert b"\r\ntransfer-encoding: chunked" in lines.lower()
            assert rest == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        else:
            response = http.respond(200, [*FIELDS, (b"content-length", b"3")], b"one", is_ordinary=is_ordinary)
            assert response == b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\none"
        assert http.next_cycle()
    assert http.request_begun
    assert read_request(http, b"", 1)[1] == b"hello"


@pytest.mark.parametrize("sent", [OLD, CLOSING])
def test_http1_connection_ends_if_the_client_sends_connection_close(sent):
    http = protocol()
    read_request(http, sent, 1000)
    http.respond(200, [*FIELDS, (b"content-length", b"3")], b"one", is_ordinary=True)
    assert not http.next_cycle()


def test_response_with_content_length_is_not_chunked():
    http = protocol()
    read_request(http, BODILESS, 1000)
    fields = [*FIELDS, (b"content-length", b"6")]
    response = http.start_response(200, fields, is_ordinary=False, is_http_1_1=True)
    response += http.send_data(b"one") + http.end_response(b"two")
    assert response.endswith(b"content-length: 6\r\n\r\nonetwo")
    assert http.next_cycle()


def test_client_that_sends_expect_100_continue_gets_100():
    http = protocol()
    http.receive(EXPECTING.removesuffix(b"hello"))
    head = http.next_request()
    assert head is not None
    http.begin_body(head)
    assert http.wants_continue
    assert http.continue_response() == b"HTTP/1.1 100 \r\n\r\n"
    assert not http.wants_continue
    assert http.next_body_piece() == b""
    http.receive(b"hello")
    assert http.next_body_piece() == b"hello"
    assert http.next_body_piece() is None


def test_arrived_body_is_read_at_once():
    http = protocol()
    http.receive(PLAIN[:-1])
    head = http.next_request()
    assert head is not None
    http.begin_body(head)
    assert http.arrived_body() is None
    http.receive(b"o")
    assert (http.arrived_body(), http.request_ended) == (b"hello", True)


def test_unread_http1_body_is_skipped_before_the_next_request():
    for sent in (PLAIN, CHUNKED):
        http = protocol()
        http.receive(sent[:-3])
        head = http.next_request()
        assert head is not None
        http.begin_body(head)
        http.drop_body()
        assert not http.request_ended
        http.receive(sent[-3:])
        http.drop_body()
        assert (http.request_ended, http.held_bytes) == (True, 0)


def test_chunk_size_is_known_before_its_bytes_arrive():
    http = protocol()
    http.receive(CHUNKED[: CHUNKED.index(b"3\r\n")] + b"FFFF\r\n")
    head = http.next_request()
    assert head is not None
    http.begin_body(head)
    assert (http.next_body_piece(), http.next_body_piece()) == (b"he", b"")
    assert http.announced_body_bytes == 2 + 0xFFFF


@pytest.mark.parametrize(
    ("sent", "status"), [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nhost: test\r\nx: " + b"x" * 5000, 431)]
)
def test_error_for_an_invalid_head_has_the_status_of_the_response(sent, status):
    http = protocol()
    http.receive(sent)
    with pytest.raises(BadHead) as caught:
        http.next_request()
    assert caught.value.status == status
    assert http.can_refuse


def in_tiny_chunks(byte_count: int) -> H1Protocol:
    """Return a protocol with a request whose body has one-byte chunks, followed by another request."""
    http = protocol()
    http.receive(CHUNKED.replace(b"2\r\nhe\r\n3\r\nllo\r\n", b"1\r\nx\r\n" * byte_count) + BODILESS)
    head = http.next_request()
    assert head is not None
    http.begin_body(head)
    return http


def test_body_of_tiny_chunks_is_read_a_few_chunks_at_a_time():
    http = in_tiny_chunks(2 * CHUNKS_A_PIECE_MAX + 3)
    pieces = [http.next_body_piece() for _ in range(4)]
    assert pieces == [b"x" * CHUNKS_A_PIECE_MAX, b"x" * CHUNKS_A_PIECE_MAX, b"xxx", None]


@pytest.mark.parametrize("is_much", [False, True])
def test_unread_body_of_tiny_chunks_is_skipped_up_to_a_bound(is_much):
    most = CHUNKS_A_PIECE_MAX * DROPPED_PIECES_MAX
    http = in_tiny_chunks(2 * most if is_much else most - 1)
    http.drop_body()
    assert http.request_ended is not is_much
    if is_much:
        assert http.held_bytes == 0  # The connection keeps reading after this, and so notices a close.
        http.receive(b"1\r\nx\r\n")
        http.drop_body()
        assert http.held_bytes == 0
    http.respond(404, [*FIELDS, (b"content-length", b"0")], b"", is_ordinary=not is_much)
    assert http.next_cycle() is not is_much
    if not is_much:
        assert http.next_request() is not None


def test_malformed_chunks_are_an_invalid_request():
    http = protocol()
    http.receive(CHUNKED.replace(b"3\r\nllo", b"zz\r\nllo"))
    head = http.next_request()
    assert head is not None
    http.begin_body(head)
    with pytest.raises(InvalidRequest):
        http.next_body_piece()
    http.drop_body()
    http.respond(400, [*FIELDS, (b"connection", b"close"), (b"content-length", b"0")], b"", is_ordinary=False)
    assert not http.next_cycle()


MANY = b"".join(b"x-%d: 1\r\n" % number for number in range(255))


@pytest.mark.parametrize("piece_bytes", [1, 7, 100_000])
@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1", b"GET / HTTP/1.0"], ids=["by hand", "by h11"])
def test_head_of_too_many_fields_is_refused(request_line, piece_bytes):
    head = request_line + b"\r\nhost: a\r\n" + MANY
    assert len(read_request(large_protocol(), head + b"\r\n", piece_bytes)[0].headers) == 256
    with pytest.raises(BadHead, match="at most 256") as caught:
        read_request(large_protocol(), head + b"y: 1\r\n\r\n", piece_bytes)
    assert caught.value.status == 431


def test_too_many_fields_are_refused_before_the_head_is_complete():
    http = large_protocol()
    http.receive(b"GET / HTTP/1.1\r\nhost: a\r\n" + MANY + b"y: 1\r\nz: 1\r\n")
    with pytest.raises(BadHead, match="at most 256"):
        http.next_request()


def test_head_of_too_many_fields_is_refused_after_another_request():
    http = large_protocol()
    http.receive(OLD.replace(b"HTTP/1.0", b"HTTP/1.1").replace(b"host", b"expect: 100-continue\r\nhost"))
    head = http.next_request()
    http.begin_body(head)
    while http.next_body_piece() is not None:
        pass
    http.receive(b"GET / HTTP/1.0\r\n" + MANY + b"y: 1\r\nz: 1\r\n\r\n")
    http.respond(200, FIELDS, b"", is_ordinary=False)
    assert http.next_cycle()
    with pytest.raises(BadHead, match="at most 256"):
        http.next_request()


def test_lines_of_a_body_do_not_count_as_header_fields():
    http = large_protocol()
    body = b"a: b\r\n" * 300
    sent = b"POST / HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    assert read_request(http, sent, 100_000)[1] == body


def test_number_of_trailers_is_limited():
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    next_one = b"GET / HTTP/1.1\r\nhost: a\r\n" + MANY + b"\r\n"
    for piece_bytes in (1, 7, 100_000):
        assert read_request(large_protocol(), head + MANY + b"\r\n" + next_one, piece_bytes)[1] == b"a"
        with pytest.raises(InvalidRequest, match="at most 256 trailers"):
            read_request(large_protocol(), head + MANY + b"y: 1\r\nz: 1\r\n\r\n", piece_bytes)


def large_protocol() -> H1Protocol:
    return H1Protocol(peer="test", head_bytes_max=65536, fields_max=256)
