"""The reader's half of the transport: brings what loads ask for, and tells holders what is still wanted."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable

import trio

from trioserve.connectors.conversion import convert, objection_to
from trioserve.connectors.stream.chunks import Chunk, Chunks, places, views
from trioserve.connectors.stream.frames import Abort, BadFrame, Head, Kind, Read, Tell, Told, frame
from trioserve.connectors.stream.holder import SILENCE_SECONDS_MAX, Note
from trioserve.connectors.stream.loads import Load
from trioserve.connectors.stream.peer_connection import (
    BROKEN,
    Identity,
    PeerConnection,
    Refused,
    describe,
    greet_holder,
    receive_body,
    receive_head,
    sentence_of,
)
from trioserve.connectors.stream.policy import StreamPolicy
from trioserve.connectors.stream.sources import Source
from trioserve.connectors.stream.wire import MayNot, Wire

__all__ = ["MakeReader", "Reader"]

CONNECT_SECONDS_MAX = 4.0  # a holder that is stopped takes connections and says nothing: it gets one more try in a hold
KEPT_SECONDS_MAX = 30.0  # of idle connections: less than the other side waits
HEARTBEAT_SECONDS = 2.5  # a quarter of a hold: two may get lost
TELL_FAILURES_MAX = 3  # in a row; after that a holder learns by its deadlines
PEER_CONNECTIONS_MAX = 4
PEERS_MAX = 64
BROKE_OFF = "this engine cannot be reached, or broke off"
"""All that a client learns of a connection that failed; the log has the rest. Another program may listen there now."""
TOLD_LATER_MAX = 1_000  # that wait until one of these has been told; beyond, holders learn by their deadlines

log = logging.getLogger(__name__)


class Peer:
    """A holder. slots: transfers from it at a time. user_count: loads that have it, whether they wait or not."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.idle: list[PeerConnection] = []
        self.slots = trio.CapacityLimiter(PEER_CONNECTIONS_MAX)
        self.user_count = 0


class Reader:
    """open_wire: connects to a holder and takes a TLS handshake, if there is one."""

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
        self._told_again: dict[Source, trio.Event] = {}  # of those that a task tells what they have to know
        self._told_later: dict[Source, None] = {}  # those for whom no task was left

    # --- one load ---

    @trio.lowlevel.enable_ki_protection
    async def bring(self, load: Load) -> None:
        """Until the load has ended, one way or another."""
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
                    await self._bring_from(peer, load)
            except Exception as error:
                # A fault of ours, and still one transfer's alone: its engine computes what did not come.
                log.exception("kv transfer failed request=%s", load.request_id)
                self._loads.failed(load, f"a fault in this engine's connector: {error!r}")
            finally:
                peer.user_count -= 1

    async def _bring_from(self, peer: Peer, load: Load) -> None:
        while load.is_alive:
            try:
                await self._attempt(peer, load)
            except Refused as refused:
                self._loads.failed(load, str(refused))
            except MayNot:
                return
            except BROKEN as error:
                self._note(str(peer.source), describe(error))
                _close_all(peer.idle)  # where one broke, the others are hardly better
                is_deaf = isinstance(error, ConnectionRefusedError)
                seconds = self._loads.broken(load, BROKE_OFF, trio.current_time(), is_deaf=is_deaf)
                if seconds is not None:
                    await trio.sleep(seconds)

    async def _attempt(self, peer: Peer, load: Load) -> None:
        """What is missing, over one connection."""
        connection = peer.idle.pop() if peer.idle else await self.connect(peer.source)
        can_go_on = False
        try:
            await self.read_over(connection, load)
            can_go_on = True
        except Refused as refused:
            can_go_on = refused.can_go_on
            raise
        finally:
            if can_go_on:
                connection.idle_since = trio.current_time()
                peer.idle.append(connection)
            else:
                connection.wire.close()

    async def read_over(self, connection: PeerConnection, load: Load) -> None:
        """Bring what is missing of a load. Raises Refused, MayNot, or one of BROKEN; load.next_chunk says how far it
        came."""
        connection.transfer_count += 1
        chunk_bytes = self._policy.options.chunk_bytes
        ask = Read(load.origin.request_id, load.start, load.token_count, load.proof, chunk_bytes, load.next_chunk)
        await connection.wire.send([frame(Kind.READ, ask, transfer=connection.transfer_count)])
        chunks = Chunks(connection.layout, load.start, load.token_count, chunk_bytes)
        while load.next_chunk < len(chunks):
            head = await self.receive_response(connection, Kind.DATA)
            await self._take_chunk(connection, head, load, chunks[load.next_chunk])
            self._loads.came(load, trio.current_time())
            self._policy.totals["bytes_received_total"] += head.body_bytes
            await trio.lowlevel.checkpoint()  # a socket that has more at once would never let others run
        await self.receive_response(connection, Kind.END)
        self.complete(load)

    def complete(self, load: Load) -> None:
        """All of it is in its blocks, and was held when its last byte was read."""
        if load.is_alive:
            size = self._pages.layout.block_size
            block_count = (load.start + load.token_count - 1) // size - load.start // size + 1
            self._policy.totals["blocks_received_total"] += block_count
            self._policy.totals["load_seconds_total"] += trio.current_time() - load.begun_at
        self._loads.complete(load)

    async def receive_response(self, connection: PeerConnection, kind: Kind) -> Head:
        """The head of what answers the last question. Raises Refused."""
        head = await receive_head(connection.wire)
        if head.kind is Kind.ABORT:
            raise Refused(sentence_of(await receive_body(connection.wire, head, Abort)), can_go_on=True)
        if head.kind is not kind or head.transfer != connection.transfer_count:
            raise BadFrame(
                f"{head.kind.name} of transfer {head.transfer} came, {kind.name} of {connection.transfer_count} is due"
            )
        return head

    async def _take_chunk(self, connection: PeerConnection, head: Head, load: Load, chunk: Chunk) -> None:
        body_bytes = chunk.token_count * connection.layout.token_bytes
        if (head.layer, head.token_start, head.token_count, head.body_bytes) != (*chunk, body_bytes):
            raise BadFrame(f"{head} came, and {chunk} in {body_bytes} bytes is due")
        if not load.is_alive:
            raise MayNot(has_begun=True)
        same = connection.layout.dtype == self._pages.layout.dtype
        pieces = views(self._pages, load.block_table, chunk) if same else None
        if pieces is None:
            landed = memoryview(bytearray(body_bytes))
            await connection.wire.receive_into([landed], lambda: load.is_alive)
            _check([landed], head)
            self.put(load, chunk, landed, connection.layout.dtype)
        else:
            await connection.wire.receive_into(pieces, lambda: load.is_alive)
            _check(pieces, head)

    def put(self, load: Load, chunk: Chunk, landed: memoryview, dtype: str) -> None:
        """Write what has landed, in numbers of dtype, to where it belongs. Raises MayNot."""
        if not load.is_alive:
            raise MayNot(has_begun=True)
        content = convert(landed, dtype, self._pages.layout.dtype)
        token_bytes = self._pages.layout.token_bytes
        done = 0
        for place in places(load.block_table, self._pages.layout.block_size, chunk):
            end = done + place.token_count * token_bytes
            self._pages.write(chunk.layer, place.block, place.start * token_bytes, content[done:end])
            done = end

    # --- connections ---

    async def connect(self, source: Source) -> PeerConnection:
        """Raises Refused if it is not the engine that is meant, or one whose KV is of no use here; or one of BROKEN."""
        with trio.fail_after(CONNECT_SECONDS_MAX):
            wire = await self._open_wire(source)
            is_welcome = False
            try:
                connection = await greet_holder(wire, self._identity)
                if connection.engine_id != source.engine_id:
                    raise Refused("another engine listens there than the one that held the blocks: it was restarted")
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
        """Those that nobody has used for a while, and what is known of holders that nobody reads from."""
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
        """None: there are too many that are in use."""
        peer = self._peers.get(source)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                self.close_idle(trio.current_time() + KEPT_SECONDS_MAX)
            if len(self._peers) >= PEERS_MAX:
                return None
            peer = self._peers[source] = Peer(source)
        return peer

    # --- what holders have to be told ---

    def tell_now(self, source: Source, nursery: trio.Nursery) -> None:
        """At once, and from then on as often as it has to hear that somebody waits; by a task that ends by itself."""
        again = self._told_again.get(source)
        if again is not None:
            again.set()
        elif len(self._told_again) < PEERS_MAX:
            self._told_again[source] = trio.Event()
            nursery.start_soon(self._tell_on, source, nursery)
        elif len(self._told_later) < TOLD_LATER_MAX:
            self._told_later[source] = None
        else:
            self._loads.cannot_tell(source)

    @trio.lowlevel.enable_ki_protection
    async def _tell_on(self, source: Source, nursery: trio.Nursery) -> None:
        connection: PeerConnection | None = None
        failure_count = 0
        try:
            while True:
                again = self._told_again[source] = trio.Event()
                tells = self._loads.tells(source)
                seconds = HEARTBEAT_SECONDS if tells else KEPT_SECONDS_MAX
                try:
                    for tell in tells:
                        if connection is None:
                            connection = await self.connect(source)
                        await self._tell(connection, source, tell)
                    failure_count = 0
                except (*BROKEN, Refused) as error:
                    if connection is not None:
                        connection.wire.close()
                        connection = None
                    failure_count += 1
                    if isinstance(error, Refused) or failure_count >= TELL_FAILURES_MAX:
                        self._note(str(source), describe(error))
                        self._loads.cannot_tell(source)
                        if not self._loads.tells(source):
                            return  # places for those who tell are few
                    else:
                        seconds = 0.1 * failure_count
                with trio.move_on_after(seconds):
                    await again.wait()
                if not tells and not again.is_set():
                    return
        except Exception:
            # A fault of ours, and still one holder's alone: it learns by its deadlines.
            log.exception("kv holder cannot be told source=%s", source)
            self._loads.cannot_tell(source)
        finally:
            del self._told_again[source]
            if connection is not None:
                connection.wire.close()
            if self._told_later:
                self.tell_now(self._told_later.popitem()[0], nursery)

    async def _tell(self, connection: PeerConnection, source: Source, tell: Tell) -> None:
        await connection.wire.send([frame(Kind.TELL, tell)])
        head = await receive_head(connection.wire)
        if head.kind is not Kind.TOLD:
            raise BadFrame(f"{head.kind.name} came where TOLD is due")
        told = await receive_body(connection.wire, head, Told)
        self._policy.totals["heartbeats_sent_total"] += 1
        self._loads.told(source, tell, told.gone)


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
        raise BadFrame(f"what came for layer {head.layer}, tokens from {head.token_start} on is not what was sent")
