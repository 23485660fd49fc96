"""What the core tells of its prefix cache, written down beside it: each change once, and always the real set."""

from __future__ import annotations

from trioserve.contracts.block_hash import BlockHash
from trioserve.core.prefix_cache import PrefixCache

__all__ = ["ResidencyBook"]


class ResidencyBook:
    """Listens to a prefix cache from its beginning. resident: what it was told, applied in order."""

    def __init__(self, cache: PrefixCache) -> None:
        self.resident: set[BlockHash] = set()
        self._cache = cache
        cache.on_residency = self._note

    def check(self) -> None:
        """Assert that what was told is what can be found. O(blocks)."""
        real = set(self._cache.resident_hashes())
        assert real == self.resident, (
            f"{len(self.resident - real)} blocks are told and not there, {len(real - self.resident)} there and not told"
        )

    def _note(self, block_hash: BlockHash, is_resident: bool) -> None:
        if is_resident:
            assert block_hash not in self.resident, "a block is told twice"
            self.resident.add(block_hash)
        else:
            assert block_hash in self.resident, "a block is removed that was not told, or was removed before"
            self.resident.remove(block_hash)
