"""Tests Ctrl-C during the download of a model: the program ends even if the download hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAIT_SECONDS_MAX = 60
# This module replaces huggingface_hub. Like the real package, it has threads for which Python waits at its exit.
STAND_IN = """
import concurrent.futures, threading

def snapshot_download(name, **options):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(print, "downloading", flush=True).result()
        pool.submit(threading.Event().wait).result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "hello"]], ids=["serve", "generate"])
def test_one_ctrl_c_ends_the_program_during_a_download(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "huggingface_hub.py").write_text(STAND_IN)
    process = subprocess.Popen(
        [sys.executable, "-m", "trioserve", *command, "--model", "org/some-model"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "downloading\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in told
