"""The reader's part of the transport: transfers the chunks of loads, and sends heartbeats and releases to holders."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from trioserve.connectors.stream.frames import (
    Abort,
    BadFrame,
    BlockViews,
    Chunk,
    Chunks,
    Head,
    Kind,
    Notice,
    NoticeReply,
    Read,
    blocks_of,
    frame,
    places,
    views,
)
from trioserve.connectors.stream.holder import SILENCE_SECONDS_MAX, Note
from trioserve.connectors.stream.peer_connection import (
    BROKEN,
    Identity,
    MayNot,
    PeerConnection,
    Refused,
    Wire,
    describe,
    greet_holder,
    receive_body,
    receive_head,
    sentence_of,
)
from trioserve.connectors.stream.policy import Load, StreamPolicy
from trioserve.connectors.stream.signature import Source
from trioserve.connectors.stream.staging import StoredBlocks, convert, objection_to

__all__ = ["MakeReader", "Reader"]

# A process that is stopped (SIGSTOP) accepts connections but never answers. This limit leaves time for one retry.
CONNECT_SECONDS_MAX = 4.0
KEPT_SECONDS_MAX = 30.0  # time to keep an idle connection; shorter than IDLE_SECONDS_MAX of the holder
HEARTBEAT_SECONDS = 2.5  # a quarter of the lifetime of a hold, so two heartbeats may get lost
NOTICE_FAILURES_MAX = 3  # maximum number of failures in a row; afterwards, the holds end by their deadlines
PEER_CONNECTIONS_MAX = 4
PEERS_MAX = 64
BROKE_OFF = "this engine cannot be reached, or broke off"
"""Message for the client after a connection failed. It has no details, because another program may listen there now.

The log has the details.
"""
# Maximum number of holders that wait for a free task. Further holders are not notified, and their holds end by their
# deadlines.
NOTIFY_LATER_MAX = 1_000

log = logging.getLogger(__name__)


class Peer:
    """Holder that this engine reads from.

    Args:
        source: Address and id of the holder.

    Attributes:
        idle: Open connections without a transfer.
        slots: Limit for transfers from this holder at a time.
        user_count: Number of loads from this holder, including waiting loads.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.idle: list[PeerConnection] = []
        self.slots = trio.CapacityLimiter(PEER_CONNECTIONS_MAX)
        self.user_count = 0


class Reader:
    """Client of the holders.

    Args:
        policy: Holds, loads and totals of this engine.
        identity: Identity of this engine.
        note: Logs a problem with a peer.
        open_wire: Connects to a holder, including the TLS handshake if there is TLS.
    """

    def __init__(
        self, policy: StreamPolicy, identity: Identity, note: Note, open_wire: Callable[[Source], Awaitable[Wire]]
    ) -> None:
        self._policy = policy
        self._loads = policy.loads
        self._identity = identity
        self._note = note
        self._open_wire = open_wire
        self._pages = policy.setup.pages
        self._slots = trio.CapacityLimiter(policy.options.reads_max)
        self._peers: dict[Source, Peer] = {}
        self._notify_again: dict[Source, trio.Event] = {}  # events that wake the task that sends messages to a holder
        self._notify_later: dict[Source, None] = {}  # holders that wait for a free task

    # --- one load ---

    @trio.lowlevel.enable_ki_protection
    async def fetch(self, load: Load) -> None:
        """Transfer a load until it has ended.

        Args:
            load: Load to transfer.
        """
        with trio.CancelScope() as scope:
            load.stop = scope.cancel
            peer = self._peer(load.origin.source)
            if peer is None:
                self._loads.failed(load, f"blocks come from {PEERS_MAX} engines already")
                return
            peer.user_count += 1
            try:
                async with peer.slots, self._slots:
                    self._loads.begun(load, trio.current_time())
                    await self._fetch_from(peer, load)
            except Exception as error:
                # This error is a bug of the reader. Only this transfer fails, and this engine computes the missing KV.
                log.exception("kv transfer failed request=%s", load.request_id)
                self._loads.failed(load, f"a fault in this engine's connector: {error!r}")
            finally:
                peer.user_count -= 1

    async def _fetch_from(self, peer: Peer, load: Load) -> None:
        while load.is_alive:
            try:
                await self._attempt(peer, load)
            except Refused as refused:
                self._loads.failed(load, str(refused))
            except MayNot:
                return
            except BROKEN as error:
                self._note(str(peer.source), describe(error))
                _close_all(peer.idle)  # The other connections to this holder have probably failed, too.
                is_deaf = isinstance(error, ConnectionRefusedError)
                seconds = self._loads.broken(load, BROKE_OFF, trio.current_time(), is_deaf=is_deaf)
                if seconds is not None:
                    await trio.sleep(seconds)

    async def _attempt(self, peer: Peer, load: Load) -> None:
        """Transfer the missing chunks over one connection."""
        connection = peer.idle.pop() if peer.idle else await self.connect(peer.source)
        can_resume = False
        try:
            await self.read_over(connection, load)
            can_resume = True
        except Refused as refused:
            can_resume = refused.can_resume
            raise
        finally:
            if can_resume:
                connection.idle_since = trio.current_time()
                peer.idle.append(connection)
            else:
                connection.wire.close()

    async def read_over(self, connection: PeerConnection, load: Load) -> None:
        """Transfer the missing chunks of a load. After an error, load.next_chunk is the first missing chunk.

        Args:
            connection: Connection to the holder.
            load: Load to transfer.

        Raises:
            Refused: the holder refused the transfer.
            MayNot: the load has ended. The function may also raise the errors in BROKEN.
        """
        connection.transfer_count += 1
        chunk_bytes = self._policy.options.chunk_bytes
        ask = Read(load.origin.request_id, load.start, load.token_count, load.proof, chunk_bytes, load.next_chunk)
        await connection.wire.send([frame(Kind.READ, ask, transfer=connection.transfer_count)])
        chunks = Chunks(connection.layout, load.start, load.token_count, chunk_bytes)
        with self.target(load, chunks) as target:
            while load.next_chunk < len(chunks):
                head = await self.receive_response(connection, Kind.DATA)
                await self._take_chunk(connection, head, load, chunks[load.next_chunk], target)
                self._policy.totals["bytes_received_total"] += head.body_bytes
                await self.chunk_came(load, chunks, target)
                await trio.lowlevel.checkpoint()  # Without this checkpoint, a fast socket would block other tasks.
        await self.receive_response(connection, Kind.END)
        self.complete(load)

    @contextmanager
    def target(self, load: Load, chunks: Chunks) -> Iterator[StoredBlocks | None]:
        """Return the host memory that receives the chunks of a load for a device. None if the host can address blocks.

        Chunks that are not in the blocks at the end of the scope are missing again.

        Args:
            load: Load to transfer.
            chunks: Its chunks.
        """
        setup = self._policy.setup
        if setup.copies is None:
            yield None
            return
        blocks = blocks_of(load.block_table, self._pages.layout, load.start, load.token_count)
        last_token_count = (load.start + load.token_count - 1) % self._pages.layout.block_size + 1
        # A device gets whole layers, so a layer that was begun over another connection is received again.
        load.next_chunk = chunks.first_of_layer(chunks.layer_of(load.next_chunk))
        target = StoredBlocks(setup.pages, setup.copies, blocks, last_token_count, lambda: load.is_alive)
        try:
            yield target
        finally:
            if target.first_layer is not None:
                load.next_chunk = chunks.first_of_layer(target.first_layer)

    async def chunk_came(self, load: Load, chunks: Chunks, target: StoredBlocks | None) -> None:
        """Record that the next chunk has arrived, and write it to a device if its layers are complete.

        Args:
            load: Load of the chunk.
            chunks: Chunks of the load.
            target: Host memory that has the chunk. None if the chunk is in the blocks.
        """
        layer = chunks.layer_of(load.next_chunk)
        self._loads.came(load, trio.current_time())
        if target is not None and load.next_chunk == chunks.first_of_layer(layer + 1):
            await target.layer_came(layer)

    def complete(self, load: Load) -> None:
        """Count and end a load whose chunks are all in its blocks.

        Args:
            load: Load to end. The holder has confirmed that the hold was alive to the end.
        """
        if load.is_alive:
            size = self._pages.layout.block_size
            block_count = (load.start + load.token_count - 1) // size - load.start // size + 1
            self._policy.totals["blocks_received_total"] += block_count
            self._policy.totals["load_seconds_total"] += trio.current_time() - load.begun_at
        self._loads.complete(load)

    async def receive_response(self, connection: PeerConnection, kind: Kind) -> Head:
        """Receive the head of the next frame of the current transfer.

        Args:
            connection: Connection to the holder.
            kind: Kind of frame that must follow.

        Raises:
            Refused: the holder sent ABORT.
            BadFrame: another frame arrived.
        """
        head = await receive_head(connection.wire)
        if head.kind is Kind.ABORT:
            raise Refused(sentence_of(await receive_body(connection.wire, head, Abort)), can_resume=True)
        if head.kind is not kind or head.transfer != connection.transfer_count:
            raise BadFrame(
                f"{head.kind.name} of transfer {head.transfer} came, {kind.name} of {connection.transfer_count} is due"
            )
        return head

    async def _take_chunk(
        self, connection: PeerConnection, head: Head, load: Load, chunk: Chunk, target: StoredBlocks | None
    ) -> None:
        body_bytes = chunk.token_count * connection.layout.token_bytes
        if (head.layer, head.token_start, head.token_count, head.body_bytes) != (*chunk, body_bytes):
            raise BadFrame(f"{head} came, and {chunk} in {body_bytes} bytes is due")
        if not load.is_alive:
            raise MayNot(has_begun=True)
        same = connection.layout.dtype == self._pages.layout.dtype
        here: BlockViews = self._pages if target is None else target.of_layer(chunk.layer)
        pieces = views(here, load.block_table, chunk) if same else None
        if pieces is None:
            landed = memoryview(bytearray(body_bytes))
            await connection.wire.receive_into([landed], lambda: load.is_alive)
            _check([landed], head)
            self.put(load, chunk, landed, connection.layout.dtype, target)
        else:
            await connection.wire.receive_into(pieces, lambda: load.is_alive)
            _check(pieces, head)

    def put(self, load: Load, chunk: Chunk, landed: memoryview, dtype: str, target: StoredBlocks | None) -> None:
        """Convert a received chunk and write it to its blocks.

        Args:
            load: Load of the chunk.
            chunk: Layer and positions of the chunk.
            landed: Content that was received.
            dtype: Dtype of the content.
            target: Host memory that receives the content for a device. None to write it to the blocks.

        Raises:
            MayNot: the load has ended.
        """
        if not load.is_alive:
            raise MayNot(has_begun=True)
        content = convert(landed, dtype, self._pages.layout.dtype)
        token_bytes = self._pages.layout.token_bytes
        done = 0
        for place in places(load.block_table, self._pages.layout.block_size, chunk):
            start, end = place.start * token_bytes, done + place.token_count * token_bytes
            if target is None:
                self._pages.write(chunk.layer, place.block, start, content[done:end])
            else:
                there = target.of_layer(chunk.layer).view(chunk.layer, place.block)
                there[start : start + end - done] = content[done:end]
            done = end

    # --- connections ---

    async def connect(self, source: Source) -> PeerConnection:
        """Connect to a holder and run the handshake.

        Args:
            source: Address and id of the holder.

        Raises:
            Refused: another engine listens at the address, or its KV cannot be used here. The function may also raise
                the errors in BROKEN.
        """
        with trio.fail_after(CONNECT_SECONDS_MAX):
            wire = await self._open_wire(source)
            is_welcome = False
            try:
                connection = await greet_holder(wire, self._identity)
                if connection.engine_id != source.engine_id:
                    raise Refused(
                        "another engine listens there: the engine that held the blocks is gone, or it was restarted"
                    )
                objection = objection_to(connection.layout, self._pages.layout)
                if objection is not None:
                    raise Refused(objection)
                is_welcome = True
            finally:
                if not is_welcome:
                    wire.close()
        wire.silence_seconds = SILENCE_SECONDS_MAX
        return connection

    def close_idle(self, now: float) -> None:
        """Close connections that are idle for KEPT_SECONDS_MAX, and forget holders without connections and loads.

        Args:
            now: Current time in seconds.
        """
        for source, peer in tuple(self._peers.items()):
            while peer.idle and now - peer.idle[0].idle_since >= KEPT_SECONDS_MAX:
                peer.idle.pop(0).wire.close()
            if not peer.idle and not peer.user_count:
                del self._peers[source]

    def close(self) -> None:
        for peer in self._peers.values():
            _close_all(peer.idle)
        self._peers.clear()

    @property
    def has_idle(self) -> bool:
        return bool(self._peers)

    def _peer(self, source: Source) -> Peer | None:
        """Return the state of a holder. None if PEERS_MAX other holders are in use."""
        peer = self._peers.get(source)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                self.close_idle(trio.current_time() + KEPT_SECONDS_MAX)
            if len(self._peers) >= PEERS_MAX:
                return None
            peer = self._peers[source] = Peer(source)
        return peer

    # --- messages to holders ---

    def notify_now(self, source: Source, nursery: trio.Nursery) -> None:
        """Send the due messages to a holder now, and heartbeats while loads need its holds.

        A task sends the messages, and ends when nothing is due any more.

        Args:
            source: Holder.
            nursery: Nursery for the task.
        """
        again = self._notify_again.get(source)
        if again is not None:
            again.set()
        elif len(self._notify_again) < PEERS_MAX:
            self._notify_again[source] = trio.Event()
            nursery.start_soon(self._keep_notified, source, nursery)
        elif len(self._notify_later) < NOTIFY_LATER_MAX:
            self._notify_later[source] = None
        else:
            self._loads.cannot_notify(source)

    @trio.lowlevel.enable_ki_protection
    async def _keep_notified(self, source: Source, nursery: trio.Nursery) -> None:
        connection: PeerConnection | None = None
        failure_count = 0
        try:
            while True:
                again = self._notify_again[source] = trio.Event()
                notices = self._loads.notices(source)
                seconds = HEARTBEAT_SECONDS if notices else KEPT_SECONDS_MAX
                try:
                    for notice in notices:
                        if connection is None:
                            connection = await self.connect(source)
                        await self._notify(connection, source, notice)
                    failure_count = 0
                except (*BROKEN, Refused) as error:
                    if connection is not None:
                        connection.wire.close()
                        connection = None
                    failure_count += 1
                    if isinstance(error, Refused) or failure_count >= NOTICE_FAILURES_MAX:
                        self._note(str(source), describe(error))
                        self._loads.cannot_notify(source)
                        if not self._loads.notices(source):
                            return  # At most PEERS_MAX tasks may run, and another holder may need a task.
                    else:
                        seconds = 0.1 * failure_count
                with trio.move_on_after(seconds):
                    await again.wait()
                if not notices and not again.is_set():
                    return
        except Exception:
            # This error is a bug of the reader. It affects only this holder, whose holds end by their deadlines.
            log.exception("kv holder cannot be notified source=%s", source)
            self._loads.cannot_notify(source)
        finally:
            del self._notify_again[source]
            if connection is not None:
                connection.wire.close()
            if self._notify_later:
                self.notify_now(self._notify_later.popitem()[0], nursery)

    async def _notify(self, connection: PeerConnection, source: Source, notice: Notice) -> None:
        await connection.wire.send([frame(Kind.NOTICE, notice)])
        head = await receive_head(connection.wire)
        if head.kind is not Kind.NOTICE_REPLY:
            raise BadFrame(f"{head.kind.name} arrived instead of NOTICE_REPLY")
        reply = await receive_body(connection.wire, head, NoticeReply)
        self._policy.totals["heartbeats_sent_total"] += 1
        self._loads.answered(source, notice, reply.gone)


MakeReader = Callable[[StreamPolicy, Identity, Note, Callable[[Source], Awaitable[Wire]]], Reader]


def _close_all(connections: list[PeerConnection]) -> None:
    for connection in connections:
        connection.wire.close()
    connections.clear()


def _check(pieces: list[memoryview], head: Head) -> None:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    if checksum != head.checksum:
        raise BadFrame(f"the content of layer {head.layer}, tokens from {head.token_start} on, is not what was sent")
