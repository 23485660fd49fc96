"""An image encoder without weights. Its image rows are a function of the pixels, and a test can block the encoder."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Coroutine
from typing import Any

import trio

from trioserve.contracts.errors import AlreadyEnded
from trioserve.contracts.media import ImagePlan, Tiles
from trioserve.testing.byte_tokenizer import IMAGE_TOKEN_ID
from trioserve.vision.families.idefics3 import Idefics3Processing

__all__ = ["FAKE_IMAGES", "FAKE_TILE_BYTES", "FakeImageEncoder", "rows_of"]

FAKE_IMAGES = Idefics3Processing(
    longest_edge=16,
    tile_size=8,
    splits=True,
    resample=1,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
    tile_tokens=4,
    embedding_size=2,
    image_token_id=IMAGE_TOKEN_ID,
)
"""Properties of the fake model's images. A square image becomes four tiles and a small copy of the whole image."""
FAKE_TILE_BYTES = FAKE_IMAGES.tile_tokens * FAKE_IMAGES.row_bytes
"""Bytes of one tile's rows."""


class FakeImageEncoder:
    """An ImageEncoder without weights.

    Args:
        processing: how images become tiles and rows.
        tile_seconds: seconds that each tile takes, by the clock of the Trio program.

    Attributes:
        encoding_count: images that are being encoded.
        gate: event that each tile waits for. None if tiles do not wait.
        fault: exception that the next tile raises. None for no exception.
        tile_count: tiles that were encoded.
        waiting_count: tiles that wait for the gate.
        is_closed: True after close(), when the engine restarts or ends.
    """

    def __init__(self, processing: Idefics3Processing = FAKE_IMAGES, *, tile_seconds: float = 0.0) -> None:
        self._processing = processing
        self.tile_seconds = tile_seconds
        self.encoding_count = 0
        self.gate: trio.Event | None = None
        self.fault: Exception | None = None
        self.tile_count = 0
        self.waiting_count = 0
        self.is_closed = False

    def hold(self) -> None:
        if self.gate is None:
            self.gate = trio.Event()

    def release(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.set()

    def close(self) -> None:
        self.is_closed = True
        self.release()

    def encode(self, tiles: Tiles, plan: ImagePlan) -> Coroutine[Any, Any, object]:
        return self._encode(tiles)

    async def _encode(self, tiles: Tiles) -> object:
        self.encoding_count += 1
        try:
            return await self._rows(tiles)
        finally:
            self.encoding_count -= 1

    async def _rows(self, tiles: Tiles) -> bytes:
        rows = b""
        for tile in range(tiles.shape[0]):
            await trio.sleep(self.tile_seconds)
            if self.gate is not None:
                self.waiting_count += 1
                try:
                    await self.gate.wait()
                finally:
                    self.waiting_count -= 1
            if self.is_closed:
                raise AlreadyEnded("the thread that computes has ended")
            if self.fault is not None:
                raise self.fault
            rows += rows_of(tiles, tile, self._processing)
            self.tile_count += 1
        return rows


def rows_of(tiles: Tiles, tile: int, processing: Idefics3Processing = FAKE_IMAGES) -> bytes:
    """Return the rows of one tile.

    Args:
        tiles: uint8 tiles of an image.
        tile: index of the tile.
        processing: how images become tiles and rows.

    Returns:
        float32 [tile_tokens, embedding_size], as bytes.
    """
    pixels = memoryview(tiles).cast("B")  # type: ignore[arg-type]  # it has a buffer
    tile_bytes = len(pixels) // tiles.shape[0]
    digest = zlib.crc32(pixels[tile * tile_bytes : (tile + 1) * tile_bytes])
    return b"".join(
        struct.pack(f"<{processing.embedding_size}f", float(digest >> 16), float(digest & 0xFFFF) + row)
        for row in range(processing.tile_tokens)
    )
