"""The server's routes as an ASGI application for hosts on Trio or asyncio, and a helper for handlers of the host."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import outcome
import trio

from trioserve.assemble import open_configured_engine, open_engine
from trioserve.asyncio.disconnect import client_left
from trioserve.asyncio.engine import Engine as AsyncioEngine
from trioserve.asyncio.engine import in_a_thread
from trioserve.asyncio.trio_thread import NoteStarted, TrioThread
from trioserve.commands.serve import engine_app
from trioserve.commands.serving import around_app, check_front, frontend_limits, optional_path
from trioserve.config import Config, make_config
from trioserve.contracts.errors import WrongLoop
from trioserve.engine.engine import Engine
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.asgi.exchange import Message, Receive, Send
from trioserve.store.store import open_store
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted_context

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["AsgiApplication", "asgi_app", "cancel_on_disconnect", "respond"]

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


API_OPTIONS = frozenset(
    {
        *("api_key", "admin_api_key", "gateway_api_key", "priority_min", "share_prefix_cache", "metrics_need_key"),
        *("load_needs_key", "cors_origin", "root_path", "max_body_bytes", "stall_timeout", "require_model"),
        *("keep_alive_comments", "keep_alive_json"),
        *("allowed_host", "allow_operator_without_key"),
        *("tenant_header", "ui", "access_log", "trust_request_chat_template", "data_dir", "store_max_bytes"),
        *("store_max_objects", "store_ttl", "max_background_responses", "background_timeout", "max_batches"),
        *("batch_concurrency", "detach_timeout_max", "max_detached_streams"),
    }
)
"""Options of `trioserve serve` that concern neither the engine nor the listening socket."""

ENGINE_OPTIONS = frozenset(inspect.signature(open_engine).parameters) - {"model", "progress"}

OpensEngine = Callable[[], AbstractAsyncContextManager[Engine]]


def asgi_app(engine: Engine | AsyncioEngine | str | OpensEngine = "smollm2", **options: Any) -> AsgiApplication:
    """Create an ASGI application with the routes of `trioserve serve`.

    The host must run on the event loop of the engine. Use Hypercorn on Trio with an engine of `trioserve.open_engine`.
    Use Uvicorn, Hypercorn on asyncio, FastAPI or Starlette with an engine of `trioserve.asyncio.open_engine`. On every
    host, the request of a client that disconnects releases all of its resources.

    Args:
        engine: an open engine, whose scope must outlive the application's requests. Alternatively, the name of a model,
            or a function that opens an engine for Trio. The application's `lifespan` then opens the engine for the
            event loop of the host.
        options: options of `trioserve serve` that concern the API, such as api_key, spelled as Python names. With the
            name of a model, options of `open_engine` are also allowed.

    Raises:
        TypeError: an option belongs to the host or to the engine, such as `port`.
        StartupError: an option is out of range.
    """
    allowed = API_OPTIONS | ENGINE_OPTIONS if isinstance(engine, str) else API_OPTIONS
    if strangers := sorted(options.keys() - allowed):
        raise TypeError(
            f"asgi_app() does not take {', '.join(strangers)}: the host listens, and an open engine has its own options"
        )
    if not (isinstance(engine, str | Engine | AsyncioEngine) or callable(engine)):
        raise TypeError(f"engine is {engine!r}, allowed is an engine, a model's name, or a function that opens one")
    config = make_config(**options, **({"model": engine} if isinstance(engine, str) else {}))
    check_front(config)
    return AsgiApplication(engine, config)


class AsgiApplication:
    """An ASGI application for `http` and `lifespan`. `asgi_app` creates it.

    The application serves requests inside of its lifespan. If the engine was already open, the application also works
    without a lifespan, but then it has no stored responses, files, batches or detached streams.

    A host runs the lifespan of the application that it serves, but not of mounted applications. For a mounted
    application, use `FastAPI(lifespan=llm.lifespan)`, or `async with llm.lifespan():` in your own lifespan.

    Args:
        engine: an engine, the name of a model, or a function that opens an engine.
        config: options of the API.
    """

    def __init__(self, engine: Engine | AsyncioEngine | str | OpensEngine, config: Config) -> None:
        self._config = config
        self._engine = engine if isinstance(engine, Engine | AsyncioEngine) else None
        self._opens: OpensEngine
        if isinstance(engine, str):
            self._opens = lambda: open_configured_engine(config)
        elif not isinstance(engine, Engine | AsyncioEngine):
            self._opens = engine
        self._app: AsgiApp | None = None

    @property
    def engine(self) -> Engine | AsyncioEngine:
        """The engine behind the API. Raises RuntimeError outside of the lifespan that opens the engine."""
        if self._engine is None:
            raise RuntimeError(
                "the lifespan of this application opens its engine, and it did not begin: enter the lifespan of a "
                "mounted application yourself, as with FastAPI(lifespan=llm.lifespan)"
            )
        return self._engine

    @asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Offer all functions of the server inside of the context. Opens the engine if it is not open yet.

        Args:
            _app: the application in which this application is mounted. Hosts pass this argument. It is ignored.

        Raises:
            TrioserveError: the errors of `open_engine`.
        """
        opened = self._on_trio() if trio.lowlevel.in_trio_task() else self._on_asyncio()
        async with opened as (engine, app):
            before = self._engine, self._app
            self._engine, self._app = engine, app
            try:
                yield
            finally:
                self._engine, self._app = before

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._respond(scope, receive, send)
        else:
            raise NotImplementedError(f"scope type {scope['type']!r} is not served here, only http and lifespan")

    async def _respond(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        engine = self.engine
        _check_host(engine)
        if isinstance(engine, AsyncioEngine):
            if self._app is None:
                self._app = engine.thread.call(_make_app, engine.on_trio, self._config)
            await respond(engine.thread, self._app, scope, receive, send)
        else:
            if self._app is None:
                self._app = _make_app(engine, self._config)
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        has_begun = False
        try:
            async with self.lifespan():
                has_begun = True
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            if has_begun:
                raise
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _on_trio(self) -> AsyncIterator[tuple[Engine, AsgiApp]]:
        if self._engine is None:
            async with self._opens() as engine, _serving(engine, self._config) as app:
                yield engine, app
        else:
            _check_host(self._engine)
            assert isinstance(self._engine, Engine)
            async with _serving(self._engine, self._config) as app:
                yield self._engine, app

    @asynccontextmanager
    async def _on_asyncio(self) -> AsyncIterator[tuple[AsyncioEngine, AsgiApp]]:
        if self._engine is None:
            async with in_a_thread(self._opens) as engine, _serving_in_its_thread(engine, self._config) as app:
                yield engine, app
        else:
            _check_host(self._engine)
            assert isinstance(self._engine, AsyncioEngine)
            async with _serving_in_its_thread(self._engine, self._config) as app:
                yield self._engine, app


@uninterrupted_context
async def _serving(engine: Engine, config: Config) -> AsyncIterator[AsgiApp]:
    """Run the whole application in the engine's Trio program."""
    async with open_store(optional_path(config.data_dir), config.store_settings()) as store:
        app = engine_app(engine, config, store, is_mounted=True)
        async with app.running():
            yield AsgiApp(around_app(app, config), frontend_limits(config))


def _serving_in_its_thread(engine: AsyncioEngine, config: Config) -> AbstractAsyncContextManager[AsgiApp]:
    return engine.thread.entered(lambda: _serving(engine.on_trio, config))


def _make_app(engine: Engine, config: Config) -> AsgiApp:
    """Create an application that needs no lifespan. Call this function in the engine's Trio program."""
    return AsgiApp(around_app(engine_app(engine, config, None, is_mounted=True), config), frontend_limits(config))


@asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the body of the `async with` when the client of a Starlette or FastAPI handler disconnects.

    This function is for hosts on Trio, such as Hypercorn's Trio worker. `trioserve.asyncio.cancel_on_disconnect` is for
    hosts on asyncio. A framework itself cancels handlers that stream, but not handlers that return a whole response.

    Args:
        request: the handler's request. Its body is read first, and the handler can still read it.

    Raises:
        HTTPException: the `async with` body was cancelled. The status is 499, and no traceback is logged.
        ClientDisconnect: the client disconnected before its whole request was received.
    """
    await request.body()
    body = trio.CancelScope()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        body.cancel()

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with body:
                yield
            nursery.cancel_scope.cancel()
    if body.cancelled_caught:
        raise client_left()


def _check_host(engine: Engine | AsyncioEngine) -> None:
    """Raise WrongLoop if the engine does not fit the event loop of the host."""
    is_trio = trio.lowlevel.in_trio_task()
    if is_trio and isinstance(engine, AsyncioEngine):
        raise WrongLoop(
            "the host runs Trio, but this engine is for asyncio: open it with trioserve.open_engine, or pass the "
            "model's name to asgi_app"
        )
    if not is_trio and isinstance(engine, Engine):
        raise WrongLoop(
            "the host runs asyncio, but this engine is for Trio: open it with trioserve.asyncio.open_engine, or pass "
            "the model's name to asgi_app"
        )
