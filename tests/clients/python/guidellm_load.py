"""Runs guidellm: six requests, two at a time, with prompts of this script. Nothing is downloaded."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _env import MODEL, ROOT

with tempfile.TemporaryDirectory() as folder:
    data, report = Path(folder, "data.jsonl"), Path(folder, "report.json")
    data.write_text("".join(json.dumps({"prompt": f"What is 17 + 2{number}?"}) + "\n" for number in range(6)))
    run = subprocess.run(
        [
            Path(sys.executable).parent / "guidellm",
            "run",
            f"--backend=kind=openai_http,target={ROOT},model={MODEL}",
            "--profile=kind=concurrent,streams=2",
            "--constraint=kind=max_requests,count=6",
            f"--data=kind=json_file,path={data}",
            f"--output=kind=json,path={report}",
            "--disable-console-interactive",
        ],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    print(run.stdout[-3000:], run.stderr[-3000:])
    assert run.returncode == 0
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 6, benchmark["requests"]
    assert not benchmark["requests"]["errored"]
print("ok")
