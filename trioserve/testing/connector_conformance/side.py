"""Fake engines for the connector conformance tests. They track block ownership and watch memory, but compute nothing.

A Side takes the role of one engine's core for one connector. It records each violation of the contract in `violations`:
reports that no request expects, and blocks that are read or written without permission. When a block is freed, the Side
overwrites it at once, as another request would do.

A Stage has the two engines of a test. The test makes the calls that their cores would make. `MemoryPages` is a KV
cache in plain memory.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

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
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams

__all__ = [
    "ABORT",
    "KV",
    "LENGTH",
    "MOMENTS_MAX",
    "SMALL_LAYOUT",
    "TOKENS",
    "Load",
    "MemoryPages",
    "Offered",
    "Side",
    "Stage",
    "WatchedPages",
    "is_same",
    "kv_of",
    "make_request",
]


SMALL_LAYOUT = KVLayout(model="small", layer_count=2, block_size=4, kv_head_count=1, head_dim=2, dtype="float32")


class MemoryPages:
    """KVPages in memory.

    Args:
        block_count: number of blocks.
        layout: layout of the blocks.
        has_views: if True, blocks can be addressed in place. If False, reads copy them, as from a device.
    """

    def __init__(self, block_count: int, layout: KVLayout = SMALL_LAYOUT, *, has_views: bool = True) -> None:
        self.layout = layout
        self.block_count = block_count
        self.has_views = has_views
        self._block_bytes = layout.block_size * layout.token_bytes
        self._layers = [memoryview(bytearray(block_count * self._block_bytes)) for _ in range(layout.layer_count)]

    def view(self, layer: int, block: BlockIndex) -> memoryview | None:
        return self._block(layer, block) if self.has_views else None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        content = self._block(layer, block)
        return content.toreadonly() if self.has_views else memoryview(bytes(content))

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        self._block(layer, block)[start : start + len(content)] = content

    def fill(self, blocks: Iterable[int], seed: int) -> None:
        """Fill blocks with content that depends only on the seed, the layer and the block.

        With dtype float32, the content consists of numbers from -1 to 1, otherwise of random bytes.

        Args:
            blocks: indexes of the blocks.
            seed: seed of the content.
        """
        for block in blocks:
            for layer in range(self.layout.layer_count):
                source = random.Random(f"{seed}/{layer}/{block}")
                here = self._block(layer, BlockIndex(block))
                if self.layout.dtype == "float32":
                    numbers = here.cast("f")
                    for index in range(len(numbers)):
                        numbers[index] = source.uniform(-1, 1)
                else:
                    here[:] = source.randbytes(len(here))

    def content(self, block: int) -> bytes:
        """Return the bytes of a block, one layer after the other.

        Args:
            block: index of the block.
        """
        return b"".join(bytes(self._block(layer, BlockIndex(block))) for layer in range(self.layout.layer_count))

    def _block(self, layer: int, block: BlockIndex) -> memoryview:
        return self._layers[layer][block * self._block_bytes : (block + 1) * self._block_bytes]


BLOCK_COUNT = 64

KV = list[list[bytes]]
"""Content of some positions: for each layer, one token's bytes per position."""


class WatchedPages(MemoryPages):
    """A KV cache that records each read of a block that must not be read.

    This class cannot record reads through a view. The test finds them because they return wrong content.

    Args:
        layout: layout of the KV cache.
        has_views: if True, blocks can be addressed in place. If False, they are copied, as from a device.

    Attributes:
        is_readable: returns True if a block may be read now.
        violations: the forbidden reads so far.
    """

    def __init__(self, layout: KVLayout, *, has_views: bool) -> None:
        super().__init__(BLOCK_COUNT, layout, has_views=has_views)
        self.is_readable: Callable[[int], bool] = lambda block: True
        self.violations: list[str] = []

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        if not self.is_readable(block):
            self.violations.append(f"block {block} was read, but reading is forbidden now")
        return super().read(layer, block)


class Load(msgspec.Struct, eq=False):
    """A load that has not ended.

    Attributes:
        request: the request whose KV is loaded.
        block_table: blocks of the request.
        start: first position to load.
        token_count: number of positions to load.
        positions: the positions to load that have a block.
        outside: content of the request's blocks at all other positions, which the load must not change.
        is_abandoned: True if the request no longer waits for the load.
    """

    request: EngineRequest
    block_table: tuple[BlockIndex, ...]
    start: int
    token_count: int
    positions: range
    outside: KV
    is_abandoned: bool = False


class Side:
    """One simulated engine of a conformance test.

    Args:
        name: "sender" or "reader".
        layout: layout of the engine's KV cache.
        has_views: if True, the CPU can address the blocks in place.

    Attributes:
        connector: the connector under test.
        pages: KV cache of the engine.
        window_tokens: sliding window of all layers in tokens. None for no sliding window.
        violations: the connector's violations of the contract.
        woken: set after the connector called `wake`.
        sends: blocks that are held for reading, by request.
        loads: loads that have not ended, by request.
        reports: all reports of the connector, oldest first.
        loaded: content that each finished load wrote, by request.
        fills: number of block fills so far. It makes the content of each fill different.
    """

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
        # For each block that must not be written at this time, the expected content.
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
        """Allocate the blocks that a number of tokens need, in random order, with new content.

        Args:
            token_count: number of tokens.
        """
        self._chance.shuffle(self._free)
        count = -(-token_count // self.pages.layout.block_size)
        blocks, self._free = self._free[:count], self._free[count:]
        assert len(blocks) == count, "no free blocks are left: the suite did not release blocks"
        self._overwrite(blocks)
        self._in_use.update(blocks)
        return tuple(BlockIndex(block) for block in blocks)

    def without_unseen(self, blocks: Sequence[BlockIndex], position: int) -> tuple[BlockIndex, ...]:
        """Free the blocks that the token at a position does not attend to. Return the block table, in which NO_BLOCK
        replaces the freed blocks.

        Args:
            blocks: block table of a request.
            position: position of the token.
        """
        if self.window_tokens is None:
            return tuple(blocks)
        first = max(0, position - self.window_tokens + 1) // self.pages.layout.block_size
        self.free_blocks(blocks[:first])
        return (NO_BLOCK,) * first + tuple(blocks[first:])

    def free_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Free blocks, except for blocks that are held for a send. Freed blocks get new content at once.

        Args:
            blocks: blocks to free. Blocks that are already free are ignored.
        """
        held = {block for blocks in self.sends.values() for block in blocks}
        freed = [block for block in blocks if block not in held and block in self._in_use]
        self._in_use.difference_update(freed)
        self._free += freed
        self._overwrite(freed)

    # --- calls that a core makes ---

    def finish(
        self, request: EngineRequest, blocks: Sequence[BlockIndex], tokens: Sequence[int], reason: FinishReason
    ) -> KVTransferParams | None:
        """End a request, and free its blocks unless the connector holds them.

        Args:
            blocks: its block table.
            tokens: its tokens.
            reason: why it ended.

        Returns:
            Parameters with which another engine can read the blocks. None if the blocks are not held.
        """
        self.check()
        blocks = self.without_unseen(blocks, len(tokens) - 1)
        is_held = self.connector.request_finished(request, blocks, tuple(tokens), reason)
        blocks = tuple(block for block in blocks if block != NO_BLOCK)
        if is_held:
            self.sends[request.id] = blocks
            return self.connector.transfer_params(request.id)
        self.free_blocks(blocks)
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
        if load.request.id in self.loads:  # The end of every other load has already been reported.
            load.is_abandoned = True
            self.connector.load_abandoned(load.request.id)

    def expire_send(self, request_id: RequestId) -> None:
        if request_id in self.sends:
            self.connector.hold_expired(request_id, HoldKind.SEND)
            self.free_blocks(self.sends.pop(request_id))

    def expire_load(self, load: Load) -> None:
        if load.request.id in self.loads:
            assert load.is_abandoned, "a load can expire only after it was abandoned"
            self.connector.hold_expired(load.request.id, HoldKind.LOAD)
            self._end_load(load)

    def abort_after_finish(self, request_id: RequestId) -> None:
        if request_id in self.sends:
            self.connector.request_aborted_after_finish(request_id)

    def drain(self) -> None:
        """Take all reports of the connector."""
        self.woken = trio.Event()
        for event in self.connector.progress():
            self.reports.append(event)
            self._take(event)

    def check(self) -> None:
        """Record the blocks that were written although they must not be written at this time."""
        for block, content in self._quiet.items():
            if self.pages.content(block) != content:
                self.violations.append(f"block {block} was written, but writing is forbidden now")
                self._quiet[block] = self.pages.content(block)

    # --- helpers ---

    def _wake(self) -> None:
        self.woken.set()

    def _take(self, event: TransferEvent) -> None:
        name = event.request_id
        if isinstance(event, StillRead):
            if name not in self.sends:
                self.violations.append(f"{event}, but there is no such hold")
        elif isinstance(event, Released):
            if name in self.sends:
                self.free_blocks(self.sends.pop(name))
            else:
                self.violations.append(f"{event}, but there is no such hold")
        elif name not in self.loads:
            self.violations.append(f"{event}, but there is no such load")
        else:
            self._record_end(self.loads[name], event)

    def _record_end(self, load: Load, event: Loaded | LoadFailed) -> None:
        count = event.token_count if isinstance(event, Loaded) else 0
        if not 0 <= count <= load.token_count:
            self.violations.append(f"{event}, but {load.token_count} tokens were requested")
        elif isinstance(event, Loaded) and not load.is_abandoned:
            positions = range(load.positions.start, load.start + count)
            self.loaded[load.request.id] = kv_of(self.pages, load.block_table, positions)
        self._end_load(load)

    def _end_load(self, load: Load) -> None:
        """Remove a load and free its blocks. The connector must not write to them any more."""
        if self._outside(load) != load.outside:
            self.violations.append(f"{load.request.id}: the load wrote outside of its positions")
        del self.loads[load.request.id]
        self.free_blocks([block for block in load.block_table if block != NO_BLOCK])

    def _outside(self, load: Load) -> KV:
        size = self.pages.layout.block_size
        positions = range(load.block_table.count(NO_BLOCK) * size, len(load.block_table) * size)
        outside = [position for position in positions if position not in load.positions]
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
    """Return the content of positions, also of blocks that must not be read now.

    Args:
        pages: the KV cache.
        block_table: blocks of a request.
        positions: positions to read.
    """
    size, token_bytes = pages.layout.block_size, pages.layout.token_bytes

    def token(layer: int, position: int) -> bytes:
        start = position % size * token_bytes
        block = MemoryPages.read(pages, layer, BlockIndex(block_table[position // size]))
        return bytes(block[start : start + token_bytes])

    return [[token(layer, position) for position in positions] for layer in range(pages.layout.layer_count)]


def is_same(found: KV, expected: KV, found_dtype: str, expected_dtype: str) -> bool:
    """Compare two contents. With equal dtypes, all bytes must match. With different dtypes, values must match within
    the precision of the coarser dtype.

    Args:
        found: the content that was read.
        expected: the expected content.
    """
    if found_dtype == expected_dtype:
        return found == expected
    tolerance = 2.0**-7 if "bfloat16" in (found_dtype, expected_dtype) else 2.0**-10
    return all(
        abs(number - expected_number) <= tolerance * abs(expected_number) + 1e-6
        for found_layer, expected_layer in zip(found, expected, strict=True)
        for found_token, expected_token in zip(found_layer, expected_layer, strict=True)
        for number, expected_number in zip(
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


LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT
MOMENTS_MAX = 60  # Moments of a load beyond this number do not differ.
TOKENS = range(100, 130)  # This prompt fills seven and a half blocks of SMALL_LAYOUT.


class Offered(msgspec.Struct, frozen=True):
    """A prompt whose blocks a sender offers.

    Attributes:
        name: id of the sender's request.
        request: the request for the reader.
        kv: content of the prompt's positions.
    """

    name: RequestId
    request: EngineRequest
    kv: KV


class Waits(Protocol):
    """Time limits of the tests of one connector."""

    patience_seconds: float
    settle_seconds: float
    real_time: bool


class Stage:
    """The two simulated engines of one test.

    Args:
        suite: contains the time limits of the test.
        sender: engine that computes prompts and offers their blocks.
        reader: engine that loads blocks. It is `sender` for a connector that serves only one engine.
    """

    def __init__(self, suite: Waits, sender: Side, reader: Side) -> None:
        self.suite = suite
        self.sender, self.reader = sender, reader
        self.sides = [sender] if sender is reader else [sender, reader]
        self.scopes: dict[str, trio.CancelScope] = {}
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def drain(self) -> None:
        for side in self.sides:
            side.drain()

    async def until(self, side: Side, is_so: Callable[[], bool], what: str) -> None:
        """Collect reports until a condition is True. The connector must call `wake` for each report.

        Args:
            side: the engine whose connector reports.
            is_so: the condition.
            what: name of the awaited event, for the error text.

        Raises:
            AssertionError: the condition is not True after `patience_seconds`.
        """
        with trio.move_on_after(self.suite.patience_seconds):
            while not is_so():
                woken = side.woken
                if not woken.is_set():
                    await woken.wait()
                side.drain()
            return
        raise AssertionError(
            f"{what} was not reported within {self.suite.patience_seconds} seconds, or `wake` was not called for it"
        )

    async def until_load_ends(self, load: Load) -> None:
        name = load.request.id
        await self.until(self.reader, lambda: name not in self.reader.loads, f"the end of the load of {name}")

    async def until_released(self, name: RequestId, side: Side | None = None) -> None:
        here = side or self.sender
        await self.until(here, lambda: name not in here.sends, f"the end of the send of {name}")

    async def settle(self) -> None:
        """Wait until all work has ended, and collect the reports."""
        if self.suite.real_time:
            await trio.sleep(self.suite.settle_seconds)
        else:
            await trio.sleep(self.suite.patience_seconds)
        self.drain()
        self.check()

    def check(self) -> None:
        for side in self.sides:
            side.check()
        broken = [f"{side.name}: {violation}" for side in self.sides for violation in side.violations]
        assert not broken, "; ".join(broken)

    def end(self, side: Side) -> None:
        """Cancel a connector's task, as at the end of its engine.

        Args:
            side: the engine.
        """
        self.scopes.pop(side.name).cancel()
