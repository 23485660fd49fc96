"""The host store's life: its directory, and one task a lane that has the jobs done in threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trioserve.connectors.host.block_files import BlockFiles
from trioserve.connectors.host.policy import HostPolicy, Lane
from trioserve.connectors.host.settings import HostSettings, host_settings_from
from trioserve.contracts.kv_transfer import ConnectorSetup, KVPages, Started

__all__ = ["HostConnector", "RunInThread", "make_connector"]

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls it in a thread, and returns or raises what that does. A caller who is cancelled may leave the thread alone."""


class HostConnector(HostPolicy):
    """A RunningConnector (contracts.kv_transfer). window_tokens: as in ConnectorSetup. run_in_thread: None: Trio's
    threads, one for each lane."""

    knows_windows = True

    def __init__(
        self,
        settings: HostSettings,
        pages: KVPages,
        wake: Callable[[], None],
        *,
        run_in_thread: RunInThread | None = None,
        window_tokens: int | None = None,
    ) -> None:
        directory = settings.directory
        files = None if directory is None else BlockFiles(directory, pages.layout)
        super().__init__(settings, pages, wake, files=files, window_tokens=window_tokens)
        self._run_in_thread = run_in_thread or _threads()
        self._has_work = {lane: trio.Event() for lane in Lane}

    async def run(self, *, task_status: Started) -> None:
        files = self._files
        self.on_work = lambda lane: self._has_work[lane].set()
        try:
            if files is not None:
                self.store.found(await self._run_in_thread(lambda: files.open(self.store.files.bytes_max)))
            async with trio.open_nursery() as nursery:
                for lane in Lane:
                    nursery.start_soon(self._work_off, lane)
                task_status.started()
        finally:
            self.close()
            if files is not None:
                files.close()

    @trio.lowlevel.enable_ki_protection
    async def _work_off(self, lane: Lane) -> None:
        while True:
            while (job := self.begin_job(lane)) is not None:
                while (work := job.next_work()) is not None:
                    try:
                        result = await self._run_in_thread(work)
                    except Exception as error:
                        self.fail(job, error)
                    else:
                        self.take(job, result)
                self.job_ended(job)
                await trio.lowlevel.checkpoint()
            self._has_work[lane] = trio.Event()
            await self._has_work[lane].wait()


def make_connector(setup: ConnectorSetup) -> HostConnector:
    """A ConnectorFactory. Options: memory_gib or memory_bytes; directory, with directory_gib or directory_bytes."""
    settings = host_settings_from(setup.options, setup.pages.layout)
    return HostConnector(settings, setup.pages, setup.wake, window_tokens=setup.window_tokens)


def _threads() -> RunInThread:
    limiter = trio.CapacityLimiter(len(Lane))

    async def run_in_thread(work: Callable[[], Any]) -> Any:
        # Left alone when cancelled: closed gates keep it from the engine's blocks, and what it writes into a file
        # becomes one only when it is complete.
        return await trio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)

    return run_in_thread
