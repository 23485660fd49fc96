"""Tests the host store as a task of an engine: threads run its work by lanes, and are abandoned at its end."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trioserve.connectors.host import block_files
from trioserve.connectors.host.block_files import BlockFiles
from trioserve.connectors.host.copying import block_bytes
from trioserve.connectors.host.policy import host_settings_from
from trioserve.connectors.host.transport import HostConnector, make_connector
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, Loaded, LoadFailed, Released
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages

SIZE = SMALL_LAYOUT.block_size
FOREIGN = 999


def request(name: str, prompt: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=0,
    )


class HeldThreads:
    """Threads that wait until the test lets them run.

    Attributes:
        waiting: Work that was passed to a thread and is not done.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], trio.Event, list[Any]]] = []
        self.is_held = False

    async def run(self, work: Callable[[], Any]) -> Any:
        if not self.is_held:
            await trio.lowlevel.checkpoint()
            return work()
        entry: tuple[Callable[[], Any], trio.Event, list[Any]] = (work, trio.Event(), [])
        self.waiting.append(entry)
        await entry[1].wait()
        return entry[2][0]

    def proceed(self, index: int = 0) -> None:
        """Run the work of one thread, even if its caller has been cancelled."""
        work, done, results = self.waiting.pop(index)
        results.append(work())
        done.set()


class Here:
    """A running connector with a cache of 16 blocks."""

    def __init__(self, *, threads: HeldThreads | None, options: dict[str, Any]) -> None:
        self.pages = MemoryPages(16)
        self.woken = trio.Event()
        self.threads = threads
        setup = ConnectorSetup(engine_id="e", role="both", pages=self.pages, options=options, wake=self._wake)
        if threads is None:
            self.host = make_connector(setup)
        else:
            settings = host_settings_from(options, SMALL_LAYOUT)
            self.host = HostConnector(settings, self.pages, self._wake, run_in_thread=threads.run)

    def _wake(self) -> None:
        self.woken.set()

    async def reports(self) -> list[object]:
        await self.woken.wait()
        self.woken = trio.Event()
        return list(self.host.progress())

    def finish(self, name: str, tokens: tuple[int, ...]) -> bool:
        blocks = [BlockIndex(index) for index in range(len(tokens) // SIZE)]
        self.pages.fill(blocks, seed=1)
        return self.host.request_finished(request(name, tokens), blocks, tokens, FinishReason.STOP)

    async def save(self, name: str, tokens: tuple[int, ...]) -> list[bytes]:
        """Save blocks and return their content. The blocks then belong to another request."""
        assert self.finish(name, tokens)
        kept = [self.pages.content(index) for index in range(len(tokens) // SIZE)]
        assert await self.reports() == [Released(RequestId(name))]
        self.pages.fill(range(len(kept)), FOREIGN)
        return kept

    def start_load(self, name: str, tokens: tuple[int, ...]) -> None:
        """Start a load to blocks from 8 on."""
        asked = request(name, (*tokens, 7))
        assert self.host.num_matched_tokens(asked, 0) == len(tokens)
        table = [BlockIndex(8 + index) for index in range(len(tokens) // SIZE + 1)]
        self.host.start_load(asked, table, 0, len(tokens))

    def loaded(self, count: int) -> list[bytes]:
        return [self.pages.content(8 + index) for index in range(count)]


A, B, C = (tuple(range(start, start + 2 * SIZE)) for start in (0, 100, 200))


@asynccontextmanager
async def running(**how: Any) -> AsyncIterator[Here]:
    how.setdefault("threads", HeldThreads())
    how.setdefault("options", {"memory_bytes": 10_000})
    here = Here(**how)
    async with trio.open_nursery() as nursery:
        await nursery.start(here.host.run)
        yield here
        nursery.cancel_scope.cancel()


async def all_settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_finished_request_is_saved_and_loaded_again(autojump_clock):
    async with running() as here:
        kept = await here.save("a", A)
        here.start_load("b", A)
        assert await here.reports() == [Loaded(RequestId("b"), 8)]
        assert here.loaded(2) == kept
        assert list(here.host.progress()) == []


async def test_worker_threads_copy_and_the_event_loop_does_not(tmp_path):
    options = {"memory_bytes": 10_000, "directory": str(tmp_path), "directory_gib": 1}
    threads: set[int] = set()
    async with running(threads=None, options=options) as here:
        read, view = here.pages.read, here.pages.view

        def noting(call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: threads.add(threading.get_ident()) or call(*arguments)

        here.pages.read, here.pages.view = noting(read), noting(view)
        kept = await here.save("a", A)
        here.start_load("b", A)
        assert await here.reports() == [Loaded(RequestId("b"), 8)]
        assert here.loaded(2) == kept
    assert threads
    assert threading.get_ident() not in threads


async def test_directory_in_use_is_refused_with_a_sentence(tmp_path):
    files = BlockFiles(tmp_path, SMALL_LAYOUT)
    files.open(10**9)
    options = {"memory_bytes": 10_000, "directory": str(tmp_path), "directory_gib": 1}
    here = Here(threads=HeldThreads(), options=options)
    with pytest.raises(StartupError, match="is used by another engine"):
        await here.host.run(task_status=trio.TASK_STATUS_IGNORED)
    files.close()


async def test_block_files_survive_a_restart(autojump_clock, tmp_path):
    options = {"memory_bytes": 10_000, "directory": str(tmp_path), "directory_gib": 1}
    async with running(options=options) as here:
        kept = await here.save("a", A)
        await all_settled()
        assert here.host.counts()["host_written"] == 2
    async with running(options=options) as here:
        here.start_load("b", A)
        assert await here.reports() == [Loaded(RequestId("b"), 8)]
        assert here.loaded(2) == kept
        assert here.host.counts()["host_loaded_from_files"] == 2


async def test_hanging_disk_does_not_block_loads_from_memory(autojump_clock, tmp_path):
    options = {
        "memory_bytes": 4 * block_bytes(SMALL_LAYOUT),
        "directory": str(tmp_path),
        "directory_gib": 1,
    }
    async with running(options=options) as here:
        for name, tokens in (("a", A), ("b", B), ("c", C)):  # Memory is full, so block a is evicted.
            await here.save(name, tokens)
            await all_settled()
        here.threads.is_held = True
        here.start_load("a2", A)
        await all_settled()
        here.threads.is_held = False
        here.start_load("c2", C)
        assert await here.reports() == [Loaded(RequestId("c2"), 8)]
        here.threads.proceed()
        assert await here.reports() == [Loaded(RequestId("a2"), 8)]


async def test_threads_of_a_cancelled_connector_change_no_memory_and_no_file(autojump_clock, tmp_path):
    options = {"memory_bytes": 10_000, "directory": str(tmp_path), "directory_gib": 1}
    async with running(options=options) as here:
        await here.save("a", A)
        await all_settled()
        here.threads.is_held = True
        here.start_load("b", A)
        assert here.finish("c", C)
        await all_settled()
        here.pages.fill(range(16), FOREIGN)
        before = [here.pages.content(block) for block in range(16)]
        assert len(here.threads.waiting) == 2
    reads: list[int] = []
    here.pages.read = lambda layer, block: reads.append(block)
    while here.threads.waiting:
        here.threads.proceed()
    assert [here.pages.content(block) for block in range(16)] == before
    assert not reads
    assert list(here.host.progress()) == []
    files = BlockFiles(tmp_path, SMALL_LAYOUT)
    files.open(10**9)  # The ended connector has released the lock.
    files.close()


async def test_error_in_a_host_thread_ends_one_transfer_and_not_the_engine(autojump_clock, caplog):
    async with running() as here:
        kept = await here.save("a", A)

        def broken(*_: object) -> None:
            raise MemoryError("no memory is left")

        view, here.pages.view = here.pages.view, broken
        here.start_load("b", A)
        assert await here.reports() == [LoadFailed(RequestId("b"), "MemoryError: no memory is left")]
        here.pages.view = view
        read, here.pages.read = here.pages.read, broken
        assert here.finish("c", C)
        assert await here.reports() == [Released(RequestId("c"))]
        assert here.host.num_matched_tokens(request("d", C), 0) == 0
        here.pages.read = read
        assert [record.message.split(" request=")[0] for record in caplog.records] == [
            "blocks not loaded",
            "blocks not saved",
        ]
        here.start_load("e", A)
        assert await here.reports() == [Loaded(RequestId("e"), 8)]
        assert here.loaded(2) == kept
        here.host.store.memory.check(reserved_bytes=0)


async def test_long_load_runs_in_batches(autojump_clock, monkeypatch):
    """An abandoned load ends after its current batch."""
    monkeypatch.setattr("trioserve.connectors.host.jobs.BATCH_BYTES", block_bytes(SMALL_LAYOUT))
    async with running() as here:
        kept = await here.save("a", A)
        here.threads.is_held = True
        here.start_load("b", A)
        await all_settled()
        here.threads.proceed()
        await all_settled()
        assert here.loaded(1) == kept[:1]
        before = here.pages.content(9)
        here.host.load_abandoned(RequestId("b"))
        here.threads.proceed()
        assert await here.reports() == [LoadFailed(RequestId("b"), "the request does not need it any more")]
        assert here.pages.content(9) == before


# --- a directory that other programs change ---


def bytes_on_disk(directory) -> int:
    return sum(path.stat().st_size for path in directory.glob("kv-*/*.kv"))


def used(here: Here) -> int:
    return int(here.host.counts()["host_directory_bytes_used"])


DAMAGES: dict[str, Callable[[Any], None]] = {
    "removed": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, 10),
    "replaced": lambda path: path.write_bytes(b"x" * 5000),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_unexpected_change_of_the_directory_triggers_a_count_of_all_files(autojump_clock, tmp_path, damage):
    options = {"memory_bytes": 10_000, "directory": str(tmp_path), "directory_gib": 1}
    async with running(options=options) as here:
        kept = {tokens: await here.save(name, tokens) for name, tokens in (("a", A), ("b", B), ("c", C))}
        await all_settled()
    async with running(options=options) as here:  # After this restart, memory is empty.
        assert used(here) == bytes_on_disk(tmp_path) > 0
        files = sorted(tmp_path.glob("kv-*/*.kv"))
        for path in files:
            DAMAGES[damage](path)
        here.start_load("d", A)
        [report] = await here.reports()
        assert isinstance(report, LoadFailed)
        await all_settled()
        assert used(here) == bytes_on_disk(tmp_path) == 0
        await here.save("e", B)
        await all_settled()
        assert used(here) == bytes_on_disk(tmp_path) > 0
        here.start_load("f", B)
        assert await here.reports() == [Loaded(RequestId("f"), 8)]
        assert here.loaded(2) == kept[B]


async def test_next_write_detects_a_removed_directory(autojump_clock, tmp_path):
    options = {"memory_bytes": 10_000, "directory": str(tmp_path / "kv"), "directory_gib": 1}
    async with running(options=options) as here:
        await here.save("a", A)
        await all_settled()
        shutil.rmtree(tmp_path / "kv")
        await here.save("b", B)
        await all_settled()
        assert used(here) == bytes_on_disk(tmp_path / "kv") > 0


async def test_failed_writes_are_counted_and_logged_as_two_lines(autojump_clock, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "trioserve.connectors.host")
    options = {"memory_bytes": 10_000, "directory": str(tmp_path), "directory_gib": 1}
    async with running(options=options) as here:
        await here.save("a", A)
        await all_settled()
        before = used(here)
        with monkeypatch.context() as patch:
            patch.setattr(block_files, "_write_all", _refuse)
            for name, tokens in (("b", B), ("c", C)):
                await here.save(name, tokens)
                await all_settled()
                assert used(here) == bytes_on_disk(tmp_path) == before
        await here.save("d", tuple(range(300, 300 + 2 * SIZE)))
        await all_settled()
        assert used(here) == bytes_on_disk(tmp_path) > before
    messages = [record.getMessage().split(",")[0] for record in caplog.records]
    assert messages == ["blocks not written to the directory", "blocks are written to the directory again"]


def _refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
