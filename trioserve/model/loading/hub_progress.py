"""What huggingface_hub tells of a download, as bytes that have come and bytes of all.

It tells that to bars of tqdm, which add up the files that come at a time: one counts what comes over the network, one
what is written. Whichever is ahead is passed on.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["watched_by"]


def watched_by(progress: Callable[[int, int], None]) -> type:
    """For its parameter tqdm_class: a bar that is not seen. progress: called from any thread. Needs tqdm, which comes
    with huggingface_hub."""
    from tqdm import tqdm

    bytes_most = 0

    class Watched(tqdm):  # type: ignore[misc]  # it brings no types
        monitor_interval = 0  # otherwise a thread

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal bytes_most
            if self.unit == "B" and self.total and self.n >= bytes_most:
                bytes_most = self.n
                progress(self.n, self.total)
            return True

    Watched.set_lock(threading.RLock())  # otherwise one between processes
    return Watched
