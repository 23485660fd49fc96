"""Where texts become tokens and tokens texts, so that a long one delays none that is shorter.

A text is tokenized in one call that nothing can interrupt, and takes about a microsecond a character. So texts of each
order of size have a thread of their own: a short one never waits for a long one, and a long one for none that takes
more than some times as long as itself. The operating system shares the cores between them, since tokenizing lets go of
the GIL.

Forms of responses are compiled in a thread of their own, which has the stack that this takes.

In front of each thread tenants take turns (FairPlaces): a tenant's text waits for one text of another tenant at most,
however many that one has sent.

What is done aside, for its own sake and without a place in the queue, has one more thread, and a bound of its own: it
delays no request at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

from trioserve.contracts.errors import Overloaded, panics_become_failures
from trioserve.text.form_bounds import COMPILE_STACK_BYTES
from trioserve.trio_tools.fair_places import FairPlaces
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.long_job import LongJob
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = [
    "ASIDE_CHARACTERS_MAX",
    "ASIDE_JOBS_MAX",
    "ASIDE_JOBS_OF_ONE_MAX",
    "SHORT_CHARACTERS_MAX",
    "TEXT_QUEUE_FULL",
    "TextRunner",
    "TextThreads",
]

SHORT_CHARACTERS_MAX = 65_536  # under 100 ms with the slowest tokenizer we know; more than most contexts hold
LONG_CHARACTERS_MAX = 1_048_576  # about a second; what is longer are books
ASIDE_JOBS_MAX = 16  # done aside at a time, or waiting for it; each keeps its text in memory
ASIDE_JOBS_OF_ONE_MAX = 4  # of them, those of one owner: the others have room left
ASIDE_CHARACTERS_MAX = 8_388_608  # of them together, about ten seconds; a longer text comes alone
CHARACTERS_PER_SECOND = 800_000  # of a slow tokenizer, for telling when to come again
TEXT_QUEUE_FULL = "text_queue_full"
"""The reason of a refusal to do something aside."""

T = TypeVar("T")


class TextRunner(Protocol):
    async def run(self, function: Callable[[], T], *, size: int) -> T:
        """Call a function of values in a thread. size: of its text, in characters, or as many microseconds. A cancelled
        caller leaves at once, and what the function makes of it is thrown away."""


@uninterrupted
class TextThreads:
    """`async with TextThreads() as threads: await threads.run(function, size=len(text))`.

    Leaving waits for the jobs at hand, and ends the threads; whoever asks from then on gets AlreadyEnded.
    """

    def __init__(self) -> None:
        self._short = WorkerThread("text")
        self._long = WorkerThread("text-long")
        self._longest = WorkerThread("text-longest")
        self._aside = WorkerThread("text-aside")
        self._forms = WorkerThread("forms", stack_bytes=COMPILE_STACK_BYTES)
        # One job at a time leaves its queue for the thread, which therefore needs none of its own.
        self._places = {
            thread: FairPlaces(1, what=what)
            for thread, what in (
                (self._short, "texts"),
                (self._long, "long texts"),
                (self._longest, "longest texts"),
                (self._aside, "texts aside"),
                (self._forms, "forms of responses"),
            )
        }
        self._scopes = AsyncExitStack()
        self._aside_jobs: Counter[str | None] = Counter()  # by owner
        self._aside_characters = 0

    async def __aenter__(self) -> TextThreads:
        async with AsyncExitStack() as scopes:
            for thread in (self._short, self._long, self._longest, self._aside, self._forms):
                await scopes.enter_async_context(thread)
            self._scopes = scopes.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._scopes.__aexit__(kind, error, traceback)

    def of_tenant(self, tenant: str | None) -> TextRunner:
        """Runs the texts of one tenant. None: of everybody who cannot be told apart."""
        return _TenantTexts(self, tenant)

    async def run(self, function: Callable[[], T], *, size: int, tenant: str | None = None) -> T:
        """Call a function of values in the thread for texts of its size (see TextRunner).

        Raises:
            Overloaded: too many texts of this tenant wait for that thread.
        """
        if size <= SHORT_CHARACTERS_MAX:
            thread = self._short
        else:
            thread = self._long if size <= LONG_CHARACTERS_MAX else self._longest
        return await self._run_in_turn(thread, tenant, function)

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        """What there is to do before the first request: loading."""
        return await self._short.run_cancellable(function, *arguments)

    async def run_compile(self, function: Callable[[Callable[[], None]], T], *, tenant: str | None) -> T:
        """Compile a form. A cancelled caller leaves at once.

        Args:
            function: gets a function to call now and then, which raises when the caller has left: what nobody waits
                for ends there.

        Raises:
            Overloaded: too many forms of this tenant wait.
        """
        job = LongJob()
        try:
            return await self._run_in_turn(self._forms, tenant, function, job.check)
        finally:
            job.cancel()  # if it still runs

    async def _run_aside(self, function: Callable[[], T], owner: str | None) -> T:
        return await self._run_in_turn(self._aside, owner, function)

    async def _run_in_turn(
        self, thread: WorkerThread, tenant: str | None, function: Callable[..., T], *arguments: Any
    ) -> T:
        async with self._places[thread].place(tenant):
            return await thread.run_cancellable(_without_panic, function, *arguments)

    @contextmanager
    def aside(self, owner: str | None) -> Iterator[TextRunner]:
        """For what somebody wants done for its own sake. It takes its place with the first `run`, which raises
        Overloaded if there is none, and keeps it as long as this scope. owner: None is everybody who cannot be told
        apart."""
        job = _AsideJob(self, owner)
        try:
            yield job
        finally:
            job.leave()


def _without_panic(function: Callable[..., T], *arguments: Any) -> T:
    with panics_become_failures():
        return function(*arguments)


class _TenantTexts:
    """A TextRunner."""

    __slots__ = ("_tenant", "_threads")

    def __init__(self, threads: TextThreads, tenant: str | None) -> None:
        self._threads = threads
        self._tenant = tenant

    async def run(self, function: Callable[[], T], *, size: int) -> T:
        return await self._threads.run(function, size=size, tenant=self._tenant)


class _AsideJob:
    def __init__(self, threads: TextThreads, owner: str | None) -> None:
        self._threads = threads
        self._owner = owner
        self._characters = 0
        self._is_counted = False

    async def run(self, function: Callable[[], T], *, size: int) -> T:
        if not self._is_counted:
            self._enter(size)
        return await self._threads._run_aside(function, self._owner)

    def _enter(self, size: int) -> None:
        threads, owner = self._threads, self._owner
        count, own = threads._aside_jobs.total(), threads._aside_jobs[owner]
        if count >= ASIDE_JOBS_MAX:
            raise self._refusal(f"{count} texts are tokenized aside, at most {ASIDE_JOBS_MAX} may be")
        if owner is not None and own >= ASIDE_JOBS_OF_ONE_MAX:
            raise self._refusal(f"{own} texts of this key are tokenized aside, at most {ASIDE_JOBS_OF_ONE_MAX} may be")
        if count and threads._aside_characters + size > ASIDE_CHARACTERS_MAX:
            raise self._refusal(
                f"texts of {threads._aside_characters} characters are tokenized aside, and with this one's {size} they "
                f"would be more than {ASIDE_CHARACTERS_MAX}"
            )
        threads._aside_jobs[owner] += 1
        threads._aside_characters += size
        self._characters, self._is_counted = size, True

    def leave(self) -> None:
        if self._is_counted:
            threads = self._threads
            threads._aside_jobs[self._owner] -= 1
            threads._aside_jobs += Counter()  # without those who have none
            threads._aside_characters -= self._characters

    def _refusal(self, message: str) -> Overloaded:
        seconds = max(1.0, self._threads._aside_characters / CHARACTERS_PER_SECOND)
        return Overloaded(
            f"{message}: try again in {seconds:.0f} s", reason=TEXT_QUEUE_FULL, retry_after_seconds=seconds
        )
