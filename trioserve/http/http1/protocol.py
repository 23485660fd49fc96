"""The server side of HTTP/1.1 without I/O: it turns bytes into requests, and responses into bytes.

It uses two parsers. The fast path (plain_request) reads ordinary requests, and this module encodes ordinary responses.
h11 handles all other messages. Only this module knows which parser has seen which message.
"""

from __future__ import annotations

import re

import h11

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import REASONS, HeaderFields, Headers, RequestHead, split_target
from trioserve.http.websocket_messages import is_websocket_upgrade

__all__ = ["BadHead", "ChunkSizes", "H1Protocol", "plain_request"]

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,20}")
_BLANK_LINE = re.compile(rb"\n\r?\n")
# The limit is for the size and the extensions of a chunk. The scan stops at a longer line, which h11 accepts or
# refuses.
_LINE_BYTES_MAX = 1024


class ChunkSizes:
    """The chunk framing of one body.

    Attributes:
        announced_bytes: size of all chunks whose size line has arrived, with or without their bytes.
        trailer_count: number of lines after the last chunk.
    """

    def __init__(self) -> None:
        self.announced_bytes = 0
        self.trailer_count = 0
        self._line = bytearray()  # The received bytes of an incomplete size line.
        self._skip_bytes = 0  # The number of bytes that are missing from the current chunk, including its line break.
        self._chunks_ended = False
        self._trailers_ended = False
        self._tail = b"\n"  # The last bytes that were searched for the end of the trailers.

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body.

        Args:
            data: bytes in the same order as for h11.
        """
        position = 0
        while position < len(data) and not self._chunks_ended:
            if self._skip_bytes:
                skipped = min(self._skip_bytes, len(data) - position)
                self._skip_bytes -= skipped
                position += skipped
                continue
            end = data.find(b"\n", position) + 1
            self._line += data[position : end or len(data)]
            position = end or len(data)
            if end:
                size = _SIZE.match(self._line)
                byte_count = int(size[0], 16) if size else 0
                self._line.clear()
                self.announced_bytes += byte_count
                self._skip_bytes = byte_count + 2
                self._chunks_ended = not byte_count  # The value is also True after a size line that cannot be read.
            elif len(self._line) > _LINE_BYTES_MAX:
                self._chunks_ended = True
        if self._chunks_ended and not self._trailers_ended:
            self._count_trailers(data[position:])

    def _count_trailers(self, data: bytes) -> None:
        text = self._tail + data
        end = _BLANK_LINE.search(text)
        self._trailers_ended = end is not None  # The bytes after the end of the trailers may be another request.
        self.trailer_count += text.count(b"\n", len(self._tail), end.start() + 1 if end else len(text))
        self._tail = text[-3:]


EncodedFields = list[tuple[bytes, bytes]]

# After this number of chunks, other tasks run. h11 needs about 10 us for each chunk, even for a small chunk.
CHUNKS_A_PIECE_MAX = 32
# ChunkSizes reads at most this number of bytes of a chunked body at a time, at about 1 us per chunk.
FED_BODY_BYTES_MAX = 8192
# At most this number of pieces of an unwanted body is skipped. If there are more, the connection ends.
DROPPED_PIECES_MAX = 32


BLANK_LINE = re.compile(rb"\n\r?\n")  # By the rules of h11, the head of a request ends at this pattern.


class BadHead(Exception):
    """The head of a request cannot be read. The connection refuses the request and ends.

    Args:
        message: the error message for the client.
        status: HTTP status of the response.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class H1Protocol:
    """The protocol state of one connection.

    To read a request, call next_request, then begin_body, then next_body_piece while the body is needed. To answer the
    request, call respond. Or call start_response, send_data any number of times, and end_response. After request and
    response, call next_cycle.

    Args:
        peer: the client's address.
        head_bytes_max: maximum size of the request line and the header fields together, in bytes.
        fields_max: maximum number of header fields of a request, and of trailers.
        received: bytes that have already been read from the transport.

    Attributes:
        request_ended: True once the whole request has been read.
    """

    def __init__(self, *, peer: str, head_bytes_max: int, fields_max: int, received: bytes = b"") -> None:
        self.request_ended = False
        self._peer = peer
        self._head_bytes_max = head_bytes_max
        self._fields_max = fields_max
        self._h11 = self._new_h11()
        self._held = bytearray(received)  # The bytes that neither the fast path nor h11 has read.
        # If True, h11 has not seen the request or the response, so that its state is out of date.
        self._bypassed_h11 = False
        self._is_plain = False  # If True, the fast path reads the head and the body of the current request.
        self._plain_body_bytes = 0  # The number of missing body bytes of a request on the fast path.
        self._unfed_head = b""  # The head of a plain request that h11 has not seen.
        self._chunk_sizes: ChunkSizes | None = None  # The chunk framing of a body without content-length.
        self._request_broken = False
        self._may_encode_here = False  # If True, an ordinary response may be encoded without h11.
        self._is_encoded_here = False  # True if the current response is encoded without h11.
        self._is_chunked = False

    # --- requests ---

    def receive(self, data: bytes | bytearray) -> None:
        self._held += data

    @property
    def held_bytes(self) -> int:
        """Bytes that arrived and that no parser has read."""
        return len(self._held)

    @property
    def request_begun(self) -> bool:
        """True if at least one byte of the next request has arrived."""
        return bool(self._held) or bool(self._h11.trailing_data[0])

    def next_request(self) -> RequestHead | None:
        """Read the head of the next request.

        Returns:
            The head, or None if it is incomplete.

        Raises:
            BadHead: the head is malformed or too large.
        """
        if self._held and self._h11.our_state is h11.IDLE and not self._h11.trailing_data[0]:
            plain = plain_request(
                self._held, peer=self._peer, head_bytes_max=self._head_bytes_max, fields_max=self._fields_max
            )
            if plain is not None:
                head, head_bytes, self._plain_body_bytes = plain
                self._unfed_head = bytes(self._held[:head_bytes])
                del self._held[:head_bytes]
                self._is_plain = self._bypassed_h11 = True
                return head
        try:
            while True:
                # h11 reads any number of header fields, so the fields are counted before. h11 may already hold this
                # head if the head arrived together with the previous request.
                self._check_field_count(bytes(self._h11.trailing_data[0]))
                event = self._h11.next_event()
                if event is not h11.NEED_DATA:
                    break
                if not self._held:
                    return None
                # h11 checks the size of a head only when it needs more bytes of the head.
                self._feed(self._head_bytes_max + 1 - len(self._h11.trailing_data[0]))
        except h11.RemoteProtocolError as error:
            raise BadHead(f"the request cannot be read: {error}", status=error.error_status_hint) from None
        assert isinstance(event, h11.Request), event
        return _request_head(event, self._peer)

    def begin_body(self, head: RequestHead) -> None:
        """Prepare to read the body of a request.

        Args:
            head: the head that next_request returned last.
        """
        # h11 encodes the responses to all other requests, because h11 knows whether the connection must end.
        keeps_alive = (head.headers.get("connection") or "keep-alive").lower() == "keep-alive"
        self._may_encode_here = head.http_version == "1.1" and keeps_alive
        if self._is_plain:
            self.request_ended = not self._plain_body_bytes
        elif "transfer-encoding" in head.headers:
            self._chunk_sizes = ChunkSizes()
            self._chunk_sizes.feed(self._h11.trailing_data[0])
        elif (head.headers.get("content-length") or "0") == "0":
            # The end of the request is read at this point, so that the following bytes are treated as the next request.
            end = self._h11.next_event()
            assert isinstance(end, h11.EndOfMessage), end
            self.request_ended = True

    @property
    def wants_continue(self) -> bool:
        """True if the client waits for a 100 (Continue) before it sends the body, see continue_response."""
        return not self._is_plain and self._h11.they_are_waiting_for_100_continue

    @property
    def announced_body_bytes(self) -> int:
        """The smallest possible size of a chunked body in bytes, as far as known. It is 0 for a body with
        content-length.
        """
        return self._chunk_sizes.announced_bytes if self._chunk_sizes is not None else 0

    def arrived_body(self) -> bytes | None:
        """Read the whole rest of the body.

        Returns:
            The bytes, or None if a part of the body is missing or h11 parses the request.
        """
        if not self._is_plain or len(self._held) < self._plain_body_bytes:
            return None
        return b"" if self.request_ended else self._take_plain_body()

    def next_body_piece(self) -> bytes | None:
        """Read the next bytes of the body, at most CHUNKS_A_PIECE_MAX chunks.

        Returns:
            The bytes. They are empty if no more bytes have arrived. None at the end of the body.

        Raises:
            InvalidRequest: the framing of the body is broken.
        """
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
        """Skip the arrived bytes of a body that the handler will not read.

        After DROPPED_PIECES_MAX pieces, the rest of the body is treated as broken, so the connection ends after the
        response.
        """
        try:
            for _ in range(DROPPED_PIECES_MAX):
                if self._request_broken or not self.next_body_piece():
                    break
            else:
                self._request_broken = not self.request_ended
        except InvalidRequest:
            pass  # _request_broken is True, so the connection ends after this response.
        if self._request_broken:
            self._held.clear()

    # --- responses ---

    def continue_response(self) -> bytes:
        return self._through_h11(h11.InformationalResponse(status_code=100, headers=[]))

    @property
    def can_refuse(self) -> bool:
        """True if no response to the current request has begun, so an error response is possible."""
        return self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    def respond(self, status: int, fields: EncodedFields, body: bytes, *, is_ordinary: bool) -> bytes:
        """Encode a complete response.

        Args:
            status: HTTP status.
            fields: all header fields except transfer-encoding.
            body: the whole body. It is empty if the response has no body.
            is_ordinary: True if the connection stays open after the response, and the handler set no content-length.
        """
        if is_ordinary and self._may_encode_here:
            self._bypassed_h11 = True
            return _head(status, fields) + body
        data = [h11.Data(data=body)] if body else []
        return self._through_h11(_response(status, fields), *data, h11.EndOfMessage())

    def start_response(self, status: int, fields: EncodedFields, *, is_ordinary: bool, is_http_1_1: bool) -> bytes:
        """Encode the head of a streamed response.

        Args:
            status: HTTP status.
            fields: all header fields except transfer-encoding.
            is_ordinary: see `respond`.
            is_http_1_1: True if the request uses HTTP/1.1, so that the body may be chunked.
        """
        self._is_encoded_here = is_ordinary and self._may_encode_here
        if self._is_encoded_here:
            self._is_chunked = self._bypassed_h11 = True
            return _head(status, [*fields, (b"transfer-encoding", b"chunked")])
        head = self._through_h11(_response(status, fields))
        # If the head has no content-length, h11 has added `transfer-encoding: chunked` to the head.
        self._is_chunked = is_http_1_1 and not _has_length(fields)
        return head

    def switch_protocols(self, fields: EncodedFields) -> tuple[bytes, bytes]:
        """Accept the upgrade that the request asks for. After that, no other method may be called.

        Args:
            fields: all header fields of the response.

        Returns:
            The encoded response, and the client's bytes that follow its request.
        """
        head = self._through_h11(h11.InformationalResponse(status_code=101, headers=fields, reason=REASONS[101]))
        following = bytes(self._h11.trailing_data[0]) + bytes(self._held)
        self._held.clear()
        return head, following

    def send_data(self, data: bytes) -> bytes:
        if self._is_chunked:
            # h11 does not count chunks, and encoding with h11 would take most of the CPU time of an event.
            self._bypassed_h11 = True
            return b"%x\r\n%b\r\n" % (len(data), data)
        return self._through_h11(h11.Data(data=data))

    def end_response(self, last: bytes) -> bytes:
        if self._is_encoded_here:
            return (self.send_data(last) if last else b"") + b"0\r\n\r\n"
        data = [h11.Data(data=last)] if last else []
        return self._through_h11(*data, h11.EndOfMessage())

    def next_cycle(self) -> bool:
        """Prepare for the next request, and return whether one may follow.

        Returns:
            False if the connection must end.
        """
        if not self.request_ended:
            return False
        state = self._h11.our_state
        if self._bypassed_h11:
            # h11 has seen only the request or only the response. So a new h11 connection replaces the old one, and gets
            # its unread bytes.
            if state is h11.MUST_CLOSE:
                return False
            if state is not h11.IDLE:
                rest, _ = self._h11.trailing_data
                self._h11 = self._new_h11()
                if rest:
                    self._h11.receive_data(rest)
            self._bypassed_h11 = False
        elif state is h11.DONE:
            self._h11.start_next_cycle()
        else:
            return False
        self.request_ended = self._is_plain = False
        self._unfed_head = b""
        self._chunk_sizes = None
        return True

    # --- the two parsers ---

    def _new_h11(self) -> h11.Connection:
        return h11.Connection(h11.SERVER, max_incomplete_event_size=self._head_bytes_max)

    def _check_field_count(self, head: bytes) -> None:
        """Raise BadHead if a head has too many fields. `head` may be incomplete, or be followed by body bytes."""
        line_count_max = self._fields_max + 2  # The request line and the empty line count as two more lines.
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
        if self._unfed_head:
            # The response is not ordinary. Before h11 can encode the response, h11 must have seen the request.
            self._h11.receive_data(self._unfed_head)
            self._h11.next_event()
            self._unfed_head = b""
        return b"".join([self._h11.send(event) or b"" for event in events])


def _request_head(request: h11.Request, peer: str) -> RequestHead:
    path, query = split_target(request.target.decode("latin-1"))
    method, http_version = request.method.decode("ascii"), request.http_version.decode("ascii")
    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
    return RequestHead(
        method=method,
        path=path,
        query=query,
        headers=headers,
        http_version=http_version,
        peer=peer,
        is_websocket=is_websocket_upgrade(method, http_version, headers),
    )


def _head(status: int, fields: EncodedFields) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % field for field in fields])
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b""), lines)


def interim_response(fields: HeaderFields) -> bytes:
    """Encode a response 102 (Processing, RFC 2518, 10.1): the server has accepted the request and will answer later.

    An interim response does not change the protocol state, so h11 need not see it.

    Args:
        fields: header fields of the interim response.
    """
    lines = b"".join([b"%b: %b\r\n" % (name.encode("ascii"), value.encode("latin-1")) for name, value in fields])
    return b"HTTP/1.1 102 Processing\r\n%b\r\n" % lines


def _response(status: int, fields: EncodedFields) -> h11.Response:
    return h11.Response(status_code=status, headers=fields, reason=REASONS.get(status, b""))


def _has_length(fields: EncodedFields) -> bool:
    return any(name == b"content-length" for name, _ in fields)


_REQUEST_LINE = re.compile(r"([-!#$%&'*+.^_`|~0-9A-Za-z]+) ([!-~]+) HTTP/1\.1")
# The pattern allows only values of visible characters and blanks. h11 also allows some other characters in some
# positions.
_FIELDS = re.compile(r"(?:\r\n[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*)*")
_LENGTH = re.compile(r"[0-9]{1,15}")
_NOT_PLAIN = frozenset({"transfer-encoding", "expect", "upgrade", "connection"})


def plain_request(
    held: bytearray, *, peer: str, head_bytes_max: int, fields_max: int
) -> tuple[RequestHead, int, int] | None:
    """Parse the head of an ordinary request.

    Args:
        held: bytes that no parser has read yet. They begin with a request.
        peer: the client's address.
        head_bytes_max: maximum size of the head in bytes.
        fields_max: maximum number of header fields.

    Returns:
        The head, its size in bytes, and the size of the body in bytes. None if the request is not ordinary or its head
        is incomplete.
    """
    end = held.find(b"\r\n\r\n", 0, head_bytes_max)
    if end < 0 or held.count(b"\n", 0, end) > fields_max:
        return None
    head = held[:end].decode("latin-1")
    line, _, rest = head.partition("\r\n")
    request_line = _REQUEST_LINE.fullmatch(line)
    if request_line is None or request_line[1] == "CONNECT" or _FIELDS.fullmatch(head, len(line)) is None:
        return None
    fields = []
    hosts = 0
    length = None
    for field in rest.split("\r\n"):
        name, _, value = field.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name == "host":
            hosts += 1
        elif name == "content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name in _NOT_PLAIN and not (name == "connection" and value.lower() == "keep-alive"):
            return None
        fields.append((name, value))
    if hosts != 1:
        return None
    path, query = split_target(request_line[2])
    plain = RequestHead(
        method=request_line[1], path=path, query=query, headers=Headers(fields), http_version="1.1", peer=peer
    )
    return plain, end + 4, length or 0
