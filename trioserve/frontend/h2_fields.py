"""The header fields of our answers in HPACK (RFC 7541), without its dynamic table.

An answer's fields are the same as the last one's, and then short, or new every time, like the request's id and length:
a table that the client and we would have to keep alike saves some forty bytes an answer, and cost a fifth of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from hpack.hpack import encode_integer
from hpack.table import HeaderTable

__all__ = ["FieldEncoder"]

INDEXED, NAMED, NO_TABLE = 0x80, 0x00, 0x20  # what the first bits of a byte say: 6.1, 6.2.2, 6.3
_WHOLE = {field: index for index, field in enumerate(HeaderTable.STATIC_TABLE, start=1)}
_NAMES: dict[bytes, int] = {}
for _index, (_name, _value) in enumerate(HeaderTable.STATIC_TABLE, start=1):
    _NAMES.setdefault(_name, _index)


class FieldEncoder:
    """Stands where h2 has hpack's Encoder. header_table_size is what the client offers; none of it is used, and the
    first block says so, so that the client may change it as it likes (4.2)."""

    def __init__(self) -> None:
        self.header_table_size = 0
        self._has_begun = False

    def encode(self, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts = [] if self._has_begun else [bytes((NO_TABLE,))]
        self._has_begun = True
        for name, value in fields:
            index = _WHOLE.get((name, value))
            if index is not None:
                parts.append(bytes((INDEXED | index,)))
            else:
                parts.append(_name_part(name) + _length(value) + value)
        return b"".join(parts)


@functools.lru_cache(maxsize=1000)
def _name_part(name: bytes) -> bytes:
    """How a literal field begins that is not to be indexed. Huffman's code would cost more than it saves."""
    index = _NAMES.get(name)
    if index is not None:
        return _integer(index, 4, NAMED)
    return bytes((NAMED,)) + _length(name) + name


def _length(text: bytes) -> bytes:
    return bytes((len(text),)) if len(text) < 127 else _integer(len(text), 7, 0)


def _integer(value: int, prefix_bits: int, first_bits: int) -> bytes:
    encoded = encode_integer(value, prefix_bits)
    encoded[0] |= first_bits
    return bytes(encoded)
