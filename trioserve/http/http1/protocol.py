"""HTTP/1.1 as a server speaks it, without I/O: bytes in, requests and their bodies out; responses in, bytes out.

Two parsers stand behind it. Ordinary requests are read by hand (fast_path.py), and ordinary responses written so;
all others are h11's. Which one has seen what is settled here, and nobody else needs to know that there are two.
"""

from __future__ import annotations

import re

import h11

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import HeaderFields
from trioserve.http.headers import Headers
from trioserve.http.http1.chunk_sizes import ChunkSizes
from trioserve.http.http1.fast_path import plain_request
from trioserve.http.message_head import REASONS, RequestHead, split_target

__all__ = ["BadHead", "H1Protocol"]

EncodedFields = list[tuple[bytes, bytes]]

CHUNKS_A_PIECE_MAX = 32  # of a body; h11 needs about 10 us for each, however small it is, and others want their turn
FED_BODY_BYTES_MAX = 8192  # at a time, of a chunked body: each of its chunks costs us about a microsecond
DROPPED_PIECES_MAX = 32  # of a body that nobody will read: whoever sends it in more crumbs gets a new connection


BLANK_LINE = re.compile(rb"\n\r?\n")  # the end of a head, as h11 sees it


class BadHead(Exception):
    """A request whose head cannot be read: it is to be refused with `status`, and the connection to be ended."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class H1Protocol:
    """One connection's side of it.

    Args:
        peer: the client's address.
        head_bytes_max: size of a request line and header fields.
        fields_max: header fields of a request, and trailers.
        received: what was read already.

    A request is next_request, begin_body, and as much of its body as is wanted; a response is respond, or
    start_response, any number of send_data, then end_response. When both are over, next_cycle.

    request_ended: the whole request has been read.
    """

    def __init__(self, *, peer: str, head_bytes_max: int, fields_max: int, received: bytes = b"") -> None:
        self.request_ended = False
        self._peer = peer
        self._head_bytes_max = head_bytes_max
        self._fields_max = fields_max
        self._h11 = self._new_h11()
        self._held = bytearray(received)  # arrived, and neither read by hand nor given to h11
        self._passed_h11 = False  # a response did, or a request: it does not know where the conversation is
        self._is_plain = False  # the request: its head and body are read by hand
        self._plain_body_bytes = 0  # what is left of that
        self._untold_head = b""  # of a plain request, as long as h11 has not seen it
        self._chunk_sizes: ChunkSizes | None = None  # of a body whose length is not told beforehand
        self._request_broken = False
        self._may_respond_by_hand = False
        self._is_by_hand = False  # the response
        self._is_chunked = False

    # --- requests ---

    def receive(self, data: bytes | bytearray) -> None:
        self._held += data

    @property
    def held_bytes(self) -> int:
        """How much has arrived that was not looked at."""
        return len(self._held)

    @property
    def request_begun(self) -> bool:
        """Whether anything of the next request has come."""
        return bool(self._held) or bool(self._h11.trailing_data[0])

    def next_request(self) -> RequestHead | None:
        """None: more of it has to come. Raises BadHead."""
        head = self._plain_request()
        if head is not None:
            return head
        try:
            while True:
                # h11 reads any number of fields, also of a head that came behind the last request.
                self._check_field_count(bytes(self._h11.trailing_data[0]))
                event = self._h11.next_event()
                if event is not h11.NEED_DATA:
                    break
                if not self._held:
                    return None
                # It looks at the size of a head only when it wants more of it.
                self._feed(self._head_bytes_max + 1 - len(self._h11.trailing_data[0]))
        except h11.RemoteProtocolError as error:
            raise BadHead(f"the request cannot be read: {error}", status=error.error_status_hint) from None
        assert isinstance(event, h11.Request), event
        return _request_head(event, self._peer)

    def begin_body(self, head: RequestHead) -> None:
        """The request that next_request gave is to be answered by a handler."""
        # Of an ordinary request. All others are h11's: it knows when their connection has to end.
        keeps_alive = (head.headers.get("connection") or "keep-alive").lower() == "keep-alive"
        self._may_respond_by_hand = head.http_version == "1.1" and keeps_alive
        if self._is_plain:
            self.request_ended = not self._plain_body_bytes
        elif "transfer-encoding" in head.headers:
            self._chunk_sizes = ChunkSizes()
            self._chunk_sizes.feed(self._h11.trailing_data[0])
        elif (head.headers.get("content-length") or "0") == "0":
            # Known from the start, so that what comes next counts as sent ahead.
            end = self._h11.next_event()
            assert isinstance(end, h11.EndOfMessage), end
            self.request_ended = True

    @property
    def wants_continue(self) -> bool:
        """Whether the client waits to be told before it sends the body: with continue_response."""
        return not self._is_plain and self._h11.they_are_waiting_for_100_continue

    @property
    def announced_body_bytes(self) -> int:
        """How much a chunked body is at least; 0 for others, whose length stands in the head."""
        return self._chunk_sizes.announced_bytes if self._chunk_sizes is not None else 0

    def body_at_hand(self) -> bytes | None:
        """What is left of the body, if all of it has come already; None also where that is not known."""
        if not self._is_plain or len(self._held) < self._plain_body_bytes:
            return None
        return b"" if self.request_ended else self._take_plain_body()

    def next_body_piece(self) -> bytes | None:
        """What has come of the body, at most CHUNKS_A_PIECE_MAX chunks. Empty: more of it has to come. None: that was
        all. Raises InvalidRequest when its framing is broken."""
        if self.request_ended:
            return None
        if self._is_plain:
            return self._take_plain_body()
        chunks: list[bytes] = []
        try:
            while not self.request_ended and len(chunks) < CHUNKS_A_PIECE_MAX:
                if self._chunk_sizes is not None and self._chunk_sizes.trailer_count > self._fields_max:
                    raise h11.RemoteProtocolError(f"at most {self._fields_max} trailers are allowed")
                event = self._h11.next_event()
                if isinstance(event, h11.Data):
                    chunks.append(bytes(event.data))
                elif event is not h11.NEED_DATA:
                    assert isinstance(event, h11.EndOfMessage), event
                    self.request_ended = True
                elif self._held:
                    self._feed(len(self._held) if self._chunk_sizes is None else FED_BODY_BYTES_MAX)
                else:
                    break
        except h11.RemoteProtocolError as error:
            self._request_broken = True
            raise InvalidRequest(f"the request body cannot be read: {error}") from None
        return None if self.request_ended and not chunks else b"".join(chunks)

    def drop_body(self) -> None:
        """Pass over what has arrived of a body that nobody will read. One in too many pieces is not followed to its
        end."""
        try:
            for _ in range(DROPPED_PIECES_MAX):
                if self._request_broken or not self.next_body_piece():
                    break
            else:
                self._request_broken = not self.request_ended
        except InvalidRequest:
            pass  # noted: the connection ends behind this response
        if self._request_broken:
            self._held.clear()

    # --- responses ---

    def continue_response(self) -> bytes:
        return self._through_h11(h11.InformationalResponse(status_code=100, headers=[]))

    @property
    def can_refuse(self) -> bool:
        """Whether no response to this request has begun."""
        return self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def respond(self, status: int, fields: EncodedFields, body: bytes, *, is_ordinary: bool) -> bytes:
        """A whole response. is_ordinary: the connection goes on behind it, and its length follows from its body."""
        if is_ordinary and self._may_respond_by_hand:
            self._passed_h11 = True
            return _head(status, fields) + body
        data = [h11.Data(data=body)] if body else []
        return self._through_h11(_response(status, fields), *data, h11.EndOfMessage())

    def start_response(self, status: int, fields: EncodedFields, *, is_ordinary: bool, is_http_1_1: bool) -> bytes:
        """The head of a streamed one; is_ordinary as in respond."""
        self._is_by_hand = is_ordinary and self._may_respond_by_hand
        if self._is_by_hand:
            self._is_chunked = self._passed_h11 = True
            return _head(status, [*fields, (b"transfer-encoding", b"chunked")])
        head = self._through_h11(_response(status, fields))
        self._is_chunked = is_http_1_1 and not _has_length(fields)  # h11 sees to it, since no length is given
        return head

    def send_data(self, data: bytes) -> bytes:
        if self._is_chunked:
            # h11 keeps no count of chunks, and the way through it is most of what an event costs.
            self._passed_h11 = True
            return _chunk(data)
        return self._through_h11(h11.Data(data=data))

    def end_response(self, last: bytes) -> bytes:
        if self._is_by_hand:
            return (_chunk(last) if last else b"") + b"0\r\n\r\n"
        data = [h11.Data(data=last)] if last else []
        return self._through_h11(*data, h11.EndOfMessage())

    def next_cycle(self) -> bool:
        """Begin with the next request. False: the connection has to end."""
        if not self.request_ended:
            return False
        state = self._h11.our_state
        if self._passed_h11:
            # It has seen the request or its response, but not both: the next one begins with what it has left.
            if state is h11.MUST_CLOSE:
                return False
            if state is not h11.IDLE:
                rest, _ = self._h11.trailing_data
                self._h11 = self._new_h11()
                if rest:
                    self._h11.receive_data(rest)
            self._passed_h11 = False
        elif state is h11.DONE:
            self._h11.start_next_cycle()
        else:
            return False
        self.request_ended = self._is_plain = False
        self._untold_head = b""
        self._chunk_sizes = None
        return True

    # --- the two parsers ---

    def _new_h11(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._head_bytes_max)

    def _plain_request(self) -> RequestHead | None:
        """The next request, if it is an ordinary one whose head is here and h11 has nothing of it."""
        if not self._held or self._h11.our_state is not h11.IDLE or self._h11.trailing_data[0]:
            return None
        plain = plain_request(
            self._held, peer=self._peer, head_bytes_max=self._head_bytes_max, fields_max=self._fields_max
        )
        if plain is None:
            return None
        head, head_bytes, self._plain_body_bytes = plain
        self._untold_head = bytes(self._held[:head_bytes])
        del self._held[:head_bytes]
        self._is_plain = self._passed_h11 = True
        return head

    def _check_field_count(self, head: bytes) -> None:
        """Of what has come of a head, which may have other bytes behind it."""
        line_count_max = self._fields_max + 2  # the request line and the empty one
        if head.count(b"\n") <= line_count_max:
            return
        end = BLANK_LINE.search(head)
        if head.count(b"\n", 0, end.end() if end else len(head)) > line_count_max:
            raise BadHead(f"the request has too many header fields: at most {self._fields_max} are allowed", status=431)

    def _take_plain_body(self) -> bytes:
        piece = bytes(self._held[: self._plain_body_bytes])
        del self._held[: self._plain_body_bytes]
        self._plain_body_bytes -= len(piece)
        self.request_ended = not self._plain_body_bytes
        return piece

    def _feed(self, byte_count_max: int) -> None:
        fed = bytes(self._held[:byte_count_max])
        del self._held[:byte_count_max]
        self._h11.receive_data(fed)
        if self._chunk_sizes is not None:
            self._chunk_sizes.feed(fed)

    def _through_h11(self, *events: h11.Event) -> bytes:
        if self._untold_head:
            # A response that is not ordinary: for that h11 has to know what was asked.
            self._h11.receive_data(self._untold_head)
            self._h11.next_event()
            self._untold_head = b""
        return b"".join([self._h11.send(event) or b"" for event in events])


def _request_head(request: h11.Request, peer: str) -> RequestHead:
    path, query = split_target(request.target.decode("latin-1"))
    return RequestHead(
        method=request.method.decode("ascii"),
        path=path,
        query=query,
        headers=Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers),
        http_version=request.http_version.decode("ascii"),
        peer=peer,
    )


def _head(status: int, fields: EncodedFields) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % field for field in fields])
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b""), lines)


def interim_response(fields: HeaderFields) -> bytes:
    """102 Processing (RFC 2518, 10.1): the request was taken, and its response comes later. It changes nothing of what
    may follow, so h11 does not have to know of it."""
    lines = b"".join([b"%b: %b\r\n" % (name.encode("ascii"), value.encode("latin-1")) for name, value in fields])
    return b"HTTP/1.1 102 Processing\r\n%b\r\n" % lines


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _response(status: int, fields: EncodedFields) -> h11.Response:
    return h11.Response(status_code=status, headers=fields, reason=REASONS.get(status, b""))


def _has_length(fields: EncodedFields) -> bool:
    return any(name == b"content-length" for name, _ in fields)
