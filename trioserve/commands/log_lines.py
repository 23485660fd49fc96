"""The program's log as lines of text or JSON, and its status messages, written by one thread.

No caller waits for a terminal, pipe or disk. Lines that the thread cannot write in time are dropped and counted.
"""

from __future__ import annotations

import io
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, TextIO

from trioserve.api.log_context import request_fields
from trioserve.commands.program_end import SteadyStderr

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics

__all__ = ["LineThread", "announce", "logging_to", "show_dropped_lines", "status_stream"]

LINES_MAX = 10_000  # a few megabytes
END_SECONDS_MAX = 2.0


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        more = [f"{name}={value}" for name, value in request_fields().items() if f" {name}=" not in line]
        return " ".join([line, *more])


class JsonLines(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, then request, tenant and trace where there are,
    and the fields of a line that has some."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = time.gmtime(record.created), int(record.msecs)
        fields: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', seconds)}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **request_fields(),
        }
        said = getattr(record, "fields", None)
        if isinstance(said, dict):
            fields |= {name: value for name, value in said.items() if value is not None}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class LineThread(logging.Handler):
    """Writes lines to a stream in its own thread, so that no caller waits for the stream.

    Its owner ends the thread with `end`. `close` leaves the thread running, because any library may call `close`:
    `logging.config.dictConfig` closes every handler of the process, its own or not.

    Args:
        stream: receives the lines.
        lines_max: lines that may wait for the thread. Further lines are dropped and counted in `dropped`.
    """

    def __init__(self, stream: TextIO, *, lines_max: int = LINES_MAX) -> None:
        super().__init__()
        # A stream that hides errors would hide lost lines, too.
        self._write_text = stream.write_or_raise if isinstance(stream, SteadyStderr) else stream.write
        self._stream = stream
        self._lines_max = lines_max
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self.put(line + "\n")

    def put(self, line: str) -> None:
        """Queue a line for the stream, or drop it if too many wait."""
        if self._lines.qsize() >= self._lines_max:
            self.dropped += 1
        else:
            self._lines.put(line)

    def end(self) -> None:
        """Write the lines that wait and end the thread, within END_SECONDS_MAX."""
        self._lines.put(None)
        self._thread.join(END_SECONDS_MAX)
        self.close()

    def _write(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            dropped = self.dropped
            if dropped > told:
                line += f"{dropped - told} lines of the log were dropped: nobody took them\n"
                told = dropped
            try:
                self._write_text(line)
                self._stream.flush()
            except (OSError, ValueError):
                self.dropped += 1


def announce(message: str) -> None:
    """Print a status message for people on standard error.

    It never blocks or fails. Inside `logging_to` it goes through the log's thread, as JSON if the log is JSON.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineThread):
            if isinstance(handler.formatter, JsonLines):
                handler.emit(logging.LogRecord("trioserve", logging.INFO, "", 0, message, None, None))
            else:
                handler.put(f"{message}\n")
            return
    with suppress(OSError, ValueError):
        # One write with the line break, so that no line of another process gets in between.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)


def status_stream() -> TextIO:
    """Return standard error, or a stream that makes JSON lines of status messages if the log is JSON."""
    is_json = any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
    return _AnnouncedLines() if is_json else sys.stderr


class _AnnouncedLines(io.StringIO):
    def write(self, text: str) -> int:
        for line in text.splitlines():
            announce(line)
        return len(text)


@contextmanager
def logging_to(stream: TextIO | None = None, *, level: str, form: Literal["text", "json"]) -> Iterator[None]:
    """The program's log goes there inside. stream: stderr. Does nothing where something else has the log already."""
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    handler = LineThread(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.end()


def show_dropped_lines(metrics: Metrics) -> None:
    """Have every exposition show how many lines the program's log has dropped so far."""
    shown = 0

    def show() -> None:
        nonlocal shown
        dropped = sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LineThread))
        metrics.log_lines_dropped_total.inc(max(0, dropped - shown))
        shown = dropped

    metrics.on_scrape(show)
