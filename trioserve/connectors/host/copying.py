"""Copies of blocks between an engine's KV cache and host memory, made in a worker thread.

numpy releases the GIL during a copy. An assignment to a memoryview does not: the event loop would wait for a switch
interval each time it wakes up. So numpy makes the copies if the CPU can address the blocks.
"""

from __future__ import annotations

import numpy as np

from trioserve.connectors.host.block_memory import Content
from trioserve.connectors.host.gate import Gate
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout, KVPages

__all__ = ["PIECE_BYTES", "block_bytes", "copy_in", "copy_out"]

PIECE_BYTES = 256 * 1024
"""Bytes per piece. A copy takes about 30 us at 10 GB/s. Closing a gate waits at most this long."""


def block_bytes(layout: KVLayout) -> int:
    """Return the size of one block in all layers, in bytes.

    Args:
        layout: KV layout of the engine.
    """
    return layout.layer_count * layout.block_size * layout.token_bytes


def copy_out(pages: KVPages, block: BlockIndex, content: Content, gate: Gate) -> bool:
    """Copy a block from the engine to host memory.

    Args:
        pages: KV cache of the engine.
        block: Block to copy.
        content: Host memory for the block.
        gate: Gate to enter for each piece.

    Returns:
        False if the gate was closed before the end. The content is not valid then.
    """
    layout = pages.layout
    size = layout.block_size * layout.token_bytes
    for layer in range(layout.layer_count):
        there = content[layer * size : (layer + 1) * size]
        here: Content | None = None
        for start in range(0, size, PIECE_BYTES):
            end = min(start + PIECE_BYTES, size)
            with gate as is_open:
                if not is_open:
                    return False
                if here is None:  # for a device, this call makes the copy
                    here = np.frombuffer(pages.read(layer, block), np.uint8)
                np.copyto(there[start:end], here[start:end])
    return True


def copy_in(pages: KVPages, block: BlockIndex, content: Content, token_count: int, gate: Gate) -> bool:
    """Copy the first tokens of a block from host memory to the engine.

    Args:
        pages: KV cache of the engine.
        block: Block to fill.
        content: Host memory with the block.
        token_count: Number of tokens to copy.
        gate: Gate to enter for each piece.

    Returns:
        False if the gate was closed before the end. The block is not complete then.
    """
    layout = pages.layout
    size = layout.block_size * layout.token_bytes
    wanted = token_count * layout.token_bytes
    for layer in range(layout.layer_count):
        here = content[layer * size : layer * size + wanted]
        for start in range(0, wanted, PIECE_BYTES):
            end = min(start + PIECE_BYTES, wanted)
            with gate as is_open:
                if not is_open:
                    return False
                view = pages.view(layer, block)
                if view is None:
                    pages.write(layer, block, start, here[start:end].data)
                else:
                    np.copyto(np.frombuffer(view, np.uint8)[start:end], here[start:end])
    return True
