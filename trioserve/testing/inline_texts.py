"""Text and image work in the event loop. Real threads would take no virtual time and would end in random order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import AlreadyEnded
from trioserve.text.grammar_bounds import COMPILE_STACK_BYTES
from trioserve.trio_tools.worker_thread import LongJob

__all__ = ["InlineTexts"]

T = TypeVar("T")


class InlineTexts(TextThreads):
    """TextThreads without threads: each job runs in the event loop, after the other tasks have had a turn.

    No thread runs beside the event loop, so a clock that jumps cannot advance while a job runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_left = False

    async def __aenter__(self) -> InlineTexts:
        await trio.lowlevel.cancel_shielded_checkpoint()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_left = True
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def run(self, function: Callable[[], T], *, size: int, tenant: str | None = None) -> T:
        """Run a job in the event loop.

        Args:
            function: the job.
            size: ignored.
            tenant: ignored.
        """
        return await self.run_cancellable(function)

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._is_left:
            raise AlreadyEnded("this job cannot run: its engine is closed")
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    async def run_compile(self, function: Callable[[Callable[[], None]], T], *, tenant: str | None) -> T:
        return await self.run_cancellable(_in_deep_stack, function, LongJob().check)

    async def _run_aside(self, function: Callable[[], T], owner: str | None) -> T:
        return await self.run_cancellable(function)


def _in_deep_stack(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread with a large stack. The event loop waits for it."""
    usual_bytes = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, "form") as thread:
            return thread.submit(function, *arguments).result()
    finally:
        threading.stack_size(usual_bytes)
