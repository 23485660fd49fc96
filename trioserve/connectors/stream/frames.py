"""Frames on a connection between two engines. Each frame has a head of 28 bytes and a body.

    reader                        holder
    HELLO      engine id and KV layout of the reader  ──►
               ◄──  CHALLENGE     engine id and KV layout of the holder
    PROOF      the reader knows the key  ──►
               ◄──  WELCOME       the holder knows the key
    READ       positions of a request that the holder has  ──►
               ◄──  DATA ...      one chunk each, in the order of Chunks
               ◄──  END           the hold was alive when its last byte was read
    NOTICE     requests that the reader still needs, and requests to release  ──►
               ◄──  NOTICE_REPLY  requests that the holder does not hold, or no longer holds

A holder that refuses a frame or stops a transfer sends ABORT with a sentence. READ and NOTICE may follow each other in
any order, one at a time. The receiver checks the head and the size of a frame before it reads the body.

A chunk is a run of positions in one layer. Its size is counted in tokens, so reader and holder may have blocks of
different sizes. Both compute the same list of chunks from a few numbers. A transfer can therefore resume at a chunk
index.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout

__all__ = [
    "BODY_BYTES_MAX",
    "CHUNK_BYTES_MAX",
    "GREETING_BYTES_MAX",
    "HEAD_BYTES",
    "ID_LENGTH_MAX",
    "NONCE_BYTES",
    "NOTICE_IDS_MAX",
    "VERSION",
    "Abort",
    "BadFrame",
    "Body",
    "Greeting",
    "Head",
    "Kind",
    "Proof",
    "Read",
    "Notice",
    "NoticeReply",
    "body_of",
    "BlockViews",
    "blocks_of",
    "data_head",
    "frame",
    "head_of",
    "Chunk",
    "Chunks",
    "Place",
    "places",
    "views",
]

VERSION = 1
MAGIC = b"TK"
NONCE_BYTES = 32
ID_LENGTH_MAX = 200  # Ids of this server have 40 characters. An id from a client may have any length.
NOTICE_IDS_MAX = 100  # So many ids fit into the body of a NOTICE, even if each character needs four bytes.
BODY_BYTES_MAX = 131_072
GREETING_BYTES_MAX = 4_096  # maximum body size for a peer that has not proved yet that it knows the key
CHUNK_BYTES_MAX = 4_194_304  # Even in the widest models, the KV of one token needs fewer bytes per layer.

_HEAD = struct.Struct("!2sBxIIIIII")
HEAD_BYTES = _HEAD.size


class BadFrame(Exception):
    """A received frame violates the protocol. The connection cannot be used any more."""


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    READ = 5
    DATA = 6
    END = 7
    ABORT = 8
    NOTICE = 9
    NOTICE_REPLY = 10
    PLACES_ASKED = 11  # Only connectors/nixl.py uses this kind and the kinds after it.
    PLACES = 12
    HAVE_READ = 13


class Head(NamedTuple):
    """Head of a frame.

    Attributes:
        kind: Kind of the frame.
        body_bytes: Size of the body that follows.
        transfer: Number that the reader gave to its READ. 0 for frames that belong to no READ.
        layer: Layer of the chunk. Only in DATA, else 0.
        token_start: First position of the chunk. Only in DATA, else 0.
        token_count: Number of positions of the chunk. Only in DATA, else 0.
        checksum: Checksum of the body. Only in DATA, else 0.
    """

    kind: Kind
    body_bytes: int
    transfer: int = 0
    layer: int = 0
    token_start: int = 0
    token_count: int = 0
    checksum: int = 0


class Greeting(msgspec.Struct, frozen=True):
    """Body of HELLO and CHALLENGE.

    Attributes:
        version: Protocol version of the sender.
        engine_id: Id of the sender.
        layout: KV layout of the sender.
        nonce: NONCE_BYTES random bytes, drawn for each connection.
    """

    version: int
    engine_id: str
    layout: KVLayout
    nonce: bytes


class Proof(msgspec.Struct, frozen=True):
    """Body of PROOF and WELCOME."""

    proof: bytes


class Read(msgspec.Struct, frozen=True):
    """Body of READ: the positions that a reader requests.

    Attributes:
        request_id: Id of the request at the holder.
        token_start: First position, counted from the start of the request.
        token_count: Number of positions.
        proof: Hash of all tokens up to the last position (see transfers.proof_of).
        chunk_bytes: Maximum size of a chunk.
        first_chunk: Index of the first chunk to send. The reader already has the chunks before it.
    """

    request_id: str
    token_start: int
    token_count: int
    proof: bytes
    chunk_bytes: int
    first_chunk: int = 0


class Notice(msgspec.Struct, frozen=True):
    """Body of NOTICE.

    Attributes:
        keep: Ids of requests whose blocks the reader still needs.
        release: Ids of requests whose blocks the reader will not read any more.
    """

    keep: tuple[str, ...] = ()
    release: tuple[str, ...] = ()


class NoticeReply(msgspec.Struct, frozen=True):
    """Body of NOTICE_REPLY, the answer to NOTICE.

    Attributes:
        gone: Ids in `keep` that the holder does not hold, or no longer holds.
    """

    gone: tuple[str, ...] = ()


class Abort(msgspec.Struct, frozen=True):
    message: str


Body = TypeVar("Body")


def frame(
    kind: Kind, body: msgspec.Struct | bytes = b"", *, transfer: int = 0, bytes_max: int = BODY_BYTES_MAX
) -> bytes:
    """Build a complete frame of any kind except DATA.

    Args:
        kind: Kind of the frame.
        body: Struct to encode as msgpack, or a body that is already encoded.
        transfer: Number of the READ that the frame belongs to, or 0.
        bytes_max: Maximum size of the encoded body. The caller guarantees it.
    """
    encoded = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    assert len(encoded) <= bytes_max, f"a body of {len(encoded)} bytes"
    return _HEAD.pack(MAGIC, kind, len(encoded), transfer, 0, 0, 0, 0) + encoded


def data_head(
    transfer: int, layer: int, token_start: int, token_count: int, body_bytes: int, checksum: int
) -> memoryview:
    return memoryview(_HEAD.pack(MAGIC, Kind.DATA, body_bytes, transfer, layer, token_start, token_count, checksum))


def head_of(content: bytes) -> Head:
    """Parse the head of a frame.

    Args:
        content: HEAD_BYTES bytes from the connection.

    Raises:
        BadFrame: the bytes are not the head of a frame, or the kind is unknown.
    """
    magic, kind, *numbers = _HEAD.unpack(content)
    if magic != MAGIC:
        raise BadFrame(f"a frame begins with {magic!r}: this is not the protocol of an engine")
    try:
        known = Kind(kind)
    except ValueError:
        raise BadFrame(f"a frame has the unknown kind {kind}") from None
    return Head(known, *numbers)


def body_of(kind: type[Body], content: bytes) -> Body:
    """Decode the body of a frame.

    Args:
        kind: Struct type of the body.
        content: Encoded body.

    Raises:
        BadFrame: the body is not valid msgpack, or does not match the struct.
    """
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"the body of a {kind.__name__} cannot be read: {error}") from None


class Chunk(NamedTuple):
    layer: int
    token_start: int
    token_count: int


class Place(NamedTuple):
    """Run of positions in one block.

    Attributes:
        block: Index of the block.
        start: First position in the block, in tokens.
        token_count: Number of positions.
    """

    block: BlockIndex
    start: int
    token_count: int


class Chunks:
    """All chunks of a transfer, layer by layer.

    Args:
        layout: KV layout of the holder. The content is sent in its dtype.
        token_start: First position of the transfer.
        token_count: Number of positions of the transfer.
        chunk_bytes: Maximum size of a chunk. A chunk has at least one token, even if the token is larger.
    """

    def __init__(self, layout: KVLayout, token_start: int, token_count: int, chunk_bytes: int) -> None:
        self._start = token_start
        self._count = token_count
        self._chunk_tokens = max(1, chunk_bytes // layout.token_bytes)
        self._per_layer = -(-token_count // self._chunk_tokens)
        self._layer_count = layout.layer_count

    def __len__(self) -> int:
        return self._per_layer * self._layer_count

    def layer_of(self, index: int) -> int:
        return index // self._per_layer

    def first_of_layer(self, layer: int) -> int:
        return layer * self._per_layer

    def __getitem__(self, index: int) -> Chunk:
        layer, turn = divmod(index, self._per_layer)
        before = turn * self._chunk_tokens
        return Chunk(layer, self._start + before, min(self._chunk_tokens, self._count - before))


class BlockViews(Protocol):
    """The part of KVPages that `views` needs."""

    @property
    def layout(self) -> KVLayout: ...

    def view(self, layer: int, block: BlockIndex) -> memoryview | None: ...


def blocks_of(
    block_table: Sequence[BlockIndex], layout: KVLayout, token_start: int, token_count: int
) -> Sequence[BlockIndex]:
    """Return the blocks that contain consecutive positions.

    Args:
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        layout: KV layout of the engine.
        token_start: First position.
        token_count: Number of positions.
    """
    return block_table[token_start // layout.block_size : -(-(token_start + token_count) // layout.block_size)]


def places(block_table: Sequence[BlockIndex], block_size: int, chunk: Chunk) -> list[Place]:
    """Find the blocks that contain the positions of a chunk.

    Args:
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        block_size: Tokens per block.
        chunk: Positions to find.

    Returns:
        One place per block, in the order of the positions.
    """
    found = []
    position, end = chunk.token_start, chunk.token_start + chunk.token_count
    while position < end:
        index, start = divmod(position, block_size)
        count = min(block_size - start, end - position)
        found.append(Place(block_table[index], start, count))
        position += count
    return found


def views(pages: BlockViews, block_table: Sequence[BlockIndex], chunk: Chunk) -> list[memoryview] | None:
    """Return writable views of the bytes of a chunk in the cache.

    Args:
        pages: KV cache of this engine, or a copy of its blocks in host memory.
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        chunk: Positions and layer of the bytes.

    Returns:
        One view per block, in the order of the positions. None if the CPU cannot address the cache.
    """
    # This loop does the same as `places`, but creates no Place objects. This function takes most of the time of a
    # transfer.
    layout = pages.layout
    block_size, token_bytes = layout.block_size, layout.token_bytes
    layer, position, left = chunk
    found = []
    while left > 0:
        index, start = divmod(position, block_size)
        count = min(block_size - start, left)
        view = pages.view(layer, block_table[index])
        if view is None:
            return None
        if count < block_size:
            view = view[start * token_bytes : (start + count) * token_bytes]
        found.append(view)
        position += count
        left -= count
    return found
