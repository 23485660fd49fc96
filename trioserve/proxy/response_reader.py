"""Parser for the responses of an HTTP/1.1 server (RFC 9112). It gets bytes and performs no I/O.

A general parser would take half of the router's time for a small request. This parser accepts less than h11. It refuses
input that real servers never send (folded header lines, lines without CR, codings other than chunked). The router
reuses a connection only if the end of the response is unambiguous. tests/proxy/test_response_reader.py compares the
parser with h11.
"""

from __future__ import annotations

import enum
import re

from trioserve.trio_tools.http_client import INTERIM_RESPONSES_MAX

__all__ = ["BadResponse", "IncompleteResponse", "ResponseHead", "ResponseReader"]

HEAD_BYTES_MAX = 65536
TRAILERS_MAX = 256  # A response may have at most this many lines after the last chunk.
CHUNK_LINE_BYTES_MAX = 4096  # A chunk line has a size and optional extensions.

_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\0\r\n]*)?")
_FIELDS = re.compile(r"(?:\r\n[-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\0\r\n]*)*")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")
_TRAILER = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\0\r\n]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_BODILESS = frozenset({204, 304})


class BadResponse(Exception):
    """The bytes are not an HTTP/1.1 response, or the response is incomplete. The message says why."""


class IncompleteResponse(BadResponse):
    """The connection ended before the response did."""


class ResponseHead:
    """Status and headers of a response.

    Args:
        status: HTTP status.
        headers: Names in lower case, and values. Repeated headers stay repeated.
    """

    __slots__ = ("headers", "status")

    def __init__(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status = status
        self.headers = headers


class _Stage(enum.Enum):
    HEAD = "the head"
    LENGTH = "a body of known length"
    CHUNK_LINE = "the line before a chunk"
    CHUNK = "a chunk"
    CHUNK_END = "the line end after a chunk"
    TRAILER = "the end after the last chunk"
    UNTIL_CLOSE = "a body until the connection closes"
    ENDED = "nothing"


class ResponseReader:
    """Parser for the consecutive responses on one connection. No response may belong to a HEAD request.

    Attributes:
        interim: Last interim response (1xx) before the head of the current response. None if there was none.
        is_drained: True if `next_piece` cannot return a piece before more bytes arrive.
    """

    def __init__(self) -> None:
        self._stage = _Stage.ENDED
        self._held = b""
        self._left_bytes = 0  # The number of bytes that are missing from the body, or from the current chunk.
        self._at_end = False
        self._is_persistent = True
        self._interim_count = 0
        self._trailer_count = 0
        self.interim: ResponseHead | None = None
        self.is_drained = False

    @property
    def is_reusable(self) -> bool:
        """True if the connection can be used for another request."""
        return self._stage is _Stage.ENDED and self._is_persistent and not self._held and not self._at_end

    @property
    def has_ended(self) -> bool:
        """True if the last response is complete."""
        return self._stage is _Stage.ENDED

    def begin(self) -> None:
        """Expect a response, because a request is about to be sent."""
        assert self.is_reusable
        self.interim = None
        self._stage = _Stage.HEAD
        self._interim_count = self._trailer_count = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        Args:
            data: Bytes from the connection. Empty at its end.
        """
        self.is_drained = False
        # The count restarts here, because heartbeats arrive every few seconds until the response is complete.
        self._interim_count = 0
        if not data:
            self._at_end = True
        else:
            self._held = self._held + data if self._held else data

    def next_head(self) -> ResponseHead | None:
        """Return the head of the response, and skip interim responses.

        Returns:
            The head, or None if more bytes are needed.

        Raises:
            BadResponse: The bytes are not a valid head.
            IncompleteResponse: The connection ended.
        """
        while True:
            end = self._held.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
            if end < 0:
                if len(self._held) >= HEAD_BYTES_MAX:
                    raise BadResponse(f"the head has more than {HEAD_BYTES_MAX} bytes")
                if self._at_end:
                    raise IncompleteResponse(
                        "the connection closed within the head" if self._held else "no response arrived"
                    )
                return None
            head, self._held = self._held[:end].decode("latin-1"), self._held[end + 4 :]
            first, line_end, _ = head.partition("\r\n")
            status_line = _STATUS.fullmatch(first)
            if status_line is None:
                raise BadResponse(f"the response begins with {first[:80]!r}")
            if _FIELDS.fullmatch(head, len(first)) is None:
                raise BadResponse("the head has a line that is not a header field")
            status = int(status_line[2])
            if status == 101:
                raise BadResponse("the server switches to another protocol, which the request did not ask for")
            headers = []
            if line_end:
                for line in head[len(first) + 2 :].split("\r\n"):
                    name, _, value = line.partition(":")
                    headers.append((name.lower(), value.strip(" \t")))
            if status >= 200:
                break
            self._interim_count += 1
            if self._interim_count > INTERIM_RESPONSES_MAX:
                raise BadResponse(f"more than {INTERIM_RESPONSES_MAX} interim responses arrived")
            self.interim = ResponseHead(status, headers)
        self._begin_body(status, status_line[1] == "1", headers)
        return ResponseHead(status, headers)

    def next_piece(self) -> bytes | None:
        """Return the bytes of the body that have arrived since the last call.

        Returns:
            Bytes. Empty at the end of the body. None if more bytes are needed.

        Raises:
            BadResponse: The chunks are invalid.
            IncompleteResponse: The connection ended.
        """
        stage, held = self._stage, self._held
        if stage is _Stage.CHUNK_LINE:
            # Nearly all pieces of an event stream are one whole chunk and take this fast path.
            line_end = held.find(b"\r\n", 0, CHUNK_LINE_BYTES_MAX)
            size = _CHUNK_SIZE.fullmatch(held, 0, max(0, line_end))
            if size is not None:
                end = line_end + 2 + int(size[1], 16)
                if end + 2 == len(held) and end > line_end + 2 and held.endswith(b"\r\n"):
                    self._held = b""
                    self.is_drained = not self._at_end
                    return held[line_end + 2 : end]
        elif stage is _Stage.LENGTH:
            return self._next_of_length()
        elif stage is _Stage.ENDED:
            return b""
        elif stage is _Stage.UNTIL_CLOSE:
            return self._next_until_close()
        assert stage is not _Stage.HEAD
        return self._next_of_chunks()

    def _begin_body(self, status: int, is_1_1: bool, headers: list[tuple[str, str]]) -> None:
        codings = [value for name, value in headers if name == "transfer-encoding"]
        lengths = {
            part.strip(" \t") for name, value in headers if name == "content-length" for part in value.split(",")
        }
        options = [
            part.strip(" \t").lower() for name, value in headers if name == "connection" for part in value.split(",")
        ]
        # If a response has two lengths, a server between router and endpoint may use the other length (RFC 9112, 6.3).
        # So the connection is not reused.
        self._is_persistent = is_1_1 and "close" not in options and not (codings and lengths)
        if status in _BODILESS:
            self._stage = _Stage.ENDED
        elif codings:
            if [coding.lower() for coding in codings] != ["chunked"]:
                raise BadResponse(f"the transfer-encoding is {', '.join(codings)[:80]!r}, allowed is chunked")
            self._stage = _Stage.CHUNK_LINE
        elif lengths:
            if len(lengths) > 1 or _LENGTH.fullmatch(length := lengths.pop()) is None:
                raise BadResponse("the content-length is not a number")
            self._left_bytes = int(length)
            self._stage = _Stage.LENGTH if self._left_bytes else _Stage.ENDED
        else:
            self._is_persistent = False
            self._stage = _Stage.UNTIL_CLOSE

    def _next_of_length(self) -> bytes | None:
        if not self._held:
            self._check_more_may_come()
            return None
        piece, self._held = self._held[: self._left_bytes], self._held[self._left_bytes :]
        self._left_bytes -= len(piece)
        if not self._left_bytes:
            self._stage = _Stage.ENDED
        return piece

    def _next_until_close(self) -> bytes | None:
        if not self._held and self._at_end:
            self._stage = _Stage.ENDED
            return b""
        piece, self._held = self._held, b""
        return piece or None

    def _next_of_chunks(self) -> bytes | None:
        held, position = self._held, 0
        if not held:
            self._check_more_may_come()
            return None
        pieces: list[bytes] = []
        while self._stage is not _Stage.ENDED:
            if self._stage is _Stage.CHUNK:
                piece = held[position : position + self._left_bytes]
                position += len(piece)
                self._left_bytes -= len(piece)
                pieces.append(piece)
                if self._left_bytes:
                    break
                self._stage = _Stage.CHUNK_END
            elif self._stage is _Stage.CHUNK_END:
                if len(held) < position + 2:
                    break
                if held[position : position + 2] != b"\r\n":
                    raise BadResponse("a chunk is longer than its size says")
                position += 2
                self._stage = _Stage.CHUNK_LINE
            else:
                end = held.find(b"\r\n", position)
                line_bytes_max = CHUNK_LINE_BYTES_MAX if self._stage is _Stage.CHUNK_LINE else HEAD_BYTES_MAX
                if (len(held) if end < 0 else end) - position > line_bytes_max:
                    raise BadResponse(f"a line between chunks has more than {line_bytes_max} bytes")
                if end < 0:
                    break
                line, position = held[position:end], end + 2
                self._take_line(line)
        self._held = held[position:]
        whole = b"".join(pieces) if len(pieces) > 1 else (pieces[0] if pieces else b"")
        if whole or self._stage is _Stage.ENDED:
            return whole
        self._check_more_may_come()
        return None

    def _take_line(self, line: bytes) -> None:
        if self._stage is _Stage.TRAILER:
            if not line:
                self._stage = _Stage.ENDED
                return
            if _TRAILER.fullmatch(line) is None:
                raise BadResponse("a line after the last chunk is not a header field")
            self._trailer_count += 1
            if self._trailer_count > TRAILERS_MAX:
                raise BadResponse(f"more than {TRAILERS_MAX} lines follow the last chunk")
            return
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise BadResponse(f"a chunk begins with {line[:80]!r}")
        self._left_bytes = int(size[1], 16)
        self._stage = _Stage.CHUNK if self._left_bytes else _Stage.TRAILER

    def _check_more_may_come(self) -> None:
        if self._at_end:
            raise IncompleteResponse(f"the connection closed, and {self._stage.value} is missing")
