"""The program's log (text or JSON lines) and its status messages. One thread writes both.

Callers never wait for a terminal, pipe or disk. If too many lines wait for the thread, further lines are dropped and
counted.
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

from trioserve.api.responder import request_fields
from trioserve.commands.program_end import SteadyStderr

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics

__all__ = ["LineThread", "announce", "logging_to", "show_dropped_lines", "status_stream"]

LINES_MAX = 10_000  # So many lines need a few megabytes.
END_SECONDS_MAX = 2.0


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        more = [f"{name}={value}" for name, value in request_fields().items() if f" {name}=" not in line]
        return " ".join([line, *more])


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line.

    The object has `time` (RFC 3339, UTC), `level`, `logger` and `message`. Then follow `request`, `tenant` and `trace`
    if the record belongs to a request, and the record's own `fields`.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = time.gmtime(record.created), int(record.msecs)
        fields: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', seconds)}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **request_fields(),
        }
        own_fields = getattr(record, "fields", None)
        if isinstance(own_fields, dict):
            fields |= {name: value for name, value in own_fields.items() if value is not None}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class LineThread(logging.Handler):
    """Writes lines to a stream in its own thread, so that callers never wait for the stream.

    The owner ends the thread with `end`. `close` does not end the thread, because any library may call `close`. For
    example, `logging.config.dictConfig` closes all handlers of the process.

    Args:
        stream: receives the lines.
        lines_max: lines that may wait for the thread. Further lines are dropped and counted in `dropped`.
    """

    def __init__(self, stream: TextIO, *, lines_max: int = LINES_MAX) -> None:
        super().__init__()
        # SteadyStderr.write hides errors, but the thread needs the errors to count lost lines.
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
        """Queue a line for the stream, or drop the line if `lines_max` lines already wait.

        Args:
            line: text with its line break.
        """
        if self._lines.qsize() >= self._lines_max:
            self.dropped += 1
        else:
            self._lines.put(line)

    def end(self) -> None:
        """Write the waiting lines and end the thread. Return after END_SECONDS_MAX at the latest."""
        self._lines.put(None)
        self._thread.join(END_SECONDS_MAX)
        self.close()

    def _write(self) -> None:
        reported = 0
        while (line := self._lines.get()) is not None:
            dropped = self.dropped
            if dropped > reported:
                line += f"{dropped - reported} lines of the log were dropped: the reader of the log was too slow\n"
                reported = dropped
            try:
                self._write_text(line)
                self._stream.flush()
            except (OSError, ValueError):
                self.dropped += 1


def announce(message: str) -> None:
    """Print a status message for people on standard error.

    Inside of `logging_to`, the thread of the log writes the message, so the call never blocks or fails. If the log is
    JSON, the message is JSON, too.

    Args:
        message: one line without a line break.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineThread):
            if isinstance(handler.formatter, JsonLines):
                handler.emit(logging.LogRecord("trioserve", logging.INFO, "", 0, message, None, None))
            else:
                handler.put(f"{message}\n")
            return
    with suppress(OSError, ValueError):
        # Text and line break are written together, so that no output of another process appears between them.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)


def status_stream() -> TextIO:
    """Return standard error. If the log is JSON, return a stream that writes each line as a JSON status message."""
    is_json = any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
    return _AnnouncedLines() if is_json else sys.stderr


class _AnnouncedLines(io.StringIO):
    def write(self, text: str) -> int:
        for line in text.splitlines():
            announce(line)
        return len(text)


@contextmanager
def logging_to(stream: TextIO | None = None, *, level: str, form: Literal["text", "json"]) -> Iterator[None]:
    """Write the program's log to a stream inside of the scope, unless the root logger already has a handler.

    Args:
        stream: receives the lines. None for standard error.
        level: lowest level to log, in upper or lower case.
        form: format of the lines.
    """
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
    """Update the metric of dropped log lines at each scrape.

    Args:
        metrics: registry that exposes the metric.
    """
    shown = 0

    def show() -> None:
        nonlocal shown
        dropped = sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LineThread))
        metrics.log_lines_dropped_total.inc(max(0, dropped - shown))
        shown = dropped

    metrics.on_scrape(show)
