"""Connector `nixl`: KV transfer with one-sided reads, for networks with RDMA. Other networks work, too.

The reader reads the memory of the holder, and then confirms that the KV was valid.

All messages use the authenticated connections of the connector `tcp`. Only the KV itself is read through NIXL. Neither
the reader nor the holder can stop a running READ at a given moment. This leads to three rules:

  - A READ never writes to KV blocks. A READ writes to the landing buffer of the connector, one window at a time. If a
    load ends early, its window stays reserved until its READ is over.
  - The reader uses the data only if the holder confirms, after the READ is complete, that the hold is still alive. An
    ended hold never becomes alive again, so the hold was alive during the whole READ.
  - After the confirmation, the thread of the engine copies or converts the data into blocks, one chunk at a time, while
    the load is alive.

    reader                         holder
    PLACES_ASKED  which request ──►
                  ◄── PLACES       location of its blocks, and the description of the agent of the holder
    (READ)
    HAVE_READ     a window, or the last one ──►
                  ◄── END          the hold is alive (or ABORT)

HAVE_READ is a message on the authenticated connection. It is not a notification of nixl, because nixl accepts
notifications from every process that can reach its port. Security has two other limits: nixl exposes the whole cache to
every engine that has the key, and UCX opens ports that check nothing. So a firewall must protect these ports
(UCX_NET_DEVICES selects where UCX listens). There is no checksum, because no process handles the data during a READ.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec
import trio

from trioserve.connectors.nixl_agent import Agent, AgentError, MemoryKind, Region, regions_of
from trioserve.connectors.settings import StreamOptions, read_options
from trioserve.connectors.stream.frames import BadFrame, Chunk, Chunks, Head, Kind, frame, places
from trioserve.connectors.stream.holder import Note
from trioserve.connectors.stream.peer_connection import Identity, MayNot, PeerConnection, Wire, receive_body
from trioserve.connectors.stream.policy import Load, StreamPolicy
from trioserve.connectors.stream.reader import Reader
from trioserve.connectors.stream.signature import Source, signing_key
from trioserve.connectors.stream.staging import StoredBlocks
from trioserve.connectors.stream.transport import StreamTransport
from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import ConnectorSetup, Started

__all__ = ["NixlOptions", "NixlTransport", "NixlConnector", "make_connector"]

PLACES_BYTES_MAX = 4_194_304  # maximum size of a message with block locations: some hundred thousand blocks
BLOCKS_MAX = 200_000
READ_SECONDS_MAX = 8.0  # time limit for the READ of one window; a load waits equally long for a silent holder
POLL_SECONDS = (0.0002, 0.005)  # seconds between two checks of a READ: the first interval, and the longest interval
WATCH_SECONDS = 0.05  # interval of checks of a READ whose load has ended
CLOSE_SECONDS_MAX = 5.0
AGENTS_MAX = 64  # maximum number of connected agents; a further agent replaces the oldest agent

_never_freed: list[Agent] = []
"""Agents whose connectors ended while a READ could still write their buffers. They stay until the process ends."""

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class NixlOptions(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector `nixl`.

    Attributes:
        landing_bytes: Size of the buffer for READs in bytes. It has reads_max windows. Each window is read, confirmed
            and copied as a whole. On a fast network, a larger window needs fewer messages. Without one, a READ holds
            the GIL for longer.
    """

    landing_bytes: int = 8_388_608

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.landing_bytes <= 1 << 34 or self.window_bytes < 4_096:
            raise StartupError(
                f"landing_bytes is {self.landing_bytes}, it must be at least 4096 for each of {self.reads_max} reads, "
                f"and at most {1 << 34}"
            )

    @property
    def window_bytes(self) -> int:
        """Size of one window in bytes."""
        return self.landing_bytes // self.reads_max


class PlacesRequest(msgspec.Struct, frozen=True):
    """Message that requests the locations of blocks. Its fields have the same meaning as in frames.Read."""

    request_id: str
    token_start: int
    token_count: int
    proof: bytes


class Places(msgspec.Struct, frozen=True):
    """Location of blocks.

    Attributes:
        agent: Description of the holder's NIXL agent.
        kind: Kind of the memory.
        layers: Region of each layer's blocks. Empty if the blocks cannot be read with NIXL.
        blocks: Blocks of the requested positions.
    """

    agent: bytes
    kind: MemoryKind
    layers: tuple[Region, ...]
    blocks: tuple[int, ...]


class HaveRead(msgspec.Struct, frozen=True):
    """Message of a reader after a READ. Fields that are not listed have the same meaning as in frames.Read.

    Attributes:
        byte_count: Bytes read since the last confirmation.
        is_all: True if this was the last window of these positions.
    """

    request_id: str
    token_start: int
    token_count: int
    proof: bytes
    byte_count: int
    is_all: bool


class Window(msgspec.Struct, eq=False):
    """Part of the landing buffer, used by one READ at a time.

    Attributes:
        address: Start address.
        memory: View of the memory.
        is_watched: True while the READ of an ended load may still write to the window.
    """

    address: int
    memory: memoryview
    is_watched: bool = False


class Nixl:
    """NIXL agent of this engine, and the windows of its landing buffer. A thread calls the agent, one call at a time.

    Args:
        policy: Holds, loads and totals of this engine.
        options: Options of the connector.

    Attributes:
        kind: Kind of the cache's memory.
        regions: Regions of the cache. Empty if other engines cannot read it.
    """

    def __init__(self, policy: StreamPolicy, options: NixlOptions) -> None:
        self._policy = policy
        self._options = options
        self._one_call = trio.CapacityLimiter(1)
        self._agent: Agent | None = None
        self._names: dict[str, str] = {}  # names of agents by engine id
        self._returned_windows, self._free_windows = trio.open_memory_channel[Window](options.reads_max)
        self._watched: list[tuple[object, Window]] = []
        self._has_watched = trio.Event()
        self.kind, self.regions = regions_of(policy.setup.pages)

    @property
    def metadata(self) -> bytes:
        assert self._agent is not None
        return self._agent.metadata

    async def call(self, call: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._one_call)

    async def open(self) -> None:
        landing = bytearray(self._options.window_bytes * self._options.reads_max)
        name = f"trioserve-{self._policy.setup.engine_id}"
        try:
            self._agent = await self._registered(name, landing)
        except AgentError as error:
            raise StartupError(f"KV connector nixl: {error}") from error
        size = self._options.window_bytes
        for index in range(self._options.reads_max):
            memory = memoryview(landing)[index * size : (index + 1) * size]
            self._returned_windows.send_nowait(Window(self._agent.landing_address + index * size, memory))

    async def _registered(self, name: str, landing: bytearray) -> Agent:
        """Make the agent. If its build cannot register memory of a GPU, other engines read over the connections."""
        try:
            return await self.call(Agent, name, self.kind, self.regions, landing)
        except AgentError as error:
            if self.kind == "DRAM":
                raise
            log.warning("nixl cannot register GPU memory, so KV goes through host memory message=%s", error)
            self.kind, self.regions = "DRAM", []
            return await self.call(Agent, name, self.kind, self.regions, landing)

    async def close(self) -> None:
        """End the agent within CLOSE_SECONDS_MAX, also when cancelled.

        nixl must stop using the memory before the memory is freed.
        """
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._watched:
            _never_freed.append(agent)
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_SECONDS_MAX):
            try:
                await trio.to_thread.run_sync(agent.close, limiter=self._one_call, abandon_on_cancel=True)
            except AgentError as error:
                log.warning("nixl did not end cleanly message=%s", error)

    @asynccontextmanager
    async def window(self) -> AsyncIterator[Window]:
        """Wait for a free window, and reserve it for the READs of one load while the scope is open.

        There are as many windows as loads may run at a time, but READs of ended loads may still use some windows.
        """
        with trio.fail_after(READ_SECONDS_MAX):
            window = await self._free_windows.receive()
        try:
            yield window
        finally:
            if not window.is_watched:
                self._returned_windows.send_nowait(window)

    async def agent_of(self, connection: PeerConnection, metadata: bytes) -> str:
        name = self._names.get(connection.engine_id)
        if name is None:
            assert self._agent is not None
            while len(self._names) >= AGENTS_MAX:
                await self.forget(next(iter(self._names)))
            name = self._names[connection.engine_id] = await self.call(self._agent.add, metadata)
        return name

    async def forget(self, engine_id: str) -> None:
        """Disconnect from an agent, after a failure or to make room for another agent. The next read connects again.

        Args:
            engine_id: Engine of the agent.
        """
        name = self._names.pop(engine_id, None)
        if name is not None and self._agent is not None:
            with suppress(AgentError):
                await self.call(self._agent.remove, name)

    async def read(self, name: str, kind: MemoryKind, window: Window, here: list[Region], there: list[Region]) -> None:
        """Read memory of another engine. The data is complete after the return.

        After a failure, a cancel or a timeout, the window stays reserved until the READ can no longer write it.

        Args:
            name: Name of the other agent.
            kind: Kind of the other agent's memory.
            window: Window that receives the data.
            here: Regions in the window.
            there: Regions of the other agent, with the same lengths.
        """
        agent = self._agent
        assert agent is not None
        handle = await self.call(agent.begin_read, name, kind, here, there)
        has_ended = False
        try:
            seconds, seconds_max = POLL_SECONDS
            with trio.fail_after(READ_SECONDS_MAX):
                while not await self.call(agent.is_done, handle):
                    await trio.sleep(seconds)
                    seconds = min(2 * seconds, seconds_max)
            has_ended = await self.call(agent.end, handle)
        finally:
            if not has_ended:
                window.is_watched = True
                self._watched.append((handle, window))
                self._has_watched.set()

    async def watch(self) -> None:
        """Return windows when the READs of ended loads are over. Runs until cancelled."""
        while True:
            if not self._watched:
                self._has_watched = trio.Event()
                await self._has_watched.wait()
            await trio.sleep(WATCH_SECONDS)
            agent = self._agent
            assert agent is not None
            for entry in tuple(self._watched):
                handle, window = entry
                try:
                    is_over = await self.call(agent.is_done, handle)
                except AgentError:
                    is_over = True
                if is_over and await self.call(agent.end, handle):
                    self._watched.remove(entry)
                    window.is_watched = False
                    self._returned_windows.send_nowait(window)


class NixlReader(Reader):
    """Reader that loads KV with READs.

    Args:
        policy: Holds, loads and totals of this engine.
        identity: Identity of this engine.
        note: Logs a problem with a peer.
        open_wire: Connects to another engine.
        nixl: NIXL agent of this engine.
        window_bytes: Size of one window in bytes.
    """

    def __init__(
        self,
        policy: StreamPolicy,
        identity: Identity,
        note: Note,
        open_wire: Callable[[Source], Awaitable[Wire]],
        nixl: Nixl,
        window_bytes: int,
    ) -> None:
        super().__init__(policy, identity, note, open_wire)
        self._nixl = nixl
        self._window_bytes = window_bytes

    async def read_over(self, connection: PeerConnection, load: Load) -> None:
        connection.transfer_count += 1
        request_id = load.origin.request_id
        ask = PlacesRequest(request_id, load.start, load.token_count, load.proof)
        await connection.wire.send([frame(Kind.PLACES_ASKED, ask, transfer=connection.transfer_count)])
        found = await receive_body(
            connection.wire, await self.receive_response(connection, Kind.PLACES), Places, PLACES_BYTES_MAX
        )
        if not found.layers:
            await super().read_over(connection, load)
            return
        first_block = load.start // connection.layout.block_size
        block_count = (load.start + load.token_count - 1) // connection.layout.block_size - first_block + 1
        if len(found.layers) != connection.layout.layer_count or len(found.blocks) != block_count:
            raise BadFrame(
                f"received {len(found.layers)} layers and {len(found.blocks)} blocks, expected {block_count} blocks"
            )
        blocks = [BlockIndex(0)] * first_block + [BlockIndex(block) for block in found.blocks]
        try:
            name = await self._nixl.agent_of(connection, found.agent)
            chunk_bytes = min(self._policy.options.chunk_bytes, self._window_bytes)
            chunks = Chunks(connection.layout, load.start, load.token_count, chunk_bytes)
            async with self._nixl.window() as window:
                with self.target(load, chunks) as target:
                    while load.next_chunk < len(chunks):
                        await self._read_window(connection, load, chunks, name, found, blocks, window, target)
        except AgentError as error:
            await self._nixl.forget(connection.engine_id)
            raise trio.BrokenResourceError(str(error)) from error
        self.complete(load)

    async def _read_window(
        self,
        connection: PeerConnection,
        load: Load,
        chunks: Chunks,
        name: str,
        found: Places,
        blocks: list[BlockIndex],
        window: Window,
        target: StoredBlocks | None,
    ) -> None:
        """Read as many chunks as fit into the window, confirm them, and copy them into blocks."""
        token_bytes = connection.layout.token_bytes
        batch: list[Chunk] = []
        byte_count = 0
        for index in range(load.next_chunk, len(chunks)):
            chunk_bytes = chunks[index].token_count * token_bytes
            if byte_count + chunk_bytes > len(window.memory):
                break
            batch.append(chunks[index])
            byte_count += chunk_bytes
        if not batch:
            raise BadFrame(f"a token has {token_bytes} bytes in a layer, and a window {len(window.memory)}")
        here, there = _pieces(connection, batch, found, blocks, window)
        await self._nixl.read(name, found.kind, window, here, there)
        is_all = load.next_chunk + len(batch) == len(chunks)
        ask = HaveRead(load.origin.request_id, load.start, load.token_count, load.proof, byte_count, is_all)
        await connection.wire.send([frame(Kind.HAVE_READ, ask, transfer=connection.transfer_count)])
        await self.receive_response(connection, Kind.END)
        done = 0
        for chunk in batch:
            end = done + chunk.token_count * token_bytes
            self.put(load, chunk, window.memory[done:end], connection.layout.dtype, target)
            await self.chunk_came(load, chunks, target)
            self._policy.totals["bytes_received_total"] += end - done
            done = end
            await trio.lowlevel.checkpoint()


class NixlTransport:
    """Transport of the connector `tcp`, with READs for the KV.

    Args:
        policy: Holds, loads and totals of this engine.
        options: Options of the connector.
    """

    def __init__(self, policy: StreamPolicy, options: NixlOptions) -> None:
        self._policy = policy
        self._nixl = Nixl(policy, options)

        def make_reader(
            policy: StreamPolicy, identity: Identity, note: Note, open_wire: Callable[[Source], Awaitable[Wire]]
        ) -> Reader:
            return NixlReader(policy, identity, note, open_wire, self._nixl, options.window_bytes)

        self._stream = StreamTransport(policy, self._respond, make_reader)

    def wake(self) -> None:
        self._stream.wake()

    async def run(self, *, task_status: Started) -> None:
        """Run until cancelled, see RunningConnector.

        Args:
            task_status: Reports the start to the parent task.
        """
        await self._nixl.open()
        try:
            await self._stream.run(task_status=task_status, beside=self._nixl.watch)
        finally:
            await self._nixl.close()

    async def _respond(self, connection: PeerConnection, head: Head) -> bool:
        if head.kind is Kind.PLACES_ASKED:
            await self._send_places(connection, head.transfer, await receive_body(connection.wire, head, PlacesRequest))
        elif head.kind is Kind.HAVE_READ:
            await self._confirm(connection, head.transfer, await receive_body(connection.wire, head, HaveRead))
        else:
            return False
        return True

    async def _send_places(self, connection: PeerConnection, transfer: int, asked: PlacesRequest) -> None:
        holder, now = self._stream.holder, trio.current_time()
        send = self._policy.sends.asked(asked.request_id, asked.token_start, asked.token_count, asked.proof, now)
        if isinstance(send, str):
            await holder.refuse(connection, transfer, send)
            return
        size = self._policy.setup.pages.layout.block_size
        first, last = asked.token_start // size, (asked.token_start + asked.token_count - 1) // size
        if last - first >= BLOCKS_MAX:
            await holder.refuse(connection, transfer, f"a request may ask for at most {BLOCKS_MAX} blocks at a time")
            return
        blocks = tuple(send.block_table[first : last + 1])
        found = Places(self._nixl.metadata, self._nixl.kind, tuple(self._nixl.regions), blocks)
        await connection.wire.send([frame(Kind.PLACES, found, transfer=transfer, bytes_max=PLACES_BYTES_MAX)])

    async def _confirm(self, connection: PeerConnection, transfer: int, read: HaveRead) -> None:
        """Confirm to the reader that the hold is alive. This proves that the hold was alive during the whole READ."""
        holder, now = self._stream.holder, trio.current_time()
        send = self._policy.sends.asked(read.request_id, read.token_start, read.token_count, read.proof, now)
        if isinstance(send, str):
            await holder.refuse(connection, transfer, send)
            return
        self._policy.totals["bytes_sent_total"] += max(0, read.byte_count)
        if read.is_all:
            holder.was_read(send, read.token_start, read.token_count)
        try:
            await connection.wire.send([frame(Kind.END, transfer=transfer)], lambda: send.is_alive)
        except MayNot:
            await holder.refuse(connection, transfer, "the hold ended while it was read")


def _pieces(
    connection: PeerConnection, batch: list[Chunk], found: Places, blocks: list[BlockIndex], window: Window
) -> tuple[list[Region], list[Region]]:
    """Return the regions of the chunks in the window, and the regions at the holder. They have the same lengths."""
    token_bytes, block_size = connection.layout.token_bytes, connection.layout.block_size
    block_bytes = block_size * token_bytes
    here, there = [], []
    at = window.address
    for chunk in batch:
        layer = found.layers[chunk.layer]
        for place in places(blocks, block_size, chunk):
            byte_count = place.token_count * token_bytes
            offset = place.block * block_bytes + place.start * token_bytes
            if not 0 <= offset <= layer.byte_count - byte_count:
                raise BadFrame(f"block {place.block} of layer {chunk.layer} is not in its cache")
            here.append(Region(at, byte_count))
            there.append(Region(layer.address + offset, byte_count, layer.device))
            at += byte_count
    return here, there


class NixlConnector(StreamPolicy):
    """RunningConnector (see contracts.kv_transfer) that moves KV with NIXL.

    Args:
        setup: Engine id, KV cache and wake function of the engine.
        options: Options of the connector.
    """

    def __init__(self, setup: ConnectorSetup, options: NixlOptions) -> None:
        super().__init__(setup, options, lambda: self._transport.wake(), key=signing_key(options))
        self._transport = NixlTransport(self, options)

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        return self._transport.run(task_status=task_status)


def make_connector(setup: ConnectorSetup) -> NixlConnector:
    """Make the connector `nixl`. This function is its ConnectorFactory.

    Args:
        setup: Setup of the engine. Its options must match NixlOptions.

    Raises:
        StartupError: an option is unknown, its value is not allowed, or the package nixl is not installed.
    """
    options = read_options(NixlOptions, setup.options)
    if find_spec("nixl") is None:
        raise StartupError(f'the connector "nixl" needs the package nixl: {install_command("nixl")}')
    return NixlConnector(setup, options)
