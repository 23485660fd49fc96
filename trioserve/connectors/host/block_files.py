"""One file a block: where it is, what is in it, and whether it can be believed. Blocks its thread; waits for disks.

    DIRECTORY/lock                   held by whoever uses the directory: there is one at a time
    DIRECTORY/kv-LAYOUT/NAME.kv      LAYOUT: a digest of the layout; NAME: the block's

A file is head, checksum (of head and content) and content. The head says the layout, the name and the proof (chain.py).
Whoever reads a file knows what its head has to be, byte for byte, so there is nothing to parse in what others may have
written. A file gets its name when it is complete, and is not flushed to the disk: after a power failure it may be
damaged, which the checksum tells. Files that go missing, or stand in the way, cost a miss.

Files of other layouts (another model, another dtype) count, too, and go when they are the oldest. What is not named
like this is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO

import msgspec

from trioserve.connectors.host.block_memory import Content
from trioserve.connectors.host.chain import proof_bytes
from trioserve.connectors.host.copying import block_bytes
from trioserve.contracts.block_hash import HASH_SCHEME, BlockHash
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import KVLayout

__all__ = ["FILES_MAX", "BlockFiles", "Differences", "FileUnusable", "FoundFile"]

FILES_MAX = 1_000_000  # that are kept: each costs some 300 bytes of memory

_MAGIC = b"trioserve kv 1\n"
_CHECKSUM_BYTES = 16
_NAME_BYTES = 16
_FOLDER = re.compile(r"kv-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]+\.(?P<end>kv|tmp)")


class FileUnusable(Exception):
    """The file is there and cannot be believed; the message says why."""


class FoundFile(msgspec.Struct, frozen=True):
    """key: its path in the directory. used_at: seconds of the file system's clock."""

    key: str
    byte_count: int
    used_at: float


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """How the directory differs from what is known of it.

    Args:
        file_count: how many files there are.
        gone, changed: keys of files that are not there, or have another size.
        unknown: files that are there.
    """

    file_count: int
    gone: list[str]
    changed: list[str]
    unknown: list[FoundFile]


class BlockFiles:
    """All calls but `key` belong into a thread."""

    def __init__(self, directory: Path, layout: KVLayout) -> None:
        self._directory = directory
        described = msgspec.json.encode({"names": HASH_SCHEME, **msgspec.to_builtins(layout)})
        self._head = _MAGIC + len(described).to_bytes(4, "little") + described
        self._folder = f"kv-{blake2b(described, digest_size=8).hexdigest()}"
        self._lock: IO[bytes] | None = None  # an object, so that the lock ends with the last reference at the latest
        head_bytes = len(self._head) + _NAME_BYTES + proof_bytes(layout.block_size)
        self.file_bytes = head_bytes + _CHECKSUM_BYTES + block_bytes(layout)

    def key(self, name: BlockHash) -> str:
        return f"{self._folder}/{name.hex()}.kv"

    def open(self, bytes_max: int) -> list[FoundFile]:
        """Make the directory if need be, lock it, and tidy up: half-written files, and the oldest ones above the limit,
        are removed. Returns the rest, oldest first. Raises StartupError if it cannot be used."""
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
        """Compare what the directory holds at this moment with what is known; nothing is changed. A directory that is
        gone holds nothing.

        Args:
            known: bytes by key.

        Raises:
            OSError: it cannot be read.
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
        """Write a block's file.

        Returns:
            False if its folder was gone, and had to be made: all other files of it are gone, too.

        Raises:
            OSError: nothing is left of it.
        """
        head, body = self._head_of(name, proof), content.data
        path = self._directory / self.key(name)
        is_there = path.parent.is_dir()
        if not is_there:  # somebody has tidied up
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        try:
            # Prompts can be guessed from their KV, so it is the owner's alone.
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
                for part in (head, _checksum(head, body), body):
                    _write_all(file, part)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says more
                unfinished.unlink(missing_ok=True)
            raise
        return is_there

    def read(self, name: BlockHash, proof: bytes, content: Content) -> None:
        """Fill content. Raises FileUnusable or OSError, and content is worth nothing then."""
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
                os.utime(file.fileno())  # so that the next start knows which are the oldest

    def remove(self, keys: Iterable[str]) -> None:
        """Raises OSError; missing ones are no error."""
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
                # Nobody writes now, so what is half-written stays so.
                is_whole = named["end"] == "kv" and (folder.name != self._folder or status.st_size == self.file_bytes)
                kept_count += is_whole
                if is_whole and kept_count <= FILES_MAX:
                    yield FoundFile(f"{folder.name}/{entry.name}", status.st_size, status.st_mtime)
                else:
                    os.unlink(entry.path)


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None: it is no file, or gone by now."""
    try:
        return entry.stat(follow_symlinks=False) if entry.is_file(follow_symlinks=False) else None
    except FileNotFoundError:
        return None


def _locked(path: Path) -> IO[bytes]:
    """A lock ends with its process, however that ends. It holds between programs of one machine."""
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
    """As much as there is, at most all of it."""
    count = 0
    while count < len(into):
        got = file.readinto(into[count:])  # type: ignore[attr-defined]  # a raw file has it
        if not got:
            break
        count += got
    return into[:count]
