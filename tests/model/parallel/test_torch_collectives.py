"""Tests of ranks in processes that use gloo. NCCL needs two GPUs, and is not tested."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.parallel.torch_collectives import TorchCollectives
from trioserve.model.runner import ModelRunner

pytestmark = pytest.mark.slow

Checkpoints = Callable[..., Path]
PROCESS_SECONDS_MAX = 120.0
SCRIPT = Path(__file__).with_name("gloo_rank.py")


@pytest.fixture(scope="module")
def gloo_rank() -> ModuleType:
    import importlib.util

    spec = importlib.util.spec_from_file_location("gloo_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def in_processes(size: int, checkpoint: Path) -> list[dict[str, Any]]:
    """Run a process for each rank, and return what each printed."""
    port = free_port()
    command = [sys.executable, str(SCRIPT), str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(checkpoint)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        ended = [process.communicate(timeout=PROCESS_SECONDS_MAX) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def test_gloo_ranks_compute_the_same_tokens_as_one_process(tiny_checkpoint: Checkpoints, gloo_rank: ModuleType) -> None:
    path = tiny_checkpoint("llama")
    first, second = in_processes(2, path)
    runner = ModelRunner.load(open_checkpoint(path), gloo_rank.settings())
    try:
        expected = gloo_rank.generated(runner)
    finally:
        runner.close()
    assert [len(tokens) for tokens in expected.values()] == [24, 24]
    assert first["tokens"] == expected
    assert first == second
    assert first["abandoned"] is True
    assert first["votes"] == [False, True, False]
    assert first["gathered"] == [[[0, 7]], [[1, 7]]]
    assert first["numpy"] == [[0], [1]]
    assert first["halves"] == [3.0, 1.0]


def test_gloo_sum_uses_rank_order(tiny_checkpoint: Checkpoints) -> None:
    found = in_processes(3, tiny_checkpoint("llama"))
    # 1e8 + 1 is 1e8 in float32. Another order would leave 1.
    assert [rank["sum"] for rank in found] == [[0.0, 3.0]] * 3


def test_connection_error_of_ranks_names_the_address() -> None:
    port = free_port()
    with pytest.raises(StartupError, match=f"rank 1 of 2 cannot connect to the others at 127.0.0.1:{port} within"):
        TorchCollectives(master_addr="127.0.0.1", master_port=port, rank=1, size=2, timeout_seconds=0.2)
