"""The lines of a batch's input: read piece by piece from the store, and what each asks for."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from trioserve.api.batches.batch_record import BatchError
from trioserve.api.files.stored_files import FILE_KIND
from trioserve.contracts.errors import StoreFault
from trioserve.store.store import Store

__all__ = ["AskedLine", "InputGone", "InputLine", "LineReader", "asked_line", "custom_id_of"]

CUSTOM_ID_CHARACTERS_MAX = 512
READ_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # after each read that fails: a disk may come back


class InputGone(Exception):
    """The input file was deleted, or its time is over."""


class InputLine(msgspec.Struct, frozen=True, kw_only=True):
    """number: from 0 on; blank lines do not count. end: offset of what follows it. raw: None: it is too long."""

    number: int
    end: int
    raw: bytes | None


class LineReader:
    """One after another, from an offset on. Holds one piece of the store and one line."""

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
        self._begin = 0  # of the next line, in what is held
        self._is_at_end = False

    async def next(self) -> InputLine | None:
        """Return the next line, None at the end.

        Raises:
            InputGone: the file is not there.
            StoreFault: it cannot be read, though it was tried several times.
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
            raise InputGone
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


class AskedLine(msgspec.Struct, frozen=True, kw_only=True):
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
    """None where there is none that could be."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def asked_line(line: InputLine, endpoint: str, *, line_bytes_max: int) -> AskedLine | BatchError:
    """What the line asks for, or what is wrong with it."""

    def wrong(code: str, message: str, param: str | None = None) -> BatchError:
        return BatchError(code=code, message=message, param=param, line=line.number + 1)

    if line.raw is None:
        return wrong("line_too_long", f"the line has more than {line_bytes_max} bytes")
    try:
        asked = msgspec.json.decode(line.raw, type=_Line)
        body = msgspec.json.decode(asked.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return wrong(
            "invalid_json_line",
            f"the line is no request of a batch ({str(error)[:200]}): send an object with custom_id, method, url and "
            "body",
        )
    if not 1 <= len(asked.custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        return wrong(
            "invalid_custom_id",
            f"custom_id has {len(asked.custom_id)} characters, allowed are 1 to {CUSTOM_ID_CHARACTERS_MAX}",
            "custom_id",
        )
    if asked.method != "POST":
        return wrong("invalid_method", f"method is {asked.method[:40]!r}, allowed is POST", "method")
    if asked.url != endpoint:
        return wrong("mismatched_url", f"url is {asked.url[:80]!r}, and the batch is for {endpoint}", "url")
    if body.stream not in (None, False):
        return wrong("stream_not_supported", "stream is set, and a batch has no reader for that", "stream")
    if body.background not in (None, False):
        return wrong("background_not_supported", "background is set, and a batch has no reader for that", "background")
    return AskedLine(custom_id=asked.custom_id, body=bytes(asked.body))
