"""What of a ModelRunner is asked for while an engine is put together, where ranks compute."""

from __future__ import annotations

from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import KVPages
from trioserve.model.number_formats import Dtype
from trioserve.ranks.messages import Loaded

__all__ = ["RankedRunner"]


class RankedRunner:
    """The sizes and names of ModelRunner; see there. Of a model that is in several processes, which outlive it."""

    def __init__(self, loaded: Loaded, rank_count: int, block_size: int) -> None:
        ranks = f", in {rank_count} ranks"
        self.device = loaded.device
        self.dtype: Dtype = loaded.dtype
        self.kv_dtype = loaded.kv_dtype
        self.computed_by = loaded.computed_by + ranks
        self.arithmetic = loaded.arithmetic + ranks
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
        raise StartupError(
            "the model is in several ranks, whose KV cache no connector reads: leave out --kv-transfer-config"
        )
