"""How far something is, on stderr: a bar in a terminal, a line at the beginning and at each quarter elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

__all__ = ["ProgressBar"]

BAR_CELLS = 30
LINE_PERCENT = 25  # of a log, from one line to the next


class ProgressBar:
    """what: "fetching smollm2", said at once. Leaving clears the bar."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_terminal = sys.stderr.isatty()
        self._percent_shown = 0
        _say(f"\r{what} ..." if self._is_terminal else f"{what}\n")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, done: int, total: int) -> None:
        """In bytes; from any thread."""
        percent = 100 * done // max(total, 1)
        if percent == self._percent_shown:
            return
        if self._is_terminal:
            filled = BAR_CELLS * percent // 100
            bar = "#" * filled + "." * (BAR_CELLS - filled)
            _say(f"\r{self._what} [{bar}] {percent:3d} %  {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        elif percent // LINE_PERCENT == self._percent_shown // LINE_PERCENT:
            return
        else:
            _say(f"{self._what}: {percent} % of {total / 1e6:.0f} MB\n")
        self._percent_shown = percent

    def clear(self) -> None:
        """Nothing of a bar is left in the terminal."""
        if self._is_terminal:
            _say("\r\x1b[K")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
