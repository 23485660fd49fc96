"""How large a chunked body says it is, as soon as a chunk says so: h11 tells of a chunk only when its bytes come.

It follows the framing beside h11 (RFC 9112, 7.1), which alone decides what the bytes mean and refuses what is broken.
"""

from __future__ import annotations

import re

__all__ = ["ChunkSizes"]

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,20}")
_LINE_BYTES_MAX = 1024  # of a chunk's size and extensions; whoever sends longer ones is left to h11


class ChunkSizes:
    """announced_bytes: of all chunks whose beginning has come, whether or not their bytes have."""

    def __init__(self) -> None:
        self.announced_bytes = 0
        self._line = bytearray()  # the beginning of a chunk, not whole yet
        self._skip_bytes = 0  # what is left of a chunk, with the line break behind it
        self._is_over = False

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
