"""Tests of the startup measurement, with fake servers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trioserve.bench.report import Machine
from trioserve.bench.runner import memory_bytes
from trioserve.bench.server_settings import StartupSettings
from trioserve.bench.startup import Start, StartupReport, main, startup_text
from trioserve.contracts.errors import StartupError

MACHINE = Machine(cpu="a CPU", cores=2, python="3.11", platform="Linux")

# This fake server is ready at the third request. It records its process and its flags.
SERVER = """
import http.server, json, os, pathlib, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.respond(200 if Handler.asked > 2 else 503, {"object": "list", "data": [{"id": "it", "object": "model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.respond(200 if (asked["model"], asked["max_tokens"]) == ("it", 1) else 400, {})

    def respond(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

with pathlib.Path(__file__).with_name("started").open("a") as file:
    print(os.getpid(), *sys.argv[1:], file=file)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
FAILING = "import sys; print('trioserve: the model is not there', file=sys.stderr); sys.exit(1)"


def checkout(folder: Path, program: str) -> Path:
    (folder / "trioserve").mkdir(parents=True)
    (folder / "trioserve/__init__.py").touch()
    (folder / "trioserve/__main__.py").write_text(program)
    (folder / "kernels").mkdir()
    return folder


def starts_of(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "trioserve/started").read_text().splitlines()]


@pytest.mark.slow
def test_both_versions_are_started_in_turn(tmp_path, monkeypatch, capsys):
    here, there = checkout(tmp_path / "here", SERVER), checkout(tmp_path / "there", SERVER)
    monkeypatch.chdir(here)  # `python -m` searches the working folder first, so it finds the fake server there.
    settings = StartupSettings(
        checkouts=(str(there),), server_flags=("--threads", "1"), rounds=2, json_path=str(tmp_path / "report.json")
    )
    assert main(settings) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [start["checkout"] for start in report["starts"]] == ["", str(there)] * 2
    for start in report["starts"]:
        assert 0 < start["ready_seconds"] < 120
        assert start["resident_bytes"] >= start["proportional_bytes"] > 0
        assert len(start["request_seconds"]) == 2
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| this version", f"| {there}"]
    for folder in (here, there):
        assert len(starts_of(folder)) == 3  # The first start of each version is not counted.
        for pid, command, *flags in starts_of(folder):
            assert (command, flags[:-1]) == ("serve", ["--threads", "1", "--port"])
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


@pytest.mark.slow
def test_model_is_read_from_the_disk_before_each_start(tmp_path, monkeypatch, capsys):
    here = checkout(tmp_path / "here", SERVER)
    monkeypatch.chdir(here)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (model / name).write_bytes(os.urandom(3 * 2**20))
    settings = StartupSettings(
        cold_path=str(model), memory_at_hand_gib=0.001, rounds=1, json_path=str(tmp_path / "report.json")
    )
    assert main(settings) == 0
    (start,) = json.loads((tmp_path / "report.json").read_text())["starts"]
    assert 0 < start["read_seconds"] < 60
    head, _line, row, *_ = capsys.readouterr().out.splitlines()
    assert head.endswith("| reading, s | ready to reading |")
    assert float(row.split(" | ")[-1].strip(" |")) == pytest.approx(
        start["ready_seconds"] / start["read_seconds"], abs=0.01
    )


def test_startup_measurement_refuses_a_missing_model(tmp_path):
    with pytest.raises(StartupError, match=r"--cold .* does not exist: name the folder or file of a model"):
        StartupSettings(cold_path=str(tmp_path / "nothing"))


def test_server_that_ends_is_reported_with_its_last_log_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(checkout(tmp_path / "here", FAILING))
    assert main(StartupSettings(rounds=3)) == 2
    assert "last line of its log: trioserve: the model is not there" in capsys.readouterr().err


def test_startup_table_has_medians_and_dashes_for_unknown_values():
    starts = [
        Start(
            checkout="",
            ready_seconds=seconds,
            cpu_seconds=None,
            resident_bytes=bytes_,
            proportional_bytes=None,
            resident_bytes_max=2**30,
        )
        for seconds, bytes_ in ((3.0, 2**20), (1.0, 5 * 2**20), (2.0, 3 * 2**20))
    ]
    report = StartupReport(settings=StartupSettings(label="mine"), date="today", machine=MACHINE, starts=starts)
    assert startup_text(report).splitlines()[2] == "| mine | 2.00 | 1.00 | - | 3 | - | 1024 | - | - |"


def test_memory_of_a_process_is_read_from_proc(tmp_path):
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "status").write_text("Name:\tserver\nVmHWM:\t    30 kB\nVmRSS:\t    20 kB\nThreads:\t3\n")
    assert memory_bytes(7, tmp_path) == (20 * 1024, None, 30 * 1024)
    (folder / "smaps_rollup").write_text("55d0-7ffe ---p 00000000 00:00 0 [rollup]\nRss: 20 kB\nPss:  15 kB\n")
    assert memory_bytes(7, tmp_path) == (20 * 1024, 15 * 1024, 30 * 1024)
    assert memory_bytes(8, tmp_path) == (None, None, None)


def test_folder_without_trioserve_is_refused(tmp_path):
    with pytest.raises(StartupError, match="has no trioserve in it"):
        StartupSettings(checkouts=(str(tmp_path),))
    with pytest.raises(StartupError, match="--memory-at-hand is -1"):
        StartupSettings(memory_at_hand_gib=-1.0)
    with pytest.raises(StartupError, match="--rounds is 0"):
        StartupSettings(rounds=0)
