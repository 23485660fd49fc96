"""Copies blocks between an engine's KV cache and host memory, in a thread that is not the event loop's.

numpy lets go of the GIL for a copy, and an assignment to a memoryview does not: the event loop would have to ask for it
back, and wait for a switch interval, whenever it wakes up. So copies are numpy's wherever the blocks can be addressed.
"""

from __future__ import annotations

import numpy as np

from trioserve.connectors.host.block_memory import Content
from trioserve.connectors.host.gate import Gate
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout, KVPages

__all__ = ["PIECE_BYTES", "block_bytes", "copy_in", "copy_out"]

PIECE_BYTES = 256 * 1024
"""Some 30 us at 10 GB/s: so long whoever closes a gate waits at most."""


def block_bytes(layout: KVLayout) -> int:
    """Of one block in all layers."""
    return layout.layer_count * layout.block_size * layout.token_bytes


def copy_out(pages: KVPages, block: BlockIndex, content: Content, gate: Gate) -> bool:
    """From the engine. False: the gate was closed, and content is worth nothing."""
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
                if here is None:  # of a device, this is the copy
                    here = np.frombuffer(pages.read(layer, block), np.uint8)
                np.copyto(there[start:end], here[start:end])
    return True


def copy_in(pages: KVPages, block: BlockIndex, content: Content, token_count: int, gate: Gate) -> bool:
    """To the engine, the block's first token_count tokens. False: the gate was closed, and it is not all there."""
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
