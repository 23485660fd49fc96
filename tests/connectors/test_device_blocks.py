"""KV transfers of engines whose blocks are on a device: few copies of many blocks, none in the thread of Trio."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.lowlevel
import trio.testing

from trioserve.connectors import loopback, nixl
from trioserve.connectors.host.transport import make_connector as make_host_connector
from trioserve.connectors.loopback import make_connector as make_loopback_connector
from trioserve.connectors.nixl_agent import AgentError
from trioserve.connectors.stream import policy, staging
from trioserve.connectors.stream.transport import make_connector as make_tcp_connector
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, HoldKind, KVLayout, Loaded, LoadFailed, Released
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.between_steps import ThreadedCopies
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages
from trioserve.trio_tools.worker_thread import WorkerThread

LAYOUT = msgspec.structs.replace(SMALL_LAYOUT, layer_count=5)
COUNT = 4 * LAYOUT.block_size - 1  # The last of four blocks is not full.


class DevicePages(MemoryPages):
    """Blocks on a device. Every access of the host to a single block raises an error."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        super().__init__(16, layout, has_views=False)

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        raise AssertionError("the host read a block of a device")

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        raise AssertionError("the host wrote a block of a device")


class Copies:
    """Copies of a device, which a test can stop before they take effect.

    Attributes:
        calls: for each call: its kind, number of layers, and number of blocks.
    """

    def __init__(self, pages: DevicePages) -> None:
        self._pages = pages
        self.calls: list[tuple[str, int, int]] = []
        self._may_run = trio.Event()
        self._may_run.set()

    def hold(self) -> None:
        self._may_run = trio.Event()

    def proceed(self) -> None:
        self._may_run.set()

    async def fetch(self, layers: range, blocks: Sequence[BlockIndex]) -> memoryview:
        self.calls.append(("fetch", len(layers), len(blocks)))
        await self._may_run.wait()
        read = partial(MemoryPages.read, self._pages)
        return memoryview(b"".join(bytes(read(layer, block)) for layer in layers for block in blocks))

    async def store(
        self,
        layers: range,
        blocks: Sequence[BlockIndex],
        content: memoryview,
        last_token_count: int,
        is_wanted: Callable[[], bool],
    ) -> bool:
        self.calls.append(("store", len(layers), len(blocks)))
        await self._may_run.wait()
        if not is_wanted():
            return False
        size = LAYOUT.block_size * LAYOUT.token_bytes
        for place, (layer, block) in enumerate((layer, block) for layer in layers for block in blocks):
            count = last_token_count if block == blocks[-1] else LAYOUT.block_size
            part = content[place * size : place * size + count * LAYOUT.token_bytes]
            MemoryPages.write(self._pages, layer, block, 0, part)
        return True


class Engine:
    """An engine whose blocks are on a device, as its core sees it."""

    def __init__(self, name: str, make: Callable[[ConnectorSetup], Any], **options: Any) -> None:
        self.pages = DevicePages()
        self.copies = Copies(self.pages)
        self.woken = trio.Event()
        self.connector = make(
            ConnectorSetup(
                engine_id=name,
                role="both",
                pages=self.pages,
                options=options,
                wake=lambda: self.woken.set(),
                copies=self.copies,
            )
        )

    async def next_report(self) -> object:
        with trio.fail_after(60):
            while True:
                found = [
                    report for report in self.connector.progress() if isinstance(report, Loaded | LoadFailed | Released)
                ]
                if found:
                    [report] = found
                    return report
                await self.woken.wait()
                self.woken = trio.Event()


@asynccontextmanager
async def running(*sides: Engine) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        for side in sides:
            await nursery.start(partial(_run, side))
        yield
        nursery.cancel_scope.cancel()


async def _run(side: Engine, *, task_status: trio.TaskStatus[None]) -> None:
    await side.connector.run(task_status=task_status)


@pytest.fixture(autouse=True)
def _retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RETRY_SECONDS", (0.0,) * 5)  # Only test_policy.py tests the delays of retries.


def request(name: str, token_count: int, params: KVTransferParams | None = None) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(range(token_count + 1)),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=3,
        stop_token_ids=frozenset(),
        seed=0,
        kv_transfer=params,
    )


THERE, HERE = [BlockIndex(block) for block in (3, 1, 4, 8)], [BlockIndex(block) for block in (9, 2, 6, 5)]


def begin(there: Engine, here: Engine) -> None:
    there.pages.fill(THERE, seed=1)
    held = request("r", COUNT, KVTransferParams(do_remote_decode=True))
    assert there.connector.request_finished(held, THERE, range(COUNT), FinishReason.LENGTH)
    params = there.connector.transfer_params(held.id)
    assert params is not None
    here.connector.start_load(request("r", COUNT, params), HERE, 0, COUNT)


def transferred(there: Engine, here: Engine) -> list[bool]:
    """Return for each token of the blocks whether it is the same in both engines."""
    size = LAYOUT.token_bytes
    return [
        all(
            there.pages.content(a)[at : at + size] == here.pages.content(b)[at : at + size]
            for at in range(token * size, LAYOUT.layer_count * LAYOUT.block_size * size, LAYOUT.block_size * size)
        )
        for a, b in zip(THERE, HERE, strict=True)
        for token in range(LAYOUT.block_size)
    ]


@pytest.mark.parametrize("chunk_bytes", (40, 100_000))
async def test_transfer_needs_one_copy_at_each_side(chunk_bytes: int) -> None:
    there = Engine("there", make_tcp_connector)
    here = Engine("here", make_tcp_connector, chunk_bytes=chunk_bytes)
    async with running(there, here):
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), COUNT)
        assert transferred(there, here) == [True] * COUNT + [False]
        assert there.copies.calls == [("fetch", 5, 4)]
        assert here.copies.calls == [("store", 5, 4)]
        assert await there.next_report() == Released(RequestId("r"))


async def test_copies_have_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE_BYTES", 2 * 4 * LAYOUT.block_size * LAYOUT.token_bytes)
    there, here = (Engine(name, make_tcp_connector) for name in ("there", "here"))
    async with running(there, here):
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), COUNT)
        assert transferred(there, here) == [True] * COUNT + [False]
        assert there.copies.calls == [("fetch", 2, 4), ("fetch", 2, 4), ("fetch", 1, 4)]
        assert here.copies.calls == [("store", 2, 4), ("store", 2, 4), ("store", 1, 4)]


@pytest.mark.parametrize("ends_by", ("abandoned", "expired"))
async def test_load_that_ends_while_the_device_copies_writes_nothing_later(ends_by: str) -> None:
    there, here = (Engine(name, make_tcp_connector) for name in ("there", "here"))
    async with running(there, here):
        here.copies.hold()
        begin(there, here)
        while not here.copies.calls:
            await trio.testing.wait_all_tasks_blocked()
        before = [here.pages.content(block) for block in HERE]
        if ends_by == "abandoned":
            here.connector.load_abandoned(RequestId("r"))
            assert isinstance(await here.next_report(), LoadFailed)
        else:
            here.connector.hold_expired(RequestId("r"), HoldKind.LOAD)
        here.copies.proceed()
        await trio.testing.wait_all_tasks_blocked()
        assert [here.pages.content(block) for block in HERE] == before
        assert list(here.connector.progress()) == []


async def test_hold_that_ends_while_the_device_copies_sends_nothing() -> None:
    there, here = (Engine(name, make_tcp_connector) for name in ("there", "here"))
    async with running(there, here):
        there.copies.hold()
        begin(there, here)
        while not there.copies.calls:
            await trio.testing.wait_all_tasks_blocked()
        there.connector.hold_expired(RequestId("r"), HoldKind.SEND)
        there.copies.proceed()
        assert isinstance(await here.next_report(), LoadFailed)
        assert here.copies.calls == []
        assert list(there.connector.progress()) == []


async def test_copy_that_fails_ends_its_transfer_only() -> None:
    there, here = (Engine(name, make_tcp_connector) for name in ("there", "here"))
    async with running(there, here):

        async def fail(layers: range, blocks: Sequence[BlockIndex]) -> memoryview:
            raise MemoryError("no pinned memory")

        there.copies.fetch, fetch = fail, there.copies.fetch  # type: ignore[method-assign]
        begin(there, here)
        assert isinstance(await here.next_report(), LoadFailed)
        assert await there.next_report() == Released(RequestId("r"))
        there.copies.fetch = fetch  # type: ignore[method-assign]
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), COUNT)


async def test_layers_that_were_not_written_before_the_connection_ended_are_received_again() -> None:
    there, here = (Engine(name, make_tcp_connector) for name in ("there", "here"))
    async with running(there, here):
        store, failures = here.copies.store, [trio.BrokenResourceError("the connection ended")]

        async def fail_once(*arguments: Any) -> bool:
            if failures:
                raise failures.pop()
            return await store(*arguments)

        here.copies.store = fail_once  # type: ignore[method-assign]
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), COUNT)
        assert transferred(there, here) == [True] * COUNT + [False]
        assert [kind for kind, *_ in there.copies.calls] == ["fetch", "fetch"]


# --- engines in one program ---


@pytest.mark.parametrize("chunk_bytes", (40, 100_000))
async def test_loopback_transfer_needs_one_device_copy_at_each_side(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "CHUNK_BYTES", chunk_bytes)
    there, here = (Engine(name, make_loopback_connector) for name in ("there", "here"))
    async with running(there, here):
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), COUNT)
        assert transferred(there, here) == [True] * COUNT + [False]
        assert there.copies.calls == [("fetch", 5, 4)]
        assert here.copies.calls == [("store", 5, 4)]
        assert await there.next_report() == Released(RequestId("r"))
        counts = there.connector.counts(), here.connector.counts()
        assert counts[0]["blocks_sent_total"] == counts[1]["blocks_received_total"] == 4
        bytes_moved = COUNT * LAYOUT.token_bytes * LAYOUT.layer_count
        assert counts[0]["bytes_sent_total"] == counts[1]["bytes_received_total"] == bytes_moved


@pytest.mark.parametrize("device", ("there", "here"))
async def test_loopback_transfer_between_a_device_and_host_memory_copies_all_blocks(device: str) -> None:
    there, here = (Engine(name, make_loopback_connector) for name in ("there", "here"))
    other = here if device == "there" else there
    other.connector.pages = other.pages = MemoryPages(16, LAYOUT)  # type: ignore[assignment]
    other.connector.setup = msgspec.structs.replace(other.connector.setup, pages=other.pages, copies=None)
    async with running(there, here):
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), COUNT)
        assert transferred(there, here) == [True] * COUNT + [False]
        assert there.copies.calls == ([("fetch", 5, 4)] if device == "there" else [])
        assert here.copies.calls == ([("store", 5, 4)] if device == "here" else [])


@pytest.mark.parametrize("side", ("fetch", "store"))
async def test_loopback_load_abandoned_during_a_device_copy_writes_nothing_later(side: str) -> None:
    there, here = (Engine(name, make_loopback_connector) for name in ("there", "here"))
    async with running(there, here):
        held = there if side == "fetch" else here
        held.copies.hold()
        begin(there, here)
        while not held.copies.calls:
            await trio.testing.wait_all_tasks_blocked()
        before = [here.pages.content(block) for block in HERE]
        here.connector.load_abandoned(RequestId("r"))
        assert isinstance(await here.next_report(), LoadFailed)
        assert await there.next_report() == Released(RequestId("r"))
        held.copies.proceed()
        await trio.testing.wait_all_tasks_blocked()
        assert [here.pages.content(block) for block in HERE] == before


async def test_loopback_load_fails_if_the_hold_ends_during_a_device_copy() -> None:
    there, here = (Engine(name, make_loopback_connector) for name in ("there", "here"))
    async with running(there, here):
        there.copies.hold()
        begin(there, here)
        while not there.copies.calls:
            await trio.testing.wait_all_tasks_blocked()
        there.connector.hold_expired(RequestId("r"), HoldKind.SEND)
        there.copies.proceed()
        report = await here.next_report()
        assert report == LoadFailed(RequestId("r"), "the hold of the blocks ended while they were read")
        assert here.copies.calls == []


# --- the host store ---


async def test_host_store_saves_and_loads_with_one_copy_each() -> None:
    engine = Engine("e", make_host_connector, memory_bytes=100_000)
    tokens = tuple(range(4 * LAYOUT.block_size))
    async with running(engine):
        engine.pages.fill(THERE, seed=1)
        kept = [engine.pages.content(block) for block in THERE]
        finished = request("a", len(tokens))
        assert engine.connector.request_finished(finished, THERE, tokens, FinishReason.STOP)
        assert await engine.next_report() == Released(RequestId("a"))
        asked = request("b", len(tokens))
        assert engine.connector.num_matched_tokens(asked, 0) == len(tokens)
        engine.connector.start_load(asked, HERE, 0, len(tokens))
        assert await engine.next_report() == Loaded(RequestId("b"), len(tokens))
        assert [engine.pages.content(block) for block in HERE] == kept
        assert engine.copies.calls == [("fetch", 5, 4), ("store", 5, 4)]


async def test_host_store_drops_what_it_fetched_from_an_expired_hold() -> None:
    engine = Engine("e", make_host_connector, memory_bytes=100_000)
    tokens = tuple(range(4 * LAYOUT.block_size))
    async with running(engine):
        engine.copies.hold()
        assert engine.connector.request_finished(request("a", len(tokens)), THERE, tokens, FinishReason.STOP)
        while not engine.copies.calls:
            await trio.testing.wait_all_tasks_blocked()
        engine.connector.hold_expired(RequestId("a"), HoldKind.SEND)  # It does not wait for the device.
        engine.copies.proceed()
        while engine.connector.store.counts.unsaved < 4:
            await trio.lowlevel.checkpoint()
        assert engine.connector.num_matched_tokens(request("b", len(tokens)), 0) == 0


# --- threads ---


class LaunchedCopies:
    """Launches copies as CudaPages does. A copy ends when the test lets it end.

    Attributes:
        launched_in: names of the threads that launched copies.
        waited_in: names of the threads that prepared memory or waited for copies.
    """

    layout = LAYOUT

    def __init__(self) -> None:
        self.launched_in: list[str] = []
        self.waited_in: list[str] = []
        self.is_over = threading.Event()

    def pinned(self, byte_count: int, content: memoryview | None = None) -> bytes:
        self.waited_in.append(threading.current_thread().name)
        return bytes(byte_count if content is None else content)

    def begin_fetch(self, layers: range, blocks: Sequence[int], host: bytes) -> LaunchedCopies:
        self.launched_in.append(threading.current_thread().name)
        assert len(host) == len(layers) * len(blocks) * LAYOUT.block_size * LAYOUT.token_bytes
        return self

    def begin_store(self, layers: range, blocks: Sequence[int], host: bytes, last_token_count: int) -> LaunchedCopies:
        return self.begin_fetch(layers, blocks, host)

    def wait(self) -> memoryview:
        self.waited_in.append(threading.current_thread().name)
        assert self.is_over.wait(60)
        return memoryview(b"content")


async def test_compute_thread_launches_copies_and_other_threads_wait_for_them() -> None:
    launched = LaunchedCopies()
    async with WorkerThread("compute") as compute:
        copies = ThreadedCopies(launched, compute)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copies.fetch, range(2), [BlockIndex(1)])
            while len(launched.waited_in) < 2:
                await trio.lowlevel.checkpoint()
            assert await compute.run(lambda: "a step") == "a step"  # The copy blocks no step either.
            launched.is_over.set()
        content = memoryview(bytes(2 * LAYOUT.block_size * LAYOUT.token_bytes))
        assert await copies.store(range(2), [BlockIndex(1)], content, 4, lambda: True)
        assert not await copies.store(range(2), [BlockIndex(1)], content, 4, lambda: False)
    assert launched.launched_in == ["trioserve-compute"] * 2
    own = threading.current_thread().name
    assert len(launched.waited_in) == 5
    assert not {own, "trioserve-compute"} & set(launched.waited_in)


async def test_cancelled_caller_does_not_wait_for_the_device() -> None:
    launched = LaunchedCopies()
    async with WorkerThread("compute") as compute:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ThreadedCopies(launched, compute).fetch, range(2), [BlockIndex(1)])
                while len(launched.waited_in) < 2:
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert scope.cancelled_caught
        launched.is_over.set()


# --- nixl ---


async def test_gpu_memory_that_nixl_cannot_register_goes_through_host_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[str, int]] = []

    class Agent:
        landing_address = 0

        def __init__(self, name: str, kind: str, regions: list[object], landing: bytearray) -> None:
            made.append((kind, len(regions)))
            if kind == "VRAM":
                raise AgentError("built without CUDA")

    monkeypatch.setattr(nixl, "Agent", Agent)
    pages: Any = DevicePages()
    pages.region = lambda layer: (1000 * layer, 1000, 0)
    policy: Any = SimpleNamespace(setup=SimpleNamespace(pages=pages, engine_id="e"))
    options: Any = SimpleNamespace(reads_max=1, window_bytes=100)
    opened = nixl.Nixl(policy, options)
    await opened.open()
    assert made == [("VRAM", 5), ("DRAM", 0)]
    assert (opened.kind, opened.regions) == ("DRAM", [])  # Readers are then served over the connections.
    assert "nixl cannot register GPU memory" in caplog.text
