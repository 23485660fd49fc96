"""Test of how compute threads share pieces of work, written in C++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trioserve_kernels.build import SOURCES, CannotBuild, find_compiler, supported_levels


@pytest.mark.slow
def test_compute_threads_take_each_piece_once_and_own_pieces_first(tmp_path: Path) -> None:
    """Run team_check.cpp. In one of its cases, a single thread takes its own pieces and those of all other threads."""
    if not supported_levels():
        pytest.skip("needs Linux on x86-64 with AVX2")
    try:
        compiler = find_compiler()
    except CannotBuild as error:
        pytest.skip(str(error))
    program = tmp_path / "team_check"
    sources = (Path(__file__).with_name("team_check.cpp"), SOURCES / "team.cpp")
    subprocess.run([compiler, "-std=c++17", "-O2", "-pthread", "-I", SOURCES, *sources, "-o", program], check=True)
    checked = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout
