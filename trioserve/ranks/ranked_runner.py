"""What of a ModelRunner is asked for while an engine is put together, where ranks compute."""

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
    """The sizes and names of ModelRunner; see there. Of a model that is in several processes, which outlive it."""

    def __init__(
        self,
        loaded: Loaded,
        ranks: Sequence[Loaded],
        kv_memories: Sequence[int],
        vision: VisionTower | None,
        block_size: int,
        stage_size: int,
    ) -> None:
        """loaded: what suits all ranks; ranks: what each says. kv_memories: see HostRanks. vision: makes rows of images
        in this process. stage_size: ranks that divide the same layers."""
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
        self.block_size = block_size
        self.block_count = loaded.block_count
        self.state_slot_count = loaded.state_slot_count
        self.snapshot_slot_count = loaded.snapshot_slot_count
        self.kv_cache_bytes = loaded.block_count * loaded.block_bytes
        self.step_weight_bytes = loaded.step_weight_bytes
        self.token_flops = loaded.token_flops
        self.attended_token_flops = loaded.attended_token_flops

    def kv_pages(self, model_name: str) -> KVPages:
        """See ModelRunner.kv_pages. Raises StartupError where the KV cache cannot be read from here."""
        if not self._kv_memories or self.device != "cpu":
            raise StartupError(
                "the model's ranks are on GPUs or on other machines, whose KV cache no connector reads: leave out "
                "--kv-transfer-config"
            )
        stages = []
        for first in range(0, len(self._ranks), self._stage_size):
            ranks = self._ranks[first : first + self._stage_size]
            layout = ranks[0].layout
            if layout is None:
                continue  # none of its layers keeps anything of a token
            like = layout.model and layout.model + self._in_ranks
            heads = [HeadRange(*rank.kv_heads) for rank in ranks]
            memories = self._kv_memories[first : first + self._stage_size]
            layout = msgspec.structs.replace(layout, model=model_name + like)
            stages.append(RankPages(layout, self.block_count, heads, memories))
        assert stages, "a model without KV has no connector"
        return stages[0] if len(stages) == 1 else StagePages(stages)
