"""Writes the latest steps to a file at each SIGUSR2. The file has the content of GET /debug/steps, without HTTP."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trioserve.contracts.errors import StartupError
from trioserve.engine.lifecycle.step_times import step_trace
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trioserve.engine.lifecycle.step_times import StepTime, StepTimes

__all__ = ["check_profile_directory", "profiling"]

logger = logging.getLogger(__name__)


def check_profile_directory(directory: str | None) -> Path | None:
    """Check that files can be written into the profile directory.

    Args:
        directory: value of --profile. None writes no files.

    Returns:
        The directory, or None.

    Raises:
        StartupError: the directory does not exist, or is not writable.
    """
    if directory is None:
        return None
    path = Path(directory)
    if not (path.is_dir() and os.access(path, os.W_OK)):
        raise StartupError(f'--profile is "{directory}", which is not a writable directory')
    return path


@asynccontextmanager
async def profiling(directory: Path | None, steps: StepTimes) -> AsyncIterator[None]:
    """Write a step file at each SIGUSR2 inside of the scope. Works only in the main thread.

    Args:
        directory: directory for the files. None ignores the signal.
        steps: times of the latest steps.
    """
    if directory is None:
        yield
        return
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(_write_at_signals, directory, steps)
            yield
            nursery.cancel_scope.cancel()


async def _write_at_signals(
    directory: Path, steps: StepTimes, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGUSR2) as signals:
        task_status.started()
        async for _ in signals:
            path = directory / f"steps-{os.getpid()}-{time.time_ns() // 1_000_000}.json"
            try:
                await trio.to_thread.run_sync(partial(_write, path, steps.latest()))
            except OSError as error:
                logger.warning("the steps were not written file=%s: %s", path, error.strerror)
            else:
                logger.info("steps written file=%s", path)


def _write(path: Path, steps: Iterable[StepTime]) -> None:
    """Write the file with a temporary name, then rename it, so that readers never see an incomplete file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(step_trace(steps))
    unfinished.replace(path)
