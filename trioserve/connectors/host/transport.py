"""Connector `host`: opens the directory, and runs one task per lane. Each task runs its jobs in worker threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from trioserve.connectors.host.block_files import BlockFiles
from trioserve.connectors.host.policy import HostPolicy, HostSettings, Lane, host_settings_from
from trioserve.contracts.kv_transfer import BlockCopies, ConnectorSetup, KVPages, Started

__all__ = ["HostConnector", "RunInThread", "make_connector"]

RunInThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in a worker thread, and returns its result or raises its error.

If the caller is cancelled, it may return before the thread ends.
"""


class HostConnector(HostPolicy):
    """RunningConnector (see contracts.kv_transfer) that keeps blocks in host memory and files.

    Args:
        settings: Limits of the host store.
        pages: KV cache of the engine.
        wake: Called when the core should call `progress`.
        run_in_thread: Runs a job in a thread. None uses Trio's threads, one per lane.
        window_tokens: Sliding window of the model (see ConnectorSetup).
        copies: Copies blocks of a device (see ConnectorSetup).
    """

    knows_windows = True

    def __init__(
        self,
        settings: HostSettings,
        pages: KVPages,
        wake: Callable[[], None],
        *,
        run_in_thread: RunInThread | None = None,
        window_tokens: int | None = None,
        copies: BlockCopies | None = None,
    ) -> None:
        directory = settings.directory
        files = None if directory is None else BlockFiles(directory, pages.layout)
        super().__init__(settings, pages, wake, files=files, window_tokens=window_tokens, copies=copies)
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
    """Make the connector `host`. This function is its ConnectorFactory.

    Args:
        setup: Setup of the engine. Its options are `memory_gib` or `memory_bytes`, and optionally `directory` with
            `directory_gib` or `directory_bytes`.

    Raises:
        StartupError: an option is unknown or not allowed, or a limit is smaller than one block.
    """
    settings = host_settings_from(setup.options, setup.pages.layout)
    return HostConnector(settings, setup.pages, setup.wake, window_tokens=setup.window_tokens, copies=setup.copies)


def _threads() -> RunInThread:
    limiter = trio.CapacityLimiter(len(Lane))

    async def run_in_thread(work: Callable[[], Any]) -> Any:
        # A cancelled caller abandons the thread. Closed gates keep the thread away from the engine's blocks, and a file
        # gets its final name only when it is complete.
        return await trio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)

    return run_in_thread
