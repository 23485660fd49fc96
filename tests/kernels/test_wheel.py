"""Test of a wheel with a compiled level: it is built with the real compiler, and computes without a compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trioserve_kernels.build import CannotBuild, find_compiler, supported_levels

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "kernels", "trioserve")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

COMMANDS = """
import sys, trioserve
from trioserve.cli import main
model = sys.argv[1]
print("imported from", trioserve.__file__)
sys.exit(
    main(["random-checkpoint", "tiny", model])
    or main(["generate", "Hello", "--model", model, "--cpu-kernels", "native", "--max-tokens", "3", "--seed", "1"])
    or main(["doctor"])
)
"""


def compiler_or_skip() -> str:
    try:
        return find_compiler()
    except CannotBuild as error:
        pytest.skip(str(error))


def run(*command: str, **environment: str) -> str:
    """Run a command, and return what it wrote to both streams."""
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def build_wheel(folder: Path, level: str) -> Path:
    """Build a wheel with unoptimized libraries, because optimizing takes most of the time."""
    fast = folder / "fast-compiler"
    fast.write_text(f'#!/bin/sh\nexec {compiler_or_skip()} "$@" -O0\n')
    fast.chmod(0o755)
    sources = folder / "sources"
    sources.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        else:
            shutil.copy(ROOT / part, sources / part)
    run(
        *PIP,
        *("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources)),
        **{**os.environ, "CXX": str(fast), "TRIOSERVE_PREBUILD": level},
    )
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.skipif(not supported_levels(), reason="needs Linux on x86-64 with AVX2")
def test_wheel_with_kernels_computes_without_a_compiler(tmp_path: Path) -> None:
    for module in ("pip", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module} here")
    level = supported_levels()[0]
    wheel = build_wheel(tmp_path, level)
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [name for name in names if name.startswith(f"trioserve_kernels/prebuilt/cpu-{level}-")]
    assert not [name for name in names if name.startswith("tests/")]

    installed, model, nothing = tmp_path / "installed", tmp_path / "model", tmp_path / "nothing"
    options = ("--no-deps", "--no-index", "--no-compile", "--target", str(installed))
    run(*PIP, "install", *options, str(wheel), **os.environ)
    nothing.mkdir()
    # The cache cannot be written, so no library that was compiled elsewhere can be used.
    bare = {"PYTHONPATH": str(installed), "PATH": str(nothing), "HOME": "/proc", "XDG_CACHE_HOME": "/proc/nothing"}
    output = run(sys.executable, "-P", "-c", COMMANDS, str(model), **bare)
    assert f"imported from {installed}" in output
    assert f"native kernels ({level}, " in output
    assert f"came with the package, compiled for {level}" in output
