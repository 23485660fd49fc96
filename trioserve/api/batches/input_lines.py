"""The lines of a batch's input, read from the store in pieces, and the exchange that runs one line.

The server sends the request of a line to itself. The exchange has no client and keeps the whole response.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import trio

from trioserve.api.batches.batch_record import BatchError
from trioserve.api.batches.stored_files import FILE_KIND
from trioserve.contracts.errors import StoreFault
from trioserve.http.exchange import Exchange, HeaderFields, Headers
from trioserve.store.store import Store

__all__ = [
    "InputDeleted",
    "InputLine",
    "InternalExchange",
    "LineReader",
    "LineRequest",
    "ResponseTooLarge",
    "custom_id_of",
    "line_request",
]

CUSTOM_ID_CHARACTERS_MAX = 512
# The server waits for these times between attempts to read, because a disk error may be temporary.
READ_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


class InputDeleted(Exception):
    """The input file was deleted or has expired."""


class InputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the input.

    Attributes:
        number: Number of the line, from 0. Blank lines do not count.
        end: Offset of the byte after the line.
        raw: The line. None if it is too long.
    """

    number: int
    end: int
    raw: bytes | None


class LineReader:
    """Reads lines in order. Holds one piece of the file and one line in memory.

    Args:
        store: Holds the input file.
        owner: Owner of the file.
        line_bytes_max: Longest line.
        number: Number of the first line to read.
        offset: Offset in bytes of the first line to read.
        kind: Kind of the file in the store.
    """

    def __init__(
        self,
        store: Store,
        file_id: str,
        owner: str | None,
        *,
        line_bytes_max: int,
        number: int = 0,
        offset: int = 0,
        kind: str = FILE_KIND,
    ) -> None:
        self._store = store
        self._kind = kind
        self._file_id = file_id
        self._owner = owner
        self._line_bytes_max = line_bytes_max
        self._number = number
        self._offset = self._read_offset = offset
        self._held = b""
        self._begin = 0  # The next line begins at this index in `_held`.
        self._is_at_end = False

    async def next(self) -> InputLine | None:
        """Return the next line, or None at the end.

        Raises:
            InputDeleted: The file does not exist.
            StoreFault: The file cannot be read after several attempts.
        """
        is_too_long = False
        while True:
            newline = self._held.find(b"\n", self._begin)
            if newline < 0 and not self._is_at_end:
                if len(self._held) - self._begin > self._line_bytes_max:
                    is_too_long = True
                    self._take(len(self._held))
                await self._read()
                continue
            raw = self._take(len(self._held) if newline < 0 else newline + 1)
            if not raw.strip() and not is_too_long:
                if newline < 0:
                    return None
                continue
            is_too_long = is_too_long or len(raw) > self._line_bytes_max
            self._number += 1
            return InputLine(number=self._number - 1, end=self._offset, raw=None if is_too_long else raw)

    def _take(self, end: int) -> bytes:
        raw = self._held[self._begin : end]
        self._offset += len(raw)
        self._begin = end
        return raw

    async def _read(self) -> None:
        piece = await self._read_piece()
        if piece is None:
            raise InputDeleted
        self._is_at_end = not piece
        self._read_offset += len(piece)
        self._held = self._held[self._begin :] + piece
        self._begin = 0

    async def _read_piece(self) -> bytes | None:
        for seconds in READ_PAUSES_SECONDS:
            try:
                return await self._store.read_blob(
                    self._kind, self._file_id, owner=self._owner, offset=self._read_offset
                )
            except StoreFault:
                await trio.sleep(seconds)
        return await self._store.read_blob(self._kind, self._file_id, owner=self._owner, offset=self._read_offset)


class LineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a line."""

    custom_id: str
    body: bytes


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    stream: Any = None
    background: Any = None


def custom_id_of(raw: bytes | None) -> str | None:
    """Return the custom_id of a line, or None if the line has no valid custom_id.

    Args:
        raw: The line. None if it is too long.
    """
    try:
        return None if raw is None else msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def line_request(line: InputLine, endpoint: str, *, line_bytes_max: int) -> LineRequest | BatchError:
    """Return the request of a line, or the error of an invalid line.

    Args:
        endpoint: Path that all lines of the batch must name.
        line_bytes_max: Longest line, for the error.
    """

    def wrong(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code=code, message=message, param=param, line=line.number + 1)

    if line.raw is None:
        return wrong("line_too_long", f"the line has more than {line_bytes_max} bytes")
    try:
        request = msgspec.json.decode(line.raw, type=_Line)
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return wrong(
            "invalid_json_line",
            f"the line is not a valid request ({str(error)[:200]}): send an object with custom_id, method, url and "
            "body",
        )
    if not 1 <= len(request.custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        return wrong(
            "invalid_custom_id",
            f"custom_id has {len(request.custom_id)} characters, allowed are 1 to {CUSTOM_ID_CHARACTERS_MAX}",
            "custom_id",
        )
    if request.method != "POST":
        return wrong("invalid_method", f"method is {request.method[:40]!r}, allowed is POST", "method")
    if request.url != endpoint:
        return wrong("mismatched_url", f"url is {request.url[:80]!r}, but the batch is for {endpoint}", "url")
    if body.stream not in (None, False):
        return wrong("stream_not_supported", "stream is set, but a batch does not stream", "stream")
    if body.background not in (None, False):
        return wrong("background_not_supported", "background is set, but a batch does not use it", "background")
    return LineRequest(custom_id=request.custom_id, body=bytes(request.body))


class ResponseTooLarge(Exception):
    """The response is larger than the limit."""


class InternalExchange(Exchange):
    """An exchange whose response is kept in memory. It has no cancel scope of its own.

    Args:
        path: Path of the request.
        headers: Headers of the request.
        body: Body of the request.
        response_bytes_max: Limit for the size of the response.

    Attributes:
        status: Status of the response. None until the response begins.
        response_headers: Headers of the response.
        response: Body of the response so far.
    """

    http_version = "1.1"
    peer = "batch"

    def __init__(self, path: str, headers: Iterable[tuple[str, str]], body: bytes, *, response_bytes_max: int) -> None:
        self.method, self.path, self.query = "POST", path, ""
        self.headers = Headers(headers)
        self.status: int | None = None
        self.response_headers = Headers(())
        self.is_finished = False
        self._body = body
        self._pieces: list[bytes] = []
        self._bytes_left = response_bytes_max

    @property
    def started(self) -> bool:
        return self.status is not None

    @property
    def response(self) -> bytes:
        return b"".join(self._pieces)

    async def body(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._body

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self.start(status, headers)
        await self.finish(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        if self.started:
            raise RuntimeError("the response has been started already")
        self.status = status
        self.response_headers = Headers(headers)
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        if not self.started or self.is_finished:
            raise RuntimeError("the response is not open")
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ResponseTooLarge
        self._pieces.append(data)
        await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        await self.send(last)
        self.is_finished = True
