"""Copies of blocks in host memory, for transfers of an engine whose blocks are on a device.

The chunks of a transfer are ordered by layers. So a transfer copies all of its blocks in some layers at once, as many
layers as fit into STAGE_BYTES. Most transfers need one copy.

`objection_to` checks that an engine can use the KV of another engine, and `convert` converts its dtype. Block sizes may
differ, because connectors count in tokens. The dtypes bfloat16, float16 and float32 may differ, too. Values are rounded
to the nearest value, and ties to the even value, as the model package does for checkpoints. KV in 8 bits is never
converted, because a second rounding would change responses. All other fields of the layout must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import BlockCopies, ConnectorSetup, KVLayout, KVPages

__all__ = ["STAGE_BYTES", "FetchedBlocks", "StoredBlocks", "convert", "layers_at_once", "objection_to"]


STAGE_BYTES = 128 * 2**20
"""Limit of host memory per running transfer. One layer is copied in any case."""


def layers_at_once(layout: KVLayout, block_count: int) -> int:
    """Return the number of layers that one copy contains.

    Args:
        layout: KV layout of the engine.
        block_count: Number of blocks of the transfer.
    """
    layer_bytes = block_count * layout.block_size * layout.token_bytes
    return max(1, min(layout.layer_count, STAGE_BYTES // layer_bytes))


class _Stage:
    """Host memory with the blocks of consecutive layers.

    Args:
        layout: KV layout of the engine.
        layers: Layers in the memory.
        blocks: Blocks in the memory.
        memory: The bytes, layer by layer, and block by block within a layer.
    """

    def __init__(self, layout: KVLayout, layers: range, blocks: Sequence[BlockIndex], memory: memoryview) -> None:
        self.layout = layout
        self.layers = layers
        self.memory = memory
        self._places = {block: place for place, block in enumerate(blocks)}
        self._block_bytes = layout.block_size * layout.token_bytes

    def view(self, layer: int, block: BlockIndex) -> memoryview:
        place = (layer - self.layers.start) * len(self._places) + self._places[block]
        return self.memory[place * self._block_bytes : (place + 1) * self._block_bytes]


class FetchedBlocks:
    """The blocks of one transfer to another engine, readable by the host.

    Args:
        setup: Cache of this engine, and its copies.
        blocks: Blocks of the transfer.
    """

    def __init__(self, setup: ConnectorSetup, blocks: Sequence[BlockIndex]) -> None:
        self._pages, self._copies = setup.pages, setup.copies
        self._blocks = blocks
        self._stage: _Stage | None = None

    async def of_layer(self, layer: int) -> KVPages | _Stage:
        """Return an object whose views contain the blocks of a layer. Copy the blocks if the host cannot address them.

        Args:
            layer: Index of the layer.
        """
        if self._copies is None:
            return self._pages
        if self._stage is None or layer not in self._stage.layers:
            layout, self._stage = self._pages.layout, None
            layers = range(layer, min(layout.layer_count, layer + layers_at_once(layout, len(self._blocks))))
            memory = await self._copies.fetch(layers, self._blocks)
            self._stage = _Stage(layout, layers, self._blocks, memory)
        return self._stage


class StoredBlocks:
    """The blocks of one load, writable by the host.

    Args:
        pages: Cache of this engine.
        copies: Copies of the engine.
        blocks: Blocks of the load.
        last_token_count: Number of tokens in the last block.
        is_wanted: False once the load has ended.
    """

    def __init__(
        self,
        pages: KVPages,
        copies: BlockCopies,
        blocks: Sequence[BlockIndex],
        last_token_count: int,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._layout, self._copies = pages.layout, copies
        self._blocks, self._last_token_count, self._is_wanted = blocks, last_token_count, is_wanted
        self._stage: _Stage | None = None

    def of_layer(self, layer: int) -> _Stage:
        """Return an object whose views accept the content of a layer. Call it for each layer in order.

        Args:
            layer: Index of the layer.
        """
        if self._stage is None:
            layout = self._layout
            layers = range(layer, min(layout.layer_count, layer + layers_at_once(layout, len(self._blocks))))
            byte_count = len(layers) * len(self._blocks) * layout.block_size * layout.token_bytes
            self._stage = _Stage(layout, layers, self._blocks, memoryview(bytearray(byte_count)))
        return self._stage

    @property
    def first_layer(self) -> int | None:
        """First layer that is not in the cache yet. None if all accepted layers are."""
        return None if self._stage is None else self._stage.layers.start

    async def layer_came(self, layer: int) -> None:
        """Write the accepted layers into the cache if this one is their last one.

        Args:
            layer: Index of a layer whose content is complete.
        """
        stage = self._stage
        if stage is None or layer != stage.layers.stop - 1:
            return
        await self._copies.store(stage.layers, self._blocks, stage.memory, self._last_token_count, self._is_wanted)
        self._stage = None


CONVERTED = ("float32", "bfloat16", "float16")
KEPT = ("int8", "fp8")
_NAN_BITS = 0x7FC0


def objection_to(theirs: KVLayout, ours: KVLayout) -> str | None:
    """Check that this engine can use KV of another engine.

    Args:
        theirs: KV layout of the other engine.
        ours: KV layout of this engine.

    Returns:
        A sentence that says why this engine cannot use the KV, or None if it can.
    """
    if theirs.model != ours.model:
        return f'its KV is of the model "{theirs.model[:200]}", and this engine has "{ours.model[:200]}"'
    for name, what in (
        ("layer_count", "layers"),
        ("part_count", "parts for keys, values or latents"),
        ("kv_head_count", "KV heads"),
        ("head_dim", "numbers in a head"),
    ):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            return f"its KV has {there} {what}, and this engine's {here}"
    for side, layout in (("its KV", theirs), ("this engine's", ours)):
        if layout.dtype not in (*CONVERTED, *KEPT):
            return f'the numbers of {side} are "{layout.dtype[:50]}", and known are {", ".join((*CONVERTED, *KEPT))}'
    if theirs.dtype != ours.dtype and (theirs.dtype in KEPT or ours.dtype in KEPT):
        return (
            f"its KV is kept as {theirs.dtype}, and this engine's as {ours.dtype}: KV in 8 bits is for engines with "
            "the same --kv-cache-dtype alone"
        )
    if theirs.block_size < 1:
        return f"its blocks have {theirs.block_size} tokens"
    return None


def convert(content: memoryview | bytearray | bytes, dtype: str, wanted: str) -> memoryview:
    """Convert KV to another dtype.

    Args:
        content: Contiguous values in `dtype`.
        dtype: Dtype of the content.
        wanted: Dtype of the result.

    Returns:
        Contiguous values in `wanted`: a view of the content if the dtypes are equal, else a copy. Values that are too
        large for the dtype become infinite, and NaN stays NaN.
    """
    view = memoryview(content).cast("B")
    if dtype == wanted:
        return view
    singles = _singles(view, dtype)
    if wanted == "float32":
        result: npt.NDArray[Any] = singles
    elif wanted == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            result = singles.astype(np.float16)
    else:
        result = _to_bfloat16(singles)
    return memoryview(cast(Any, result)).cast("B")


def _singles(view: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    """Return the values as float32, which represents each of the dtypes exactly."""
    if dtype == "float32":
        return np.frombuffer(view, np.float32)
    if dtype == "float16":
        return np.frombuffer(view, np.float16).astype(np.float32)
    return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(singles: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return bfloat16 values as uint16 bits, because numpy has no bfloat16."""
    bits = singles.view(np.uint32)
    # Round to the nearest value: add half of the lowest bit that is kept, or slightly less if that bit is 0, and drop
    # the lower bits. A carry into the exponent is correct. The sum of a NaN may overflow, so NaNs are set afterwards.
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(singles)] = _NAN_BITS
    return rounded
