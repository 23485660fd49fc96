"""Reads a model's files into the page cache while other work runs. Loading then does not wait for the disk.

The module imports only the standard library, because reading starts before all other modules are imported.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

__all__ = ["start_reading_ahead", "weight_files"]

THREAD = "trioserve-read-ahead"
AT_ONCE_BYTES = 2**30  # Limit per call, because a running call cannot be interrupted.


def start_reading_ahead(model: str) -> threading.Thread | None:
    """Start a daemon thread that reads a model's files and then ends.

    Args:
        model: path or name of the model.

    Returns:
        The thread, or None if the model is not on disk, or if its files are larger than half of the memory.
    """
    files = weight_files(Path(model))
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not files or sum(file.stat().st_size for file in files) > memory_bytes // 2:
        return None
    thread = threading.Thread(target=_read, args=(files,), name=THREAD, daemon=True)
    thread.start()
    return thread


def weight_files(path: Path) -> list[Path]:
    """Return the files that probably contain a model's weights. The result is empty if this is not clear.

    Args:
        path: directory or file of the model.
    """
    try:
        if path.is_file():
            return [path] if path.suffix.lower() == ".gguf" else []
        single = path / "model.safetensors"
        return [single] if single.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))[:1]
    except OSError:
        return []


def _read(files: list[Path]) -> None:
    # An unreadable file is ignored now. Loading the model reports it later.
    with contextlib.suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
        for path in files:
            with path.open("rb", buffering=0) as file:
                offset = 0
                # sendfile passes pages to the null device without copying them.
                while sent := os.sendfile(nowhere.fileno(), file.fileno(), offset, AT_ONCE_BYTES):
                    offset += sent
