"""What goes over a connection between two engines: frames, a head of 28 bytes and a body.

    reader                        holder
    HELLO      who I am       ──►
               ◄──  CHALLENGE     who I am
    PROOF      that I know the key
               ◄──  WELCOME       so do I
    READ       positions of a request that you hold
               ◄──  DATA ...      one chunk each, in the order of chunks.Chunks
               ◄──  END           the hold was alive when the last byte of it was read
    TELL       what I still want, and what no more
               ◄──  TOLD          what of it is not held any more

A holder that refuses or gives up says ABORT with a sentence instead. READ and TELL may follow each other on a
connection in any order, one at a time. Heads and sizes are checked before anything is read for them.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, TypeVar

import msgspec

from trioserve.contracts.kv_transfer import KVLayout

__all__ = [
    "BODY_BYTES_MAX",
    "CHUNK_BYTES_MAX",
    "GREETING_BYTES_MAX",
    "HEAD_BYTES",
    "ID_LENGTH_MAX",
    "NONCE_BYTES",
    "TELL_IDS_MAX",
    "VERSION",
    "Abort",
    "BadFrame",
    "Body",
    "Greeting",
    "Head",
    "Kind",
    "Proof",
    "Read",
    "Tell",
    "Told",
    "body_of",
    "data_head",
    "frame",
    "head_of",
]

VERSION = 1
MAGIC = b"TK"
NONCE_BYTES = 32
ID_LENGTH_MAX = 200  # ours have 40; a request of somebody else's making may come with any
TELL_IDS_MAX = 100  # so that a TELL fits a body even in an encoding with four bytes a character
BODY_BYTES_MAX = 131_072
GREETING_BYTES_MAX = 4_096  # all that a stranger can make us take
CHUNK_BYTES_MAX = 4_194_304  # a single token of the widest models has less than that in a layer

_HEAD = struct.Struct("!2sBxIIIIII")
HEAD_BYTES = _HEAD.size


class BadFrame(Exception):
    """What came is not what may come here. The connection is of no use any more."""


class Kind(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    READ = 5
    DATA = 6
    END = 7
    ABORT = 8
    TELL = 9
    TOLD = 10
    PLACES_ASKED = 11  # this one and those below are of connectors/nixl_transport.py
    PLACES = 12
    HAVE_READ = 13


class Head(NamedTuple):
    """transfer: the number that the reader gave a READ; the rest is of DATA alone, and else 0."""

    kind: Kind
    body_bytes: int
    transfer: int = 0
    layer: int = 0
    token_start: int = 0
    token_count: int = 0
    checksum: int = 0


class Greeting(msgspec.Struct, frozen=True):
    """HELLO and CHALLENGE. nonce: NONCE_BYTES random bytes, new for each connection."""

    version: int
    engine_id: str
    layout: KVLayout
    nonce: bytes


class Proof(msgspec.Struct, frozen=True):
    """PROOF and WELCOME."""

    proof: bytes


class Read(msgspec.Struct, frozen=True):
    """token_start, token_count: positions from the start of the request. proof: of all tokens up to their end (see
    proof.py). first_chunk: those before it have come already. chunk_bytes: how large a chunk may be."""

    request_id: str
    token_start: int
    token_count: int
    proof: bytes
    chunk_bytes: int
    first_chunk: int = 0


class Tell(msgspec.Struct, frozen=True):
    """keep: requests whose blocks are still wanted. release: those of whose blocks nothing more will be read."""

    keep: tuple[str, ...] = ()
    release: tuple[str, ...] = ()


class Told(msgspec.Struct, frozen=True):
    """gone: of those in `keep`, the ones that are not held, or not any more."""

    gone: tuple[str, ...] = ()


class Abort(msgspec.Struct, frozen=True):
    message: str


Body = TypeVar("Body")


def frame(
    kind: Kind, body: msgspec.Struct | bytes = b"", *, transfer: int = 0, bytes_max: int = BODY_BYTES_MAX
) -> bytes:
    """A whole frame, of any kind but DATA. body: encoded here, if it is not yet. bytes_max: what is taken there."""
    encoded = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    assert len(encoded) <= bytes_max, f"a body of {len(encoded)} bytes"
    return _HEAD.pack(MAGIC, kind, len(encoded), transfer, 0, 0, 0, 0) + encoded


def data_head(
    transfer: int, layer: int, token_start: int, token_count: int, body_bytes: int, checksum: int
) -> memoryview:
    return memoryview(_HEAD.pack(MAGIC, Kind.DATA, body_bytes, transfer, layer, token_start, token_count, checksum))


def head_of(content: bytes) -> Head:
    """Raises BadFrame for anything that is none."""
    magic, kind, *numbers = _HEAD.unpack(content)
    if magic != MAGIC:
        raise BadFrame(f"a frame begins with {magic!r}: this is not how engines talk")
    try:
        known = Kind(kind)
    except ValueError:
        raise BadFrame(f"a frame of kind {kind}, which is not known") from None
    return Head(known, *numbers)


def body_of(kind: type[Body], content: bytes) -> Body:
    """Raises BadFrame if it is not what it should be."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"the body of a {kind.__name__} cannot be read: {error}") from None
