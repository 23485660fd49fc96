"""Runs the programs in examples/ with the real model, in the way in which a user runs them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

SAYS = {
    "agent_over_websocket.py": ["  weather({", "  add({", " of them cached", "KV blocks in use: 0"],
    "agent_session.py": ["weather({", "add({", "prompt tokens from the cache: "],
    "asyncio_first_response_wins.py": ["first: ", "others: ['running', 'running']", "KV blocks in use: 0"],
    "fastapi_app.py": ["a story: ", "models: ['smollm2']", "the client has left", "KV blocks in use: 0"],
    "fastapi_on_trio.py": ["a story: ", "models: ['smollm2']", "the client has left", "KV blocks in use: 0"],
    "deadline.py": ["KV blocks in use: 0"],
    "deadline_in_the_queue.py": ["first: running", "second: waiting, 0 KV blocks", "DEADLINE", "left in the queue: 0"],
    "first_response_wins.py": ["first: ", "KV blocks in use: 0"],
    "same_bits.py": ["in a batch: True", "as a prompt: True"],
    "train_digits.py": ["autoencoder: step 1 of 1, loss", "transformer: step 3 of 3, loss", "the model is in"],
    "grpo.py": ["iteration 2: reward ", " cut off, ", " continued, ", "leaked blocks: 0"],
    "leave_during_prefill.py": ["in the middle of its prompt: LiveRequestView(", "a step later, KV blocks in use: 0"],
}


FEW_ROLLOUTS = ["--iterations", "2", "--prompts", "2", "--group", "2", "--tokens", "4"]
ARGUMENTS = {  # The training is short, because its quality does not matter in this test.
    "grpo.py": FEW_ROLLOUTS,
    "train_digits.py": ["--steps", "4"],
}

SECONDS_MAX = 300  # Most examples take a few seconds. Training is slow while other tests run at the same time.
RUN_ELSEWHERE = ["ray_data.py"]  # The file tests/ray/test_ray_data.py runs this example.
PUBLIC_MODULES = {"trioserve", "trioserve.asyncio", "trioserve.rollouts", "trioserve.testing"}


def test_every_example_is_run_by_a_test():
    assert sorted([*SAYS, *RUN_ELSEWHERE]) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_imports_only_public_names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trioserve":
            assert node.module in PUBLIC_MODULES, f"from {node.module}"
            public = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= {*public}, f"from {node.module}"
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names if alias.name.partition(".")[0] == "trioserve"}
            assert names <= PUBLIC_MODULES, names


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_prints_the_expected_lines(name, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", EXAMPLES / name, *ARGUMENTS.get(name, [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for words in SAYS[name]:
        assert words in ran.stdout, ran.stdout
    if name == "train_digits.py":
        check_model_of_digits(tmp_path / "build" / "digits")


@pytest.mark.slow
def test_grpo_example_runs_over_http():
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", EXAMPLES / "grpo.py", "--http", *FEW_ROLLOUTS],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("iteration ")]
    assert len(lines) == 2
    assert all(line.endswith("leaked blocks: 0") for line in lines), lines


def check_model_of_digits(path):
    """Check that diffusers loads the trained pipeline and draws two digits."""
    from diffusers import DiTPipeline

    pipeline = DiTPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    labels = pipeline.get_label_ids(["7", "0"])
    assert labels == [7, 0]
    seven, nought = pipeline(labels, num_inference_steps=2).images
    assert seven.size == nought.size == (32, 32)
