"""Decompression of request bodies (Content-Encoding gzip and deflate).

The limits of a body also apply to the decompressed body. So a small body that decompresses to gigabytes ("zip bomb")
costs no more than any other body.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import UnknownCoding

if TYPE_CHECKING:
    from trioserve.http.body_budget import BodyShare
    from trioserve.http.headers import Headers

__all__ = ["CODINGS", "decoded_body"]

CODINGS = "gzip, deflate"
# Size of one decompressed piece. The first piece takes about a millisecond and is decompressed in this thread. Further
# pieces are decompressed in another thread.
PIECE_BYTES = 256 * 1024
GZIP = 16 + zlib.MAX_WBITS
RAW_DEFLATE = -zlib.MAX_WBITS


async def decoded_body(share: BodyShare, headers: Headers) -> bytes:
    """Return the whole body, and decompress it if it was sent compressed.

    Args:
        share: holds the body as it was sent. Afterwards it holds the decompressed body.
        headers: header fields of the request.

    Raises:
        UnknownCoding: the content-encoding is not supported.
        InvalidRequest: the body does not match its content-encoding, or is incomplete.
        BodyTooLarge: the decompressed body is too large.
        Overloaded: the bodies of all clients together are too large.
    """
    coding = headers.get("content-encoding")
    if coding is None or share.is_decompressed:
        return share.whole()
    return await _decompressed(share, coding.strip().lower(), headers.get("authorization") or headers.get("x-api-key"))


async def _decompressed(share: BodyShare, coding: str, key: str | None) -> bytes:
    """Decompress a body piece by piece. If many bodies wait for the threads, API keys take turns."""
    raw = share.whole()
    if coding in ("", "identity"):
        return raw
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise UnknownCoding(f'the body has the content-encoding "{coding[:40]}", allowed are {CODINGS}, or none at all')
    # The compressed body stays counted until the end of the decompression: both bodies are in memory.
    decoder = zlib.decompressobj(_window_bits(coding, raw))
    rest = raw
    pieces = [_piece(decoder, rest, coding)]
    share.count_decompressed(pieces[0])
    while decoder.unconsumed_tail:
        rest = decoder.unconsumed_tail
        piece = await share.decompressions.call(partial(_piece, decoder, rest, coding), key=key)
        share.count_decompressed(piece)
        pieces.append(piece)
    if not decoder.eof:
        raise InvalidRequest(f"the body ends in the middle of its {coding} data: send all of it")
    if decoder.unused_data:
        raise InvalidRequest(
            f"{len(decoder.unused_data)} bytes follow the {coding} data of the body: send a single member"
        )
    return share.replace_compressed(b"".join(pieces))


def _window_bits(coding: str, raw: bytes) -> int:
    if coding != "deflate":
        return GZIP
    # "deflate" is the zlib format (RFC 9110, 8.4.1.2), but some clients omit the header of two bytes.
    has_header = len(raw) >= 2 and raw[0] & 0x0F == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_header else RAW_DEFLATE


def _piece(decoder: zlib._Decompress, rest: bytes, coding: str) -> bytes:
    try:
        return decoder.decompress(rest, PIECE_BYTES)
    except zlib.error as error:
        raise InvalidRequest(f"the content-encoding is {coding}, but the body is no valid {coding}: {error}") from None
