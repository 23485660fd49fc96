"""Names of a request's blocks, and proofs that a stored block belongs to the request.

A block is found by its name, a hash of 16 bytes. A stored block is used only if its proof is also right. The proof
contains the tokens of the block, and 32 bytes of another hash of the salt and all tokens before the block. If two
prefixes have the same name, the result is a miss.
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
    """Names of one request's full blocks. Each name is computed once, when it is first needed.

    Cost: about 1 us per block.

    Args:
        salt: Cache salt of the request.
        block_size: Tokens per block.
        hash_block: Hash function. Tests may pass another one.
    """

    __slots__ = ("_block_size", "_hash_block", "_names", "salt")

    def __init__(self, salt: str | None, block_size: int, *, hash_block: HashBlock = hash_block) -> None:
        self.salt = salt
        self._block_size = block_size
        self._hash_block = hash_block
        self._names: list[BlockHash] = []

    def name(self, index: int, tokens: Sequence[int]) -> BlockHash:
        """Return the name of a full block.

        Args:
            index: Index of the block.
            tokens: Tokens of the request. Between two calls, tokens may only be appended.
        """
        names = self._names
        while len(names) <= index:
            start = len(names) * self._block_size
            parent = names[-1] if names else root_hash(self.salt)
            names.append(self._hash_block(parent, tokens[start : start + self._block_size]))
        return names[index]


class Proofs:
    """Proofs of one request's full blocks. They must be requested in ascending order.

    Cost: about 2 us per block.

    Args:
        salt: Cache salt of the request.
        tokens: Tokens of the request.
        block_size: Tokens per block.
    """

    def __init__(self, salt: str | None, tokens: Sequence[int], block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        seed = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
        self._before = blake2b(blake2b(seed, digest_size=_BEFORE_BYTES).digest(), digest_size=_BEFORE_BYTES)
        self._hashed_count = 0

    def of(self, index: int) -> bytes:
        start = index * self._block_size
        assert start >= self._hashed_count, f"block {index} is requested after a later block"
        self._before.update(pack_tokens(self._tokens[self._hashed_count : start]))
        self._hashed_count = start
        return self._before.digest() + pack_tokens(self._tokens[start : start + self._block_size])


def proof_bytes(block_size: int) -> int:
    return _BEFORE_BYTES + 4 * block_size


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack tokens as 4 bytes each, little-endian on every machine.

    Args:
        tokens: Token ids, each 0 <= id < 2**32.
    """
    return struct.pack(f"<{len(tokens)}I", *tokens)
