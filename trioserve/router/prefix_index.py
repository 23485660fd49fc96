"""Maps block hashes to the endpoints that were sent these blocks.

The index is bounded: the least recently used entries are removed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from trioserve.contracts.endpoint import EndpointId

__all__ = ["PrefixIndex"]

HOLDERS_MAX = 16  # endpoints per block: no request looks at more endpoints
BLOCKS_MAX = 500_000  # hashes, about 150 bytes each; with 16 tokens a block, the caches of many machines


class PrefixIndex:
    """An index of blocks by hash. A hash covers all earlier blocks (see contracts/block_hash), so a match always begins
    with the first block.

    Args:
        blocks_max: maximum number of hashes. For each hash the last HOLDERS_MAX endpoints are kept.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._holders: OrderedDict[bytes, dict[EndpointId, None]] = OrderedDict()  # the most recently used last

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, hashes: Sequence[bytes]) -> dict[EndpointId, int]:
        """Return the number of leading blocks that each endpoint was sent. Endpoints without a match are missing.

        Args:
            hashes: hashes of the prompt's blocks, in order.
        """
        matched: dict[EndpointId, int] = {}
        still: list[EndpointId] | None = None  # None: more endpoints than are kept
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
        # Insert backwards, so that the first block of a prefix is removed last: without the first block, the later
        # blocks are never found.
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
