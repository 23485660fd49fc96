"""Runs an ASGI application in an engine's Trio thread, for a host on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import outcome
import trio

from trioserve.asyncio.trio_thread import NoteStarted, TrioThread
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.asgi.exchange import Message, Receive, Send

__all__ = ["respond"]

T = TypeVar("T")


async def respond(thread: TrioThread, app: AsgiApp, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
    """Answer one request. If the host cancels this call, the request ends as if its client had left.

    Args:
        thread: the engine's thread.
        app: the application. It runs in the engine's thread.
        scope: ASGI's scope of the request.
        receive: the host's `receive`, which is called in the asyncio loop.
        send: the host's `send`, which is called in the asyncio loop.
    """
    host = _Host(thread)

    async def receive_in_loop() -> Message:
        return await host.call(receive)

    async def send_in_loop(message: Message) -> None:
        await host.call(lambda: send(message))

    async def work(note_started: NoteStarted) -> None:
        await app(scope, receive_in_loop, send_in_loop)

    task = thread.begin(work)
    try:
        await task.ended.wait(cancel=task.cancel)
    except BaseException as error:
        task.cancel()
        host.cancel_calls()
        if not isinstance(error, GeneratorExit):  # A generator that is being closed must not await.
            await host.wait_for_calls()
        raise
    host.cancel_calls()
    await host.wait_for_calls()
    task.result()


class _Host:
    """Lets the application, which runs on Trio, call functions in the host's asyncio loop. One object serves one call
    of the application.

    A cancelled Trio task never waits for the loop. Instead, the caller of the application waits for the calls that
    still run in the loop.
    """

    def __init__(self, thread: TrioThread) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    @trio.lowlevel.enable_ki_protection
    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a function in a new task of the loop, and return its result. If the caller is cancelled, the task is
        cancelled.
        """
        waiting = trio.lowlevel.current_task()
        is_waiting = True
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            if is_waiting and not self._is_over:
                task = self._loop.create_task(_as_coroutine(function), context=self._context.copy())
                tasks.append(task)
                self._tasks.add(task)
                task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            result: outcome.Outcome[T]
            # The task was cancelled by this class when no Trio task waits for it, or by the host because the client
            # left.
            if task.cancelled():
                result = outcome.Error(OSError("the host has cancelled its call"))
            else:
                error = task.exception()
                result = outcome.Value(task.result()) if error is None else outcome.Error(error)
            self._thread.soon(pass_result, result)

        def pass_result(result: outcome.Outcome[T]) -> None:
            if is_waiting:
                trio.lowlevel.reschedule(waiting, result)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
            nonlocal is_waiting
            is_waiting = False
            with contextlib.suppress(RuntimeError):  # The asyncio loop is closed.
                self._loop.call_soon_threadsafe(cancel)
            return trio.lowlevel.Abort.SUCCEEDED

        self._loop.call_soon_threadsafe(begin)
        returned: T = await trio.lowlevel.wait_task_rescheduled(leave)
        return returned

    def cancel_calls(self) -> None:
        """Cancel all calls and start no further calls. Call this in the loop when the application has ended."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    async def wait_for_calls(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _as_coroutine(function: Callable[[], Awaitable[T]]) -> T:
    return await function()
