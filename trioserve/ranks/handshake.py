"""How a rank of another machine and its server find out that both know the same key, before either believes a word.

Each sends a number that it has drawn, and gets both numbers back under the key (HMAC-SHA-256, RFC 2104); so nothing of
an earlier connection is of use. What follows is not encrypted: ranks belong into a network of their own, as the sums of
torch.distributed do, which know no key at all.
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
    """From the server, first."""

    nonce: bytes
    version: str = VERSION


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From a rank."""

    rank: int
    nonce: bytes
    proof: bytes
    version: str = VERSION


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """From the server. proof: that it knows the key, too; refused: why the rank is not taken, if it is not."""

    proof: bytes = b""
    refused: str | None = None


def challenge() -> Challenge:
    return Challenge(secrets.token_bytes(NONCE_BYTES))


def answered(asked: Challenge, rank: int, key: str) -> Hello:
    """Raises StartupError if the server is of another version: what it says would not be understood."""
    if asked.version != VERSION:
        raise StartupError(
            f"the server is trioserve {asked.version}, and this is {VERSION}: all machines need the same version"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Hello(rank, nonce, _proof(b"rank", key, asked.nonce, nonce, rank))


def verdict(asked: Challenge, hello: Hello, key: str) -> Verdict:
    """What a server says to a rank. Never raises: whoever sends this may be a stranger."""
    if not 0 <= hello.rank <= RANK_MAX:
        return Verdict(refused=f"its rank is {hello.rank}, a rank is 0 to {RANK_MAX}")
    if len(hello.nonce) != NONCE_BYTES:
        return Verdict(refused=f"its nonce has {len(hello.nonce)} bytes instead of {NONCE_BYTES}")
    if not hmac.compare_digest(hello.proof, _proof(b"rank", key, asked.nonce, hello.nonce, hello.rank)):
        return Verdict(refused="its key is not the server's: give both the same --ranks-key")
    if hello.version != VERSION:
        return Verdict(refused=f"it is trioserve {hello.version}, and the server is {VERSION}")
    return Verdict(_proof(b"server", key, asked.nonce, hello.nonce, hello.rank))


def is_server(asked: Challenge, hello: Hello, given: Verdict, key: str) -> bool:
    """Whether who has given this verdict knows the key."""
    return hmac.compare_digest(given.proof, _proof(b"server", key, asked.nonce, hello.nonce, hello.rank))


def _proof(who: bytes, key: str, server_nonce: bytes, rank_nonce: bytes, rank: int) -> bytes:
    # Lengths are fixed, so that no two proofs are of the same bytes.
    message = b"trioserve ranks " + who.ljust(8) + server_nonce[:NONCE_BYTES].ljust(NONCE_BYTES) + rank_nonce
    return hmac.digest(key.encode(), message + rank.to_bytes(8, "little", signed=True), "sha256")
