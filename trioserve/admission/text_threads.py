"""Threads that tokenize, detokenize and compile. A long text in these threads does not delay shorter texts.

One call tokenizes a whole text. The call cannot be interrupted, and takes about a microsecond per character. So there
is one thread per size class of texts. A short text never waits for a long text. A long text waits only for texts of its
own size class. Tokenizing releases the GIL, so the operating system shares the cores between these threads.

Schemas and grammars are compiled in a separate thread, which has a larger stack.

Tenants take turns at each thread (FairSlots). A tenant's text waits for at most one text of each other tenant.

Some jobs do not belong to a request in the queue, such as /tokenize. They are called "aside jobs", and run in a
separate thread with its own limit. They delay no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

from trioserve.contracts.errors import Overloaded, panics_become_failures
from trioserve.text.grammar_bounds import COMPILE_STACK_BYTES
from trioserve.trio_tools.fair_slots import FairSlots
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.worker_thread import LongJob, WorkerThread

__all__ = [
    "ASIDE_CHARACTERS_MAX",
    "ASIDE_JOBS_MAX",
    "ASIDE_JOBS_OF_ONE_MAX",
    "SHORT_CHARACTERS_MAX",
    "TEXT_QUEUE_FULL",
    "TextRunner",
    "TextThreads",
]

# A text of this size takes less than 100 ms with the slowest known tokenizer, and fills most contexts.
SHORT_CHARACTERS_MAX = 65_536
LONG_CHARACTERS_MAX = 1_048_576  # A text of this size takes about a second. Only books are longer.
ASIDE_JOBS_MAX = 16  # Highest number of aside jobs that run or wait. Each job keeps its text in memory.
# Highest number of aside jobs of one owner, so that other owners can have aside jobs, too.
ASIDE_JOBS_OF_ONE_MAX = 4
# Limit on the characters of all aside jobs, about ten seconds of work. A single job may be longer.
ASIDE_CHARACTERS_MAX = 8_388_608
CHARACTERS_PER_SECOND = 800_000  # Speed of a slow tokenizer, from which retry times are computed.
TEXT_QUEUE_FULL = "text_queue_full"
"""Reason of a refusal when there are too many aside jobs."""

T = TypeVar("T")


class TextRunner(Protocol):
    """Runs functions on texts outside of the event loop."""

    async def run(self, function: Callable[[], T], *, size: int, tenant: str | None = None) -> T:
        """Call a function in a thread. If the caller is cancelled, it returns at once, and the result is discarded.

        Args:
            function: The function. It must not use state of the event loop.
            size: Estimated work in microseconds. For a text, its number of characters.
            tenant: Tenant of the text. Tenants take turns. None if clients are not distinguished.
        """


@uninterrupted
class TextThreads:
    """Starts and ends the threads: `async with TextThreads() as threads: await threads.run(function, size=len(text))`.

    Leaving the scope waits for the current jobs and ends the threads. Later calls raise AlreadyEnded.
    """

    def __init__(self) -> None:
        self._short = WorkerThread("text")
        self._long = WorkerThread("text-long")
        self._longest = WorkerThread("text-longest")
        self._aside = WorkerThread("text-aside")
        self._compiling = WorkerThread("forms", stack_bytes=COMPILE_STACK_BYTES)
        # FairSlots admits one job at a time, so a thread does not need a queue.
        self._places = {
            thread: FairSlots(1, what=what)
            for thread, what in (
                (self._short, "texts"),
                (self._long, "long texts"),
                (self._longest, "longest texts"),
                (self._aside, "texts aside"),
                (self._compiling, "schemas and grammars"),
            )
        }
        self._scopes = AsyncExitStack()
        self._aside_jobs: Counter[str | None] = Counter()  # Number of aside jobs by owner.
        self._aside_characters = 0

    async def __aenter__(self) -> TextThreads:
        async with AsyncExitStack() as scopes:
            for thread in (self._short, self._long, self._longest, self._aside, self._compiling):
                await scopes.enter_async_context(thread)
            self._scopes = scopes.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._scopes.__aexit__(kind, error, traceback)

    async def run(self, function: Callable[[], T], *, size: int, tenant: str | None = None) -> T:
        """Call a function in the thread for texts of its size.

        Args:
            function: See TextRunner.
            size: See TextRunner.
            tenant: See TextRunner.

        Raises:
            Overloaded: too many texts of this tenant wait for that thread.
        """
        if size <= SHORT_CHARACTERS_MAX:
            thread = self._short
        else:
            thread = self._long if size <= LONG_CHARACTERS_MAX else self._longest
        return await self._run_in_turn(thread, tenant, function)

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a text thread without waiting for a turn. Use this only while the server loads, before the
        first request.

        Args:
            function: Function to call.
            arguments: Its arguments.
        """
        return await self._short.run_cancellable(function, *arguments)

    async def run_compile(self, function: Callable[[Callable[[], None]], T], *, tenant: str | None) -> T:
        """Compile a schema or grammar. If the caller is cancelled, it returns at once.

        Args:
            function: The function. It gets a check function, and must call it often. The check raises if the caller was
                cancelled, which ends the compilation.
            tenant: Owner of the request.

        Raises:
            Overloaded: too many schemas and grammars of this tenant wait.
        """
        job = LongJob()
        try:
            return await self._run_in_turn(self._compiling, tenant, function, job.check)
        finally:
            job.cancel()  # The thread may still run this job.

    async def _run_aside(self, function: Callable[[], T], owner: str | None) -> T:
        return await self._run_in_turn(self._aside, owner, function)

    async def _run_in_turn(
        self, thread: WorkerThread, tenant: str | None, function: Callable[..., T], *arguments: Any
    ) -> T:
        async with self._places[thread].place(tenant):
            return await thread.run_cancellable(_without_panic, function, *arguments)

    @contextmanager
    def aside(self, owner: str | None) -> Iterator[TextRunner]:
        """Return a runner for one aside job, which belongs to no request in the queue.

        The runner counts as one job from its first `run` until the scope ends. The first `run` raises Overloaded if
        there are too many jobs.

        Args:
            owner: Owner of the work. None if clients are not distinguished.
        """
        job = _AsideJob(self, owner)
        try:
            yield job
        finally:
            job.leave()


def _without_panic(function: Callable[..., T], *arguments: Any) -> T:
    with panics_become_failures():
        return function(*arguments)


class _AsideJob:
    """One aside job. All calls of `run` together count as one job of its owner. Implements TextRunner."""

    def __init__(self, threads: TextThreads, owner: str | None) -> None:
        self._threads = threads
        self._owner = owner
        self._characters = 0
        self._is_counted = False

    async def run(self, function: Callable[[], T], *, size: int, tenant: str | None = None) -> T:
        if not self._is_counted:
            self._enter(size)
        return await self._threads._run_aside(function, self._owner)

    def _enter(self, size: int) -> None:
        threads, owner = self._threads, self._owner
        count, own = threads._aside_jobs.total(), threads._aside_jobs[owner]
        if count >= ASIDE_JOBS_MAX:
            raise self._refusal(f"{count} tokenize or detokenize calls run or wait, at most {ASIDE_JOBS_MAX} may")
        if owner is not None and own >= ASIDE_JOBS_OF_ONE_MAX:
            raise self._refusal(
                f"{own} tokenize or detokenize calls of this key run or wait, at most {ASIDE_JOBS_OF_ONE_MAX} may"
            )
        if count and threads._aside_characters + size > ASIDE_CHARACTERS_MAX:
            raise self._refusal(
                f"tokenize and detokenize calls with {threads._aside_characters} characters run or wait, and {size} "
                f"characters of this call would make more than {ASIDE_CHARACTERS_MAX}"
            )
        threads._aside_jobs[owner] += 1
        threads._aside_characters += size
        self._characters, self._is_counted = size, True

    def leave(self) -> None:
        if self._is_counted:
            threads = self._threads
            threads._aside_jobs[self._owner] -= 1
            threads._aside_jobs += Counter()  # Adding an empty Counter removes the owners whose count is 0.
            threads._aside_characters -= self._characters

    def _refusal(self, message: str) -> Overloaded:
        seconds = max(1.0, self._threads._aside_characters / CHARACTERS_PER_SECOND)
        return Overloaded(
            f"{message}: try again in {seconds:.0f} s", reason=TEXT_QUEUE_FULL, retry_after_seconds=seconds
        )
