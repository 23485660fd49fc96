"""The engines for asyncio programs, for text and for images, and conversations with an engine.

The Trio engine behind them runs in a thread of its own. A thread has three advantages over Trio's guest mode: steps
continue while a callback blocks the asyncio loop, a Ctrl-C never interrupts Trio's internals, and a loop can have
several engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import trio

from trioserve.asyncio.streams import ImageStream, PoolingStream, RequestStream
from trioserve.asyncio.trio_thread import NoteStarted, ThreadOwner, TrioTask, TrioThread
from trioserve.contracts.errors import EngineFault
from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine as TrioEngine
from trioserve.engine.image_engine import ImageEngine as TrioImageEngine
from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.request_stream import PartStream
from trioserve.engine.session import Session as TrioSession
from trioserve.trio_tools.own_run import opened_once

__all__ = ["Engine", "ImageEngine", "Session", "for_asyncio", "in_a_thread", "opened_in_a_thread"]


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
    open_engine: Callable[[], AbstractAsyncContextManager[ObjectT]], new: Callable[[TrioThread, ObjectT], U]
) -> AsyncIterator[U]:
    """Open an engine, or several engines, in a Trio run of its own thread.

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
        opened: list[ObjectT] = []

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
    opens: Callable[P, AbstractAsyncContextManager[ObjectT]], new: Callable[[TrioThread, ObjectT], U]
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

    open_for_asyncio.__doc__ = f"""Open an engine, or several engines, for an asyncio program.

    The engine runs in a thread of its own. The context gives its counterpart in trioserve.asyncio. The description for
    Trio programs also applies:

    {opens.__doc__}"""
    return open_for_asyncio


class Session(OnTrio[TrioSession]):
    """One conversation: `async with engine.session() as session: reply = await session.respond(messages)`.

    See trioserve.Session. A turn is complete when the engine's thread has its last delta, even if the asyncio task has
    not read this delta.
    """

    generate = made(TrioSession.generate, RequestStream)
    respond = awaited(TrioSession.respond)
    expect_turn = called(TrioSession.expect_turn)

    async def __aenter__(self) -> Self:
        self.thread.call(self.on_trio.enter)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.thread.call(self.on_trio.leave)

    @property
    def id(self) -> str:
        """Name of the session, for status pages and logs."""
        return self.on_trio.id

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """Messages of all complete turns, in OpenAI's format. Empty if the turns are texts or tokens."""
        return self.on_trio.messages

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of all complete turns: the prompt and the response of the last one."""
        return self.on_trio.token_ids


class Engine(ThreadedEngine[TrioEngine]):
    """A text engine, created by trioserve.asyncio.open_engine. See ThreadedEngine."""

    generate = made(TrioEngine.generate, RequestStream)
    embed = made(TrioEngine.embed, PoolingStream)
    session = made(TrioEngine.session, Session)
    abort = called(TrioEngine.abort)
    abort_with_partial = called(TrioEngine.abort_with_partial)
    abort_all = called(TrioEngine.abort_all)
    hand_over = called(TrioEngine.hand_over)
    end_reasoning = called(TrioEngine.end_reasoning)
    live_requests = called(TrioEngine.live_requests)
    stats = called(TrioEngine.stats)
    load = called(TrioEngine.load)
    sleep = awaited(TrioEngine.sleep)
    wake_up = awaited(TrioEngine.wake_up)
    drain = called(TrioEngine.drain)
    pause_generation = awaited(TrioEngine.pause_generation)
    reset_prefix_cache = called(TrioEngine.reset_prefix_cache)
    limit_kv_cache = awaited(TrioEngine.limit_kv_cache)
    resume_generation = called(TrioEngine.resume_generation)
    update_weights = awaited(TrioEngine.update_weights)
    init_weights_update_group = awaited(TrioEngine.init_weights_update_group)
    destroy_weights_update_group = awaited(TrioEngine.destroy_weights_update_group)
    wait_until_idle = awaited(TrioEngine.wait_until_idle)
    wait_all_free = awaited(TrioEngine.wait_all_free)
    load_adapter = awaited(TrioEngine.load_adapter)
    unload_adapter = awaited(TrioEngine.unload_adapter)
    encode = awaited(TrioEngine.encode)
    decode = awaited(TrioEngine.decode)

    def read_parts(self, stream: RequestStream, *, tools: Sequence[Mapping[str, Any]] | None = None) -> PartStream:
        """Parse a chat response into content, reasoning and tool calls, in the format of the model's family.

        Args:
            stream: a stream that was entered and that no other task reads.
            tools: the tools that the prompt contains. If None, nothing is parsed as a tool call.

        Raises:
            InvalidRequest: a tool does not have OpenAI's format.
        """
        return PartStream(stream, self.on_trio.families, tools)

    @property
    def model(self) -> ModelDescription:
        """The model that is served."""
        return self.on_trio.model

    @property
    def default_sampling(self) -> SamplingParams:
        """Sampling parameters of requests that set none."""
        return self.on_trio.default_sampling

    @property
    def weight_version(self) -> str:
        """Version of the weights that the engine computes with. It is "default" until the weights are replaced."""
        return self.thread.call(lambda: self.on_trio.weight_version)


def in_a_thread(
    open_engine: Callable[[], AbstractAsyncContextManager[TrioEngine]],
) -> AbstractAsyncContextManager[Engine]:
    """Open an engine in a thread of its own. See opened_in_a_thread.

    Args:
        open_engine: opens the engine on Trio.
    """
    return opened_in_a_thread(open_engine, Engine)


class ImageEngine(ThreadedEngine[TrioImageEngine]):
    """An image engine, created by trioserve.asyncio.open_image_engine. See ThreadedEngine."""

    generate_image = made(TrioImageEngine.generate_image, ImageStream)
    abort = called(TrioImageEngine.abort)
    abort_all = called(TrioImageEngine.abort_all)
    live_requests = called(TrioImageEngine.live_requests)
    stats = called(TrioImageEngine.stats)
    load = called(TrioImageEngine.load)
    sleep = awaited(TrioImageEngine.sleep)
    wake_up = awaited(TrioImageEngine.wake_up)
    drain = called(TrioImageEngine.drain)
    pause_generation = awaited(TrioImageEngine.pause_generation)
    resume_generation = called(TrioImageEngine.resume_generation)
    wait_until_idle = awaited(TrioImageEngine.wait_until_idle)
    wait_all_free = awaited(TrioImageEngine.wait_all_free)

    @property
    def model(self) -> ImageModelDescription:
        """The model that is served."""
        return self.on_trio.model

    @property
    def limits(self) -> ImageRequestLimits:
        """Limits on requests, in addition to the limits of the model."""
        return self.on_trio.limits
