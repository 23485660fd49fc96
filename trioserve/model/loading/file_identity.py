"""Whether a file is still the one that was looked at, without reading it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["FileIdentity", "identities_of"]


class FileIdentity(NamedTuple):
    """Of a file that nobody has written to or put another one in the place of, it stays the same."""

    device: int
    inode: int
    byte_count: int
    written_ns: int


def identities_of(paths: Iterable[Path]) -> dict[Path, FileIdentity]:
    """Of those that are there."""
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found[path] = FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return found
