"""Connector `loopback`, between engines in one Trio program.

The decode engine copies blocks from the prefill engine's cache.

The connector is as strict as a network connector. A reader finds the other engine by its name in a hub. The reader
copies one block at a time, with a checkpoint between two blocks, and either engine may end the read at a checkpoint. If
the blocks of an engine are on a device, one copy has all blocks of a transfer (see stream/staging.py). A read belongs
to one offer, and before each copy the reader checks that the offer is still valid. An offer is withdrawn when its hold
expires, its request is aborted, or its engine ends. The offer then never becomes valid again, even if its blocks are
used again, and the reader drops the blocks that it has copied.

Only `run` and its tasks wait. Each load has one task. All other methods are synchronous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import trio

from trioserve.connectors.stream.frames import Chunk, Chunks, blocks_of, places, views
from trioserve.connectors.stream.staging import FetchedBlocks, StoredBlocks, convert, objection_to
from trioserve.connectors.windowed_tables import first_place, first_position
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import (
    ConnectorSetup,
    HoldKind,
    Loaded,
    LoadFailed,
    Released,
    Started,
    StillRead,
    TransferEvent,
)
from trioserve.contracts.request import EngineRequest, KVTransferParams

__all__ = ["LoopbackConnector", "Offer", "Reading", "make_connector"]

REPORT_SECONDS = 1.0  # seconds between two reports that a reader is active: a tenth of the default duration of a hold
CHUNK_BYTES = 2**20  # bytes that are copied in host memory between two checkpoints
HUB = "default"

COUNTED = (
    "blocks_sent_total",
    "bytes_sent_total",
    "blocks_received_total",
    "bytes_received_total",
    *(f"sends_{end}_total" for end in ("completed", "unwanted", "aborted", "expired")),
    *(f"loads_{end}_total" for end in ("completed", "failed", "abandoned")),
)

Hub = dict[str, "LoopbackConnector"]
"""Connectors by engine id."""

_HUBS: trio.lowlevel.RunVar[dict[str, Hub]] = trio.lowlevel.RunVar("trioserve.connectors.loopback")


class Offer(msgspec.Struct, eq=False):
    """Blocks of a finished request that are held for a reader.

    Attributes:
        request_id: Finished request.
        blocks: Block table.
        tokens: Tokens whose KV the blocks contain.
        is_valid: True while the blocks hold this KV and may be read.
        reader_count: Number of running reads.
        was_read: True if a reader has received all positions that it requested.
    """

    request_id: RequestId
    blocks: tuple[BlockIndex, ...]
    tokens: tuple[int, ...]
    is_valid: bool = True
    reader_count: int = 0
    was_read: bool = False


class Reading(msgspec.Struct, eq=False):
    """Running load.

    Attributes:
        request_id: Request that loads.
        connection: Connector of the engine whose blocks are read.
        offer: Offer that is read.
        block_table: Blocks of the request that loads.
        start: First position to load.
        token_count: Number of positions to load.
        asked_count: Number of positions that the core requested, including positions before `start` that have no
            block.
        block_count: Number of blocks that were copied so far.
        is_over: True if the load has ended and writes no more blocks.
        scope: Scope of the task that copies. None before the task begins.
    """

    request_id: RequestId
    connection: LoopbackConnector
    offer: Offer
    block_table: tuple[BlockIndex, ...]
    start: int
    token_count: int
    asked_count: int
    block_count: int = 0
    is_over: bool = False
    scope: trio.CancelScope | None = None


class LoopbackConnector:
    """RunningConnector (see contracts.kv_transfer) between engines in one Trio program.

    The connector holds the blocks of a request if `do_remote_decode` is set and the request ended with reason STOP or
    LENGTH. The hold ends when a reader has read the blocks, or when the last reader does not need them any more. Blocks
    behind a sliding window are neither held nor read. Block sizes and dtypes of the engines may differ (see
    stream/staging.py).

    Args:
        setup: Setup of the engine. Its only option is `hub`, a name. Engines in the same hub find each other.
    """

    knows_windows = True

    def __init__(self, setup: ConnectorSetup) -> None:
        unknown = setup.options.keys() - {"hub"}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise StartupError(f"the connector loopback has no option {names}. Allowed: hub, a name")
        self.engine_id = setup.engine_id
        self.setup = setup
        self.pages = setup.pages
        self._hub_name = str(setup.options.get("hub", HUB))
        self._wake = setup.wake
        self._events: list[TransferEvent] = []
        self._offers: dict[RequestId, Offer] = {}
        self._readings: dict[RequestId, Reading] = {}
        # The nursery exists while the connector runs. Its tasks share one thread and copy blocks one load after
        # another, so that the first load ends soon.
        self._nursery: trio.Nursery | None = None
        self._hub: Hub = {}
        self._turn = trio.Semaphore(1)
        self._counts = dict.fromkeys(COUNTED, 0.0)

    # --- methods for the core ---

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        params = _read_params(request)
        return 0 if params is None else max(0, _token_count(params, request) - computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        params = _read_params(request)
        assert params is not None, f"{request.id}: nothing was matched, so nothing can be loaded"
        connection, offer = self._find(params)
        end = computed_count + token_count
        start = first_position(block_table, self.pages.layout.block_size, computed_count)
        message = self._objection(params, connection, offer, request.known_token_ids[:end], start)
        if message is not None:
            if connection is not None and offer is not None:
                connection.release(offer)
            self._counts["loads_failed_total"] += 1
            self._report(LoadFailed(request.id, message))
            return
        assert connection is not None
        assert offer is not None
        assert self._nursery is not None
        reading = Reading(request.id, connection, offer, tuple(block_table), start, end - start, token_count)
        self._readings[request.id] = reading
        offer.reader_count += 1
        connection.note_reader(offer)
        self._nursery.start_soon(self._read, reading)

    def load_abandoned(self, request_id: RequestId) -> None:
        reading = self._readings.get(request_id)
        if reading is not None:
            self._counts["loads_abandoned_total"] += 1
            self.end(reading, LoadFailed(request_id, "the request does not need it any more"))

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        params = _read_params(request)
        if params is not None:  # The request has ended, for any reason, so it reads no more blocks.
            connection, offer = self._find(params)
            if connection is not None and offer is not None:
                connection.release(offer)
        is_wanted = request.kv_transfer is not None and request.kv_transfer.do_remote_decode
        ended_by_itself = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (is_wanted and ended_by_itself and tokens and self._nursery is not None):
            return False
        self._offers[request.id] = Offer(request.id, tuple(block_table), tuple(tokens))
        return True

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        offer = self._offers.get(request_id)
        if offer is None:
            return None
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=request_id,
            remote_block_ids=offer.blocks,
            remote_block_size=self.pages.layout.block_size,
            remote_num_tokens=len(offer.tokens),
        )

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        offer = self._offers.get(request_id)
        if offer is not None:
            self._withdraw(offer, "aborted")
            self._report(Released(request_id))

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        if kind is HoldKind.SEND:
            offer = self._offers.get(request_id)
            if offer is not None:
                self._withdraw(offer, "expired")
            self._forget(request_id, (Released, StillRead))
        else:
            reading = self._readings.get(request_id)
            if reading is not None:
                self.end(reading, None)
            self._forget(request_id, (Loaded, LoadFailed))

    def progress(self) -> Iterable[TransferEvent]:
        events, self._events = self._events, []
        return events

    def counts(self) -> Mapping[str, float]:
        return dict(self._counts)

    # --- methods for the other engine ---

    def offer_of(self, request_id: str) -> Offer | None:
        """Return the offer of a request that has ended in this engine, or None.

        Args:
            request_id: Finished request.
        """
        return self._offers.get(RequestId(request_id))

    def note_reader(self, offer: Offer) -> None:
        """Extend the hold of an offer, because a reader is active.

        Args:
            offer: Offer that is read.
        """
        event = StillRead(offer.request_id)
        if offer.is_valid and event not in self._events:
            self._report(event)

    def release(self, offer: Offer) -> None:
        """Release the blocks of an offer if no reader uses them.

        Args:
            offer: Offer that a reader does not need any more.
        """
        if offer.is_valid and offer.reader_count == 0:
            self._withdraw(offer, "completed" if offer.was_read else "unwanted")
            self._report(Released(offer.request_id))

    def note_sent(self, block_count: int, byte_count: int) -> None:
        self._counts["blocks_sent_total"] += block_count
        self._counts["bytes_sent_total"] += byte_count

    # --- copying ---

    def copy_next(self, reading: Reading) -> bool:
        """Copy one block, and report the end of the load.

        A failure ends the load and raises no error.

        Args:
            reading: Load to continue.

        Returns:
            True if more blocks must be copied.
        """
        if reading.is_over:
            return False
        if not reading.offer.is_valid:
            self._fail(reading, "the hold of the blocks ended while they were read")
            return False
        try:
            self._copy_block(reading)
        except Exception as error:
            self._fail(reading, f"copying a block raised {type(error).__name__}: {error}")
            return False
        if reading.block_count * self.pages.layout.block_size < reading.token_count:
            return True
        self._complete(reading)
        return False

    def end(self, reading: Reading, event: Loaded | LoadFailed | None) -> None:
        """End a load. Afterwards, nothing is written, and the other engine may release the blocks.

        Args:
            reading: Load to end.
            event: Event for the core. None for no event.
        """
        if reading.is_over:
            return
        reading.is_over = True
        del self._readings[reading.request_id]
        if reading.scope is not None:
            reading.scope.cancel()
        if event is not None:
            self._report(event)
        reading.offer.reader_count -= 1
        reading.connection.release(reading.offer)

    def _fail(self, reading: Reading, message: str) -> None:
        self._counts["loads_failed_total"] += 1
        self.end(reading, LoadFailed(reading.request_id, message))

    def _complete(self, reading: Reading) -> None:
        layout = reading.connection.pages.layout
        sent = blocks_of(reading.offer.blocks, layout, reading.start, reading.token_count)
        reading.connection.note_sent(len(sent), 0)
        self._counts["loads_completed_total"] += 1
        reading.offer.was_read = True
        self.end(reading, Loaded(reading.request_id, reading.asked_count))

    def _copy_block(self, reading: Reading) -> None:
        near, connection = self.pages.layout, reading.connection.pages.layout
        position = reading.start + reading.block_count * near.block_size
        token_count = min(near.block_size, reading.start + reading.token_count - position)
        target = reading.block_table[position // near.block_size]
        sources = places(reading.offer.blocks, connection.block_size, Chunk(0, position, token_count))
        for layer in range(near.layer_count):
            token_start = 0
            for source in sources:
                end = source.start + source.token_count
                content = reading.connection.pages.read(layer, source.block)
                content = content[source.start * connection.token_bytes : end * connection.token_bytes]
                self.pages.write(
                    layer, target, token_start * near.token_bytes, convert(content, connection.dtype, near.dtype)
                )
                token_start += source.token_count
        self._note_received(reading, 1, token_count)

    def _note_received(self, reading: Reading, block_count: int, token_count: int) -> None:
        layout = reading.connection.pages.layout
        byte_count = token_count * layout.token_bytes * layout.layer_count
        reading.block_count += block_count
        self._counts["blocks_received_total"] += block_count
        self._counts["bytes_received_total"] += byte_count
        reading.connection.note_sent(0, byte_count)

    async def _copy_at_once(self, reading: Reading) -> None:
        """Copy the blocks of a load if the blocks of an engine are on a device. A failure ends the load."""
        near, connection, copies = self.pages.layout, reading.connection.pages.layout, self.setup.copies
        start, count = reading.start, reading.token_count
        sources = blocks_of(reading.offer.blocks, connection, start, count)
        targets = blocks_of(reading.block_table, near, start, count)
        fetched = FetchedBlocks(reading.connection.setup, sources)
        stored = None
        if copies is not None:
            last_token_count = (start + count - 1) % near.block_size + 1
            stored = StoredBlocks(self.pages, copies, targets, last_token_count, lambda: not reading.is_over)
        chunks = Chunks(connection, start, count, CHUNK_BYTES)
        try:
            for index in range(len(chunks)):
                chunk = chunks[index]
                source = await fetched.of_layer(chunk.layer)
                if not reading.offer.is_valid:
                    self._fail(reading, "the hold of the blocks ended while they were read")
                    return
                target = self.pages if stored is None else stored.of_layer(chunk.layer)
                there = views(source, reading.offer.blocks, chunk)
                here = views(target, reading.block_table, chunk)
                assert there is not None, "the host addresses the blocks of an engine without copies"
                assert here is not None, "the host addresses the blocks of an engine without copies"
                content = convert(b"".join(there), connection.dtype, near.dtype)
                first = 0
                for part in here:
                    part[:] = content[first : first + len(part)]
                    first += len(part)
                if stored is not None and index + 1 == chunks.first_of_layer(chunk.layer + 1):
                    await stored.layer_came(chunk.layer)
                await trio.lowlevel.checkpoint()
        except Exception as error:
            self._fail(reading, f"copying blocks raised {type(error).__name__}: {error}")
            return
        self._note_received(reading, len(targets), count)
        self._complete(reading)

    # --- tasks ---

    async def run(self, *, task_status: Started) -> None:
        hub = _hub(self._hub_name)
        if self.engine_id in hub:
            raise StartupError(f"the hub {self._hub_name} already has an engine {self.engine_id}")
        try:
            async with trio.open_nursery() as nursery:
                hub[self.engine_id] = self
                self._hub, self._nursery = hub, nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            hub.pop(self.engine_id, None)
            self._hub, self._nursery = {}, None
            for reading in list(self._readings.values()):
                self._fail(reading, "the connector has ended")
            for offer in list(self._offers.values()):  # Running readers notice the withdrawal before their next block.
                self._withdraw(offer, "aborted")
                self._report(Released(offer.request_id))

    @trio.lowlevel.enable_ki_protection
    async def _read(self, reading: Reading) -> None:
        """Copy all blocks, and regularly extend their hold."""
        if reading.is_over:
            return
        async with trio.open_nursery() as nursery:
            reading.scope = nursery.cancel_scope
            nursery.start_soon(self._report_activity, reading)
            async with self._turn:
                if self.setup.copies is not None or reading.connection.setup.copies is not None:
                    await self._copy_at_once(reading)
                    return
                while self.copy_next(reading):
                    await trio.lowlevel.checkpoint()

    @trio.lowlevel.enable_ki_protection
    async def _report_activity(self, reading: Reading) -> None:
        while True:
            await trio.sleep(REPORT_SECONDS)
            reading.connection.note_reader(reading.offer)

    # --- private methods ---

    def _find(self, params: KVTransferParams) -> tuple[LoopbackConnector | None, Offer | None]:
        connection = self._hub.get(params.remote_engine_id or "")
        return connection, None if connection is None else connection.offer_of(params.remote_request_id or "")

    def _objection(
        self,
        params: KVTransferParams,
        connection: LoopbackConnector | None,
        offer: Offer | None,
        tokens: tuple[int, ...],
        start: int,
    ) -> str | None:
        """Return the reason why the KV of `tokens` cannot be read from position `start` on, or None."""
        if self._nursery is None:
            return "the connector is not running"
        if connection is None:
            return f"the hub {self._hub_name} has no engine {params.remote_engine_id}"
        if offer is None:
            return f"engine {params.remote_engine_id} holds no blocks of {params.remote_request_id}"
        if offer.tokens[: len(tokens)] != tokens:
            return f"{params.remote_request_id} has another prompt"
        objection = objection_to(connection.pages.layout, self.pages.layout)
        held_from = first_place(offer.blocks) * connection.pages.layout.block_size
        if objection is None and start < held_from:
            return f"{params.remote_request_id} is held from position {held_from} on, but needed from {start} on"
        return objection

    def _withdraw(self, offer: Offer, why: str) -> None:
        """Withdraw an offer. A running reader notices before its next block."""
        offer.is_valid = False
        self._counts[f"sends_{why}_total"] += 1
        del self._offers[offer.request_id]

    def _report(self, event: TransferEvent) -> None:
        self._events.append(event)
        self._wake()

    def _forget(self, request_id: RequestId, kinds: tuple[type[TransferEvent], ...]) -> None:
        """Drop the events of a request whose hold has expired."""
        self._events = [
            event for event in self._events if event.request_id != request_id or not isinstance(event, kinds)
        ]


def make_connector(setup: ConnectorSetup) -> LoopbackConnector:
    """Make the connector `loopback`. This function is its ConnectorFactory.

    Args:
        setup: Setup of the engine.

    Raises:
        StartupError: An option is unknown.
    """
    return LoopbackConnector(setup)


def _hub(name: str) -> Hub:
    """Return the hub of this Trio program with this name. The first call for a name creates the hub."""
    try:
        hubs = _HUBS.get()
    except LookupError:
        hubs = {}
        _HUBS.set(hubs)
    return hubs.setdefault(name, {})


def _read_params(request: EngineRequest) -> KVTransferParams | None:
    """Return the parameters of a request whose KV is held by another engine, or None."""
    params = request.kv_transfer
    if params is None or not params.do_remote_prefill:
        return None
    return params if params.remote_engine_id is not None and params.remote_request_id is not None else None


def _token_count(params: KVTransferParams, request: EngineRequest) -> int:
    """Return how many tokens the other engine holds.

    If the parameters do not contain this number, all known tokens of the request are assumed.
    """
    known_count = len(request.known_token_ids)
    return known_count if params.remote_num_tokens is None else min(params.remote_num_tokens, known_count)
