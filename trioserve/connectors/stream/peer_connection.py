"""Connection between two engines that have proved that they know the key, and the handshake that proves it.

In a handshake, both engines prove that they have the same key, without sending it. Each engine sends an HMAC-SHA256
(RFC 2104) over both greetings. Each greeting contains a nonce, so a recorded proof is useless on another connection.
The proofs of reader and holder start with different words, so neither engine can send back the proof that it received.
The reader sends its proof first. A peer without the key gets no proof, and so no data from which it could guess the
key.

The handshake does not encrypt or sign the rest of the connection. Networks that are not trusted need TLS.

A `Wire` reads from and writes to KV blocks only while the blocks may be used. Before each piece, it checks that the
blocks may still be used. Nothing is awaited between the check and the copy. Trio's recv_into cannot be used for this:
it can complete and be cancelled in the same pass of the event loop, and could write to blocks that now belong to
another request. Trio therefore only waits until the socket is ready. The copy is a call that does not wait.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import trio

from trioserve.connectors.stream.frames import (
    BODY_BYTES_MAX,
    GREETING_BYTES_MAX,
    HEAD_BYTES,
    ID_LENGTH_MAX,
    NONCE_BYTES,
    VERSION,
    Abort,
    BadFrame,
    Body,
    Greeting,
    Head,
    Kind,
    Proof,
    body_of,
    frame,
    head_of,
)
from trioserve.contracts.kv_transfer import KVLayout

__all__ = [
    "BROKEN",
    "Identity",
    "MayNot",
    "PeerConnection",
    "Refused",
    "Side",
    "SocketWire",
    "StreamWire",
    "Wire",
    "always",
    "check_greeting",
    "describe",
    "greet_holder",
    "greet_reader",
    "is_proof",
    "make_greeting",
    "make_proof",
    "receive_body",
    "receive_head",
    "sentence_of",
]


PIECES_MAX = 512  # maximum number of pieces per system call; the limit of the kernel is 1,024
PART_BYTES = 65_536  # maximum bytes per call of a stream; a call that takes longer than silence_seconds fails


class MayNot(Exception):
    """The blocks of a transfer must not be used any more.

    Args:
        has_begun: True if some bytes were already transferred. In that case, the connection cannot be used any more.
    """

    def __init__(self, *, has_begun: bool) -> None:
        super().__init__("the blocks must not be used any more")
        self.has_begun = has_begun


def always() -> bool:
    return True


class Wire(Protocol):
    """Connection that moves bytes between a peer and KV blocks.

    All methods that wait raise trio.TooSlowError after `silence_seconds` without progress, trio.BrokenResourceError if
    the connection fails, and trio.ClosedResourceError after close(). A call that can move all bytes at once does not
    yield to other tasks.

    Attributes:
        silence_seconds: Time without progress after which a call fails.
    """

    silence_seconds: float

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        """Send all pieces in order.

        Args:
            pieces: Bytes to send.
            may: Returns True while the pieces may be read. Called before each read.

        Raises:
            MayNot: `may` returned False.
        """
        ...

    async def receive(self, byte_count: int) -> bytes:
        """Receive an exact number of bytes.

        Args:
            byte_count: Number of bytes.
        """
        ...

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        """Fill all pieces in order.

        Args:
            pieces: Memory to fill.
            may: Returns True while the pieces may be written. Called before each write.

        Raises:
            MayNot: `may` returned False.
        """
        ...

    def close(self) -> None:
        """Close the connection without waiting. Tasks that wait for this connection get an error."""
        ...


class SocketWire:
    """Plain TCP connection that sends from and receives into blocks without a copy.

    Args:
        stream: Stream whose socket is taken over. The caller must not use it any more.
        silence_seconds: Time without progress after which a call fails.
    """

    def __init__(self, stream: trio.SocketStream, silence_seconds: float) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self.silence_seconds = silence_seconds

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        rest = [memoryview(piece) for piece in pieces]
        has_begun = False
        while rest:
            if not may():
                raise MayNot(has_begun=has_begun)
            try:
                sent_bytes = self._socket.sendmsg(rest[:PIECES_MAX])
            except (BlockingIOError, InterruptedError):
                with trio.fail_after(self.silence_seconds):
                    await trio.lowlevel.wait_writable(self._socket)
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"the connection is broken: {error}") from error
            has_begun = True
            _advance(rest, sent_bytes)

    async def receive(self, byte_count: int) -> bytes:
        content = bytearray(byte_count)
        await self.receive_into([memoryview(content)])
        return bytes(content)

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        rest = [piece for piece in pieces if len(piece)]
        has_begun = False
        while rest:
            if not may():
                raise MayNot(has_begun=has_begun)
            try:
                received_bytes = self._socket.recvmsg_into(rest[:PIECES_MAX])[0]
            except (BlockingIOError, InterruptedError):
                with trio.fail_after(self.silence_seconds):
                    await trio.lowlevel.wait_readable(self._socket)
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"the connection is broken: {error}") from error
            if not received_bytes:
                raise trio.BrokenResourceError("the peer has closed the connection")
            has_begun = True
            _advance(rest, received_bytes)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class StreamWire:
    """Connection over any Trio stream, mostly TLS.

    The connection copies blocks before it sends them, because a stream may read its argument later. It copies received
    bytes into the blocks.

    Args:
        stream: Stream to use.
        silence_seconds: Time without progress after which a call fails.
        close: Closes the stream, or the socket below it, without waiting.
    """

    def __init__(self, stream: trio.abc.Stream, silence_seconds: float, close: Callable[[], None]) -> None:
        self._stream = stream
        self._close = close
        self._early = b""  # received bytes that no call has returned yet
        self.silence_seconds = silence_seconds

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        if not may():
            raise MayNot(has_begun=False)
        copied = memoryview(b"".join(pieces))
        for start in range(0, len(copied), PART_BYTES):
            with trio.fail_after(self.silence_seconds):
                await self._stream.send_all(copied[start : start + PART_BYTES])

    async def receive(self, byte_count: int) -> bytes:
        content = bytearray(byte_count)
        await self.receive_into([memoryview(content)])
        return bytes(content)

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        rest = [piece for piece in pieces if len(piece)]
        has_begun = False
        while rest:
            if not self._early:
                with trio.fail_after(self.silence_seconds):
                    self._early = bytes(await self._stream.receive_some(PART_BYTES))
                if not self._early:
                    raise trio.BrokenResourceError("the peer has closed the connection")
            if not may():
                raise MayNot(has_begun=has_begun)
            has_begun = True
            count = min(len(self._early), len(rest[0]))
            rest[0][:count] = self._early[:count]
            self._early = self._early[count:]
            _advance(rest, count)

    def close(self) -> None:
        self._close()


def _advance(rest: list[memoryview], byte_count: int) -> None:
    """Remove the bytes that were transferred from the front of `rest`."""
    done = 0
    while done < len(rest) and byte_count >= len(rest[done]):
        byte_count -= len(rest[done])
        done += 1
    del rest[:done]
    if byte_count:
        rest[0] = rest[0][byte_count:]


Side = Literal["reader", "holder"]


def make_greeting(engine_id: str, layout: KVLayout) -> Greeting:
    return Greeting(VERSION, engine_id, layout, secrets.token_bytes(NONCE_BYTES))


def check_greeting(greeting: Greeting) -> None:
    """Check that a peer uses the same protocol.

    Args:
        greeting: Greeting of the peer.

    Raises:
        BadFrame: the version differs, or a field is not valid.
    """
    if greeting.version != VERSION:
        raise BadFrame(f"it uses protocol version {greeting.version}, and this engine uses {VERSION}")
    if len(greeting.nonce) != NONCE_BYTES:
        raise BadFrame(f"its nonce has {len(greeting.nonce)} bytes instead of {NONCE_BYTES}")
    if not 0 < len(greeting.engine_id) <= ID_LENGTH_MAX:
        raise BadFrame(f"its engine id has {len(greeting.engine_id)} characters")


def make_proof(key: bytes, side: Side, hello: bytes, challenge: bytes) -> bytes:
    """Compute the proof that one engine sends.

    Args:
        key: Key of the group.
        side: Engine that sends the proof.
        hello: Encoded greeting of the reader.
        challenge: Encoded greeting of the holder.
    """
    made = hmac.new(key, b"trioserve kv " + side.encode(), hashlib.sha256)
    for greeting in (hello, challenge):
        made.update(len(greeting).to_bytes(8, "big"))
        made.update(greeting)
    return made.digest()


def is_proof(proof: bytes, key: bytes, side: Side, hello: bytes, challenge: bytes) -> bool:
    """Compare a proof with the expected proof in constant time.

    Args:
        proof: Proof that was received.
        key: Key of the group.
        side: Engine that sent the proof.
        hello: Encoded greeting of the reader.
        challenge: Encoded greeting of the holder.
    """
    return hmac.compare_digest(proof, make_proof(key, side, hello, challenge))


SENTENCE_LENGTH_MAX = 1_000

BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, BadFrame)
"""Errors that mean that a connection cannot be used any more. TLS errors are OSErrors."""


class Refused(Exception):
    """The peer refused, or did not prove that it knows the key. A retry would not help.

    Args:
        message: Reason.
        can_resume: True if the connection can still be used for other transfers.
    """

    def __init__(self, message: str, *, can_resume: bool = False) -> None:
        super().__init__(message)
        self.can_resume = can_resume


class Identity(msgspec.Struct, frozen=True):
    """Id and KV layout of this engine, and the key of its group."""

    engine_id: str
    layout: KVLayout
    key: bytes


class PeerConnection(msgspec.Struct, eq=False):
    """Connection after a successful handshake.

    Attributes:
        wire: Connection to the peer.
        engine_id: Id of the peer.
        layout: KV layout of the peer.
        transfer_count: Number of READ frames sent so far. Each READ gets the next number.
        idle_since: Time in seconds when the last transfer ended.
    """

    wire: Wire
    engine_id: str
    layout: KVLayout
    transfer_count: int = 0
    idle_since: float = 0.0


async def greet_holder(wire: Wire, identity: Identity) -> PeerConnection:
    """Run the reader's part of the handshake.

    Args:
        wire: Connection to the holder.
        identity: Identity of this engine.

    Raises:
        Refused: the holder refused, or does not know the key. The function may also raise the errors in BROKEN.
    """
    hello = msgspec.msgpack.encode(make_greeting(identity.engine_id, identity.layout))
    await wire.send([frame(Kind.HELLO, hello)])
    challenge = await _receive_greeting(wire, Kind.CHALLENGE)
    holder = _greeting_of(challenge)
    await wire.send([frame(Kind.PROOF, Proof(make_proof(identity.key, "reader", hello, challenge)))])
    welcome = await _receive_small(wire, Kind.WELCOME, Proof)
    if not is_proof(welcome.proof, identity.key, "holder", hello, challenge):
        raise Refused("it does not know the key of this engine")
    return PeerConnection(wire, holder.engine_id, holder.layout)


async def greet_reader(wire: Wire, identity: Identity) -> PeerConnection:
    """Run the holder's part of the handshake.

    Args:
        wire: Connection to the reader.
        identity: Identity of this engine.

    Raises:
        Refused: the reader refused, or does not know the key. The function may also raise the errors in BROKEN.
    """
    hello = await _receive_greeting(wire, Kind.HELLO)
    reader = _greeting_of(hello)
    challenge = msgspec.msgpack.encode(make_greeting(identity.engine_id, identity.layout))
    await wire.send([frame(Kind.CHALLENGE, challenge)])
    response = await _receive_small(wire, Kind.PROOF, Proof)
    if not is_proof(response.proof, identity.key, "reader", hello, challenge):
        await wire.send([frame(Kind.ABORT, Abort("the key is another one here: give both engines the same key"))])
        raise Refused("it does not know the key of this engine")
    await wire.send([frame(Kind.WELCOME, Proof(make_proof(identity.key, "holder", hello, challenge)))])
    return PeerConnection(wire, reader.engine_id, reader.layout)


async def receive_head(wire: Wire) -> Head:
    return head_of(await wire.receive(HEAD_BYTES))


async def receive_body(wire: Wire, head: Head, kind: type[Body], bytes_max: int = BODY_BYTES_MAX) -> Body:
    return body_of(kind, await _receive_content(wire, head, bytes_max))


def sentence_of(abort: Abort) -> str:
    """Return the message of a peer as one printable line of at most SENTENCE_LENGTH_MAX characters.

    Args:
        abort: Message of the peer.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in abort.message[:SENTENCE_LENGTH_MAX])


def describe(error: BaseException) -> str:
    """Describe the error of a connection for the log and the client.

    Args:
        error: Error that ended the connection.
    """
    if isinstance(error, trio.TooSlowError):
        return "nothing came for too long"
    return str(error) or type(error).__name__


async def _receive_greeting(wire: Wire, kind: Kind) -> bytes:
    return await _receive_content(wire, await _receive_kind(wire, kind), GREETING_BYTES_MAX)


async def _receive_small(wire: Wire, kind: Kind, body: type[Body]) -> Body:
    return await receive_body(wire, await _receive_kind(wire, kind), body, GREETING_BYTES_MAX)


async def _receive_kind(wire: Wire, kind: Kind) -> Head:
    head = await receive_head(wire)
    if head.kind is Kind.ABORT:
        raise Refused(sentence_of(await receive_body(wire, head, Abort, GREETING_BYTES_MAX)))
    if head.kind is not kind:
        raise BadFrame(f"{head.kind.name} arrived instead of {kind.name}")
    return head


async def _receive_content(wire: Wire, head: Head, bytes_max: int) -> bytes:
    if head.body_bytes > bytes_max:
        raise BadFrame(f"the body of a {head.kind.name} has {head.body_bytes} bytes, at most {bytes_max} are allowed")
    return await wire.receive(head.body_bytes)


def _greeting_of(content: bytes) -> Greeting:
    greeting = body_of(Greeting, content)
    check_greeting(greeting)
    return greeting
