"""Replacements for threads and processes, and an order of tasks that depends only on a seed, for repeatable tests.

Text, image and store jobs run in the event loop.

Real threads and processes would take no virtual time and would end in random order. A test can delay image jobs, and
simulate a full disk of the store.

Trio runs tasks that are ready in a random order, so that no program relies on an order. For tests, private names of
Trio make the order depend only on Trio's random numbers. Only this module uses these private names. If they are
missing, the module raises an error, because the simulation could not be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, TypeVar

import trio

from trioserve.admission.decoding_process import DecodeReply, Job, decode
from trioserve.admission.file_decoders import AudioDecoder, FileDecoder, ImageDecoder
from trioserve.admission.text_threads import TextThreads
from trioserve.api.images.image_context import EncodingThreads
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, StartupError
from trioserve.contracts.media import AudioLimits, ImageLimits
from trioserve.metrics.registry import Metrics
from trioserve.store.database import FILE_NAME, StoreDatabase
from trioserve.store.settings import StoreSettings
from trioserve.store.store import Store
from trioserve.text.grammar_bounds import COMPILE_STACK_BYTES
from trioserve.trio_tools.worker_thread import LongJob

__all__ = [
    "InlineAudioDecoder",
    "InlineDecoder",
    "InlineImages",
    "InlineStore",
    "InlineTexts",
    "JobGate",
    "open_inline_store",
    "seeded_schedule",
]


T = TypeVar("T")


class InlineTexts(TextThreads):
    """TextThreads without threads: each job runs in the event loop, after all other tasks have run.

    No thread runs in parallel to the event loop, so an autojump clock cannot advance while a job runs.
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
    """Call a function in a thread with a large stack. The event loop is blocked until the thread ends."""
    usual_bytes = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, "form") as thread:
            return thread.submit(function, *arguments).result()
    finally:
        threading.stack_size(usual_bytes)


class JobGate:
    """Gate that each job passes before it runs. A test can close the gate.

    Attributes:
        run_count: jobs that have passed the gate.
        held_count: jobs that wait at the gate.
    """

    def __init__(self) -> None:
        self.run_count = 0
        self.held_count = 0
        self._opened: trio.Event | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Close the gate inside of the context. Jobs wait until the context ends, or until they are cancelled."""
        self._opened = trio.Event()
        try:
            yield
        finally:
            self._opened.set()
            self._opened = None

    async def enter(self) -> None:
        """Let all other tasks run once, then wait until the gate is open."""
        self.held_count += 1
        try:
            await trio.lowlevel.checkpoint()
            if self._opened is not None:
                await self._opened.wait()
        finally:
            self.held_count -= 1
        self.run_count += 1


class InlineImages(EncodingThreads):
    """Encodes images in the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = JobGate()

    async def run(self, function: Callable[[], T], *, tenant: str) -> T:
        await self.gate.enter()
        return function()


class _DecodesInline(FileDecoder):
    gate: JobGate

    async def _decoded(self, job: Job, content: bytes, size: int) -> tuple[DecodeReply, bytes | memoryview]:
        await self.gate.enter()
        reply, pixels = decode(job, content)
        if reply.error is not None:
            raise InvalidRequest(reply.error, param=job.place)
        return reply, pixels


class InlineDecoder(_DecodesInline, ImageDecoder):
    """Decodes images in the event loop, and starts no process."""

    def __init__(self, limits: ImageLimits, metrics: Metrics) -> None:
        super().__init__(limits, metrics)
        self.gate = JobGate()


class InlineAudioDecoder(_DecodesInline, AudioDecoder):
    """Decodes recordings in the event loop, and starts no process."""

    def __init__(self, limits: AudioLimits, metrics: Metrics) -> None:
        super().__init__(limits, metrics)
        self.gate = JobGate()


class _InlineRunner:
    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        # Other tasks run before and after the call, and a cancel does not interrupt the call. A real thread has the
        # same effects.
        await trio.lowlevel.cancel_shielded_checkpoint()
        result = function(*arguments)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        await trio.lowlevel.checkpoint()
        return function(*arguments)


class InlineStore(Store):
    """A store that runs in the event loop. `open_inline_store` creates it."""

    def set_disk_full(self, is_full: bool) -> None:
        """Make SQLite refuse new pages with SQLITE_FULL, or accept them again.

        Args:
            is_full: True if the disk is full after this call.
        """
        self._database.set_pages_max(1 if is_full else None)


@contextmanager
def open_inline_store(directory: Path | None = None, settings: StoreSettings | None = None) -> Iterator[InlineStore]:
    """Open a store whose time is the clock of the Trio program.

    Args:
        directory: existing folder for the database file. None keeps the database in memory.
        settings: limits of the store.
    """
    path = None if directory is None else directory / FILE_NAME
    database = StoreDatabase(path, settings or StoreSettings(), now=trio.current_time())
    try:
        yield InlineStore(_InlineRunner(), database, trio.current_time)
    finally:
        database.close()


SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"
SOURCE = "_r"


class _ThreadRandom(Random):
    """Source of random numbers that uses a seed in its own thread, and another source in all other threads.

    Trio has one source of random numbers for all threads. Without this class, a Trio loop in another thread would take
    numbers from the seed's sequence.

    Args:
        others: source of random numbers for the other threads.
    """

    def __init__(self, others: Random) -> None:
        super().__init__()
        self._others = others
        self._thread_id = threading.get_ident()

    def random(self) -> float:
        return super().random() if threading.get_ident() == self._thread_id else self._others.random()

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k) if threading.get_ident() == self._thread_id else self._others.getrandbits(k)


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """Make the order of tasks in `trio.run` depend on a seed in this thread, inside of the context.

    Args:
        seed: seed of the random numbers that determine the order of tasks.

    Raises:
        StartupError: this version of Trio does not have the private names.
    """
    module = trio._core._run
    source = getattr(module, SOURCE, None)
    if not hasattr(module, SWITCH) or not isinstance(source, Random):
        raise StartupError(
            f"Trio {trio.__version__} has no {SWITCH} or no {SOURCE}, so its scheduling cannot be repeated: use a "
            "version that has them (0.31 to 0.35 do), or simulate without --stack"
        )
    was_on = getattr(module, SWITCH)
    seeded = _ThreadRandom(source)
    seeded.seed(seed)
    setattr(module, SWITCH, True)
    setattr(module, SOURCE, seeded)
    try:
        yield
    finally:
        setattr(module, SWITCH, was_on)
        setattr(module, SOURCE, source)
