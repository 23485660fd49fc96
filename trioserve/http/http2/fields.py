"""Header fields in HPACK (RFC 7541): those of our responses, and two things that need not be done for every request.

A response's fields are the same as the last one's, and then short, or new every time, like the request's id and length:
a table that the client and we would have to keep alike saves some forty bytes a response, and cost a fifth of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import h2.config
import hpack
from hpack.hpack import encode_integer
from hpack.table import HeaderTable

__all__ = ["FieldDecoder", "FieldEncoder", "is_ordinary"]

INDEXED, NAMED, NO_TABLE = 0x80, 0x00, 0x20  # what the first bits of a byte say: 6.1, 6.2.2, 6.3
# Of a block; a client's usual one is a few hundred bytes, and fewer once it is in the table.
REMEMBERED_BYTES_MAX = 1024
_WHOLE = {field: index for index, field in enumerate(HeaderTable.STATIC_TABLE, start=1)}
_NAMES: dict[bytes, int] = {}
for _index, (_name, _value) in enumerate(HeaderTable.STATIC_TABLE, start=1):
    _NAMES.setdefault(_name, _index)

# The fields of an ordinary request, name and value in turn, each with a line feed. It is narrower than what h2 takes.
_ORDINARY = re.compile(
    rb"(?:(?::method\n(?!CONNECT\n)|:scheme\n|:authority\n|:path\n)[!-~]+\n){4}"
    rb"(?:(?!(?:connection|cookie|host|keep-alive|proxy-connection|te|transfer-encoding|upgrade)\n)[-_0-9a-z]+\n"
    rb"(?:[!-~](?:[ -~]*[!-~])?)?\n)*"
)


class FieldDecoder(hpack.Decoder):
    """Stands where h2 has hpack's Decoder, and knows two things better.

    A block that is the last one again means the same again, if the last one left the table as it was. And an ordinary
    request's fields are right: h2 would look at each of their characters, which config tells it not to.
    """

    def __init__(self, config: h2.config.H2Configuration, *, list_bytes_max: int) -> None:
        super().__init__(max_header_list_size=list_bytes_max)
        self._config = config
        self._block: bytes | None = None  # the last one, if it left the table as it was
        self._fields: list[hpack.HeaderTuple] = []

    def decode(self, data: bytes, raw: bool = True) -> list[hpack.HeaderTuple]:
        if data == self._block:
            return self._fields
        self._block = None
        entries = self.header_table.dynamic_entries.copy()
        fields = list(super().decode(data, raw=True))  # as h2 wants them
        self._check(not is_ordinary(fields))
        if len(data) <= REMEMBERED_BYTES_MAX and self.header_table.dynamic_entries == entries:
            self._block, self._fields = data, fields
        return fields

    def _check(self, checked: bool) -> None:
        if self._config.validate_inbound_headers is not checked:
            self._config.validate_inbound_headers = self._config.normalize_inbound_headers = checked


def is_ordinary(fields: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether these are the fields of a request which h2 would pass on as they are."""
    text = b"".join([b"%b\n%b\n" % field for field in fields])
    return (
        _ORDINARY.fullmatch(text) is not None
        and text.count(b"\n") == 2 * len(fields)
        and len({name for name, _ in fields[:4]}) == 4
    )


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
