"""Tests of the Triton kernels without a GPU: their results in the interpreter, and that they compile."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trioserve_kernels
from trioserve_kernels import pick_kernels
from trioserve_kernels.compile_check import SHARED_BYTES_MAX, read_table

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (pip install trioserve[gpu])")
TESTS_OF_TRITON = Path(__file__).with_name("triton")
# In triton 3.6 with numpy 2.4 or newer, the interpreter fails at any loop whose bounds were loaded.
INTERPRETS = HAS_TRITON and tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) >= (3, 7)


def run(*arguments: str, **environment: str) -> str:
    """Run a Python process. Triton reads TRITON_INTERPRET only when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def interpreted_parts() -> list[str]:
    """Return the Triton tests in parts: each file, and each test of the file with whole models."""
    parts = []
    for path in sorted(TESTS_OF_TRITON.glob("test_*.py")):
        if path.name == "test_whole_model.py":
            names = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            parts += [f"{path.name}::{name}" for name in names]
        else:
            parts.append(path.name)
    return parts


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.skipif(
    HAS_TRITON and not INTERPRETS, reason="the interpreter of this triton does not work with newer numpy"
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: tests/kernels/triton runs on it")
# seconds. All parts together take eight minutes, and several times as long beside other programs.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", interpreted_parts())
def test_triton_tests_pass_in_the_interpreter(part: str) -> None:
    # One interpreted test may take longer than the limit of other tests. The limit of this test bounds it.
    options = ("-q", "--numprocesses", "0", "--timeout", "1800")
    output = run("pytest", *options, f"{TESTS_OF_TRITON}/{part}", TRITON_INTERPRET="1")
    assert " passed" in output


@pytest.mark.slow
@NEEDS_TRITON
def test_every_triton_kernel_compiles_for_hopper() -> None:
    output = run("trioserve_kernels.compile_check")
    folder = Path(trioserve_kernels.__path__[0]) / "triton"
    for file in folder.glob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("def ") and "_kernel(" in line:
                assert line.removeprefix("def ").split("(")[0] in output


@pytest.mark.slow
@NEEDS_TRITON
@pytest.mark.timeout(900)  # seconds. It takes 90, or 3 if Triton's cache has the kernels.
@pytest.mark.parametrize("arch", sorted(SHARED_BYTES_MAX))
def test_registers_and_shared_memory_are_those_of_the_table(arch: int) -> None:
    """The process checks the limits: shared memory of the GPU, and no spilled register in 16 bits."""
    lines = run("trioserve_kernels.compile_check", "--table", "--arch", str(arch)).splitlines()
    compiled = {tuple(line.split(" | ")[:2]): line.split(" | ")[2] for line in lines}
    version, cells = read_table()
    listed = {(kernel, case): cell for (kernel, case, column), cell in cells.items() if column == arch}
    assert compiled.keys() == {key[:2] for key in cells}
    if version == importlib.metadata.version("triton"):
        changed = {key: (cell, listed.get(key)) for key, cell in compiled.items() if cell != listed.get(key)}
        assert not changed, "check the change, then run: python -m trioserve_kernels.compile_check --write"


@NEEDS_TRITON
def test_kernels_are_selected_by_name() -> None:
    assert pick_kernels("triton").NAME == "triton"
    assert pick_kernels("torch").NAME == pick_kernels().NAME == "torch"
