"""Checks the command line of `llm`: a prompt, a schema and a tool."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _env import BASE_URL, KEY, MODEL

LLM = Path(sys.executable).parent / "llm"
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY}

    def llm(*arguments: str) -> str:
        run = subprocess.run([LLM, "-m", "ours", *arguments], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert llm("What is 17 + 25?") == "42"
    assert llm("--no-stream", "What is 17 + 25?") == "42"
    assert json.loads(llm("--schema", "name, age int", "Jason is 25 years old.")) == {"name": "Jason", "age": 25}
    tool = "def get_weather(city: str) -> str:\n    'The weather of a city.'\n    return '18 degrees'\n"
    assert llm("--functions", tool, "What is the weather in Paris?").endswith("It is 18 degrees in Paris.")
print("ok")
