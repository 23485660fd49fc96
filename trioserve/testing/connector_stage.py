"""What the conformance suite sets a connector on: engines that are nothing but books, and memory that is watched.

A Side plays one engine's core towards one connector and notes every promise that is broken, as `violations`: reports
that nobody may expect, blocks that are written or read by somebody who has no right to. Blocks that come back are
overwritten at once, as another request would do it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import NO_BLOCK, BlockIndex, RequestId
from trioserve.contracts.kv_transfer import (
    ConnectorSetup,
    HoldKind,
    KVConnector,
    KVLayout,
    Loaded,
    LoadFailed,
    Released,
    StillRead,
    TransferEvent,
)
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.memory_pages import MemoryPages

__all__ = ["KV", "Load", "Side", "WatchedPages", "is_same", "kv_of", "make_request"]

BLOCK_COUNT = 64

KV = list[list[bytes]]
"""What some positions hold: for each layer, a token's bytes for each position."""


class WatchedPages(MemoryPages):
    """is_readable: whether somebody may read a block now. Who does so otherwise is a violation; what is read through a
    view cannot be seen here, and is noticed by what it brings."""

    def __init__(self, layout: KVLayout, *, has_views: bool) -> None:
        super().__init__(BLOCK_COUNT, layout, has_views=has_views)
        self.is_readable: Callable[[int], bool] = lambda block: True
        self.violations: list[str] = []

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        if not self.is_readable(block):
            self.violations.append(f"block {block} is read, and nobody may")
        return super().read(layer, block)


class Load(msgspec.Struct, eq=False):
    """A load that is out. positions: those that lie in a block. outside: what stands in its blocks where it may not
    write."""

    request: EngineRequest
    block_table: tuple[BlockIndex, ...]
    start: int
    token_count: int
    positions: range
    outside: KV
    is_abandoned: bool = False


class Side:
    """One engine. window_tokens: of the sliding window of all layers of its model. sends, loads: what is out, by
    request. reports: every report, in order. woken: set when the connector has called `wake`. violations: what the
    connector did that it must not."""

    def __init__(self, name: str, layout: KVLayout, *, has_views: bool = True) -> None:
        self.name = name
        self.pages = WatchedPages(layout, has_views=has_views)
        self.pages.is_readable = lambda block: block in self._in_use
        self.window_tokens: int | None = None
        self.violations = self.pages.violations
        self.woken = trio.Event()
        self.sends: dict[RequestId, tuple[BlockIndex, ...]] = {}
        self.loads: dict[RequestId, Load] = {}
        self.reports: list[TransferEvent] = []
        self.loaded: dict[RequestId, KV] = {}
        self.fills = 0
        self._chance = random.Random(name)
        self._free = list(range(BLOCK_COUNT))
        self._in_use: set[int] = set()
        # What every block holds into which nobody may write now.
        self._quiet: dict[int, bytes] = {}
        self._overwrite(range(BLOCK_COUNT))

    def connect(
        self, make: Callable[[ConnectorSetup], KVConnector], options: Mapping[str, Any], engine_id: str
    ) -> None:
        self.connector = make(
            ConnectorSetup(
                engine_id=engine_id,
                role="both",
                pages=self.pages,
                options=options,
                wake=self._wake,
                window_tokens=self.window_tokens,
            )
        )

    # --- blocks ---

    def take(self, token_count: int) -> tuple[BlockIndex, ...]:
        """As many blocks as these tokens need, in no order, with content of their own."""
        self._chance.shuffle(self._free)
        count = -(-token_count // self.pages.layout.block_size)
        blocks, self._free = self._free[:count], self._free[count:]
        assert len(blocks) == count, "the suite has used up its blocks: it forgets to give them back"
        self._overwrite(blocks)
        self._in_use.update(blocks)
        return tuple(BlockIndex(block) for block in blocks)

    def without_unseen(self, blocks: Sequence[BlockIndex], position: int) -> tuple[BlockIndex, ...]:
        """A block table without the blocks that the token at this position does not see, which are given back."""
        if self.window_tokens is None:
            return tuple(blocks)
        first = max(0, position - self.window_tokens + 1) // self.pages.layout.block_size
        self.give_back(blocks[:first])
        return (NO_BLOCK,) * first + tuple(blocks[first:])

    def give_back(self, blocks: Sequence[BlockIndex]) -> None:
        """They are another's from now on, unless a hold has them, too."""
        held = {block for blocks in self.sends.values() for block in blocks}
        gone = [block for block in blocks if block not in held and block in self._in_use]
        self._in_use.difference_update(gone)
        self._free += gone
        self._overwrite(gone)

    # --- what a core does ---

    def finish(
        self, request: EngineRequest, blocks: Sequence[BlockIndex], tokens: Sequence[int], reason: FinishReason
    ) -> KVTransferParams | None:
        """The request ends with these blocks, which are given back unless they are held now."""
        self.check()
        blocks = self.without_unseen(blocks, len(tokens) - 1)
        is_held = self.connector.request_finished(request, blocks, tuple(tokens), reason)
        blocks = tuple(block for block in blocks if block != NO_BLOCK)
        if is_held:
            self.sends[request.id] = blocks
            return self.connector.transfer_params(request.id)
        self.give_back(blocks)
        return None

    def start_load(self, request: EngineRequest, computed_count: int, token_count: int) -> Load:
        end, size = computed_count + token_count, self.pages.layout.block_size
        block_table = self.without_unseen(self.take(len(request.known_token_ids)), end)
        positions = range(max(computed_count, block_table.count(NO_BLOCK) * size), end)
        written = [block for block in block_table[computed_count // size :] if block != NO_BLOCK]
        load = Load(request, block_table, computed_count, token_count, positions, outside=[])
        load.outside = self._outside(load)
        self.loads[request.id] = load
        for block in written:
            del self._quiet[block]
        self.connector.start_load(request, block_table, computed_count, token_count)
        return load

    def abandon(self, load: Load) -> None:
        if load.request.id in self.loads:  # otherwise it was reported before
            load.is_abandoned = True
            self.connector.load_abandoned(load.request.id)

    def expire_send(self, request_id: RequestId) -> None:
        if request_id in self.sends:
            self.connector.hold_expired(request_id, HoldKind.SEND)
            self.give_back(self.sends.pop(request_id))

    def expire_load(self, load: Load) -> None:
        if load.request.id in self.loads:
            assert load.is_abandoned, "a load is a hold when nobody waits for it any more"
            self.connector.hold_expired(load.request.id, HoldKind.LOAD)
            self._end_load(load)

    def abort_after_finish(self, request_id: RequestId) -> None:
        if request_id in self.sends:
            self.connector.request_aborted_after_finish(request_id)

    def drain(self) -> None:
        """Take what there is to report."""
        self.woken = trio.Event()
        for event in self.connector.progress():
            self.reports.append(event)
            self._take(event)

    def check(self) -> None:
        """Note what was written by nobody who may."""
        for block, content in self._quiet.items():
            if self.pages.content(block) != content:
                self.violations.append(f"block {block} was written, and nobody may")
                self._quiet[block] = self.pages.content(block)

    # --- inside ---

    def _wake(self) -> None:
        self.woken.set()

    def _take(self, event: TransferEvent) -> None:
        name = event.request_id
        if isinstance(event, StillRead):
            if name not in self.sends:
                self.violations.append(f"{event}: and there is no such hold")
        elif isinstance(event, Released):
            if name in self.sends:
                self.give_back(self.sends.pop(name))
            else:
                self.violations.append(f"{event}: and there is no such hold")
        elif name not in self.loads:
            self.violations.append(f"{event}: and there is no such load")
        else:
            self._take_end(self.loads[name], event)

    def _take_end(self, load: Load, event: Loaded | LoadFailed) -> None:
        count = event.token_count if isinstance(event, Loaded) else 0
        if not 0 <= count <= load.token_count:
            self.violations.append(f"{event}: and {load.token_count} tokens were asked for")
        elif isinstance(event, Loaded) and not load.is_abandoned:
            positions = range(load.positions.start, load.start + count)
            self.loaded[load.request.id] = kv_of(self.pages, load.block_table, positions)
        self._end_load(load)

    def _end_load(self, load: Load) -> None:
        """Nothing more is written to its blocks, which are another's."""
        if self._outside(load) != load.outside:
            self.violations.append(f"{load.request.id}: the load wrote beside its positions")
        del self.loads[load.request.id]
        self.give_back([block for block in load.block_table if block != NO_BLOCK])

    def _outside(self, load: Load) -> KV:
        size = self.pages.layout.block_size
        there = range(load.block_table.count(NO_BLOCK) * size, len(load.block_table) * size)
        outside = [position for position in there if position not in load.positions]
        return kv_of(self.pages, load.block_table, outside)

    def _overwrite(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.fills += 1
            self.pages.fill([block], seed=2 * self.fills + (self.name == "reader"))
            self._quiet[block] = self.pages.content(block)


def make_request(
    name: str,
    prompt: Sequence[int],
    kv_transfer: KVTransferParams | None = None,
    *,
    output_tokens_max: int = 4,
    cache_salt: str | None = None,
) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=output_tokens_max,
        stop_token_ids=frozenset(),
        seed=0,
        cache_salt=cache_salt,
        kv_transfer=kv_transfer,
    )


def kv_of(pages: MemoryPages, block_table: Sequence[int], positions: Sequence[int]) -> KV:
    """What stands at these positions, whoever may read it."""
    size, token_bytes = pages.layout.block_size, pages.layout.token_bytes

    def token(layer: int, position: int) -> bytes:
        start = position % size * token_bytes
        block = MemoryPages.read(pages, layer, BlockIndex(block_table[position // size]))
        return bytes(block[start : start + token_bytes])

    return [[token(layer, position) for position in positions] for layer in range(pages.layout.layer_count)]


def is_same(found: KV, expected: KV, found_dtype: str, expected_dtype: str) -> bool:
    """Byte for byte; between different dtypes, number by number as far as the coarser of them is exact."""
    if found_dtype == expected_dtype:
        return found == expected
    tolerance = 2.0**-7 if "bfloat16" in (found_dtype, expected_dtype) else 2.0**-10
    return all(
        abs(here - there) <= tolerance * abs(there) + 1e-6
        for found_layer, expected_layer in zip(found, expected, strict=True)
        for found_token, expected_token in zip(found_layer, expected_layer, strict=True)
        for here, there in zip(
            _numbers(found_token, found_dtype), _numbers(expected_token, expected_dtype), strict=True
        )
    )


def _numbers(content: bytes, dtype: str) -> tuple[float, ...]:
    if dtype == "bfloat16":
        return tuple(
            struct.unpack("<f", b"\0\0" + content[index : index + 2])[0] for index in range(0, len(content), 2)
        )
    size, letter = (4, "f") if dtype == "float32" else (2, "e")
    return struct.unpack(f"<{len(content) // size}{letter}", content)
