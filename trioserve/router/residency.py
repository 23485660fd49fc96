"""Which blocks each endpoint has, as it says itself. Nothing is guessed here: who says nothing is unknown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import EndpointId

__all__ = ["BLOCKS_MAX", "ResidencyIndex"]

BLOCKS_MAX = 500_000  # of one endpoint, about 200 bytes each; at 16 tokens a block, the cache of a large machine


class _Residency:
    def __init__(self, block_size: int, window_tokens: int | None) -> None:
        self.block_size = block_size
        self.window_tokens = window_tokens
        self.hashes: set[BlockHash] = set()

    def first_needed(self, block_count: int) -> int:
        """Of a prefix of so many blocks, the first that whoever goes on behind it sees."""
        if self.window_tokens is None:
            return 0
        return max(0, block_count * self.block_size - self.window_tokens + 1) // self.block_size


class ResidencyIndex:
    """Bounded for each endpoint: of one that has more blocks, those that come last are not believed until others go. So
    it may know of fewer than there are, and never of more."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._by_endpoint: dict[EndpointId, _Residency] = {}
        # Most blocks are at one endpoint alone: a dictionary for each would cost more than the names.
        self._holders: dict[BlockHash, EndpointId | dict[EndpointId, None]] = {}
        self._sizes: Counter[int] = Counter()
        self._windowed_count = 0  # endpoints whose models have a window

    def likely_holders(self, blocks: Mapping[int, Sequence[BlockHash]], count: int) -> list[EndpointId]:
        """So many endpoints, of each size of blocks, that have the longest leading runs of these blocks, or fewer if no
        more have any. Of equal ones, some. O(blocks), however many endpoints there are. Where the model has a window,
        those that have the last of these blocks, whatever became of earlier ones."""
        found: list[EndpointId] = []
        for names in blocks.values():
            run = [name for name in names if name in self._holders] if self._windowed_count else None
            if run is None:
                run = list(itertools.takewhile(self._holders.__contains__, names))
            of_size: dict[EndpointId, None] = {}
            for name in reversed(run):
                holders = self._holders[name]
                more = itertools.islice(holders, count) if isinstance(holders, dict) else (holders,)
                of_size.update(dict.fromkeys(more))
                if len(of_size) >= count:
                    break
            found += itertools.islice(of_size, count)
        return found

    def matched_tokens(self, endpoint: EndpointId, blocks: Mapping[int, Sequence[BlockHash]]) -> int | None:
        """Of how many leading tokens the endpoint has the blocks; None if it is unknown what it has, or how its blocks
        of this prompt are called. blocks: names of the prompt's blocks, by their size. O(blocks that match), or
        O(blocks) where the model has a window."""
        residency = self._by_endpoint.get(endpoint)
        names = None if residency is None else blocks.get(residency.block_size)
        if residency is None or names is None:
            return None
        count = there_from = 0
        for index, name in enumerate(names):
            if name not in residency.hashes:
                if residency.window_tokens is None:
                    break
                there_from = index + 1  # what comes behind it may do without it
            if there_from <= residency.first_needed(index + 1):
                count = index + 1
        return count * residency.block_size

    def block_count(self, endpoint: EndpointId) -> int | None:
        """How many blocks are known of it; None if it is unknown what it has."""
        residency = self._by_endpoint.get(endpoint)
        return None if residency is None else len(residency.hashes)

    def block_sizes(self) -> frozenset[int]:
        """Of all endpoints that say what they have."""
        return frozenset(self._sizes)

    def replace(
        self, endpoint: EndpointId, block_size: int, hashes: Sequence[BlockHash], window_tokens: int | None = None
    ) -> None:
        """These, and no others, are what it has. window_tokens: how far back any layer of its model sees."""
        self.forget(endpoint)
        self._by_endpoint[endpoint] = _Residency(block_size, window_tokens)
        self._windowed_count += window_tokens is not None
        self._sizes[block_size] += 1
        self.add(endpoint, hashes)

    def add(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        """It has these, too. Ignored of an endpoint that has not said what it had before."""
        residency = self._by_endpoint.get(endpoint)
        if residency is not None:
            room = self._blocks_max - len(residency.hashes)
            for name in hashes[: max(0, room)]:
                residency.hashes.add(name)
                holders = self._holders.get(name)
                if holders is None:
                    self._holders[name] = endpoint
                elif isinstance(holders, dict):
                    holders[endpoint] = None
                elif holders != endpoint:
                    self._holders[name] = {holders: None, endpoint: None}

    def remove(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        """It has these no longer."""
        residency = self._by_endpoint.get(endpoint)
        if residency is not None:
            for name in hashes:
                if name in residency.hashes:
                    residency.hashes.discard(name)
                    self._drop(endpoint, name)

    def forget(self, endpoint: EndpointId) -> None:
        """It is unknown what it has."""
        residency = self._by_endpoint.pop(endpoint, None)
        if residency is None:
            return
        self._windowed_count -= residency.window_tokens is not None
        self._sizes[residency.block_size] -= 1
        if not self._sizes[residency.block_size]:
            del self._sizes[residency.block_size]
        for name in residency.hashes:
            self._drop(endpoint, name)

    def _drop(self, endpoint: EndpointId, name: BlockHash) -> None:
        holders = self._holders[name]
        if not isinstance(holders, dict):
            del self._holders[name]
            return
        del holders[endpoint]
        if len(holders) == 1:
            self._holders[name] = next(iter(holders))
