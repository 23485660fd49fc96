"""Handshake in which two engines prove that they have the same key, without sending it.

Each engine sends an HMAC-SHA256 (RFC 2104) over both greetings. Each greeting contains a nonce, so a recorded proof is
useless on another connection. The proofs of reader and holder start with different words, so neither engine can send
back the proof that it received. The reader sends its proof first. A peer without the key gets no proof, and so no data
from which it could guess the key.

The handshake does not encrypt or sign the rest of the connection. Networks that are not trusted need TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

from trioserve.connectors.stream.frames import ID_LENGTH_MAX, NONCE_BYTES, VERSION, BadFrame, Greeting
from trioserve.contracts.kv_transfer import KVLayout

__all__ = ["Side", "check_greeting", "is_proof", "make_greeting", "make_proof"]

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
