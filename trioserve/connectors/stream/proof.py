"""What shows that two engines mean the same tokens: KV is only good for the prompt that it was computed from."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from trioserve.contracts.block_hash import root_hash

__all__ = ["proof_of"]


def proof_of(cache_salt: str | None, tokens: Sequence[int]) -> bytes:
    """32 bytes that name these tokens under this salt, each 0 <= id < 2**32. Whoever asks for KV shows it, so that
    nobody gets KV of a prompt that is not its own, and loads none that would stand for another one in its prefix cache.
    About 20 us for 1,000 tokens."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return blake2b(root_hash(cache_salt) + packed, digest_size=32).digest()
