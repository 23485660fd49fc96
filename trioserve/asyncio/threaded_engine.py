"""An engine as an asyncio program sees it: every method of the one on Trio, which runs in a thread of its own.

A thread and not a guest of the asyncio loop: steps go on while a callback holds that loop up, a Ctrl-C finds Trio's
insides never half done, and a loop may have several engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import trio

from trioserve.asyncio.trio_thread import NoteStarted, ThreadOwner, TrioTask, TrioThread
from trioserve.contracts.errors import EngineFault
from trioserve.engine.shell.engine_life import EngineLife
from trioserve.trio_tools.own_run import opened_once

__all__ = ["EngineT", "ThreadedEngine", "awaited", "called", "made", "opened_in_a_thread"]

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
EngineT = TypeVar("EngineT", bound=EngineLife[Any, Any, Any, Any])


class ThreadedEngine(Generic[EngineT]):
    """To be used in asyncio tasks, of one loop or of several.

    Methods that never wait on Trio are plain calls here, too. The engine's thread does what they ask, and the caller's
    loop is held up until it is their turn, which is soon: nothing blocks that thread.

    thread, on_trio: for rooms that bring more than this to asyncio: where the engine runs, and itself, which is to be
    touched there alone.
    """

    def __init__(self, thread: TrioThread, engine: EngineT) -> None:
        self.thread = thread
        self.on_trio = engine

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken, a full queue apart."""
        return self.thread.call(lambda: self.on_trio.ready)

    @property
    def is_paused(self) -> bool:
        """Whether no step begins until resume_generation."""
        return self.thread.call(lambda: self.on_trio.is_paused)

    @property
    def is_sleeping(self) -> bool:
        """Whether it has given memory back, or is about to, until all is there again."""
        return self.thread.call(lambda: self.on_trio.is_sleeping)

    @property
    def has_half_weights(self) -> bool:
        """Whether an update of the weights has ended halfway, so that nothing is computed until another one is
        whole."""
        return self.thread.call(lambda: self.on_trio.has_half_weights)

    @property
    def fault(self) -> EngineFault | None:
        """What it broke with, for good."""
        return self.on_trio.fault


def called(method: Callable[Concatenate[EngineT, P], T]) -> Callable[Concatenate[ThreadedEngine[EngineT], P], T]:
    """The same method, which never waits, called in the engine's thread."""

    @functools.wraps(method)
    def call(self: ThreadedEngine[EngineT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.call(functools.partial(method, self.on_trio, *args, **kwargs))

    return call


def awaited(
    method: Callable[Concatenate[EngineT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ThreadedEngine[EngineT], P], Coroutine[Any, Any, T]]:
    """The same method, run in the engine's thread."""

    @functools.wraps(method)
    async def call(self: ThreadedEngine[EngineT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.thread.run(functools.partial(method, self.on_trio, *args, **kwargs))

    return call


def made(
    method: Callable[Concatenate[EngineT, P], T], new: Callable[[TrioThread, T], U]
) -> Callable[Concatenate[ThreadedEngine[EngineT], P], U]:
    """The same method, which gives something to be entered."""

    @functools.wraps(method)
    def call(self: ThreadedEngine[EngineT], /, *args: P.args, **kwargs: P.kwargs) -> U:
        return new(self.thread, method(self.on_trio, *args, **kwargs))

    return call


@opened_once
async def opened_in_a_thread(
    open_engine: Callable[[], AbstractAsyncContextManager[EngineT]], new: Callable[[TrioThread, EngineT], U]
) -> AsyncIterator[U]:
    """An engine that is opened in a Trio run of its own, as `new` has it for asyncio. Leaving is what leaving it there
    is, and leaves no thread; its requests end together with it: whoever reads one elsewhere gets AlreadyEnded.

    Raises what that raises: EngineFault cancels the body before, as on Trio."""
    thread = TrioThread()
    _owner = ThreadOwner(thread)
    async with thread:
        opened: list[EngineT] = []

        async def keep(note_started: NoteStarted) -> None:
            async with open_engine() as engine:
                opened.append(engine)
                note_started()
                await trio.sleep_forever()

        task = thread.begin(keep)
        await task.started.wait(cancel=task.cancel)
        if opened:
            with contextlib.suppress(_Broken):
                async with _cancelled_at_the_end_of(task):
                    yield new(thread, opened[0])
    task.raise_failure()
    assert opened, "it ended before it was opened, and nobody knows why"


class _Broken(Exception):
    """The body was cancelled, since the engine is over."""


@asynccontextmanager
async def _cancelled_at_the_end_of(task: TrioTask[None]) -> AsyncIterator[None]:
    """Raises _Broken when the task has ended before the body, and has cancelled it."""
    is_inside = True

    def cancel_body(_ended: asyncio.Future[None]) -> None:
        if is_inside:
            patience.reschedule(asyncio.get_running_loop().time())

    ended = task.ended.future()
    try:
        async with asyncio.timeout(None) as patience:
            ended.add_done_callback(cancel_body)
            try:
                yield
            finally:
                is_inside = False
    except TimeoutError:
        if not patience.expired():
            raise
        raise _Broken from None
