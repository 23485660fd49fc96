"""Which endpoints know which blocks, by the names of the blocks. Bounded; what was not asked for longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from trioserve.contracts.endpoint import EndpointId

__all__ = ["PrefixIndex"]

HOLDERS_MAX = 16  # of one block: as many as are ever looked at for a request
BLOCKS_MAX = 500_000  # names, about 150 bytes each; at 16 tokens a block the caches of many machines


class PrefixIndex:
    """A block's name stands for all before it too (see contracts/block_hash), so a match is a leading run. Of a block
    that many endpoints know, a common beginning, the last HOLDERS_MAX are remembered."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._holders: OrderedDict[bytes, dict[EndpointId, None]] = OrderedDict()  # the youngest last

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, hashes: Sequence[bytes]) -> dict[EndpointId, int]:
        """How many of the leading blocks each endpoint knows; those that know none are left out."""
        matched: dict[EndpointId, int] = {}
        still: list[EndpointId] | None = None  # None: more than are remembered
        for depth, name in enumerate(hashes, 1):
            holders = self._holders.get(name)
            if holders is None:
                break
            there = list(holders) if still is None else [endpoint for endpoint in still if endpoint in holders]
            if not there:
                break
            for endpoint in there:
                matched[endpoint] = depth
            still = None if len(holders) >= HOLDERS_MAX and still is None else there
        return matched

    def add(self, endpoint: EndpointId, hashes: Sequence[bytes]) -> None:
        # Backwards, so that the first block of a prefix is the youngest: without it the others are never found.
        for name in reversed(hashes):
            holders = self._holders.setdefault(name, {})
            holders.pop(endpoint, None)
            holders[endpoint] = None
            if len(holders) > HOLDERS_MAX:
                del holders[next(iter(holders))]
            self._holders.move_to_end(name)
        while len(self._holders) > self._blocks_max:
            self._holders.popitem(last=False)

    def remove(self, endpoint: EndpointId, hashes: Sequence[bytes]) -> None:
        for name in hashes:
            holders = self._holders.get(name)
            if holders is not None:
                holders.pop(endpoint, None)
                if not holders:
                    del self._holders[name]

    def forget(self, endpoint: EndpointId) -> None:
        self.remove(endpoint, list(self._holders))
