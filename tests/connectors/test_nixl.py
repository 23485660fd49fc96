"""Tests of NIXL transfers with a fake agent whose READs complete on demand, also after their loads have ended."""

from __future__ import annotations

import ctypes
import importlib.util
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from trioserve.connectors import nixl
from trioserve.connectors import nixl as nixl_connector
from trioserve.connectors.nixl import NixlConnector, NixlOptions, Places, make_connector
from trioserve.connectors.nixl_agent import AgentError, Region, regions_of
from trioserve.connectors.settings import read_options
from trioserve.connectors.stream import policy
from trioserve.connectors.stream.reader import BROKE_OFF
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, HoldKind, KVLayout, Loaded, LoadFailed, Released
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages

COUNT = 15
BLOCKS_THERE, BLOCKS_HERE = [3, 0, 2, 1], [4, 6, 5, 7]


class FakeRead:
    def __init__(self, here: list[Region], there: list[Region]) -> None:
        self.here, self.there = here, there
        self.is_done = False

    def land(self) -> None:
        """Copy the current content of the source to the target."""
        for here, there in zip(self.here, self.there, strict=True):
            ctypes.memmove(here.address, there.address, here.byte_count)
        self.is_done = True


class FakeAgent:
    """Agent for both sides of a transfer. Both sides are this process, so addresses are valid on both.

    Attributes:
        reads: All reads of the class, in order.
        is_held: True if reads wait for `land`.
        failures: Number of next reads that fail at once.
    """

    reads: list[FakeRead]
    is_held: bool
    failures: int
    removed: list[str]

    def __init__(self, name: str, kind: str, regions: list[Region], landing: bytearray) -> None:
        self.metadata = name.encode()
        self.landing = (ctypes.c_char * len(landing)).from_buffer(landing)
        self.landing_address = ctypes.addressof(self.landing)

    def add(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove(self, name: str) -> None:
        FakeAgent.removed.append(name)

    def begin_read(self, name: str, kind: str, here: list[Region], there: list[Region]) -> FakeRead:
        assert name == "trioserve-there"
        if FakeAgent.failures:
            FakeAgent.failures -= 1
            raise AgentError("nixl READ: no")
        read = FakeRead(here, there)
        FakeAgent.reads.append(read)
        if not FakeAgent.is_held:
            read.land()
        return read

    def is_done(self, read: FakeRead) -> bool:
        return read.is_done

    def end(self, read: FakeRead) -> bool:
        return read.is_done

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def fake_agent(monkeypatch):
    FakeAgent.reads, FakeAgent.is_held, FakeAgent.failures, FakeAgent.removed = [], False, 0, []
    monkeypatch.setattr(nixl, "Agent", FakeAgent)
    monkeypatch.setattr(nixl, "_never_freed", [])
    monkeypatch.setattr(nixl_connector, "find_spec", lambda name: object())
    monkeypatch.setattr(policy, "RETRY_SECONDS", (0.0,) * 5)  # Only test_policy.py tests the delays of retries.


class Engine:
    def __init__(self, name: str, layout: KVLayout = SMALL_LAYOUT, **options: Any) -> None:
        self.pages = MemoryPages(8, layout)
        self.woken = trio.Event()
        self.reports: list[object] = []
        self.connector: NixlConnector = make_connector(
            ConnectorSetup(
                engine_id=name, role="both", pages=self.pages, options=options, wake=lambda: self.woken.set()
            )
        )

    async def until(self, is_so: Callable[[], object]) -> None:
        """Take reports until the condition holds."""
        with trio.fail_after(60):
            while not is_so():
                self.woken = trio.Event()
                self.reports += self.connector.progress()
                if not is_so():
                    with trio.move_on_after(0.01):  # Some changes cause no report, so check again soon.
                        await self.woken.wait()

    def ends(self) -> list[object]:
        return [report for report in self.reports if isinstance(report, Loaded | LoadFailed | Released)]


@asynccontextmanager
async def engines(layout: KVLayout = SMALL_LAYOUT, **options: Any) -> AsyncIterator[list[Engine]]:
    sides = [Engine("there"), Engine("here", layout, **options)]
    async with trio.open_nursery() as nursery:
        for side in sides:
            await nursery.start(partial(_run, side.connector))
        yield sides
        nursery.cancel_scope.cancel()


async def _run(connector: NixlConnector, *, task_status: trio.TaskStatus[None]) -> None:
    await connector.run(task_status=task_status)


def request(name: str, params: KVTransferParams) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(range(COUNT + 1)),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=3,
        stop_token_ids=frozenset(),
        seed=0,
        kv_transfer=params,
    )


def begin(there: Engine, here: Engine, name: str = "r", seed: int = 1) -> None:
    there.pages.fill(BLOCKS_THERE, seed)
    held = request(name, KVTransferParams(do_remote_decode=True))
    blocks = [BlockIndex(block) for block in BLOCKS_THERE]
    assert there.connector.request_finished(held, blocks, range(COUNT), FinishReason.LENGTH)
    params = there.connector.transfer_params(held.id)
    assert params is not None
    here.connector.start_load(request(name, params), [BlockIndex(block) for block in BLOCKS_HERE], 0, COUNT)


def contents(side: Engine, blocks: list[int]) -> list[bytes]:
    return [side.pages.content(block) for block in blocks]


def is_equal(there: Engine, here: Engine) -> bool:
    last = COUNT % 4 * SMALL_LAYOUT.token_bytes  # The last block is not full.
    *full, (part_there, part_here) = zip(contents(there, BLOCKS_THERE), contents(here, BLOCKS_HERE), strict=True)
    size = 4 * SMALL_LAYOUT.token_bytes
    return all(a == b for a, b in full) and all(
        part_there[at : at + last] == part_here[at : at + last] for at in range(0, len(part_there), size)
    )


@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 40}, {"landing_bytes": 4_096, "reads_max": 1}])
async def test_held_blocks_are_read_and_confirmed(options):
    async with engines(**options) as (there, here):
        begin(there, here)
        await here.until(here.ends)
        assert here.ends() == [Loaded(RequestId("r"), COUNT)]
        assert is_equal(there, here)
        await there.until(there.ends)
        assert there.ends() == [Released(RequestId("r"))]
        counts, sent = here.connector.counts(), there.connector.counts()
        assert counts["bytes_received_total"] == sent["bytes_sent_total"] == COUNT * 2 * SMALL_LAYOUT.token_bytes
        assert counts["blocks_received_total"] == sent["blocks_sent_total"] == 4
        assert sent["sends_completed_total"] == 1


async def test_nixl_load_converts_another_dtype_and_block_size():
    layout = msgspec.structs.replace(SMALL_LAYOUT, dtype="bfloat16", block_size=8)
    async with engines(layout) as (there, here):
        begin(there, here)
        await here.until(here.ends)
        assert here.ends() == [Loaded(RequestId("r"), COUNT)]
        theirs = bytes(there.pages.read(0, BlockIndex(3)))[:4]
        ours = bytes(here.pages.read(0, BlockIndex(4)))[:2]
        assert ours in (theirs[2:], (int.from_bytes(theirs[2:], "little") + 1).to_bytes(2, "little"))


async def test_hold_that_ends_during_a_read_fails_the_load_without_writing():
    FakeAgent.is_held = True
    async with engines() as (there, here):
        begin(there, here)
        before = contents(here, BLOCKS_HERE)
        await here.until(lambda: FakeAgent.reads)
        there.connector.hold_expired(RequestId("r"), HoldKind.SEND)
        there.pages.fill(BLOCKS_THERE, seed=2)  # The blocks now belong to another request.
        for read in FakeAgent.reads:
            read.land()
        await here.until(here.ends)
        (failed,) = here.ends()
        assert isinstance(failed, LoadFailed)
        assert "held" in failed.message
        assert contents(here, BLOCKS_HERE) == before
        assert there.connector.counts()["bytes_sent_total"] == 0


@pytest.mark.parametrize("expires", [False, True])
async def test_window_of_an_ended_load_stays_reserved_for_its_read(expires):
    FakeAgent.is_held = True
    async with engines(reads_max=1) as (there, here):
        begin(there, here)
        await here.until(lambda: FakeAgent.reads)
        here.connector.load_abandoned(RequestId("r"))
        if expires:
            here.connector.hold_expired(RequestId("r"), HoldKind.LOAD)
        here.pages.fill(BLOCKS_HERE, seed=7)
        before = contents(here, BLOCKS_HERE)
        await there.until(there.ends)  # The reader notifies the holder at once.
        begin(there, here, "next", seed=3)
        await here.until(lambda: here.connector.counts()["heartbeats_sent_total"] >= 2)
        assert len(FakeAgent.reads) == 1  # The next read waits for the only window.
        FakeAgent.is_held = False
        FakeAgent.reads[0].land()
        assert contents(here, BLOCKS_HERE) == before
        await here.until(lambda: Loaded(RequestId("next"), COUNT) in here.reports)
        assert is_equal(there, here)
        ends = [report for report in here.ends() if report.request_id == "r"]  # type: ignore[attr-defined]
        assert [type(report) for report in ends] == ([] if expires else [LoadFailed])


async def test_failed_read_is_retried_with_a_new_connection_to_the_agent(caplog):
    FakeAgent.failures = 2
    async with engines() as (there, here):
        begin(there, here)
        await here.until(here.ends)
        assert here.ends() == [Loaded(RequestId("r"), COUNT)]
        assert is_equal(there, here)
        assert FakeAgent.removed == ["trioserve-there"] * 2
        FakeAgent.failures = 100
        begin(there, here, "s")
        await here.until(lambda: len(here.ends()) == 2)
        failed = here.ends()[1]
        assert isinstance(failed, LoadFailed)
        assert BROKE_OFF in failed.message
        assert "nixl READ: no" in caplog.text


async def test_read_that_never_ends_fails_its_load_and_keeps_its_buffer(monkeypatch):
    monkeypatch.setattr(nixl, "READ_SECONDS_MAX", 0.01)
    FakeAgent.is_held = True
    async with engines(reads_max=2) as (there, here):
        begin(there, here)
        await here.until(here.ends)
        assert isinstance(here.ends()[0], LoadFailed)
        assert len(FakeAgent.reads) == 2  # Further reads found no free window.
    assert len(nixl._never_freed) == 1


async def test_blocks_without_address_are_sent_over_the_connection(monkeypatch):
    monkeypatch.setattr(nixl, "regions_of", lambda pages: ("DRAM", []))
    async with engines() as (there, here):
        begin(there, here)
        await here.until(here.ends)
        assert here.ends() == [Loaded(RequestId("r"), COUNT)]
        assert is_equal(there, here)
        assert FakeAgent.reads == []


@pytest.mark.parametrize(
    "places",
    [
        Places(b"trioserve-there", "DRAM", (Region(0, 2**40),), (0, 1, 2, 3)),
        Places(b"trioserve-there", "DRAM", (Region(0, 2**40),) * 2, (0, 1, 2)),
        Places(b"trioserve-there", "DRAM", (Region(0, 2**40),) * 2, (0, 1, 2, -1)),
        Places(b"trioserve-there", "DRAM", (Region(0, 100),) * 2, (0, 1, 2, 3)),
    ],
)
async def test_invalid_memory_addresses_of_a_peer_are_not_read(monkeypatch, places):
    async with engines() as (there, here):
        monkeypatch.setattr(nixl, "Places", lambda *arguments: places)
        monkeypatch.setattr(nixl, "receive_body", _receive_body_as(Places))
        begin(there, here)
        await here.until(here.ends)
        assert isinstance(here.ends()[0], LoadFailed)
        assert FakeAgent.reads == []


def _receive_body_as(kind: type) -> Any:
    from trioserve.connectors.stream.peer_connection import receive_body

    async def receive(wire, head, body, *bounds):
        return await receive_body(wire, head, body if isinstance(body, type) else kind, *bounds)

    return receive


def test_memory_regions_cover_the_blocks():
    kind, regions = regions_of(MemoryPages(8))
    block_bytes = SMALL_LAYOUT.block_size * SMALL_LAYOUT.token_bytes
    assert kind == "DRAM"
    assert [(region.byte_count, region.device) for region in regions] == [(8 * block_bytes, 0)] * 2
    assert regions_of(MemoryPages(8, has_views=False)) == ("DRAM", [])

    class OnDevice(MemoryPages):
        def region(self, layer: int) -> tuple[int, int, int]:
            return 4096 * (layer + 1), 100, 3

    assert regions_of(OnDevice(8)) == ("VRAM", [Region(4096, 100, 3), Region(8192, 100, 3)])


@pytest.mark.parametrize("options", [{"landing_bytes": 100}, {"landing_bytes": 2**35}, {"landing": 1}, {"port": -1}])
def test_invalid_option_of_nixl_is_refused(options):
    with pytest.raises(StartupError):
        read_options(NixlOptions, options)


async def test_failed_start_of_nixl_is_reported_in_one_sentence(monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(StartupError, match="cannot be listened on"):
        await Engine("there", port=taken.getsockname()[1]).connector.run(task_status=trio.TASK_STATUS_IGNORED)

    def no_ucx(*arguments: object) -> None:
        raise AgentError("nixl cannot be started: no UCX")

    monkeypatch.setattr(nixl, "Agent", no_ucx)
    with pytest.raises(StartupError, match="nixl cannot be started: no UCX"):
        await Engine("there").connector.run(task_status=trio.TASK_STATUS_IGNORED)


def test_missing_nixl_package_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr(nixl_connector, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install .*\[nixl\]"):
        Engine("there")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_agent_reads_memory_with_the_real_package():
    """Only this test uses nixl itself: an agent reads memory of another agent into its landing buffer."""
    from trioserve.connectors.nixl_agent import Agent

    pages = MemoryPages(4)
    pages.fill(range(4), seed=1)
    kind, regions = regions_of(pages)
    landing = bytearray(4_096)
    here, there = Agent("here", "DRAM", [], landing), Agent("there", kind, regions, bytearray(4_096))
    name = here.add(there.metadata)
    assert name == "there"
    read = here.begin_read(name, kind, [Region(here.landing_address, 32)], [Region(regions[1].address + 64, 32)])
    while not here.is_done(read):
        pass
    assert here.end(read)
    assert landing[:32] == bytes(pages.read(1, BlockIndex(1)))[:32]
    with pytest.raises(AgentError):
        here.begin_read(name, kind, [Region(here.landing_address, 32)], [Region(8, 32)])
    here.remove(name)
    here.close()
    there.close()
