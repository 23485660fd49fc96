"""How a request's blocks are named, and what shows that a stored block belongs to them.

A name is 16 bytes and finds a block. What is found is believed only if its proof is right, too: the block's own tokens,
and 32 bytes of another hash of the salt and all tokens before them. So two prefixes under one name cost a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b

from trioserve.contracts.block_hash import BlockHash, hash_block, root_hash

__all__ = ["BlockChain", "HashBlock", "Proofs", "pack_tokens", "proof_bytes"]

HashBlock = Callable[[BlockHash, Sequence[int]], BlockHash]

_BEFORE_BYTES = 32


class BlockChain:
    """The names of one request's full blocks; each is made once, when it is asked for. About 1 us a block."""

    __slots__ = ("_block_size", "_hash_block", "_names", "salt")

    def __init__(self, salt: str | None, block_size: int, *, hash_block: HashBlock = hash_block) -> None:
        self.salt = salt
        self._block_size = block_size
        self._hash_block = hash_block
        self._names: list[BlockHash] = []

    def name(self, index: int, tokens: Sequence[int]) -> BlockHash:
        """Of the full block `index`. tokens: of the request; they may only grow between two calls."""
        names = self._names
        while len(names) <= index:
            start = len(names) * self._block_size
            parent = names[-1] if names else root_hash(self.salt)
            names.append(self._hash_block(parent, tokens[start : start + self._block_size]))
        return names[index]


class Proofs:
    """The proofs of one request's full blocks, to be asked for in ascending order. About 2 us a block."""

    def __init__(self, salt: str | None, tokens: Sequence[int], block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        seed = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
        self._before = blake2b(blake2b(seed, digest_size=_BEFORE_BYTES).digest(), digest_size=_BEFORE_BYTES)
        self._hashed_count = 0

    def of(self, index: int) -> bytes:
        start = index * self._block_size
        assert start >= self._hashed_count, f"block {index} is asked for after a later one"
        self._before.update(pack_tokens(self._tokens[self._hashed_count : start]))
        self._hashed_count = start
        return self._before.digest() + pack_tokens(self._tokens[start : start + self._block_size])


def proof_bytes(block_size: int) -> int:
    return _BEFORE_BYTES + 4 * block_size


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """4 bytes each, the lowest first, on every machine."""
    return struct.pack(f"<{len(tokens)}I", *tokens)
