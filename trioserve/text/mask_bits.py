"""Operations on one row of a token mask in memory. Bit i % 32 of uint32 word i // 32 belongs to token i."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

__all__ = [
    "allowed_row",
    "clear_bits",
    "has_any_bit",
    "has_bit",
    "is_row_empty",
    "keep_bits",
    "row_tokens",
    "set_all_bits",
    "set_bits",
]


def set_all_bits(address: int, words_per_row: int, vocab_size: int) -> None:
    """Set the bits of all tokens in the vocabulary, and clear the unused bits at the end of the row.

    Args:
        address: Memory address of the row.
        words_per_row: Number of uint32 words in the row.
        vocab_size: Number of tokens in the vocabulary.
    """
    whole = vocab_size // 32
    ctypes.memset(address, 0xFF, 4 * whole)
    if whole < words_per_row:
        ctypes.memset(address + 4 * whole, 0, 4 * (words_per_row - whole))
        ctypes.c_uint32.from_address(address + 4 * whole).value = (1 << vocab_size % 32) - 1


def set_bits(address: int, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        ctypes.c_uint32.from_address(address + token_id // 32 * 4).value |= 1 << token_id % 32


def clear_bits(address: int, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        word = ctypes.c_uint32.from_address(address + token_id // 32 * 4)
        word.value &= ~(1 << token_id % 32)


def keep_bits(address: int, row: bytes) -> None:
    """Clear the bits of a row that are not set in another row.

    Args:
        address: Memory address of the row to change.
        row: The other row.
    """
    own = int.from_bytes(ctypes.string_at(address, len(row)), "little") & int.from_bytes(row, "little")
    ctypes.memmove(address, own.to_bytes(len(row), "little"), len(row))


def allowed_row(token_ids: Iterable[int], words_per_row: int) -> bytes:
    """Make a row in which only the bits of the given tokens are set.

    Args:
        words_per_row: Number of uint32 words in the row.
    """
    row = bytearray(4 * words_per_row)
    for token_id in token_ids:
        row[token_id // 8] |= 1 << token_id % 8
    return bytes(row)


def has_bit(row: bytes, token_id: int) -> bool:
    return bool(row[token_id // 8] >> token_id % 8 & 1)


def has_any_bit(address: int, token_ids: Iterable[int]) -> bool:
    """Return True if the bit of at least one of the given tokens is set in a row.

    Args:
        address: Memory address of the row.
    """
    word = ctypes.c_uint32.from_address
    return any(word(address + token_id // 32 * 4).value >> token_id % 32 & 1 for token_id in token_ids)


def is_row_empty(address: int, words_per_row: int) -> bool:
    """Return True if no bit is set in a row.

    Args:
        address: Memory address of the row.
        words_per_row: Number of uint32 words in the row.

    Cost: 1 microsecond for 131,072 tokens.
    """
    return ctypes.string_at(address, 4 * words_per_row) == bytes(4 * words_per_row)


def row_tokens(row: bytes) -> Iterator[int]:
    """Iterate over the tokens whose bits are set in a row, in ascending order.

    Args:
        row: Bytes of the row.
    """
    for place, byte in enumerate(row):
        if byte:
            yield from (8 * place + bit for bit in range(8) if byte >> bit & 1)
