"""Files of the host store, one per block. All operations wait for the disk and block their thread.

    DIRECTORY/lock                   locked by the engine that uses the directory, one engine at a time
    DIRECTORY/kv-LAYOUT/NAME.kv      LAYOUT is a digest of the KV layout, NAME is the name of the block

A file contains a head, a checksum of head and content, and the content. The head contains the layout, the name and the
proof (see Proofs). The reader of a file computes the expected head and compares all bytes of the head. So the reader
parses nothing that another program may have written. A file gets its final name when it is complete. The writer does
not flush the file to the disk, so a power failure may damage the file. The checksum detects the damage. A file that is
missing or cannot be read causes a cache miss.

Files with other KV layouts (of another model or dtype) also count towards the size limit, and are removed when they are
the oldest files. Files whose names do not match this pattern are never changed.

A block is found by its name, a hash of 16 bytes. A stored block is used only if its proof also matches the request. The
proof contains the tokens of the block, and 32 bytes of another hash of the salt and all tokens before the block. If two
prefixes have the same name, the lookup is a cache miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO

import msgspec

from trioserve.connectors.host.copying import Content, block_bytes
from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import HASH_SCHEME, BlockHash, hash_block, root_hash
from trioserve.contracts.kv_transfer import KVLayout

__all__ = [
    "BlockChain",
    "HashBlock",
    "Proofs",
    "pack_tokens",
    "proof_bytes",
    "FILES_MAX",
    "BlockFiles",
    "Differences",
    "FileUnusable",
    "FoundFile",
]

HashBlock = Callable[[BlockHash, Sequence[int]], BlockHash]

_BEFORE_BYTES = 32


class BlockChain:
    """Names of one request's full blocks. Each name is computed once, when it is first needed.

    Cost: about 1 us per block.

    Args:
        salt: Cache salt of the request.
        block_size: Tokens per block.
        hash_block: Hash function. Tests may pass another function.
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
    """Proofs of one request's full blocks. The caller must request them in the order of the blocks.

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


FILES_MAX = 1_000_000  # maximum number of files; the record of one file needs about 300 bytes of memory

_MAGIC = b"trioserve kv 1\n"
_CHECKSUM_BYTES = 16
_NAME_BYTES = 16
_FOLDER = re.compile(r"kv-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]+\.(?P<end>kv|tmp)")


class FileUnusable(Exception):
    """A file exists, but its content is wrong. The message gives the reason."""


class FoundFile(msgspec.Struct, frozen=True):
    """File in the directory.

    Attributes:
        key: Path relative to the directory.
        byte_count: Size of the file.
        used_at: Time of the last use in seconds, by the clock of the file system.
    """

    key: str
    byte_count: int
    used_at: float


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between the directory and the records.

    Attributes:
        file_count: Number of files in the directory.
        gone: Keys of recorded files that do not exist.
        changed: Keys of recorded files that have another size.
        unknown: Files that exist but are not recorded.
    """

    file_count: int
    gone: list[str]
    changed: list[str]
    unknown: list[FoundFile]


class BlockFiles:
    """Files of one engine's blocks. All methods except `key` wait for the disk, so call them in a worker thread.

    Args:
        directory: Directory of the files.
        layout: KV layout of the engine.
    """

    def __init__(self, directory: Path, layout: KVLayout) -> None:
        self._directory = directory
        described = msgspec.json.encode({"names": HASH_SCHEME, **msgspec.to_builtins(layout)})
        self._head = _MAGIC + len(described).to_bytes(4, "little") + described
        self._folder = f"kv-{blake2b(described, digest_size=8).hexdigest()}"
        # Garbage collection of this object closes the lock file and so releases the lock, if `close` was not called.
        self._lock: IO[bytes] | None = None
        head_bytes = len(self._head) + _NAME_BYTES + proof_bytes(layout.block_size)
        self.file_bytes = head_bytes + _CHECKSUM_BYTES + block_bytes(layout)

    def key(self, name: BlockHash) -> str:
        return f"{self._folder}/{name.hex()}.kv"

    def open(self, bytes_max: int) -> list[FoundFile]:
        """Create the directory if necessary, lock it, and remove incomplete files and the oldest files above the limit.

        Args:
            bytes_max: Limit for all files.

        Returns:
            The remaining files, oldest first.

        Raises:
            StartupError: the directory cannot be used, or another engine uses it.
        """
        try:
            (self._directory / self._folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(self._directory / "lock")
            probe = self._directory / self._folder / "0.tmp"
            probe.write_bytes(b"")
            probe.unlink()
            found = sorted(self._scan(), key=lambda file: file.used_at)
        except OSError as error:
            self.close()
            raise StartupError(f"the host connector cannot use the directory {self._directory}: {error}") from None
        byte_count = sum(file.byte_count for file in found)
        surplus = 0
        while byte_count > bytes_max:
            byte_count -= found[surplus].byte_count
            surplus += 1
        self.remove(file.key for file in found[:surplus])
        return found[surplus:]

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def compare(self, known: Mapping[str, int]) -> Differences:
        """Compare the directory with the records, and change nothing. A missing directory counts as empty.

        Args:
            known: Sizes of the recorded files in bytes, by key.

        Raises:
            OSError: the directory cannot be read.
        """
        found: list[FoundFile] = []
        with contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self._directory):
                if _FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        found += (
                            FoundFile(f"{folder.name}/{entry.name}", status.st_size, status.st_mtime)
                            for entry in os.scandir(folder.path)
                            if (named := _FILE.fullmatch(entry.name)) is not None and named["end"] == "kv"
                            if (status := _status(entry)) is not None
                        )
        sizes = {file.key: file.byte_count for file in found}
        return Differences(
            file_count=len(found),
            gone=[key for key in known if key not in sizes],
            changed=[key for key, size in known.items() if sizes.get(key, size) != size],
            unknown=[file for file in found if file.key not in known],
        )

    def write(self, name: BlockHash, proof: bytes, content: Content) -> bool:
        """Write the file of a block.

        Args:
            name: Name of the block.
            proof: Proof of the block's tokens (see Proofs).
            content: KV of the block.

        Returns:
            False if the folder was missing and had to be created. All other files of the folder are then missing, too.

        Raises:
            OSError: the disk refused the file. No part of it remains.
        """
        head, body = self._head_of(name, proof), content.data
        path = self._directory / self.key(name)
        is_there = path.parent.is_dir()
        if not is_there:  # Another program has removed the folder, or this is its first file.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        try:
            # The prompt can be reconstructed from its KV, so only the owner may read the file.
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
                for part in (head, _checksum(head, body), body):
                    _write_all(file, part)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):  # The error of the write says more than an error of the removal.
                unfinished.unlink(missing_ok=True)
            raise
        return is_there

    def read(self, name: BlockHash, proof: bytes, content: Content) -> None:
        """Read the file of a block.

        Args:
            name: Name of the block.
            proof: Proof of the block's tokens (see Proofs).
            content: Memory to fill. It is not valid after an error.

        Raises:
            FileUnusable: the content of the file is wrong.
            OSError: the file cannot be read.
        """
        head, body = self._head_of(name, proof), content.data
        path = self._directory / self.key(name)
        with open(path, "rb", buffering=0) as file:
            if _read_up_to(file, memoryview(bytearray(len(head)))) != head:
                raise FileUnusable("it is not about these tokens")
            checksum = _read_up_to(file, memoryview(bytearray(_CHECKSUM_BYTES)))
            if len(_read_up_to(file, body)) < len(body):
                raise FileUnusable("it is too short")
            if checksum != _checksum(head, body):
                raise FileUnusable("its checksum is wrong")
            with contextlib.suppress(OSError):
                # The next start removes the files with the oldest times first, so mark this file as used now.
                os.utime(file.fileno())

    def remove(self, keys: Iterable[str]) -> None:
        """Remove files. Missing files are ignored.

        Args:
            keys: Keys of the files.

        Raises:
            OSError: a file cannot be removed.
        """
        for key in keys:
            (self._directory / key).unlink(missing_ok=True)

    def _head_of(self, name: BlockHash, proof: bytes) -> bytes:
        return self._head + name.ljust(_NAME_BYTES, b"\0") + proof

    def _scan(self) -> Iterator[FoundFile]:
        kept_count = 0
        for folder in os.scandir(self._directory):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                if not entry.is_file(follow_symlinks=False):
                    continue
                named = _FILE.fullmatch(entry.name)
                if named is None:
                    continue
                status = entry.stat(follow_symlinks=False)
                # No engine writes files during this scan, so an incomplete file stays incomplete.
                is_whole = named["end"] == "kv" and (folder.name != self._folder or status.st_size == self.file_bytes)
                kept_count += is_whole
                if is_whole and kept_count <= FILES_MAX:
                    yield FoundFile(f"{folder.name}/{entry.name}", status.st_size, status.st_mtime)
                else:
                    os.unlink(entry.path)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file. None if the entry is not a regular file, or was removed."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _locked(path: Path) -> IO[bytes]:
    """Open and lock a file. The lock excludes other processes of this machine, and ends when its process ends."""
    file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115 - it stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StartupError(
            f"the directory {path.parent} is used by another engine: give each one a directory of its own"
        ) from None
    except OSError:
        file.close()
        raise
    return file


def _checksum(head: bytes, body: memoryview) -> bytes:
    digest = blake2b(head, digest_size=_CHECKSUM_BYTES)
    digest.update(body)
    return digest.digest()


def _write_all(file: IO[bytes], content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _read_up_to(file: IO[bytes], into: memoryview) -> memoryview:
    """Read until the buffer is full or the file ends. Return the filled part."""
    count = 0
    while count < len(into):
        got = file.readinto(into[count:])  # type: ignore[attr-defined]  # raw files have readinto
        if not got:
            break
        count += got
    return into[:count]
