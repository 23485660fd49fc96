"""Reads the announced size and the number of trailers of a chunked body.

h11 reports a chunk only when its bytes arrive, and accepts any number of trailers. So this module reads the chunk
framing (RFC 9112, 7.1) a second time. h11 alone decides what the bytes mean, and refuses broken framing.
"""

from __future__ import annotations

import re

__all__ = ["ChunkSizes"]

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,20}")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_LINE_BYTES_MAX = 1024  # size and extensions of a chunk; the scan stops at a longer line, which h11 accepts or refuses


class ChunkSizes:
    """The chunk framing of one body.

    Attributes:
        announced_bytes: size of all chunks whose size line has arrived, with or without their bytes.
        trailer_count: number of lines after the last chunk.
    """

    def __init__(self) -> None:
        self.announced_bytes = 0
        self.trailer_count = 0
        self._line = bytearray()  # an incomplete size line
        self._skip_bytes = 0  # missing bytes of the current chunk, with its line break
        self._chunks_ended = False
        self._trailers_ended = False
        self._tail = b"\n"  # the last bytes that were searched for the end of the trailers

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
                self._chunks_ended = not byte_count  # also true after a size line that cannot be read
            elif len(self._line) > _LINE_BYTES_MAX:
                self._chunks_ended = True
        if self._chunks_ended and not self._trailers_ended:
            self._count_trailers(data[position:])

    def _count_trailers(self, data: bytes) -> None:
        text = self._tail + data
        end = _BLANK_LINE.search(text)
        self._trailers_ended = end is not None  # the bytes after the end may be another request
        self.trailer_count += text.count(b"\n", len(self._tail), end.start() + 1 if end else len(text))
        self._tail = text[-3:]
