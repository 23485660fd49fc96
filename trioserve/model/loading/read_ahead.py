"""What of a model's files is not in memory comes there from the disk while others are busy, so that nobody has to wait
for it later. Needs nothing but Python, since it is to begin before anything else is imported."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

__all__ = ["start_reading_ahead", "weight_files"]

THREAD = "trioserve-read-ahead"
AT_ONCE_BYTES = 2**30  # in a call, which another thread that holds the GIL cannot interrupt


def start_reading_ahead(model: str) -> threading.Thread | None:
    """In a daemon thread, which ends by itself. model: as it is served. None: it is no file or directory with
    weights, or has more of them than half of the memory holds."""
    files = weight_files(Path(model))
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not files or sum(file.stat().st_size for file in files) > memory_bytes // 2:
        return None
    thread = threading.Thread(target=_read, args=(files,), name=THREAD, daemon=True)
    thread.start()
    return thread


def weight_files(path: Path) -> list[Path]:
    """Those that a model's weights are probably in; none where it cannot be told."""
    try:
        if path.is_file():
            return [path] if path.suffix.lower() == ".gguf" else []
        single = path / "model.safetensors"
        return [single] if single.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))[:1]
    except OSError:
        return []


def _read(files: list[Path]) -> None:
    # What cannot be read is said where it is needed.
    with contextlib.suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
        for path in files:
            with path.open("rb", buffering=0) as file:
                offset = 0
                # Pages are handed over, and nothing is copied.
                while sent := os.sendfile(nowhere.fileno(), file.fileno(), offset, AT_ONCE_BYTES):
                    offset += sent
