"""Progress of long work for people, on stderr: one line that is overwritten in a terminal, occasional lines in a
log.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TextIO, TypeVar

__all__ = ["LOG_SECONDS", "ProgressBar", "ProgressLine", "with_progress"]

LOG_SECONDS = 10.0
TERMINAL_SECONDS = 0.1
BAR_CELLS = 20
MEGABYTE = 1_000_000

T = TypeVar("T")


class ProgressLine:
    """A line of text that is updated while work runs. Any thread may use this object.

    The exit of the scope clears the line. Later calls of `show` do nothing.

    Args:
        stream: Where to write. If None, stderr.
        log_seconds: Seconds between two lines if the stream is not a terminal.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        log_seconds: float = LOG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._period = TERMINAL_SECONDS if self.is_terminal else log_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._shows_at = clock() + (0.0 if self.is_terminal else log_seconds)
        self._is_shown = self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_due(self) -> bool:
        """Return True if `show` would write now."""
        return self._clock() >= self._shows_at

    def show(self, text: str, *, now: bool = False) -> None:
        """Show a text, unless another text was shown a moment ago.

        Args:
            text: The text, cut to the width of a terminal.
            now: True to show the text in any case.
        """
        with self._lock:
            at = self._clock()
            if self._is_closed or (at < self._shows_at and not now):
                return
            self._shows_at = at + self._period
            if self.is_terminal:
                columns = shutil.get_terminal_size().columns
                # The text is cut to one line, because a text of two lines could not be overwritten.
                self._write(f"\r\x1b[K{text[: columns - 1]}")
                self._is_shown = True
            else:
                self._write(f"{text}\n")

    def say(self, text: str) -> None:
        """Write a line that later texts do not overwrite.

        Args:
            text: The line.
        """
        with self._lock:
            self._clear()
            self._write(f"{text}\n")

    def close(self) -> None:
        """Clear the line if the stream is a terminal."""
        with self._lock:
            self._clear()
            self._is_closed = True

    def _clear(self) -> None:
        if self._is_shown:
            self._write("\r\x1b[K")
            self._is_shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class ProgressBar(ProgressLine):
    """A line that shows how much of the work is done.

    Args:
        what: Description of the work, such as "fetching smollm2". It is shown at once.
        stream: Where to write. If None, stderr.
        unit: Plural noun for the counted items. If None, bytes are counted and shown in MB.
        log_seconds: Seconds between two lines if the stream is not a terminal.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        what: str,
        stream: TextIO | None = None,
        *,
        unit: str | None = None,
        log_seconds: float = LOG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream, log_seconds=log_seconds, clock=clock)
        self._what = what
        self._unit = unit
        self.show(f"{what} ..." if self.is_terminal else what, now=True)

    def turn_to(self, what: str) -> None:
        """Replace the description of the work by another description.

        Args:
            what: The description.
        """
        if what != self._what:
            self._what = what
            self.show(f"{what} ..." if self.is_terminal else what, now=True)

    def show_share(self, done: float, total: int, more: str = "") -> None:
        """Show how much is done.

        Args:
            done: Items or bytes that are done.
            total: All items or bytes.
            more: Text to append.
        """
        if not self.is_due:
            return
        share = min(done / max(total, 1), 1.0)
        filled = int(BAR_CELLS * share)
        bar = f" [{'#' * filled}{'.' * (BAR_CELLS - filled)}]" if self.is_terminal else ":"
        counted = f"{done:,.0f} of {total:,} {self._unit}"
        if self._unit is None:
            counted = f"{done / MEGABYTE:,.0f} of {total / MEGABYTE:,.0f} MB"
        self.show(f"{self._what}{bar} {int(100 * share):3d} %  {counted}{more and ', '}{more}")

    def show_seconds(self, seconds: float) -> None:
        """Show how long the work has taken. Use this if the remaining work is not known.

        Args:
            seconds: Seconds so far.
        """
        self.show(f"{self._what} ... {seconds:.0f} s")


def with_progress(items: Sequence[T], what: str, *, unit: str, stream: TextIO | None = None) -> Iterator[T]:
    """Yield the items, and show a progress bar for the loop.

    Args:
        items: Items of the loop.
        what: Description of the work.
        unit: Plural noun for the items.
        stream: Where to write. If None, stderr.
    """
    with ProgressBar(what, stream, unit=unit) as bar:
        for number, item in enumerate(items):
            bar.show_share(number, len(items))
            yield item
