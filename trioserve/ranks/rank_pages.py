"""The KV cache of a group as one, in the layout that it has in one process: each block is put together of what the
ranks have of it, head by head. So engines exchange KV whatever their numbers of ranks are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model.kv_memory import KVMemory

__all__ = ["HeadRange", "RankPages", "StagePages", "head_ranges"]


class HeadRange(msgspec.Struct, frozen=True):
    """The heads of keys and values that a rank has."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


def head_ranges(ranks: Sequence[HeadRange]) -> tuple[tuple[HeadRange, ...], int]:
    """Of each rank the heads that are read from it, so that each is read once: where several have a head, from the
    first of them. And how many there are in all."""
    found: list[HeadRange] = []
    end = 0
    for rank in ranks:
        assert rank.first <= end, "the ranks have all heads, in their order"
        first = min(max(rank.first, end), rank.end)
        found.append(HeadRange(first, rank.end - first))
        end = max(end, rank.end)
    return tuple(found), end


class RankPages:
    """KVPages of ranks on this machine's CPUs. What is read is a copy."""

    def __init__(
        self,
        layout: KVLayout,
        block_count: int,
        heads: Sequence[HeadRange],
        descriptors: Sequence[int],
    ) -> None:
        """layout: of a rank, but for its number of heads. descriptors: of each rank's KVMemory."""
        self._read_from, head_count = head_ranges(heads)
        self._heads = tuple(heads)
        self.layout = msgspec.structs.replace(layout, kv_head_count=head_count)
        self.block_count = block_count
        self._block_bytes = layout.block_size * self.layout.token_bytes
        # Of each rank and layer [blocks, block_size * part_count, heads, bytes of a head].
        self._pages: list[list[npt.NDArray[np.uint8]]] = []
        for descriptor, own in zip(descriptors, heads, strict=True):
            memory = KVMemory(descriptor)
            token_bytes = msgspec.structs.replace(layout, kv_head_count=own.count).token_bytes
            shape = (block_count, layout.block_size * layout.part_count, own.count, -1)
            byte_count = block_count * layout.block_size * token_bytes
            self._pages.append([memory.take(byte_count).reshape(shape) for _ in range(layout.layer_count)])

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        parts = [
            pages[layer][block][:, heads.first - own.first : heads.end - own.first]
            for pages, heads, own in zip(self._pages, self._read_from, self._heads, strict=True)
            if heads.count
        ]
        joined: npt.NDArray[np.uint8] = np.concatenate(parts, axis=1)
        return joined.reshape(-1).data.toreadonly()

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        if len(content) == self._block_bytes:
            whole = np.frombuffer(content, dtype=np.uint8)
        else:
            whole = np.array(self.read(layer, block))
            whole[start : start + len(content)] = content
        by_head = whole.reshape(self.layout.block_size * self.layout.part_count, self.layout.kv_head_count, -1)
        for pages, own in zip(self._pages, self._heads, strict=True):
            pages[layer][block] = by_head[:, own.first : own.end]


class StagePages:
    """KVPages of stages, whose layers lie one behind the other."""

    def __init__(self, stages: Sequence[RankPages]) -> None:
        """stages: those whose layers keep anything, in their order; one at least."""
        self._places = [(stage, layer) for stage in stages for layer in range(stage.layout.layer_count)]
        self.layout = msgspec.structs.replace(stages[0].layout, layer_count=len(self._places))
        self.block_count = stages[0].block_count

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        stage, own_layer = self._places[layer]
        return stage.read(own_layer, block)

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        stage, own_layer = self._places[layer]
        stage.write(own_layer, block, start, content)
