"""A connection between two engines that have shown each other the key, and frames over it."""

from __future__ import annotations

import msgspec
import trio

from trioserve.connectors.stream.frames import (
    BODY_BYTES_MAX,
    GREETING_BYTES_MAX,
    HEAD_BYTES,
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
from trioserve.connectors.stream.handshake import check_greeting, is_proof, make_greeting, make_proof
from trioserve.connectors.stream.wire import Wire
from trioserve.contracts.kv_transfer import KVLayout

__all__ = [
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

SENTENCE_LENGTH_MAX = 1_000

BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, BadFrame)
"""What may become of a connection. Errors of TLS are OSErrors."""


class Refused(Exception):
    """The other side has said no, or is not whom it should be: trying again would not help. can_go_on: the connection
    is still good for something else."""

    def __init__(self, message: str, *, can_go_on: bool = False) -> None:
        super().__init__(message)
        self.can_go_on = can_go_on


class Identity(msgspec.Struct, frozen=True):
    """Who we are, and the key."""

    engine_id: str
    layout: KVLayout
    key: bytes


class PeerConnection(msgspec.Struct, eq=False):
    """transfer_count: reads asked for over it; each has its number. idle_since: when the last one ended."""

    wire: Wire
    engine_id: str
    layout: KVLayout
    transfer_count: int = 0
    idle_since: float = 0.0


async def greet_holder(wire: Wire, identity: Identity) -> PeerConnection:
    """Show a holder the key, and see that it has it. Raises Refused, or one of BROKEN."""
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
    """See that whoever has connected knows the key, and show that we do. Raises Refused, or one of BROKEN."""
    hello = await _receive_greeting(wire, Kind.HELLO)
    reader = _greeting_of(hello)
    challenge = msgspec.msgpack.encode(make_greeting(identity.engine_id, identity.layout))
    await wire.send([frame(Kind.CHALLENGE, challenge)])
    response = await _receive_small(wire, Kind.PROOF, Proof)
    if not is_proof(response.proof, identity.key, "reader", hello, challenge):
        await wire.send([frame(Kind.ABORT, Abort("the key is another one here"))])
        raise Refused("it does not know the key of this engine")
    await wire.send([frame(Kind.WELCOME, Proof(make_proof(identity.key, "holder", hello, challenge)))])
    return PeerConnection(wire, reader.engine_id, reader.layout)


async def receive_head(wire: Wire) -> Head:
    return head_of(await wire.receive(HEAD_BYTES))


async def receive_body(wire: Wire, head: Head, kind: type[Body], bytes_max: int = BODY_BYTES_MAX) -> Body:
    return body_of(kind, await _receive_content(wire, head, bytes_max))


def sentence_of(abort: Abort) -> str:
    """What the other side says, as far as it fits into a log: a line, and no longer than a sentence may be."""
    return "".join(letter if letter.isprintable() else "?" for letter in abort.message[:SENTENCE_LENGTH_MAX])


def describe(error: BaseException) -> str:
    """What happened to a connection, for the log and for the client."""
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
        raise BadFrame(f"{head.kind.name} came where {kind.name} is due")
    return head


async def _receive_content(wire: Wire, head: Head, bytes_max: int) -> bytes:
    if head.body_bytes > bytes_max:
        raise BadFrame(
            f"the body of a {head.kind.name} is said to have {head.body_bytes} bytes, allowed are {bytes_max}"
        )
    return await wire.receive(head.body_bytes)


def _greeting_of(content: bytes) -> Greeting:
    greeting = body_of(Greeting, content)
    check_greeting(greeting)
    return greeting
