"""Tests of ranks on other machines. This machine runs them, but they connect over TCP and use gloo collectives."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import trioserve
from trioserve import SamplingParams
from trioserve.ranks.host import keep_ranks

pytestmark = pytest.mark.slow

SECONDS_MAX = 180.0
KEY = "a key that nobody guesses"
SAMPLING = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)


def two_free_ports() -> int:
    """Return the first of two adjacent free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


@asynccontextmanager
async def opened(path: Path, cpu_kernels: str, shape: tuple[int, int] = (1, 2)) -> AsyncIterator[Any]:
    """Open an engine. The second half of its ranks is on the other machine.

    Args:
        shape: number of stages, and ranks of each.
    """
    count = shape[0] * shape[1]
    far = range(count // 2, count)
    port = two_free_ports()
    with trio.fail_after(SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(
                    keep_ranks, far, path=path, host="127.0.0.1", port=port, key=KEY, at_once=min(len(far), shape[1])
                )
            )
            async with trioserve.open_engine(
                str(path),
                pipeline_parallel_size=shape[0],
                tensor_parallel_size=shape[1],
                nnodes=2,
                master_port=port,
                ranks_key=KEY,
                dtype="float32",
                kv_cache_memory=0.01,
                threads=2,
                cpu_kernels=cpu_kernels,  # type: ignore[arg-type]
            ) as engine:
                yield engine
            nursery.cancel_scope.cancel()


async def generate(engine: Any) -> list[int]:
    tokens: list[int] = []
    async with engine.generate("Once upon a time", SAMPLING) as stream:
        async for delta in stream:
            tokens += delta.token_ids
    return tokens


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
async def test_remote_ranks_generate_the_same_output_as_one_process(
    cpu_kernels: str, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model("llama")
    async with trioserve.open_engine(
        str(path),
        dtype="float32",
        kv_cache_memory=0.01,
        threads=2,
        cpu_kernels=cpu_kernels,  # type: ignore[arg-type]
    ) as engine:
        expected = await generate(engine)
    async with opened(path, cpu_kernels) as engine:
        assert await generate(engine) == expected


@pytest.mark.parametrize(("cpu_kernels", "shape"), [("native", (2, 1)), ("torch", (2, 1)), ("native", (2, 2))])
async def test_remote_stages_generate_the_same_output_as_one_process(
    cpu_kernels: str, shape: tuple[int, int], tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model("llama")
    async with trioserve.open_engine(
        str(path),
        dtype="float32",
        kv_cache_memory=0.01,
        threads=1,
        cpu_kernels=cpu_kernels,  # type: ignore[arg-type]
    ) as engine:
        expected = await generate(engine)
    async with opened(path, cpu_kernels, shape) as engine:
        assert await generate(engine) == expected
        free = engine.stats().blocks_used
        with trio.CancelScope() as scope:
            async with engine.generate("The sea", SAMPLING) as stream:
                async for _delta in stream:
                    scope.cancel()
        assert await generate(engine) == expected
        assert engine.stats().blocks_used == free == 0


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
async def test_killed_remote_rank_reconnects_and_the_stream_resumes(
    shape: tuple[int, int], tiny_model: Callable[[str], Path], rank_pids: Callable[[], list[int]]
) -> None:
    async with opened(tiny_model("llama"), "native", shape) as engine:
        expected = await generate(engine)
        before = rank_pids()
        assert len(before) == 2
        tokens: list[int] = []
        async with engine.generate("Once upon a time", SAMPLING) as stream:
            async for delta in stream:
                if len(tokens) < 10 <= len(tokens) + len(delta.token_ids):
                    os.kill(before[-1], signal.SIGKILL)
                tokens += delta.token_ids
        assert tokens == expected
        assert not set(rank_pids()) & set(before)
