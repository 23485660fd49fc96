"""Runs llm-comply with its three formats. Failed image tests are ignored, because the model reads only text."""

import json
import subprocess
import sys
from pathlib import Path

from _env import BASE_URL, KEY, MODEL

PROGRAM = Path(sys.executable).parent / "llm-comply"
failed = []
for name in ("openai-chat", "open-responses", "anthropic"):
    run = subprocess.run(
        [PROGRAM, "--base-url", BASE_URL, "--api-key", KEY, "--model", MODEL, "--format", name, "--json"],
        capture_output=True,
        text=True,
    )
    print(name, run.stdout[-2000:], run.stderr[-2000:])
    for result in json.loads(run.stdout)["results"]:
        if result["status"] == "failed" and not result["id"].endswith("image-input"):
            failed.append((name, result["id"], result.get("errors")))
assert not failed, failed
print("ok")
