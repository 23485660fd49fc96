"""Handshake of a server and a rank on another machine: each proves to the other that it knows the shared key.

Both sides send a random nonce. The proof is an HMAC-SHA-256 (RFC 2104) of both nonces under the key, so a recorded
handshake cannot be replayed. Later messages are not encrypted, and torch.distributed does not authenticate at all.
Ranks therefore need a private network.
"""

from __future__ import annotations

import hmac
import secrets

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.contracts.version import VERSION

__all__ = ["Challenge", "Hello", "Verdict", "answered", "challenge", "is_server", "verdict"]

NONCE_BYTES = 32
RANK_MAX = 2**31 - 1


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The first message, from the server."""

    nonce: bytes
    version: str = VERSION


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The reply of a rank."""

    rank: int
    nonce: bytes
    proof: bytes
    version: str = VERSION


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The decision of the server.

    Attributes:
        proof: proof that the server knows the key.
        refused: why the rank is refused. None: it is accepted.
    """

    proof: bytes = b""
    refused: str | None = None


def challenge() -> Challenge:
    return Challenge(secrets.token_bytes(NONCE_BYTES))


def answered(asked: Challenge, rank: int, key: str) -> Hello:
    """Return the rank's reply to a challenge.

    Args:
        asked: the server's challenge.
        rank: number of the rank.
        key: the shared key, `--ranks-key`.

    Raises:
        StartupError: the server has another version, so later messages could not be decoded.
    """
    if asked.version != VERSION:
        raise StartupError(
            f"the server is trioserve {asked.version}, and this is {VERSION}: all machines need the same version"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Hello(rank, nonce, _proof(b"rank", key, asked.nonce, nonce, rank))


def verdict(asked: Challenge, hello: Hello, key: str) -> Verdict:
    """Return the server's decision about a rank. Never raises, because the sender may be a stranger.

    Args:
        asked: the challenge that the server sent.
        hello: the reply to it.
        key: the shared key, `--ranks-key`.
    """
    if not 0 <= hello.rank <= RANK_MAX:
        return Verdict(refused=f"its rank is {hello.rank}, allowed are 0 to {RANK_MAX}")
    if len(hello.nonce) != NONCE_BYTES:
        return Verdict(refused=f"its nonce has {len(hello.nonce)} bytes instead of {NONCE_BYTES}")
    if not hmac.compare_digest(hello.proof, _proof(b"rank", key, asked.nonce, hello.nonce, hello.rank)):
        return Verdict(refused="its key is not the server's: give both the same --ranks-key")
    if hello.version != VERSION:
        return Verdict(refused=f"it is trioserve {hello.version}, and the server is {VERSION}")
    return Verdict(_proof(b"server", key, asked.nonce, hello.nonce, hello.rank))


def is_server(asked: Challenge, hello: Hello, given: Verdict, key: str) -> bool:
    """Return whether the sender of a verdict knows the key.

    Args:
        asked: the challenge that arrived.
        hello: the reply that was sent.
        given: the verdict that arrived.
        key: the shared key, `--ranks-key`.
    """
    return hmac.compare_digest(given.proof, _proof(b"server", key, asked.nonce, hello.nonce, hello.rank))


def _proof(side: bytes, key: str, server_nonce: bytes, rank_nonce: bytes, rank: int) -> bytes:
    # All fields have a fixed length, so that different proofs never cover the same bytes.
    message = b"trioserve ranks " + side.ljust(8) + server_nonce[:NONCE_BYTES].ljust(NONCE_BYTES) + rank_nonce
    return hmac.digest(key.encode(), message + rank.to_bytes(8, "little", signed=True), "sha256")
