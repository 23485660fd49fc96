"""Tests of the comparison of a pair with one server, with fake processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trioserve.bench.disagg import (
    CopyFigures,
    DisaggregatedReport,
    TransferFigures,
    copying_process,
    disaggregated_text,
    main,
    seconds_to_receive,
)
from trioserve.bench.report import Machine
from trioserve.bench.server_settings import DisaggregatedSettings
from trioserve.contracts.errors import StartupError

# This fake server replaces every process. It answers at once, records its flags and requests, and reports received KV.
SERVER = """
import http.server, json, os, pathlib, sys

HERE = pathlib.Path(__file__).parent
METRICS = '''trioserve:kv_transfer_loads_completed_total {0}
trioserve:kv_transfer_loads_failed_total {1}
trioserve:kv_transfer_blocks_received_total {0}0.0
trioserve:kv_transfer_bytes_received_total {0}e+06
trioserve:kv_transfer_load_seconds_total {2}
'''
looks = 0

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global looks
        looks += self.path == "/metrics"  # the counters grow between any two reads
        metrics = METRICS.format(looks, looks // 6, looks * 0.0005)
        self.answer(metrics.encode() if self.path == "/metrics" else b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAILS and len(body["prompt"]) > 40:
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        with (HERE / "asked").open("a") as file:
            print(ROLE, len(body["prompt"]), body["max_tokens"], file=file)
        event = b'data: {"choices": [{"text": "a"}]}\\n\\n'
        last = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\\n\\ndata: [DONE]\\n\\n'
        self.answer(event * body["max_tokens"] + last)

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass

FAILS = os.environ.get("PRETEND_TO_FAIL")
words = sys.argv[1:]
ROLE = words[0] if "--role" not in words else words[words.index("--role") + 1]
with (HERE / "started").open("a") as file:
    print(os.getpid(), *words, file=file)
port = int(words[words.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

SETTINGS = DisaggregatedSettings(
    concurrency=2, output_tokens=50, requests=3, rate_per_second=1000.0, long_prompt_tokens=64, threads=4, rounds=2
)


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    (tmp_path / "trioserve").mkdir()
    (tmp_path / "trioserve/__init__.py").touch()
    (tmp_path / "trioserve/__main__.py").write_text(SERVER)
    for package in ("bench", "contracts", "trio_tools"):  # The process that makes plain copies imports these modules.
        (tmp_path / "trioserve" / package).symlink_to(Path(__file__).parents[2] / "trioserve" / package)
    monkeypatch.chdir(tmp_path)  # `python -m` searches the working folder first, so it finds the fake server there.
    return tmp_path / "trioserve"


@pytest.mark.slow
def test_server_and_pair_get_the_same_load_in_turn(fakes, tmp_path, capsys):
    assert main(SETTINGS.__class__(**{**_fields(SETTINGS), "json_path": str(tmp_path / "report.json")})) == 0

    started = [line.split() for line in (fakes / "started").read_text().splitlines()]
    one, prefill, decode, router = (line[1:] for line in started)
    assert one[:3] == ["serve", "--threads", "4"]
    for words, role in ((prefill, "prefill"), (decode, "decode")):
        assert words[:5] == ["serve", "--role", role, "--threads", "2"]
        assert json.loads(words[6]) == {"kv_connector": "tcp"}
    assert router[0] == "route"
    assert [f"p=http://127.0.0.1:{prefill[-1]}", f"d=http://127.0.0.1:{decode[-1]}"] == [router[2], router[4]]
    for line in started:  # All processes have ended.
        with pytest.raises(ProcessLookupError):
            os.kill(int(line[0]), 0)

    asked = [line.split() for line in (fakes / "asked").read_text().splitlines()]
    longs = [line for line in asked if line[1] == "64"]
    # First come five transfers without other requests. Of each four prompts after them, the first is a warm-up.
    assert [line[0] for line in longs] == ["route"] * 5 + (["serve"] * 4 + ["route"] * 4) * 2
    assert {tuple(line[1:]) for line in asked if line not in longs} == {("32", "50")}

    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["is_pair"] for each in report["rounds"]] == [False, True, False, True]
    assert report["copy"]["bytes"] == 1_000_000
    text = capsys.readouterr().out
    assert "5 transfers over tcp without other requests: 50 blocks, 5.0 MB at 2.00 GB/s; 1 failed." in text
    assert "A plain socket copy of 1.0 MB" in text
    assert "1 transfers over tcp under the load above: 10 blocks, 1.0 MB at 2.00 GB/s; 0 failed." in text


def test_failed_request_ends_the_comparison_of_a_pair_with_one_server(fakes, monkeypatch, capsys):
    monkeypatch.setenv("PRETEND_TO_FAIL", "1")
    assert main(SETTINGS) == 1
    assert "a request failed: status 500" in capsys.readouterr().err


def test_server_that_does_not_start_is_reported_with_its_last_log_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "trioserve").mkdir()
    (tmp_path / "trioserve/__init__.py").touch()
    (tmp_path / "trioserve/__main__.py").write_text("import sys; sys.exit('no such model')")
    monkeypatch.chdir(tmp_path)
    assert main(SETTINGS) == 2
    assert "did not become ready; the last line of its log: no such model" in capsys.readouterr().err


def test_report_says_that_no_kv_was_transferred():
    nothing = TransferFigures(transfers=0, blocks=0, bytes=0, seconds=0.0, failures=7)
    machine = Machine(cpu="a CPU", cores=2, python="3.11", platform="Linux")
    copy = CopyFigures(bytes=1, seconds=[1.0])
    report = DisaggregatedReport(
        settings=SETTINGS, date="today", machine=machine, rounds=[], alone=nothing, loaded=nothing, copy=copy
    )
    assert "No KV was transferred over tcp without other requests: 7 transfers failed." in disaggregated_text(report)


def test_socket_copy_transfers_all_bytes():
    with copying_process(3_000_000) as port:
        assert seconds_to_receive(port, 3_000_000) > 0
        with pytest.raises(ConnectionError, match="1 of 3000001 bytes"):
            seconds_to_receive(port, 3_000_001)


@pytest.mark.parametrize(
    ("field", "value"), [("connector", "pigeon"), ("threads", 1), ("rate_per_second", 0.0), ("long_prompt_tokens", 8)]
)
def test_values_out_of_range_are_refused_by_the_comparison(field, value):
    with pytest.raises(StartupError):
        DisaggregatedSettings(**{field: value})


def _fields(settings):
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
