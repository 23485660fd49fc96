"""Tests the transfer of KV blocks between two processes with each connector that supports it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import trio

from trioserve.connectors.settings import find_connector
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, Loaded, LoadFailed
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.connector_conformance.side import MemoryPages

SECONDS_MAX = 60  # The limit is long, because other work may use the machine.
NEEDS_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
CONNECTORS = ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)]


def holder_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_holder", Path(__file__).with_name("kv_holder.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = holder_script()


class Holder:
    """A process that runs kv_holder.py and holds the same blocks for each of several requests.

    Attributes:
        params: transfer parameters, one per request.
    """

    def __init__(self, process: trio.Process, lines: AsyncIterator[str], params: list[KVTransferParams]) -> None:
        self.process = process
        self.params = params
        self._lines = lines

    async def next_line(self) -> str:
        with trio.fail_after(SECONDS_MAX):
            return await anext(self._lines)


async def lines_of(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    early = b""
    while content := await stream.receive_some():
        *lines, early = (early + content).split(b"\n")
        for line in lines:
            yield line.decode()


@asynccontextmanager
async def holder(connector: str, request_count: int, block_count: int) -> AsyncIterator[Holder]:
    command = [sys.executable, str(Path(SCRIPT.__file__ or "")), connector, str(request_count), str(block_count)]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = lines_of(process.stdout)
    try:
        with trio.fail_after(SECONDS_MAX):
            params = [msgspec.json.decode(await anext(lines), type=KVTransferParams) for _ in range(request_count)]
        yield Holder(process, lines, params)
        await process.stdin.aclose()
        with trio.fail_after(SECONDS_MAX):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await lines.aclose()  # type: ignore[attr-defined]
        await process.stdin.aclose()
        await process.stdout.aclose()


class Reader:
    def __init__(self, connector: str, block_count: int) -> None:
        self.pages = MemoryPages(block_count, SCRIPT.LAYOUT)
        self.block_count = block_count
        self.woken = trio.Event()
        self.reports: list[Loaded | LoadFailed] = []
        self.connector = find_connector(connector)(
            ConnectorSetup(engine_id="reader", role="decode", pages=self.pages, options={}, wake=self._wake)
        )

    def _wake(self) -> None:
        self.woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        await self.connector.run(task_status=task_status)

    def begin(self, name: str, params: KVTransferParams) -> None:
        token_count = self.block_count * SCRIPT.LAYOUT.block_size
        request = EngineRequest(
            id=RequestId(name),
            prompt_token_ids=(1,) * (token_count + 1),
            sampling=SamplingParams(temperature=0.0),
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=0,
            kv_transfer=params,
        )
        assert self.connector.num_matched_tokens(request, 0) == token_count
        blocks = [BlockIndex(block) for block in range(self.block_count)]
        self.connector.start_load(request, blocks, 0, token_count)

    async def next_report(self) -> Loaded | LoadFailed:
        with trio.fail_after(SECONDS_MAX):
            while not self.reports:
                await self.woken.wait()
                self.woken = trio.Event()
                self.reports += self.connector.progress()
        return self.reports.pop(0)


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_blocks_are_loaded_from_another_process_and_released_there(connector):
    expected = MemoryPages(20, SCRIPT.LAYOUT)
    expected.fill(range(20), SCRIPT.SEED)
    async with holder(connector, 3, 20) as there, trio.open_nursery() as nursery:
        reader = Reader(connector, 20)
        await nursery.start(reader.run)
        for index, params in enumerate(there.params):
            for layer in range(SCRIPT.LAYOUT.layer_count):
                for block in range(20):
                    reader.pages.write(layer, BlockIndex(block), 0, memoryview(bytes(100)))
            reader.begin(f"r{index}", params)
            assert await reader.next_report() == Loaded(RequestId(f"r{index}"), 320)
            assert all(reader.pages.content(block) == expected.content(block) for block in range(20))
            assert await there.next_line() == f"released held-{index}"
        nursery.cancel_scope.cancel()
    assert there.process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_kill_of_a_holding_process_fails_only_loads_from_that_process(connector):
    async with trio.open_nursery() as nursery:
        reader = Reader(connector, 20)
        await nursery.start(reader.run)
        async with holder(connector, 2, 20) as there:
            reader.begin("before", there.params[0])
            assert isinstance(await reader.next_report(), Loaded)
            there.process.kill()
            reader.begin("after", there.params[1])
            assert isinstance(await reader.next_report(), LoadFailed)
        # A new process with the same engine id replaces the killed process.
        async with holder(connector, 1, 20) as there:
            reader.begin("again", there.params[0])
            assert await reader.next_report() == Loaded(RequestId("again"), 320)
        nursery.cancel_scope.cancel()
