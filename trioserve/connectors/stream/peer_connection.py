"""Connection between two engines that have proved that they know the key, and the handshake that proves it.

In a handshake, both engines prove that they have the same key, without sending it. Each engine sends an HMAC-SHA256
(RFC 2104) over both greetings. Each greeting contains a nonce, so a recorded proof is useless on another connection.
The proofs of reader and holder start with different words, so neither engine can send back the proof that it received.
The reader sends its proof first. A peer without the key gets no proof, and so no data from which it could guess the
key.

The handshake does not encrypt or sign the rest of the connection. Networks that are not trusted need TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

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
from trioserve.connectors.stream.wire import Wire
from trioserve.contracts.kv_transfer import KVLayout

__all__ = [
    "Side",
    "check_greeting",
    "is_proof",
    "make_greeting",
    "make_proof",
    "BROKEN",
    "PeerConnection",
    "Identity",
    "Refused",
    "describe",
    "greet_holder",
    "greet_reader",
    "receive_body",
    "receive_head",
    "sentence_of",
]

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
