"""The memory budget of all request bodies, and their decompression within the budget.

Each exchange has a share of the budget, and releases the share when the exchange ends.
"""

from __future__ import annotations

import zlib
from functools import partial

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.http.exchange import BodyTooLarge, Headers, UnknownCoding
from trioserve.http.limits import FrontendLimits
from trioserve.trio_tools.fair_slots import FairSlots

__all__ = ["CODINGS", "BodyBudget", "BodyShare", "decoded_body"]

# At most this number of bodies is decompressed at the same time, each in a thread. The bound leaves processors for the
# model if many compressed bodies arrive.
DECOMPRESSIONS_MAX = 2


class BodyBudget:
    """The bytes of request bodies and websocket messages that a server holds.

    Args:
        limits: limits on the size of a body, and on the sum of all bodies.

    Attributes:
        bytes_held: bytes of bodies whose exchange is open, and of messages that handlers have not finished.
        bytes_total: bytes of all bodies and messages that ever arrived, compressed if they were sent compressed.
        decompressions: limits how many bodies are decompressed at the same time.
    """

    def __init__(self, limits: FrontendLimits) -> None:
        self.limits = limits
        self.bytes_held = 0
        self.bytes_total = 0
        self.decompressions = FairSlots(DECOMPRESSIONS_MAX, what="compressed bodies")

    def hold(self, byte_count: int) -> None:
        """Count bytes that are now held.

        Args:
            byte_count: number of bytes.

        Raises:
            Overloaded: the bodies of all clients together become too large. Then nothing is counted.
        """
        if self.bytes_held + byte_count > self.limits.bodies_bytes_max:
            raise Overloaded(
                f"request bodies of all clients hold {self.bytes_held} bytes, "
                f"at most {self.limits.bodies_bytes_max} are allowed: try again shortly",
                reason="request_bodies",
                retry_after_seconds=1.0,
            )
        self.bytes_held += byte_count

    def release(self, byte_count: int) -> None:
        self.bytes_held -= byte_count


class BodyShare:
    """The body of one exchange while it arrives, and its share of the budget.

    Args:
        budget: the budget of the server.

    Attributes:
        is_decompressed: True if the body was sent compressed, and is now held decompressed.
    """

    __slots__ = ("_budget", "_byte_count", "_decompressed_bytes", "_pieces", "is_decompressed")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._pieces: list[bytes] = []
        self._byte_count = self._decompressed_bytes = 0
        self.is_decompressed = False

    @property
    def decompressions(self) -> FairSlots:
        return self._budget.decompressions

    def check_announced(self, headers: Headers) -> None:
        """Check the field content-length before any byte of the body is read.

        Args:
            headers: header fields of the request.

        Raises:
            BodyTooLarge: content-length is larger than allowed.
            InvalidRequest: content-length is not a number.
        """
        announced = headers.get("content-length")
        if announced is None:
            return
        if not (announced.isascii() and announced.isdigit()):
            raise InvalidRequest(f"content-length is {announced!r}, allowed is a number of bytes")
        self.check_size(int(announced))

    def check_size(self, byte_count: int) -> None:
        """Raise an error if a body of this size is not allowed.

        Args:
            byte_count: size of the body, or of the part that is known.

        Raises:
            BodyTooLarge: `byte_count` is larger than allowed.
        """
        allowed = self._budget.limits.body_bytes_max
        if byte_count > allowed:
            raise BodyTooLarge(f"the request body has {byte_count} bytes or more, at most {allowed} are allowed")

    def add(self, piece: bytes) -> None:
        """Append the next bytes of the body, as the client sent them.

        Args:
            piece: the next bytes.

        Raises:
            BodyTooLarge: the body becomes too large. The piece is not kept.
            Overloaded: the bodies of all clients together become too large. The piece is not kept.
        """
        self.check_size(self._byte_count + len(piece))
        self._budget.hold(len(piece))
        self._pieces.append(piece)
        self._byte_count += len(piece)
        self._budget.bytes_total += len(piece)

    def count_decompressed(self, piece: bytes) -> None:
        """Count a piece of the decompressed body. The caller keeps the piece.

        Args:
            piece: the next bytes.

        Raises:
            BodyTooLarge, Overloaded: as for `add`.
        """
        self.check_size(self._decompressed_bytes + len(piece))
        self._budget.hold(len(piece))
        self._decompressed_bytes += len(piece)

    def replace_compressed(self, whole: bytes) -> bytes:
        """Replace the compressed body by the decompressed body.

        Args:
            whole: the decompressed body. `count_decompressed` must have counted all of its pieces.

        Returns:
            `whole`.
        """
        assert len(whole) == self._decompressed_bytes
        self._budget.release(self._byte_count)
        self._pieces, self._byte_count, self._decompressed_bytes = [whole], len(whole), 0
        self.is_decompressed = True
        return whole

    def whole(self) -> bytes:
        """Return all bytes of the body so far. The bytes stay counted."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def release(self) -> None:
        """Return all bytes of the share to the budget. Further calls do nothing."""
        self._budget.release(self._byte_count + self._decompressed_bytes)
        self._byte_count = self._decompressed_bytes = 0
        self._pieces = []


CODINGS = "gzip, deflate"
# A decompressed piece has at most this size. The first piece takes about a millisecond and is decompressed in the event
# loop's thread. Further pieces are decompressed in another thread.
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
    # The compressed body stays counted until the end of the decompression, because both bodies are in memory.
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
    # The name "deflate" means the zlib format (RFC 9110, 8.4.1.2), but some clients omit its header of two bytes.
    has_header = len(raw) >= 2 and raw[0] & 0x0F == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_header else RAW_DEFLATE


def _piece(decoder: zlib._Decompress, rest: bytes, coding: str) -> bytes:
    try:
        return decoder.decompress(rest, PIECE_BYTES)
    except zlib.error as error:
        raise InvalidRequest(f"the content-encoding is {coding}, but the body is no valid {coding}: {error}") from None
