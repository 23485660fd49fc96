"""Tests the files of blocks in a directory: locking, the files at a start, and files of other programs."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trioserve.connectors.host import block_files
from trioserve.connectors.host.block_files import BlockFiles, FileUnusable, Proofs
from trioserve.connectors.host.copying import block_bytes
from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import BlockHash
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT

NAME = BlockHash(bytes(range(16)))
PROOF = Proofs(None, range(4), 4).of(0)
PLENTY = 10**9


@pytest.fixture
def open_files(tmp_path) -> Iterator[Callable[..., BlockFiles]]:
    """Return a function that opens files as an engine does, and close the files after the test.

    The list `found` receives the keys of files that exist at the start.
    """
    opened: list[BlockFiles] = []

    def make(layout=SMALL_LAYOUT, bytes_max: int = PLENTY) -> BlockFiles:
        files = BlockFiles(tmp_path / "kv", layout)
        opened.append(files)
        files.found = [file.key for file in files.open(bytes_max)]
        return files

    yield make
    for files in opened:
        files.close()


def content_of(number: int) -> np.ndarray:
    content = np.empty(block_bytes(SMALL_LAYOUT), np.uint8)
    content[:] = number
    return content


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_block_written_to_a_file_can_be_read(open_files, tmp_path):
    files = open_files()
    files.write(NAME, PROOF, content_of(7))
    into = np.empty(block_bytes(SMALL_LAYOUT), np.uint8)
    files.read(NAME, PROOF, into)
    assert (into == 7).all()
    path = tmp_path / "kv" / files.key(NAME)
    assert path.stat().st_size == files.file_bytes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_block_file_is_read_only_with_the_right_proof(open_files):
    files = open_files()
    files.write(NAME, PROOF, content_of(7))
    for other in (
        Proofs("salt", range(4), 4).of(0),
        Proofs(None, [0, 1, 2, 4], 4).of(0),
        Proofs(None, range(8), 4).of(1),
    ):
        with pytest.raises(FileUnusable, match="it is not about these tokens"):
            files.read(NAME, other, np.empty(block_bytes(SMALL_LAYOUT), np.uint8))


def test_any_changed_byte_of_a_block_file_is_detected(open_files, tmp_path):
    files = open_files()
    files.write(NAME, PROOF, content_of(7))
    path = tmp_path / "kv" / files.key(NAME)
    right = path.read_bytes()
    for place in range(len(right)):
        path.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        with pytest.raises(FileUnusable):
            files.read(NAME, PROOF, np.empty(block_bytes(SMALL_LAYOUT), np.uint8))
    for length in range(0, len(right), 7):
        path.write_bytes(right[:length])
        with pytest.raises(FileUnusable, match="tokens" if length < len(right) - 128 - 16 else "it is too short"):
            files.read(NAME, PROOF, np.empty(block_bytes(SMALL_LAYOUT), np.uint8))


def test_host_directory_is_used_by_one_engine_at_a_time(open_files, tmp_path):
    files = open_files()
    with pytest.raises(StartupError, match="is used by another engine: give each one a directory of its own"):
        open_files()
    files.close()
    open_files()
    with open(tmp_path / "kv" / "lock", "rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_path_that_cannot_be_a_host_directory_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartupError, match="the host connector cannot use the directory"):
        BlockFiles(tmp_path / "file", SMALL_LAYOUT).open(PLENTY)


def test_unwritable_host_directory_is_refused(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    files = BlockFiles(tmp_path, SMALL_LAYOUT)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(StartupError, match="Permission denied"):
        files.open(PLENTY)
    monkeypatch.undo()
    files.open(PLENTY)  # The failed start has released the lock.
    files.close()


def test_block_files_are_listed_at_start_oldest_first_within_the_limit(open_files, tmp_path):
    files = open_files()
    for number, age in enumerate((3, 1, 2)):
        files.write(name_of(number), PROOF, content_of(number))
        os.utime(tmp_path / "kv" / files.key(name_of(number)), (age, age))
    files.close()
    files = open_files()
    assert files.found == [files.key(name_of(number)) for number in (1, 2, 0)]
    files.close()
    files = open_files(bytes_max=2 * files.file_bytes)
    assert files.found == [files.key(name_of(number)) for number in (2, 0)]
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 2


def test_reading_updates_the_time_of_a_file(open_files, tmp_path):
    files = open_files()
    for number in range(2):
        files.write(name_of(number), PROOF, content_of(number))
        os.utime(tmp_path / "kv" / files.key(name_of(number)), (number, number))
    files.read(name_of(0), PROOF, np.empty(block_bytes(SMALL_LAYOUT), np.uint8))
    files.close()
    files = open_files()
    assert files.found == [files.key(name_of(1)), files.key(name_of(0))]


def test_number_of_block_files_is_limited(open_files, tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "FILES_MAX", 2)
    files = open_files()
    for number in range(3):
        files.write(name_of(number), PROOF, content_of(number))
    files.close()
    assert len(open_files().found) == 2
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 2


def test_incomplete_files_are_removed_and_other_files_are_kept(open_files, tmp_path):
    files = open_files()
    files.write(NAME, PROOF, content_of(7))
    files.close()
    folder = (tmp_path / "kv" / files.key(NAME)).parent
    (folder / "00ff.tmp").write_bytes(b"half")
    (folder / "00ff.kv").write_bytes(b"short")
    strangers = [folder / "notes.txt", folder / "Z.kv", tmp_path / "kv" / "00ff.kv", tmp_path / "kv" / "mine" / "0.kv"]
    (tmp_path / "kv" / "mine").mkdir()
    (folder / "1f.kv").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "00.kv").write_bytes(b"")
    (tmp_path / "kv" / "kv-0123456789abcdef").symlink_to(outside)
    for path in strangers:
        path.write_bytes(b"a stranger's")
    files = open_files(bytes_max=files.file_bytes)
    assert files.found == [files.key(NAME)]
    assert all(path.exists() for path in [*strangers, folder / "1f.kv", outside / "00.kv"])
    assert not (folder / "00ff.tmp").exists()
    assert not (folder / "00ff.kv").exists()


def test_files_of_another_layout_count_for_the_limit_and_are_not_read(open_files, tmp_path):
    other = open_files(msgspec.structs.replace(SMALL_LAYOUT, model="other"))
    other.write(NAME, PROOF, content_of(1))
    os.utime(tmp_path / "kv" / other.key(NAME), (1, 1))
    other.close()
    files = open_files()
    assert files.key(NAME) != other.key(NAME)
    assert files.found == [other.key(NAME)]
    with pytest.raises(FileNotFoundError):
        files.read(NAME, PROOF, np.empty(block_bytes(SMALL_LAYOUT), np.uint8))
    files.write(NAME, PROOF, content_of(2))
    files.close()
    assert open_files(bytes_max=files.file_bytes).found == [files.key(NAME)], (
        "the oldest file is removed, of any layout"
    )


def test_failed_write_of_a_block_leaves_no_file(open_files, tmp_path, monkeypatch):
    files = open_files()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        files.write(NAME, PROOF, content_of(7))
    assert [path.name for path in (tmp_path / "kv").rglob("*") if path.is_file()] == ["lock"]


def test_removed_host_directory_is_created_again(open_files, tmp_path):
    files = open_files()
    (tmp_path / "kv" / files.key(NAME)).parent.rmdir()
    files.write(NAME, PROOF, content_of(7))
    files.remove([files.key(NAME), "kv-0000000000000000/00.kv"])
    assert not (tmp_path / "kv" / files.key(NAME)).exists()
