"""Runs the probe of canitoolcall, which compares streamed and unstreamed tool calls."""

import subprocess
import sys
from pathlib import Path

from _env import BASE_URL, MODEL

run = subprocess.run(
    [Path(sys.executable).parent / "canitoolcall", "probe", "--base-url", BASE_URL, "--model", MODEL],
    capture_output=True,
    text=True,
)
print(run.stdout, run.stderr)
assert run.returncode == 0
print("ok")
