"""The holder's half of the transport: answers those who come for its blocks."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

import trio

from trioserve.connectors.stream.chunks import Chunk, Chunks, places, views
from trioserve.connectors.stream.frames import (
    CHUNK_BYTES_MAX,
    TELL_IDS_MAX,
    Abort,
    BadFrame,
    Head,
    Kind,
    Read,
    Tell,
    Told,
    data_head,
    frame,
)
from trioserve.connectors.stream.peer_connection import (
    BROKEN,
    Identity,
    PeerConnection,
    Refused,
    describe,
    greet_reader,
    receive_body,
    receive_head,
)
from trioserve.connectors.stream.policy import StreamPolicy
from trioserve.connectors.stream.sends import Send
from trioserve.connectors.stream.wire import MayNot, Wire
from trioserve.trio_tools.places import Places

__all__ = [
    "GREETINGS_MAX",
    "GREETINGS_OF_ADDRESS_MAX",
    "GREETING_SECONDS_MAX",
    "SILENCE_SECONDS_MAX",
    "Holder",
    "MoreFrames",
]

GREETING_SECONDS_MAX = 5.0  # for a stranger to show the key
GREETINGS_MAX = 64  # strangers at a time; for another one, the oldest of the address that has most ends
GREETINGS_OF_ADDRESS_MAX = 16  # of these: engines behind one address connect a few at a time
SILENCE_SECONDS_MAX = 4.0  # in the middle of something; one more try fits into what a hold lasts without a sign of life
IDLE_SECONDS_MAX = 60.0  # of a reader that asks for nothing

MoreFrames = Callable[[PeerConnection, Head], Awaitable[bool]]
"""Answers a frame of a kind that is not of this protocol, and says whether it is one of its own."""

Note = Callable[[str, str], None]
"""Logs a trouble once. The peer, and what it was."""


def _at_any_time() -> float:
    return 0.0


class Holder:
    def __init__(self, policy: StreamPolicy, identity: Identity, note: Note, more_frames: MoreFrames | None) -> None:
        self._policy = policy
        self._identity = identity
        self._note = note
        self._more_frames = more_frames
        self._pages = policy.setup.pages
        self._reader_count = 0  # connections that have shown the key
        self.strangers = Places(
            places_max=GREETINGS_MAX, strangers_max=GREETINGS_MAX, per_address_max=GREETINGS_OF_ADDRESS_MAX
        )

    async def serve(self, open_wire: Callable[[], Awaitable[Wire]], peer: str) -> None:
        """Serve one connection until its end.

        Strangers have places of their own: those that say nothing take none of the readers', and end when others come.

        Args:
            open_wire: opens the connection, which may wait for a TLS handshake. What it returns is closed at the end.
            peer: the connection's address, which is counted and logged.
        """
        wires: list[Wire] = []
        connection = None
        is_reader = False
        try:
            connection = await self._greet(open_wire, wires, peer)
            if self._reader_count >= self._policy.options.connections_max:
                self._refused(peer, "too many connections of readers are open")
                return
            self._reader_count += 1
            is_reader = True
            while True:
                # A reader that always has another question would never let others run.
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
        """Greet a stranger.

        Args:
            wires: gets the connection as soon as there is one, however the greeting ends.

        Raises:
            Refused: it does not know the key, or others came before it has shown it.
        """
        place = self.strangers.crowd_in(peer)
        if place is None:  # the others of its address are ending
            raise Refused("too many connections of its address have not shown the key")
        try:
            with trio.CancelScope() as scope, trio.fail_after(GREETING_SECONDS_MAX):
                place.may_end_at, place.end = _at_any_time, scope.cancel
                wire = await open_wire()
                wires.append(wire)
                return await greet_reader(wire, self._identity)
            raise Refused("it had not shown the key when others came")
        finally:
            self.strangers.leave(place)

    def _refused(self, peer: str, why: str) -> None:
        self._policy.totals["peers_refused_total"] += 1
        self._note(peer, why)

    async def _respond(self, connection: PeerConnection) -> None:
        """One thing that the reader asks or tells."""
        connection.wire.silence_seconds = IDLE_SECONDS_MAX
        head = await receive_head(connection.wire)
        connection.wire.silence_seconds = SILENCE_SECONDS_MAX
        if head.kind is Kind.READ:
            await self._send(connection, head.transfer, await receive_body(connection.wire, head, Read))
        elif head.kind is Kind.TELL:
            await self._told(connection, await receive_body(connection.wire, head, Tell))
        elif self._more_frames is None or not await self._more_frames(connection, head):
            raise BadFrame(f"{head.kind.name} came where a question is due")

    async def _told(self, connection: PeerConnection, tell: Tell) -> None:
        if len(tell.keep) + len(tell.release) > TELL_IDS_MAX:
            raise BadFrame(f"{len(tell.keep) + len(tell.release)} requests are told of at a time")
        sends = self._policy.sends
        self._policy.totals["heartbeats_received_total"] += 1
        sends.released(tell.release)
        gone = sends.still_wanted(tell.keep, trio.current_time())
        await connection.wire.send([frame(Kind.TOLD, Told(gone))])

    async def _send(self, connection: PeerConnection, transfer: int, read: Read) -> None:
        if not 0 < read.chunk_bytes <= CHUNK_BYTES_MAX:
            raise BadFrame(f"chunks of {read.chunk_bytes} bytes are asked for")
        sends = self._policy.sends
        send = sends.asked(read.request_id, read.token_start, read.token_count, read.proof, trio.current_time())
        if isinstance(send, str):
            await self.refuse(connection, transfer, send)
            return
        chunks = Chunks(self._pages.layout, read.token_start, read.token_count, read.chunk_bytes)
        if not 0 <= read.first_chunk <= len(chunks):
            raise BadFrame(f"chunk {read.first_chunk} is asked for, and there are {len(chunks)}")
        in_frame = False
        with trio.CancelScope() as scope:
            send.stops[connection] = scope.cancel
            try:
                for index in range(read.first_chunk, len(chunks)):
                    await trio.lowlevel.checkpoint()  # a socket that takes all at once would never let others run
                    in_frame = True
                    await self._send_chunk(connection, transfer, send, chunks[index])
                    in_frame = False
                    sends.sign_of_life(send, trio.current_time())
                # The look at the hold and the first byte of this are one step: whoever gets it has got what was held.
                await connection.wire.send([frame(Kind.END, transfer=transfer)], lambda: send.is_alive)
                self.was_read(send, read.token_start, read.token_count)
                return
            except MayNot as stopped:
                in_frame = in_frame and stopped.has_begun
            finally:
                del send.stops[connection]
        if in_frame:
            raise trio.BrokenResourceError("the hold has ended in the middle of a chunk")
        await self.refuse(connection, transfer, "the hold has ended while it was read")

    async def _send_chunk(self, connection: PeerConnection, transfer: int, send: Send, chunk: Chunk) -> None:
        if not send.is_alive:
            raise MayNot(has_begun=False)
        pieces = self._pieces(send, chunk)
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        body_bytes = chunk.token_count * self._pages.layout.token_bytes
        head = data_head(transfer, chunk.layer, chunk.token_start, chunk.token_count, body_bytes, checksum)
        await connection.wire.send([head, *pieces], lambda: send.is_alive)
        self._policy.totals["bytes_sent_total"] += body_bytes

    def _pieces(self, send: Send, chunk: Chunk) -> list[memoryview]:
        found = views(self._pages, send.block_table, chunk)
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
        """A sentence instead of a response."""
        self._policy.totals["transfers_refused_total"] += 1
        await connection.wire.send([frame(Kind.ABORT, Abort(message), transfer=transfer)])

    def was_read(self, send: Send, token_start: int, token_count: int) -> None:
        """A reader has got these positions."""
        send.was_read = True
        size = self._pages.layout.block_size
        self._policy.totals["blocks_sent_total"] += (token_start + token_count - 1) // size - token_start // size + 1
