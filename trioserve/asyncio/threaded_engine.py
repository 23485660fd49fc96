"""Makes the methods of a Trio engine available to asyncio tasks. The engine runs in a thread of its own.

A thread has three advantages over Trio's guest mode: steps continue while a callback blocks the asyncio loop, a Ctrl-C
never interrupts Trio's internals, and a loop can have several engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import trio

from trioserve.asyncio.trio_thread import NoteStarted, ThreadOwner, TrioTask, TrioThread
from trioserve.contracts.errors import EngineFault
from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.trio_tools.own_run import opened_once

__all__ = ["EngineT", "OnTrio", "ThreadedEngine", "awaited", "called", "for_asyncio", "made", "opened_in_a_thread"]

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
ObjectT = TypeVar("ObjectT")
EngineT = TypeVar("EngineT", bound=EngineLifecycle[Any, Any])


class OnTrio(Generic[ObjectT]):
    """The counterpart of an object of the engine's thread, for asyncio tasks of one or several loops.

    A method that is not async in the Trio object is not async in this class either. Such a method runs in the engine's
    thread, and blocks the caller's loop until it has run. This time is short, because nothing blocks the engine's
    thread.

    Attributes:
        thread: the engine's thread. Packages that extend the asyncio engine use it.
        on_trio: the Trio object. Use it only in the engine's thread.
    """

    def __init__(self, thread: TrioThread, on_trio: ObjectT) -> None:
        self.thread = thread
        self.on_trio = on_trio


class ThreadedEngine(OnTrio[EngineT]):
    """An engine for asyncio tasks. See OnTrio."""

    @property
    def ready(self) -> bool:
        """True if the engine accepts new requests. A full queue may still refuse a request."""
        return self.thread.call(lambda: self.on_trio.ready)

    @property
    def is_paused(self) -> bool:
        """True if no step starts until `resume_generation`."""
        return self.thread.call(lambda: self.on_trio.is_paused)

    @property
    def is_sleeping(self) -> bool:
        """True from when the engine begins to release its memory until all of the memory is allocated again."""
        return self.thread.call(lambda: self.on_trio.is_sleeping)

    @property
    def has_half_weights(self) -> bool:
        """True if a weight update stopped before its end. Then nothing is computed until another update is complete."""
        return self.thread.call(lambda: self.on_trio.has_half_weights)

    @property
    def fault(self) -> EngineFault | None:
        """The error that made the engine fail for good, or None."""
        return self.on_trio.fault


def called(method: Callable[Concatenate[ObjectT, P], T]) -> Callable[Concatenate[OnTrio[ObjectT], P], T]:
    """Turn a method that never waits into a method that runs in the engine's thread.

    Args:
        method: method of the Trio object.

    Returns:
        A plain method of the asyncio object with the same parameters.
    """

    @functools.wraps(method)
    def call(self: OnTrio[ObjectT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.call(functools.partial(method, self.on_trio, *args, **kwargs))

    return call


def awaited(
    method: Callable[Concatenate[ObjectT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[OnTrio[ObjectT], P], Coroutine[Any, Any, T]]:
    """Turn an async method of a Trio object into an async method that runs in the engine's thread.

    Args:
        method: method of the Trio object.

    Returns:
        An async method of the asyncio object with the same parameters.
    """

    @functools.wraps(method)
    async def call(self: OnTrio[ObjectT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.thread.run(functools.partial(method, self.on_trio, *args, **kwargs))

    return call


def made(
    method: Callable[Concatenate[ObjectT, P], T], new: Callable[[TrioThread, T], U]
) -> Callable[Concatenate[OnTrio[ObjectT], P], U]:
    """Turn a method that returns a Trio object into a method that returns the asyncio counterpart of this object.

    Args:
        method: method of the Trio engine.
        new: creates the counterpart from the thread and the Trio object.

    Returns:
        A plain method of the asyncio engine with the same parameters.
    """

    @functools.wraps(method)
    def call(self: OnTrio[ObjectT], /, *args: P.args, **kwargs: P.kwargs) -> U:
        return new(self.thread, method(self.on_trio, *args, **kwargs))

    return call


@opened_once
async def opened_in_a_thread(
    open_engine: Callable[[], AbstractAsyncContextManager[EngineT]], new: Callable[[TrioThread, EngineT], U]
) -> AsyncIterator[U]:
    """Open an engine in a Trio run of its own thread.

    Leaving the scope closes the engine and ends the thread. All requests end with the engine: a task that still reads a
    stream gets AlreadyEnded.

    Args:
        open_engine: opens the engine on Trio.
        new: creates the engine's asyncio counterpart.

    Raises:
        EngineFault: the engine failed for good. The body is cancelled first, as on Trio.
        Exception: any error of opening or closing the engine.
    """
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
                async with _cancel_body_at_end_of(task):
                    yield new(thread, opened[0])
    task.raise_failure()
    assert opened, "the engine ended before it was open, without an error"


class _Broken(Exception):
    """Raised after the body was cancelled because the engine ended."""


@asynccontextmanager
async def _cancel_body_at_end_of(task: TrioTask[None]) -> AsyncIterator[None]:
    """Cancel the body and raise _Broken if the task ends before the body."""
    is_inside = True

    def cancel_body(_ended: asyncio.Future[None]) -> None:
        if is_inside:
            timeout.reschedule(asyncio.get_running_loop().time())

    ended = task.ended.future()
    try:
        async with asyncio.timeout(None) as timeout:
            ended.add_done_callback(cancel_body)
            try:
                yield
            finally:
                is_inside = False
    except TimeoutError:
        if not timeout.expired():
            raise
        raise _Broken from None


def for_asyncio(
    opens: Callable[P, AbstractAsyncContextManager[EngineT]], new: Callable[[TrioThread, EngineT], U]
) -> Callable[P, AbstractAsyncContextManager[U]]:
    """Make a function that opens an engine for asyncio programs, in a thread of its own.

    Args:
        opens: opens an engine for Trio programs.
        new: makes the asyncio engine.

    Returns:
        The function, with the parameters of `opens`.
    """

    @functools.wraps(opens)
    def open_for_asyncio(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[U]:
        # Wrong arguments raise TypeError in the caller, and not later in the engine's thread.
        inspect.signature(opens).bind(*args, **kwargs)
        return opened_in_a_thread(functools.partial(opens, *args, **kwargs), new)

    open_for_asyncio.__doc__ = f"""Open an engine for an asyncio program.

    The engine runs in a thread of its own. The context gives a trioserve.asyncio.{getattr(new, "__name__", "Engine")}.
    The description for Trio programs also applies:

    {opens.__doc__}"""
    return open_for_asyncio
