"""Tests unmodified client libraries against a whole server whose model follows a script.

Each client has a script in the folder `python` or `node`, and runs in the environment that clients.toml names. `make
clients` builds the environments. Without its environment, a script runs only if its library is installed in the
environment of the tests, and is skipped otherwise. The variable TRIOSERVE_CLIENTS sets the folder of the environments.
TRIOSERVE_URL sets another server, such as a router.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CLIENTS: dict[str, Any] = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
ENVIRONMENTS = Path(os.environ.get("TRIOSERVE_CLIENTS", HERE.parents[1] / "build" / "clients"))
SECONDS_MAX = 280  # The timeout is long, because the slowest client needs minutes for its imports on a shared machine.
AT_HAND = {
    "openai": "openai",
    "anthropic": "anthropic",
    "ollama": "ollama",
}  # Libraries that `make test` installs, by the first word of the script's name.
FAMILIES = (
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "openai",
    "pythonic",
    "qwen3_coder",
)

# The script llm_comply_suite checks that a request without a model is refused.
FLAGS = {"llm_comply_suite": ("--require-model",)}

pytestmark = pytest.mark.slow


def python_of(script: str) -> str:
    """Return the interpreter that has the library of the script, or skip the test."""
    name = CLIENTS["python"][script]
    python = ENVIRONMENTS / name / "bin" / "python"
    if python.exists():
        return str(python)
    module = AT_HAND.get(script.partition("_")[0])
    if script == "openai_agents" or module is None or importlib.util.find_spec(module) is None:
        pytest.skip(f"there is no environment {name} in {ENVIRONMENTS}: make clients builds it")
    return sys.executable


def run(command: list[str], url: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRIOSERVE_URL": os.environ.get("TRIOSERVE_URL", url), "NO_COLOR": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX
    )
    said = "\n".join(done.stdout.splitlines()[-80:])
    assert done.returncode == 0, said
    assert said.splitlines()[-1] == "ok", said


@pytest.mark.parametrize("script", CLIENTS["python"])
def test_python_client_script_passes(script: str, server_url: Callable[..., str]) -> None:
    python = python_of(script)
    run([python, str(HERE / "python" / f"{script}.py")], server_url(*FLAGS.get(script, ())))


@pytest.mark.parametrize("script", sorted(file.stem for file in (HERE / "node").glob("*.mjs") if file.stem != "env"))
def test_node_client_script_passes(script: str, server_url: Callable[..., str]) -> None:
    node = shutil.which("node")
    if node is None or not (HERE / "node" / "node_modules").exists():
        pytest.skip("there is no node, or no node_modules beside the scripts: make clients installs them")
    run([node, str(HERE / "node" / f"{script}.mjs")], server_url())


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_calls_of_each_model_family_are_parsed(family: str, server_url: Callable[..., str]) -> None:
    python = python_of("canitoolcall_probe")
    run([python, str(HERE / "python" / "canitoolcall_probe.py")], server_url("--family", family))


@pytest.mark.parametrize(
    "script",
    ["openai_chat", "openai_responses", "openai_websocket", "openai_batches", "anthropic_messages", "ollama_chat"],
)
def test_client_script_passes_with_a_router_before_two_servers(script: str, router_url: str) -> None:
    python = python_of(script)
    run([python, str(HERE / "python" / f"{script}.py")], router_url)
