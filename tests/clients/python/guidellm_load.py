"""guidellm: a short load of two requests at a time, counted by itself."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _env import MODEL, ROOT

with tempfile.TemporaryDirectory() as folder:
    run = subprocess.run(
        [
            Path(sys.executable).parent / "guidellm",
            "benchmark",
            "run",
            "--target",
            ROOT,
            "--model",
            MODEL,
            "--profile",
            "concurrent",
            "--rate",
            "2",
            "--max-requests",
            "6",
            "--data",
            str(Path(folder, "data.jsonl")),
            "--outputs",
            "json",
            "--output-dir",
            folder,
            "--disable-console-interactive",
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    print(run.stdout[-3000:], run.stderr[-3000:])
    assert run.returncode == 0
    report = json.loads(next(Path(folder).glob("*.json")).read_text())
    assert report["benchmarks"], report
print("ok")
