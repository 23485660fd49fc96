"""Presents a model in ranks as one model: its sizes and names, and the KV caches of all ranks as one KV cache.

A KV block is assembled from the KV heads of all ranks. So engines with different numbers of ranks can exchange KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout, KVPages
from trioserve.model.device import with_images
from trioserve.model.kv_storage import KVMemory
from trioserve.model.number_formats import Dtype
from trioserve.ranks.messages import Loaded

if TYPE_CHECKING:
    from trioserve.model.vision.tower import VisionTower

__all__ = ["HeadRange", "RankPages", "RankedRunner", "StagePages", "head_ranges"]


class RankedRunner:
    """The sizes and names of a model that several processes compute. It has those attributes and
    methods of ModelRunner that are needed to assemble an engine.

    Args:
        loaded: the summary of all ranks.
        ranks: the report of each rank, in order.
        kv_memories: see HostRanks.
        vision: computes image rows in this process. None if the model accepts no images.
        block_size: tokens per block.
        stage_size: ranks of each stage.
    """

    def __init__(
        self,
        loaded: Loaded,
        ranks: Sequence[Loaded],
        kv_memories: Sequence[int],
        vision: VisionTower | None,
        block_size: int,
        stage_size: int,
    ) -> None:
        self.vision = vision
        self._in_ranks = f", in {len(ranks)} ranks"
        self._ranks, self._kv_memories, self._stage_size = ranks, kv_memories, stage_size
        self.device = loaded.device
        self.dtype: Dtype = loaded.dtype
        self.kv_dtype = loaded.kv_dtype
        self.computed_by = loaded.computed_by + self._in_ranks
        self.arithmetic = with_images(
            loaded.arithmetic + self._in_ranks, self.dtype, None if vision is None else vision.dtype
        )
        self.is_batch_invariant = loaded.is_batch_invariant
        self.launches = loaded.launches
        self.max_num_seqs, self.step_tokens_max = loaded.max_num_seqs, loaded.step_tokens_max
        self.block_size = block_size
        self.block_count = loaded.block_count
        self.state_slot_count = loaded.state_slot_count
        self.snapshot_slot_count = loaded.snapshot_slot_count
        self.kv_cache_bytes = loaded.block_count * loaded.block_bytes
        self.step_weight_bytes = loaded.step_weight_bytes
        self.token_flops = loaded.token_flops
        self.attended_token_flops = loaded.attended_token_flops

    def kv_pages(self, model_name: str) -> KVPages:
        """Return access to the KV cache of all ranks, see ModelRunner.kv_pages.

        Args:
            model_name: name that engines compare before they exchange KV.

        Raises:
            StartupError: this process cannot read the ranks' KV caches.
        """
        if not self._kv_memories or self.device != "cpu":
            raise StartupError(
                "the model's ranks are on GPUs or on other machines, and connectors cannot read their KV caches: "
                "remove --kv-transfer-config"
            )
        stages = []
        for first in range(0, len(self._ranks), self._stage_size):
            ranks = self._ranks[first : first + self._stage_size]
            layout = ranks[0].layout
            if layout is None:
                continue  # The layers of this stage have no KV.
            suffix = layout.model and layout.model + self._in_ranks
            heads = [HeadRange(*rank.kv_heads) for rank in ranks]
            memories = self._kv_memories[first : first + self._stage_size]
            layout = msgspec.structs.replace(layout, model=model_name + suffix)
            stages.append(RankPages(layout, self.block_count, heads, memories))
        assert stages, "a model without KV has no connector"
        return stages[0] if len(stages) == 1 else StagePages(stages)


class HeadRange(msgspec.Struct, frozen=True):
    """The range of KV heads of a rank.

    Attributes:
        first: index of the first head in the whole model.
        count: number of heads.
    """

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


def head_ranges(ranks: Sequence[HeadRange]) -> tuple[tuple[HeadRange, ...], int]:
    """Select a rank for each head, so that each head is read once even if several ranks have copies of it.

    Args:
        ranks: the heads of each rank, in ascending order.

    Returns:
        The heads to read from each rank (the first rank that has a head), and the number of heads of the model.
    """
    found: list[HeadRange] = []
    end = 0
    for rank in ranks:
        assert rank.first <= end, "the ranks together have all heads, in ascending order"
        first = min(max(rank.first, end), rank.end)
        found.append(HeadRange(first, rank.end - first))
        end = max(end, rank.end)
    return tuple(found), end


class RankPages:
    """The KVPages of the ranks of one stage, which use the CPUs of this machine. Reading returns copies.

    Args:
        layout: layout of a rank. Its number of heads is replaced by the number of heads of the model.
        block_count: blocks of the KV cache.
        heads: heads of each rank.
        descriptors: file descriptor of each rank's KVMemory.
    """

    def __init__(
        self,
        layout: KVLayout,
        block_count: int,
        heads: Sequence[HeadRange],
        descriptors: Sequence[int],
    ) -> None:
        self._read_from, head_count = head_ranges(heads)
        self._heads = tuple(heads)
        self.layout = msgspec.structs.replace(layout, kv_head_count=head_count)
        self.block_count = block_count
        self._block_bytes = layout.block_size * self.layout.token_bytes
        # For each rank and layer, an array with shape [blocks, block_size * part_count, heads, bytes of a head].
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
    """The KVPages of all stages. The layers of each stage follow the layers of the previous stage.

    Args:
        stages: the stages that have layers with KV, in order. There is at least one.
    """

    def __init__(self, stages: Sequence[RankPages]) -> None:
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
