"""Fixtures: helper modules, and groups of real processes."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trioserve.model.parallel.collectives import make_shared_memory
from trioserve_kernels.native import NoNativeKernels, load_library

PROGRAM = Path(__file__).with_name("rank_program.py")
SECONDS_MAX = 120


@pytest.fixture(scope="session")
def thread_ranks() -> ModuleType:
    """Return the module thread_ranks."""
    # pytest's importlib mode leaves sys.path alone, so helper modules are loaded by path.
    spec = importlib.util.spec_from_file_location("thread_ranks", Path(__file__).with_name("thread_ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rank_program() -> ModuleType:
    """Return the module rank_program."""
    spec = importlib.util.spec_from_file_location("rank_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def group() -> Callable[..., list[Any]]:
    """Return a function that runs a case of rank_program in one process per rank and returns all results."""
    try:
        load_library()  # compiles the kernels if necessary
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")
    return run_group


def run_group(case: str, size: int, *arguments: Any) -> list[Any]:
    descriptor = make_shared_memory(size)
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, case, str(rank), str(size), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
        )
        for rank in range(size)
    ]
    os.close(descriptor)
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(arguments))
            process.stdin.close()
            process.stdin = None
        outputs = [process.communicate(timeout=SECONDS_MAX)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * size, "a rank failed: see its stderr"
    return [pickle.loads(answer) for answer in outputs]
