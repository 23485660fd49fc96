"""Clients as people use them, unchanged, against a whole server whose model follows a script.

Each is a script below `python` or `node`, and runs in the environment that clients.toml names; `make clients` builds
those. Without them a script runs where its library is at hand, and is skipped elsewhere. TRIOSERVE_CLIENTS: where the
environments are. TRIOSERVE_URL: another server to try them on, such as a router.
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
SECONDS_MAX = 280  # for the slowest to import what it needs, on a shared machine
AT_HAND = {
    "openai": "openai",
    "anthropic": "anthropic",
    "ollama": "ollama",
}  # by the beginning of a script's name, what `make test` has
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

# It asks whether a request without a model is refused.
FLAGS = {"llm_comply_suite": ("--require-model",)}

pytestmark = pytest.mark.slow


def python_of(script: str) -> str:
    """The interpreter that has the script's library."""
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
def test_a_python_client_is_served(script: str, server_url: Callable[..., str]) -> None:
    python = python_of(script)
    run([python, str(HERE / "python" / f"{script}.py")], server_url(*FLAGS.get(script, ())))


@pytest.mark.parametrize("script", sorted(file.stem for file in (HERE / "node").glob("*.mjs") if file.stem != "env"))
def test_a_node_client_is_served(script: str, server_url: Callable[..., str]) -> None:
    node = shutil.which("node")
    if node is None or not (HERE / "node" / "node_modules").exists():
        pytest.skip("there is no node, or no node_modules beside the scripts: make clients installs them")
    run([node, str(HERE / "node" / f"{script}.mjs")], server_url())


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_every_family_survive_the_parser(family: str, server_url: Callable[..., str]) -> None:
    python = python_of("canitoolcall_probe")
    run([python, str(HERE / "python" / "canitoolcall_probe.py")], server_url("--family", family))


@pytest.mark.parametrize(
    "script", ["openai_chat", "openai_responses", "openai_batches", "anthropic_messages", "ollama_chat"]
)
def test_a_router_before_two_servers_is_as_good(script: str, router_url: str) -> None:
    python = python_of(script)
    run([python, str(HERE / "python" / f"{script}.py")], router_url)
