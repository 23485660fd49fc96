"""A KV cache in plain memory (contracts.kv_transfer.KVPages), for tests of connectors."""

from __future__ import annotations

import random
from collections.abc import Iterable

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout

__all__ = ["SMALL_LAYOUT", "MemoryPages"]

SMALL_LAYOUT = KVLayout(model="small", layer_count=2, block_size=4, kv_head_count=1, head_dim=2, dtype="float32")


class MemoryPages:
    """KVPages in memory.

    Args:
        block_count: number of blocks.
        layout: layout of the blocks.
        has_views: if True, blocks can be addressed in place. If False, reads copy them, as from a device.
    """

    def __init__(self, block_count: int, layout: KVLayout = SMALL_LAYOUT, *, has_views: bool = True) -> None:
        self.layout = layout
        self.block_count = block_count
        self.has_views = has_views
        self._block_bytes = layout.block_size * layout.token_bytes
        self._layers = [memoryview(bytearray(block_count * self._block_bytes)) for _ in range(layout.layer_count)]

    def view(self, layer: int, block: BlockIndex) -> memoryview | None:
        return self._block(layer, block) if self.has_views else None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        content = self._block(layer, block)
        return content.toreadonly() if self.has_views else memoryview(bytes(content))

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        self._block(layer, block)[start : start + len(content)] = content

    def fill(self, blocks: Iterable[int], seed: int) -> None:
        """Fill blocks with content that depends only on the seed, the layer and the block.

        With dtype float32, the content consists of numbers from -1 to 1, otherwise of random bytes.

        Args:
            blocks: indexes of the blocks.
            seed: seed of the content.
        """
        for block in blocks:
            for layer in range(self.layout.layer_count):
                source = random.Random(f"{seed}/{layer}/{block}")
                here = self._block(layer, BlockIndex(block))
                if self.layout.dtype == "float32":
                    numbers = here.cast("f")
                    for index in range(len(numbers)):
                        numbers[index] = source.uniform(-1, 1)
                else:
                    here[:] = source.randbytes(len(here))

    def content(self, block: int) -> bytes:
        """Return the bytes of a block, one layer after the other.

        Args:
            block: index of the block.
        """
        return b"".join(bytes(self._block(layer, BlockIndex(block))) for layer in range(self.layout.layer_count))

    def _block(self, layer: int, block: BlockIndex) -> memoryview:
        return self._layers[layer][block * self._block_bytes : (block + 1) * self._block_bytes]
