"""Header fields in HPACK (RFC 7541): those of our responses, and those of requests within bounds on work.

A response's fields are the same as the last one's, and then short, or new every time, like the request's id and length:
a table that the client and we would have to keep alike saves some forty bytes a response, and cost a fifth of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

import h2.config
import hpack
from hpack.exceptions import InvalidTableSizeError
from hpack.hpack import encode_integer
from hpack.huffman_table import HUFFMAN_COMPLETE, HUFFMAN_EMIT_SYMBOL, HUFFMAN_FAIL, HUFFMAN_TABLE
from hpack.table import HeaderTable, table_entry_size

__all__ = ["FieldDecoder", "FieldEncoder", "is_ordinary"]

INDEXED, NAMED, NO_TABLE = 0x80, 0x00, 0x20  # what the first bits of a byte say: 6.1, 6.2.2, 6.3
# Of a block; a client's usual one is a few hundred bytes, and fewer once it is in the table.
REMEMBERED_BYTES_MAX = 1024
SIZE_UPDATES_MAX = 4  # at the start of a block; an encoder needs two (RFC 7541, 4.2)
INTEGER_BYTES_MAX = 5  # behind the prefix: more than 32 bits
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
    """Stands where h2 has hpack's Decoder, which a client can make work for much longer than its block is.

    hpack copies the rest of a block for each field, so its time grows with the square of the block; it takes any number
    of fields and of changes of the table's size. Here the time is linear, and both are bounded.
    A block that equals the last one means the same again, if the last one left the table as it was. And an ordinary
    request's fields are right: h2 would look at each of their characters, which config tells it not to.

    Args:
        config: of h2's connection.
        list_bytes_max: size of a list of fields (RFC 9113, 6.5.2).
        fields_max: fields in a block.
    """

    def __init__(self, config: h2.config.H2Configuration, *, list_bytes_max: int, fields_max: int) -> None:
        super().__init__(max_header_list_size=list_bytes_max)
        self._config = config
        self._fields_max = fields_max
        self._block: bytes | None = None  # the last one, if it left the table as it was
        self._fields: list[hpack.HeaderTuple] = []

    def decode(self, data: bytes, raw: bool = True) -> list[hpack.HeaderTuple]:
        if data == self._block:
            return self._fields
        self._block = None
        entries = self.header_table.dynamic_entries.copy()
        fields = self._read_block(data)
        self._assert_valid_table_size()
        self._check(not is_ordinary(fields))
        if len(data) <= REMEMBERED_BYTES_MAX and self.header_table.dynamic_entries == entries:
            self._block, self._fields = data, fields
        return fields

    def _read_block(self, data: bytes) -> list[hpack.HeaderTuple]:
        """Fields as bytes, as h2 wants them. Raises an HPACKError."""
        table = self.header_table
        fields: list[hpack.HeaderTuple] = []
        list_bytes = position = size_update_count = 0
        while position < len(data):
            first = data[position]
            if first & 0x80:  # 6.1: an entry of the table
                index, position = _read_integer(data, position, 7)
                field = hpack.HeaderTuple(*table.get_by_index(index))
            elif first & 0xE0 == NO_TABLE:  # 6.3: the table's size
                size, position = _read_integer(data, position, 5)
                size_update_count += 1
                if fields or size_update_count > SIZE_UPDATES_MAX:
                    raise hpack.HPACKDecodingError("the size of the table changes behind a field, or too often")
                if size > self.max_allowed_table_size:
                    raise InvalidTableSizeError("the table is to have more bytes than are allowed")
                self.header_table_size = size
                continue
            else:  # 6.2: a literal value, and a name of the table or a literal one
                index, position = _read_integer(data, position, 6 if first & 0x40 else 4)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, position = _read_text(data, position)
                value, position = _read_text(data, position)
                if first & 0x40:
                    table.add(name, value)
                kind = hpack.NeverIndexedHeaderTuple if first & 0x50 == 0x10 else hpack.HeaderTuple
                field = kind(name, value)
            fields.append(field)
            list_bytes += table_entry_size(field[0], field[1])
            if list_bytes > self.max_header_list_size or len(fields) > self._fields_max:
                raise hpack.OversizedHeaderListError(
                    f"the header fields are too many or too long: at most {self._fields_max} are allowed, and "
                    f"{self.max_header_list_size} bytes"
                )
        return fields

    def _check(self, checked: bool) -> None:
        if self._config.validate_inbound_headers is not checked:
            self._config.validate_inbound_headers = self._config.normalize_inbound_headers = checked


def _read_integer(data: bytes, position: int, prefix_bits: int) -> tuple[int, int]:
    """An integer (5.1) and where it ends."""
    try:
        mask = (1 << prefix_bits) - 1
        value = data[position] & mask
        position += 1
        if value < mask:
            return value, position
        for shift in range(0, 7 * INTEGER_BYTES_MAX, 7):
            following = data[position]
            position += 1
            value += (following & 0x7F) << shift
            if following < 0x80:
                return value, position
    except IndexError:
        raise hpack.HPACKDecodingError("the block ends within a number") from None
    raise hpack.HPACKDecodingError("a number has too many bytes")


def _read_text(data: bytes, position: int) -> tuple[bytes, int]:
    """A string (5.2) and where it ends."""
    if position >= len(data):
        raise hpack.HPACKDecodingError("the block ends before a string")
    is_huffman = data[position] & 0x80
    byte_count, position = _read_integer(data, position, 7)
    end = position + byte_count
    if end > len(data):
        raise hpack.HPACKDecodingError("the block ends within a string")
    text = data[position:end]
    return _plain_text(text) if is_huffman else text, end


_huffman_steps: dict[int, tuple[int, bytes]] = {}
"""What a byte does in a state of hpack's table, which has half bytes: the next state and the symbols that end there. At
most 65,536 entries, made when they are first needed: four times as fast as hpack's own loop."""
_HUFFMAN_ENDS = 1 << 8  # flag of a state in which a string may end


def _plain_text(coded: bytes) -> bytes:
    """Decode Huffman's code (5.2)."""
    parts = []
    state = _HUFFMAN_ENDS
    steps = _huffman_steps
    for byte in coded:
        key = (state & 0xFF) << 8 | byte
        step = steps.get(key)
        if step is None:
            step = steps[key] = _huffman_step(state & 0xFF, byte)
        state, symbols = step
        parts.append(symbols)
    if not state & _HUFFMAN_ENDS:
        raise hpack.HPACKDecodingError("a string in Huffman's code ends within a symbol")
    return b"".join(parts)


def _huffman_step(state: int, byte: int) -> tuple[int, bytes]:
    symbols = bytearray()
    flags = 0
    for half in (byte >> 4, byte & 0xF):
        state, flags, symbol = HUFFMAN_TABLE[state * 16 + half]
        if flags & HUFFMAN_FAIL:
            raise hpack.HPACKDecodingError("a string in Huffman's code has a symbol that may not be there")
        if flags & HUFFMAN_EMIT_SYMBOL:
            symbols.append(symbol)
    return state | (_HUFFMAN_ENDS if flags & HUFFMAN_COMPLETE else 0), bytes(symbols)


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
