"""A filter for the frames of an HTTP/2 client, which protects the h2 library and detects floods. No I/O.

h2 decides what frames mean. The filter is needed for six reasons:

- h2 buffers a frame of any announced size until the frame is complete.
- h2 treats GOAWAY as the end of the connection, although open streams continue.
- PRIORITY frames, which RFC 9113 deprecates, would only cost time.
- h2 stores each setting that a client sends, even if the setting's number is unknown.
- The server must detect a flood before it spends work on the frames.
- One read may contain so many frames that other tasks must run before all of them are handled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import h2.exceptions
from h2.errors import ErrorCodes

from trioserve.http.counters import ConnectionRefusal
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import RateBucket
from trioserve.trio_tools.http2_client import known_settings

__all__ = [
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "FRAME_BYTES_MAX",
    "HEADERS",
    "PREFACE",
    "SETTINGS",
    "Flood",
    "FrameGate",
    "frame",
    "goaway_frame",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, 3.4 defines the preface.
FRAME_BYTES_MAX = 16384  # The value is the default of SETTINGS_MAX_FRAME_SIZE. Larger frames would delay other streams.

HEAD = struct.Struct(">HBBBL")  # The head of a frame has length, kind, flags and stream id (RFC 9113, 4.1).
HEAD_BYTES = HEAD.size
KIND_AT = 3
# A DATA frame up to this size counts as a control frame, because a small frame costs as much as a full frame. The limit
# allows a few small frames per body.
SMALL_DATA_BYTES_MAX = 128
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4


# Each value is the estimated cost of a frame in microseconds, measured on one core and rounded up. The cost of a header
# block is added to the frame that ends the block.
PIECE_WORK_US_MAX = 2000
FRAME_WORK_US = 20
SETTINGS_WORK_US = 60
HEAD_WORK_US = 150
HEAD_BYTES_A_US = 4  # In one microsecond, Python code decodes this number of bytes of Huffman-coded text.
DATA_BYTES_A_US = 1000


class Flood(h2.exceptions.ProtocolError):
    """The client sends more frames of some kind than a real client needs.

    Args:
        message: the message for the log.
        reason: the reason for the counters.
    """

    error_code = ErrorCodes.ENHANCE_YOUR_CALM

    def __init__(self, message: str, reason: ConnectionRefusal) -> None:
        super().__init__(message)
        self.reason = reason


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    byte_count = len(payload)
    return HEAD.pack(byte_count >> 8, byte_count & 0xFF, kind, flags, stream_id) + payload


def goaway_frame(last_stream_id: int, error_code: int) -> bytes:
    """Encode a GOAWAY (RFC 9113, 6.8) without h2, because h2 would stop the open streams after its own GOAWAY.

    Args:
        last_stream_id: the last stream that the server processes.
        error_code: an error code of RFC 9113, 7.
    """
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream_id, error_code))


class FrameGate:
    """A filter that splits the client's bytes after the preface into frames, and selects the frames for h2.

    Args:
        limits: limits on frames and header blocks.
        now: current time, in monotonic seconds.

    Attributes:
        goaway_received: True once the client sent GOAWAY. Then it opens no more streams.
        data_frames_sent: DATA frames of the server since the client's last control frame. The client may answer each
            DATA frame with two window updates, for the stream and for the connection.
    """

    def __init__(self, limits: FrontendLimits, *, now: float) -> None:
        self.goaway_received = False
        self.data_frames_sent = 0
        self._header_block_since: float | None = None
        self._frame_since = now  # The arrival time of the first byte of the incomplete frame.
        self._settings_received = False
        self._header_block_bytes = 0
        self._header_block_bytes_max = limits.head_bytes_max
        self._held = bytearray()
        self._control_frames = RateBucket(
            per_second=limits.control_frames_per_second_max, burst=limits.control_frames_burst_max, now=now
        )

    @property
    def header_block_since(self) -> float | None:
        """Arrival time of the first byte of an unfinished header block, or None. The head of a HEADERS frame counts as
        a byte of the block.
        """
        if self._header_block_since is None and len(self._held) > KIND_AT and self._held[KIND_AT] == HEADERS:
            return self._frame_since
        return self._header_block_since

    def pieces(self, received: bytes | bytearray, now: float) -> Iterator[bytes]:
        """Split received bytes into pieces of complete frames for h2. At most one incomplete frame is kept for the next
        call.

        Args:
            received: the bytes of one read.
            now: current time, in monotonic seconds.

        Yields:
            Frames that cost about PIECE_WORK_US_MAX together. The caller may let other tasks run between two pieces.
            The caller must consume all pieces before the next call.

        Raises:
            Flood: the client sends too many frames that are of no use.
            FrameTooLargeError: a frame announces more than FRAME_BYTES_MAX.
            ProtocolError: a violation of the protocol that h2 ignores, or reports with another code than RFC 9113
                requires.
        """
        held = self._held
        if not held:
            self._frame_since = now
        held += received
        position = 0
        kept_from = 0
        kept: list[bytes] = []
        work_us = 0
        try:
            while len(held) - position >= HEAD_BYTES:
                byte_count = int.from_bytes(held[position : position + 3], "big")
                if byte_count > FRAME_BYTES_MAX:
                    raise h2.exceptions.FrameTooLargeError(
                        f"the client sent a frame of {byte_count} bytes, at most {FRAME_BYTES_MAX} are allowed"
                    )
                end = position + HEAD_BYTES + byte_count
                if end > len(held):
                    break
                work_us += self._work_us(held, position, byte_count)
                if not self._passes(held, position, byte_count, now):
                    kept.append(bytes(held[kept_from:position]))
                    kept_from = end
                elif held[position + KIND_AT] == SETTINGS and byte_count:
                    kept.append(bytes(held[kept_from:position]))
                    kept.append(_with_known_settings(bytes(held[position:end])))
                    kept_from = end
                position = end
                self._frame_since = now
                if work_us >= PIECE_WORK_US_MAX:
                    kept.append(bytes(held[kept_from:position]))
                    yield b"".join(kept)
                    kept.clear()
                    kept_from, work_us = position, 0
            kept.append(bytes(held[kept_from:position]))
            if piece := b"".join(kept):
                yield piece
        finally:
            del held[:position]

    def _work_us(self, held: bytearray, position: int, byte_count: int) -> int:
        kind = held[position + KIND_AT]
        if kind == DATA:
            return FRAME_WORK_US + byte_count // DATA_BYTES_A_US
        if kind in (HEADERS, CONTINUATION) and held[position + 4] & END_HEADERS:
            return HEAD_WORK_US + (self._header_block_bytes + byte_count) // HEAD_BYTES_A_US
        return SETTINGS_WORK_US if kind == SETTINGS else FRAME_WORK_US

    def _passes(self, held: bytearray, position: int, byte_count: int, now: float) -> bool:
        """Check and count a frame, and return True if h2 should get the frame."""
        kind = held[position + KIND_AT]
        flags = held[position + 4]
        if not self._settings_received:
            if kind != SETTINGS:
                raise h2.exceptions.ProtocolError("the first frame is not SETTINGS")
            self._settings_received = True
        if kind == SETTINGS and flags & ACK and byte_count:
            raise h2.exceptions.FrameTooLargeError("an acknowledgement of SETTINGS is not empty")
        if kind == DATA:
            if byte_count <= SMALL_DATA_BYTES_MAX and not flags & END_STREAM:
                self._count_control_frame(now)
            return True
        if kind in (HEADERS, CONTINUATION):
            self._follow_header_block(byte_count, ends=bool(flags & END_HEADERS))
            return True
        self._count_control_frame(now)
        if self._header_block_since is not None:
            return True  # The frame is not allowed inside a header block, so h2 will end the connection.
        stream_id = int.from_bytes(held[position + 5 : position + 9], "big") & 0x7FFFFFFF
        if kind == PRIORITY and byte_count == 5 and stream_id:
            return False
        if kind == GOAWAY and byte_count >= 8 and not stream_id:
            self.goaway_received = True
            return False
        return kind <= CONTINUATION  # Frames of unknown kinds must be ignored (RFC 9113, 5.5).

    def _follow_header_block(self, byte_count: int, *, ends: bool) -> None:
        self._header_block_bytes += byte_count
        if self._header_block_bytes > self._header_block_bytes_max:
            raise Flood(
                f"a header block has more than {self._header_block_bytes_max} bytes", ConnectionRefusal.HEAD_TOO_LARGE
            )
        if ends:
            self._header_block_bytes = 0
            self._header_block_since = None
        elif self._header_block_since is None:
            self._header_block_since = self._frame_since

    def _count_control_frame(self, now: float) -> None:
        self._control_frames.allow(2 * self.data_frames_sent)
        self.data_frames_sent = 0
        if not self._control_frames.take(now):
            raise Flood("too many control frames", ConnectionRefusal.CONTROL_FRAMES)


def _with_known_settings(settings_frame: bytes) -> bytes:
    """Return a SETTINGS frame without unknown settings."""
    flags = settings_frame[4]
    payload = settings_frame[HEAD_BYTES:]
    if flags & ACK:
        return settings_frame
    stream_id = int.from_bytes(settings_frame[5:9], "big")
    return frame(SETTINGS, flags, stream_id, known_settings(payload))
