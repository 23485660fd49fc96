"""How large a chunked body says it is, and how many trailers follow it.

h11 reports a chunk only when its bytes come, and takes any number of trailers.

It follows the framing beside h11 (RFC 9112, 7.1), which alone decides what the bytes mean and refuses what is broken.
"""

from __future__ import annotations

import re

__all__ = ["ChunkSizes"]

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,20}")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_LINE_BYTES_MAX = 1024  # of a chunk's size and extensions; whoever sends longer ones is left to h11


class ChunkSizes:
    """Follows the framing of one body.

    announced_bytes: of all chunks whose beginning has come, whether or not their bytes have. trailer_count: lines
    behind the last chunk.
    """

    def __init__(self) -> None:
        self.announced_bytes = 0
        self.trailer_count = 0
        self._line = bytearray()  # the beginning of a chunk, not whole yet
        self._skip_bytes = 0  # what is left of a chunk, with the line break behind it
        self._is_over = False  # the chunks are
        self._has_ended = False  # and the trailers
        self._tail = b"\n"  # of what was looked at behind the last chunk

    def feed(self, data: bytes) -> None:
        """Bytes of the body, in the order in which h11 gets them."""
        position = 0
        while position < len(data) and not self._is_over:
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
                self._is_over = not byte_count  # the end, or nothing that we understand
            elif len(self._line) > _LINE_BYTES_MAX:
                self._is_over = True
        if self._is_over and not self._has_ended:
            self._count_trailers(data[position:])

    def _count_trailers(self, data: bytes) -> None:
        text = self._tail + data
        end = _BLANK_LINE.search(text)
        self._has_ended = end is not None  # another request may follow
        self.trailer_count += text.count(b"\n", len(self._tail), end.start() + 1 if end else len(text))
        self._tail = text[-3:]
