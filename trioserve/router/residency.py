"""Indexes of the endpoints that have the blocks of a prompt. One index guesses from earlier requests, and the other
index uses the reports of endpoints.

The size of both indexes is bounded.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.ids import BlockHash

__all__ = ["BLOCKS_MAX", "PrefixIndex", "ResidencyIndex"]

HOLDERS_MAX = 16  # The index keeps at most this many endpoints for each block. No request looks at more endpoints.
# Each hash takes about 150 bytes. With 16 tokens in a block, this number covers the caches of many machines.
SENT_BLOCKS_MAX = 500_000


class PrefixIndex:
    """An index of blocks by hash. A hash covers all earlier blocks (see contracts/ids), so a match always begins
    with the first block.

    Args:
        blocks_max: maximum number of hashes. For each hash the last HOLDERS_MAX endpoints are kept.
    """

    def __init__(self, blocks_max: int = SENT_BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        # The most recently used hashes are last.
        self._holders: OrderedDict[bytes, dict[EndpointId, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, hashes: Sequence[bytes]) -> dict[EndpointId, int]:
        """Return for each endpoint how many leading blocks of the prompt it was sent. Endpoints without a match are
        missing.

        Args:
            hashes: hashes of the prompt's blocks, in order.
        """
        matched: dict[EndpointId, int] = {}
        # `still` is None while every block so far has HOLDERS_MAX endpoints, because the index may have dropped further
        # endpoints.
        still: list[EndpointId] | None = None
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
        # Insert the hashes backwards, so that the first block of a prefix is removed last. Without the first block, the
        # later blocks are never found.
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


# The index keeps at most this many blocks of one endpoint, about 200 bytes each. With 16 tokens in a block, this number
# covers the cache of a large machine.
BLOCKS_MAX = 500_000


class _Residency:
    def __init__(self, block_size: int, window_tokens: int | None) -> None:
        self.block_size = block_size
        self.window_tokens = window_tokens
        self.hashes: set[BlockHash] = set()

    def first_needed(self, block_count: int) -> int:
        """Return the index of the first of `block_count` prefix blocks that the token after these blocks attends to."""
        if self.window_tokens is None:
            return 0
        return max(0, block_count * self.block_size - self.window_tokens + 1) // self.block_size


class ResidencyIndex:
    """An index of reported blocks, bounded for each endpoint.

    If an endpoint has more blocks than the limit, further blocks are ignored until known blocks are removed. So the
    index may lack blocks, but never contains a block that the endpoint does not have.

    Args:
        blocks_max: maximum number of blocks of one endpoint.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._by_endpoint: dict[EndpointId, _Residency] = {}
        # Most blocks are at a single endpoint. A dictionary for each block would need more memory than the hashes.
        self._holders: dict[BlockHash, EndpointId | dict[EndpointId, None]] = {}
        self._sizes: Counter[int] = Counter()
        self._windowed_count = 0  # The number of endpoints whose models have an attention window.

    def likely_holders(self, blocks: Mapping[int, Sequence[BlockHash]], count: int) -> list[EndpointId]:
        """Find endpoints with the longest leading runs of the prompt's blocks, for each block size.

        If the model has an attention window, endpoints with the last known blocks are found, even if earlier blocks are
        missing. The choice between endpoints with equally long runs is arbitrary.

        Args:
            blocks: hashes of the prompt's blocks, by block size in tokens.
            count: maximum number of endpoints for each block size.

        Cost:
            O(blocks), independent of the number of endpoints.
        """
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
        """Return how many leading tokens of a prompt the endpoint has in its blocks.

        Args:
            endpoint: name of the endpoint.
            blocks: hashes of the prompt's blocks, by block size in tokens.

        Returns:
            The number of tokens, or None if the endpoint's blocks are unknown or `blocks` lacks the endpoint's block
            size.

        Cost:
            O(matching blocks), or O(blocks) if the model has a window.
        """
        residency = self._by_endpoint.get(endpoint)
        names = None if residency is None else blocks.get(residency.block_size)
        if residency is None or names is None:
            return None
        count = there_from = 0
        for index, name in enumerate(names):
            if name not in residency.hashes:
                if residency.window_tokens is None:
                    break
                there_from = index + 1  # A match may begin after this block if no later token attends to this block.
            if there_from <= residency.first_needed(index + 1):
                count = index + 1
        return count * residency.block_size

    def block_count(self, endpoint: EndpointId) -> int | None:
        """Return how many blocks the endpoint has reported, or None if its blocks are unknown.

        Args:
            endpoint: name of the endpoint.
        """
        residency = self._by_endpoint.get(endpoint)
        return None if residency is None else len(residency.hashes)

    def block_sizes(self) -> frozenset[int]:
        """Return the block sizes in tokens of all endpoints that report."""
        return frozenset(self._sizes)

    def replace(
        self, endpoint: EndpointId, block_size: int, hashes: Sequence[BlockHash], window_tokens: int | None = None
    ) -> None:
        """Replace the known blocks of an endpoint.

        Args:
            endpoint: name of the endpoint.
            block_size: tokens of a block.
            hashes: hashes of all its blocks.
            window_tokens: attention window of the endpoint's model in tokens. None: the model has no window.
        """
        self.forget(endpoint)
        self._by_endpoint[endpoint] = _Residency(block_size, window_tokens)
        self._windowed_count += window_tokens is not None
        self._sizes[block_size] += 1
        self.add(endpoint, hashes)

    def add(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        """Add blocks of an endpoint. Does nothing until `replace` has set the complete list.

        Args:
            endpoint: name of the endpoint.
            hashes: hashes of the blocks.
        """
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
        """Remove blocks of an endpoint.

        Args:
            endpoint: name of the endpoint.
            hashes: hashes of the blocks.
        """
        residency = self._by_endpoint.get(endpoint)
        if residency is not None:
            for name in hashes:
                if name in residency.hashes:
                    residency.hashes.discard(name)
                    self._drop(endpoint, name)

    def forget(self, endpoint: EndpointId) -> None:
        """Forget the blocks of an endpoint. They then count as unknown.

        Args:
            endpoint: name of the endpoint.
        """
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
