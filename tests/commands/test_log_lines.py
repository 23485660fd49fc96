"""Tests the format of log lines, and that no caller waits until a line is written."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import sys
import threading

import pytest

from trioserve.commands.log_lines import (
    JsonLines,
    LineThread,
    TextLines,
    announce,
    logging_to,
    show_dropped_lines,
    status_stream,
)
from trioserve.metrics.registry import Metrics
from trioserve.testing.memory_server import open_memory_server
from trioserve.trio_tools.progress import ProgressBar

PATH = "/v1/completions"
KEY, TRACE = "a-key-that-is-secret", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def written():
    """Return a function that opens a log with a formatter. The log's lines are in a StringIO."""
    made: list[tuple[LineThread, logging.Logger]] = []

    def open_log(formatter: logging.Formatter) -> io.StringIO:
        stream = io.StringIO()
        handler = LineThread(stream)
        handler.setFormatter(formatter)
        logger = logging.getLogger("trioserve")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        made.append((handler, logger))
        return stream

    def close() -> None:
        while made:
            handler, logger = made.pop()
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
            handler.end()

    open_log.close = close
    yield open_log
    close()


async def test_request_is_logged_as_one_line_of_json(written):
    stream = written(JsonLines())
    async with open_memory_server(api_keys=(KEY,), logs_requests=True) as server:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
        await server.client().post(PATH, {"prompt": "xyzzy", "max_tokens": 2}, headers=headers)
        await server.client().get("/health")
        await server.client().post(PATH, {"prompt": 7}, headers=headers)
        await server.client().post(PATH, {})
    written.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["method"], line["path"], line["status"], line["outcome"]) for line in lines] == [
        ("POST", PATH, 200, "finished"),
        ("POST", PATH, 400, "refused"),
        ("POST", PATH, 401, "refused"),
    ]
    first, wrong, _ = lines
    assert (first["request"], first["prompt_tokens"], first["completion_tokens"]) == ("mine", 5, 2)
    assert isinstance(first["seconds"], float)
    assert first["time"].endswith("Z")
    assert wrong["reason"]
    assert len(first["tenant"]) == 32
    assert "trace" not in first
    assert KEY not in stream.getvalue()
    assert "xyzzy" not in stream.getvalue()


async def test_requests_are_not_logged_without_the_access_log(written):
    stream = written(TextLines())
    async with open_memory_server() as server:
        await server.client().post(PATH, {"prompt": "p", "max_tokens": 2})
    written.close()
    assert stream.getvalue() == ""


async def test_other_log_lines_of_a_request_contain_its_id(written):
    stream = written(JsonLines())
    asked = {"prompt": "p", "max_tokens": 9, "stream": True}
    opened = open_memory_server(max_num_seqs=1, max_queued_requests=0, paused=True, logs_requests=True)
    async with opened as server, server.client().ask(PATH, asked):
        await server.client().post(PATH, {"prompt": "p"}, headers={"x-request-id": "second", "x-tenant-id": "t"})
    written.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (refused,) = [line for line in lines if line["message"].startswith("refused")]
    assert (refused["request"], refused["tenant"], refused["logger"]) == (
        "second",
        "t",
        "trioserve.engine.lifecycle.request_admission",
    )


async def test_log_line_of_a_traced_request_contains_its_trace(written):
    otel = pytest.importorskip("trioserve.tracing.otel").OtelTracing(endpoint="http://127.0.0.1:1", sample=0.0)
    stream = written(TextLines())
    async with open_memory_server(logs_requests=True, tracer=otel.tracer) as server:
        await server.client().post(PATH, {"prompt": "p", "max_tokens": 2}, headers={"traceparent": TRACE[:-1] + "0"})
    otel.close()
    written.close()
    assert f" trace={TRACE[3:35]}" in stream.getvalue()


def test_exception_is_logged_as_one_line():
    formatter = JsonLines()
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "file", 1, "it %s", ("broke",), __import__("sys").exc_info()
        )
    line = formatter.format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it broke"
    assert "ValueError: two" in json.loads(line)["exception"]


def test_unread_log_stream_blocks_no_caller():
    may_write = threading.Event()
    begun = threading.Event()
    got: list[str] = []

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            begun.set()
            may_write.wait(60)
            got.append(text)
            return len(text)

    handler = LineThread(Stuck(), lines_max=5)
    handler.setFormatter(logging.Formatter("%(message)s"))
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "file", 1, "line", (), None)
    handler.emit(record)
    assert begun.wait(20)
    for _ in range(8):
        handler.emit(record)
    assert handler.dropped == 3
    may_write.set()
    handler.end()
    assert "".join(got).count("line\n") == 6
    assert "3 lines of the log were dropped" in "".join(got)


def test_log_continues_after_a_library_configures_logging():
    """nixl calls dictConfig when it is imported, and dictConfig closes every handler of the process."""
    stream, root = io.StringIO(), logging.getLogger()
    handlers, root.handlers = root.handlers, []
    level = root.level
    try:
        with logging_to(stream, level="info", form="text"):
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
            announce("serving")
    finally:
        root.handlers = handlers
        root.setLevel(level)
    assert stream.getvalue() == "serving\n"


def test_log_message_and_its_line_break_are_one_write(monkeypatch):
    """Several processes share standard error. Output of another process must not appear inside of a line."""
    written = []

    class Noting(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", Noting())
    announce("serving")
    assert [text for text in written if text] == ["serving\n"]


def test_every_scrape_shows_the_number_of_dropped_log_lines():
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no room on the disk")

    metrics = Metrics(None, parts=("frontend",))
    show_dropped_lines(metrics)
    handler, root = LineThread(Broken()), logging.getLogger()
    root.addHandler(handler)
    try:
        for _ in range(3):
            logging.getLogger("trioserve.x").warning("a line")
        assert metrics.total("log_lines_dropped_total") == 0
        handler.end()  # The thread has tried to write all lines.
        for _ in range(2):
            metrics.refresh()
            assert metrics.total("log_lines_dropped_total") == 3
    finally:
        root.removeHandler(handler)


def test_every_line_of_a_json_log_is_json(monkeypatch):
    """If the log is not JSON, progress and status messages are plain text."""
    stream = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with logging_to(stream, level="info", form="json"):
        announce("serving a model")
        bar = ProgressBar("loading a model", status_stream())
        bar.turn_to("compiling kernels")
        bar.close()
        logging.getLogger("x").warning("two\nlines")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    messages = [line["message"] for line in lines]
    assert messages == ["serving a model", "loading a model", "compiling kernels", "two\nlines"]
