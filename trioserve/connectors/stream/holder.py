"""The holder's part of the transport: serves the connections of readers."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

import trio

from trioserve.connectors.stream.frames import (
    CHUNK_BYTES_MAX,
    NOTICE_IDS_MAX,
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
    data_head,
    frame,
    places,
    views,
)
from trioserve.connectors.stream.peer_connection import (
    BROKEN,
    Identity,
    MayNot,
    PeerConnection,
    Refused,
    Wire,
    describe,
    greet_reader,
    receive_body,
    receive_head,
)
from trioserve.connectors.stream.policy import Send, StreamPolicy
from trioserve.connectors.stream.staging import FetchedBlocks
from trioserve.trio_tools.connection_limit import ConnectionLimit

__all__ = [
    "GREETINGS_MAX",
    "GREETINGS_OF_ADDRESS_MAX",
    "GREETING_SECONDS_MAX",
    "SILENCE_SECONDS_MAX",
    "Holder",
    "MoreFrames",
]

GREETING_SECONDS_MAX = 5.0  # time in which a new peer must prove that it knows the key
# Maximum number of handshakes at a time. A further one ends the oldest handshake of the address with most handshakes.
GREETINGS_MAX = 64
GREETINGS_OF_ADDRESS_MAX = 16  # handshakes per address at a time; all engines of one address open only a few at a time
SILENCE_SECONDS_MAX = 4.0  # longest time without progress in a transfer; leaves time for one retry before a hold ends
IDLE_SECONDS_MAX = 60.0  # time after which a connection without requests is closed

MoreFrames = Callable[[PeerConnection, Head], Awaitable[bool]]
"""Handles a frame of a kind that this file does not know. Returns False if the function does not know it either."""

Note = Callable[[str, str], None]
"""Logs a problem once. The arguments are the peer and the message."""


def _at_any_time() -> float:
    return 0.0


class Holder:
    """Server for the readers of this engine's holds.

    Args:
        policy: Holds, loads and totals of this engine.
        identity: Identity of this engine.
        note: Logs a problem with a peer.
        more_frames: Handles the kinds of frames that only another connector uses. None if no other connector is used.

    Attributes:
        strangers: Limits for the peers that have not proved yet that they know the key.
    """

    def __init__(self, policy: StreamPolicy, identity: Identity, note: Note, more_frames: MoreFrames | None) -> None:
        self._policy = policy
        self._identity = identity
        self._note = note
        self._more_frames = more_frames
        self._pages = policy.setup.pages
        self._reader_count = 0  # connections whose handshake has succeeded
        self.strangers = ConnectionLimit(
            connections_max=GREETINGS_MAX, strangers_max=GREETINGS_MAX, per_address_max=GREETINGS_OF_ADDRESS_MAX
        )

    async def serve(self, open_wire: Callable[[], Awaitable[Wire]], peer: str) -> None:
        """Serve one connection until its end.

        Peers without a finished handshake have a separate limit. They cannot use up the connections of readers, and new
        peers replace the oldest ones.

        Args:
            open_wire: Opens the connection. It may wait for a TLS handshake. The connection is closed at the end.
            peer: Address of the peer, for limits and log lines.
        """
        wires: list[Wire] = []
        connection = None
        is_reader = False
        try:
            connection = await self._greet(open_wire, wires, peer)
            if self._reader_count >= self._policy.options.connections_max:
                self._refused(peer, "connections_max connections of readers are open")
                return
            self._reader_count += 1
            is_reader = True
            while True:
                # Without this checkpoint, a reader that sends frames without pause would block all other tasks.
                await trio.lowlevel.checkpoint()
                await self._respond(connection)
        except (*BROKEN, Refused) as error:
            if connection is None or isinstance(error, BadFrame):
                self._refused(peer, describe(error))
        finally:
            self._reader_count -= is_reader
            for wire in wires:
                wire.close()

    async def _greet(self, open_wire: Callable[[], Awaitable[Wire]], wires: list[Wire], peer: str) -> PeerConnection:
        """Run the handshake with a new peer.

        Args:
            open_wire: Opens the connection.
            wires: Receives the connection once it is open, also if the handshake fails.
            peer: Address of the peer.

        Raises:
            Refused: the peer does not know the key, or newer peers took its place before the handshake ended.
        """
        place = self.strangers.crowd_in(peer)
        if place is None:  # The address has the maximum number of handshakes, and all of them are already ending.
            raise Refused("too many connections of its address have not shown the key")
        try:
            with trio.CancelScope() as scope, trio.fail_after(GREETING_SECONDS_MAX):
                place.may_end_at, place.end = _at_any_time, scope.cancel
                wire = await open_wire()
                wires.append(wire)
                return await greet_reader(wire, self._identity)
            raise Refused("newer connections took its place before it had shown the key")
        finally:
            self.strangers.leave(place)

    def _refused(self, peer: str, why: str) -> None:
        self._policy.totals["peers_refused_total"] += 1
        self._note(peer, why)

    async def _respond(self, connection: PeerConnection) -> None:
        """Receive one frame from the reader and answer it."""
        connection.wire.silence_seconds = IDLE_SECONDS_MAX
        head = await receive_head(connection.wire)
        connection.wire.silence_seconds = SILENCE_SECONDS_MAX
        if head.kind is Kind.READ:
            await self._send(connection, head.transfer, await receive_body(connection.wire, head, Read))
        elif head.kind is Kind.NOTICE:
            await self._answer_notice(connection, await receive_body(connection.wire, head, Notice))
        elif self._more_frames is None or not await self._more_frames(connection, head):
            raise BadFrame(f"{head.kind.name} arrived instead of READ or NOTICE")

    async def _answer_notice(self, connection: PeerConnection, notice: Notice) -> None:
        count = len(notice.keep) + len(notice.release)
        if count > NOTICE_IDS_MAX:
            raise BadFrame(f"{count} requests are in a NOTICE, at most {NOTICE_IDS_MAX} are allowed")
        sends = self._policy.sends
        self._policy.totals["heartbeats_received_total"] += 1
        sends.released(notice.release)
        gone = sends.note_still_read(notice.keep, trio.current_time())
        await connection.wire.send([frame(Kind.NOTICE_REPLY, NoticeReply(gone))])

    async def _send(self, connection: PeerConnection, transfer: int, read: Read) -> None:
        if not 0 < read.chunk_bytes <= CHUNK_BYTES_MAX:
            raise BadFrame(f"a READ has chunk_bytes {read.chunk_bytes}: it must be 1 to {CHUNK_BYTES_MAX}")
        sends = self._policy.sends
        send = sends.asked(read.request_id, read.token_start, read.token_count, read.proof, trio.current_time())
        if isinstance(send, str):
            await self.refuse(connection, transfer, send)
            return
        chunks = Chunks(self._pages.layout, read.token_start, read.token_count, read.chunk_bytes)
        if not 0 <= read.first_chunk <= len(chunks):
            raise BadFrame(f"a READ starts at chunk {read.first_chunk} of {len(chunks)}")
        in_frame = False
        with trio.CancelScope() as scope:
            send.stops[connection] = scope.cancel
            try:
                blocks = blocks_of(send.block_table, self._pages.layout, read.token_start, read.token_count)
                fetched = FetchedBlocks(self._policy.setup, blocks)
                for index in range(read.first_chunk, len(chunks)):
                    await trio.lowlevel.checkpoint()  # Without a checkpoint, a fast socket would block other tasks.
                    try:
                        here = await fetched.of_layer(chunks[index].layer)
                    except (MemoryError, RuntimeError) as error:
                        # Only this transfer fails. If the device is broken, the next step reports it.
                        self._note("this engine", f"blocks could not be copied to the host: {error}")
                        raise trio.BrokenResourceError("blocks could not be copied to the host") from error
                    in_frame = True
                    await self._send_chunk(connection, transfer, send, chunks[index], here)
                    in_frame = False
                    sends.sign_of_life(send, trio.current_time())
                # No other code runs between the check of the hold and the first byte of END. So END proves that the
                # hold was alive.
                await connection.wire.send([frame(Kind.END, transfer=transfer)], lambda: send.is_alive)
                self.was_read(send, read.token_start, read.token_count)
                return
            except MayNot as stopped:
                in_frame = in_frame and stopped.has_begun
            finally:
                del send.stops[connection]
        if in_frame:
            raise trio.BrokenResourceError("the hold ended in the middle of a chunk")
        await self.refuse(connection, transfer, "the hold ended while it was read")

    async def _send_chunk(
        self, connection: PeerConnection, transfer: int, send: Send, chunk: Chunk, here: BlockViews
    ) -> None:
        if not send.is_alive:
            raise MayNot(has_begun=False)
        pieces = self._pieces(send, chunk, here)
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        body_bytes = chunk.token_count * self._pages.layout.token_bytes
        head = data_head(transfer, chunk.layer, chunk.token_start, chunk.token_count, body_bytes, checksum)
        await connection.wire.send([head, *pieces], lambda: send.is_alive)
        self._policy.totals["bytes_sent_total"] += body_bytes

    def _pieces(self, send: Send, chunk: Chunk, here: BlockViews) -> list[memoryview]:
        found = views(here, send.block_table, chunk)
        if found is not None:
            return found
        token_bytes = self._pages.layout.token_bytes
        return [
            self._pages.read(chunk.layer, place.block)[
                place.start * token_bytes : (place.start + place.token_count) * token_bytes
            ]
            for place in places(send.block_table, self._pages.layout.block_size, chunk)
        ]

    async def refuse(self, connection: PeerConnection, transfer: int, message: str) -> None:
        """Refuse a READ with a message.

        Args:
            connection: Connection of the reader.
            transfer: Number of the READ.
            message: Reason.
        """
        self._policy.totals["transfers_refused_total"] += 1
        await connection.wire.send([frame(Kind.ABORT, Abort(message), transfer=transfer)])

    def was_read(self, send: Send, token_start: int, token_count: int) -> None:
        """Record that a reader received positions of a hold.

        Args:
            send: Hold that was read.
            token_start: First position.
            token_count: Number of positions.
        """
        send.was_read = True
        size = self._pages.layout.block_size
        self._policy.totals["blocks_sent_total"] += (token_start + token_count - 1) // size - token_start // size + 1
