"""Bodies that clients have compressed (Content-Encoding): gzip and deflate become what they were, within the limits of
a body, so that one of a few bytes which would unfold to gigabytes costs no more than any other."""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import UnknownCoding

if TYPE_CHECKING:
    from trioserve.http.body_budget import BodyShare
    from trioserve.http.headers import Headers

__all__ = ["CODINGS", "plain_body"]

CODINGS = "gzip, deflate"
PIECE_BYTES = 256 * 1024  # unfolded here in about a millisecond; all that comes behind it, in a thread
GZIP = 16 + zlib.MAX_WBITS
RAW_DEFLATE = -zlib.MAX_WBITS


async def plain_body(share: BodyShare, headers: Headers) -> bytes:
    """The whole body that the share holds, unfolded if it came compressed; from then on the share holds that.

    Raises UnknownCoding, InvalidRequest for a body that is not what its header says, BodyTooLarge and Overloaded as for
    a body that came as it is.
    """
    coding = headers.get("content-encoding")
    if coding is None or share.is_plain:
        return share.whole()
    return await _unfolded(share, coding.strip().lower(), headers.get("authorization") or headers.get("x-api-key"))


async def _unfolded(share: BodyShare, coding: str, key: str | None) -> bytes:
    """Unfold a body, piece by piece, in turn with those of other keys."""
    raw = share.whole()
    if coding in ("", "identity"):
        return raw
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise UnknownCoding(f'the body has the content-encoding "{coding[:40]}", allowed are {CODINGS}, or none at all')
    # What came stays counted until all of it is unfolded: both are in memory.
    decoder = zlib.decompressobj(_window_bits(coding, raw))
    rest = raw
    pieces = [_piece(decoder, rest, coding)]
    share.add_unfolded(pieces[0])
    while decoder.unconsumed_tail:
        rest = decoder.unconsumed_tail
        piece = await share.unfolding.call(partial(_piece, decoder, rest, coding), key=key)
        share.add_unfolded(piece)
        pieces.append(piece)
    if not decoder.eof:
        raise InvalidRequest(f"the body ends in the middle of its {coding}: send it whole")
    if decoder.unused_data:
        raise InvalidRequest(f"{len(decoder.unused_data)} bytes follow the body's {coding}: send one member alone")
    return share.become_plain(b"".join(pieces))


def _window_bits(coding: str, raw: bytes) -> int:
    if coding != "deflate":
        return GZIP
    # "deflate" is zlib's format (RFC 9110, 8.4.1.2), but some clients send the stream without its two bytes of head.
    has_head = len(raw) >= 2 and raw[0] & 0x0F == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_head else RAW_DEFLATE


def _piece(decoder: zlib._Decompress, rest: bytes, coding: str) -> bytes:
    try:
        return decoder.decompress(rest, PIECE_BYTES)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {coding}, as its content-encoding says: {error}") from None
