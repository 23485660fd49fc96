"""Implements, for a model in ranks, those methods of ModelRunner that are needed to assemble an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import KVPages
from trioserve.model.device import with_images
from trioserve.model.number_formats import Dtype
from trioserve.ranks.messages import Loaded
from trioserve.ranks.rank_pages import HeadRange, RankPages, StagePages

if TYPE_CHECKING:
    from trioserve.model.vision_tower import VisionTower

__all__ = ["RankedRunner"]


class RankedRunner:
    """The sizes and names of a model that several processes compute. It has the same attributes as ModelRunner.

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
