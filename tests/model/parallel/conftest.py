"""Groups of real processes for the tests of this room."""

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

from trioserve.model.parallel.shared_memory import make_shared_memory
from trioserve_kernels.native import NoNativeKernels, load_library

PROGRAM = Path(__file__).with_name("rank_program.py")
SECONDS_MAX = 120


@pytest.fixture(scope="session")
def thread_ranks() -> ModuleType:
    """The module thread_ranks itself: RankGroup, thread_group."""
    # pytest's importlib mode leaves sys.path alone, so a neighbouring helper is loaded by its path.
    spec = importlib.util.spec_from_file_location("thread_ranks", Path(__file__).with_name("thread_ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rank_program() -> ModuleType:
    """The module rank_program itself: rank_runner, history."""
    spec = importlib.util.spec_from_file_location("rank_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def group() -> Callable[..., list[Any]]:
    """group(case, size, *arguments) -> what rank_program's case gives in each rank, a process of its own each."""
    try:
        load_library()  # compiled here, if need be
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
        told = [process.communicate(timeout=SECONDS_MAX)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * size, "a rank failed: see its stderr"
    return [pickle.loads(answer) for answer in told]
