"""How two engines show each other that they have the same key, which never crosses the wire.

Each proves it by an HMAC-SHA256 (RFC 2104) over both greetings, in which each has put a nonce of its own: an overheard
proof is worth nothing on another connection. The proofs of the two sides begin with different words, so that none can
be handed back to whom it came from. The reader goes first: whoever connects without the key gets nothing to guess with.

What follows is neither hidden nor signed: on a network that is not trusted, it wants TLS.
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
    """Raises BadFrame if this cannot be an engine that we understand."""
    if greeting.version != VERSION:
        raise BadFrame(f"it speaks version {greeting.version} of the protocol, and this engine version {VERSION}")
    if len(greeting.nonce) != NONCE_BYTES:
        raise BadFrame(f"its nonce has {len(greeting.nonce)} bytes instead of {NONCE_BYTES}")
    if not 0 < len(greeting.engine_id) <= ID_LENGTH_MAX:
        raise BadFrame(f"its engine id has {len(greeting.engine_id)} characters")


def make_proof(key: bytes, side: Side, hello: bytes, challenge: bytes) -> bytes:
    """hello, challenge: both greetings as they went over the wire."""
    made = hmac.new(key, b"trioserve kv " + side.encode(), hashlib.sha256)
    for greeting in (hello, challenge):
        made.update(len(greeting).to_bytes(8, "big"))
        made.update(greeting)
    return made.digest()


def is_proof(proof: bytes, key: bytes, side: Side, hello: bytes, challenge: bytes) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(proof, make_proof(key, side, hello, challenge))
