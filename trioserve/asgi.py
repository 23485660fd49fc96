"""The server's routes as an ASGI application, for hosts on Trio and on asyncio, and what its handlers need there."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from trioserve.assemble import open_configured_engine, open_engine
from trioserve.asyncio.asgi import respond
from trioserve.asyncio.disconnect import client_left
from trioserve.asyncio.engine import Engine as AsyncioEngine
from trioserve.asyncio.engine import in_a_thread
from trioserve.commands.engine_app import engine_app, store_settings
from trioserve.commands.serving import around_app, check_front, frontend_limits, optional_path
from trioserve.config import Config, make_config
from trioserve.contracts.errors import WrongLoop
from trioserve.engine.engine import Engine
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.asgi.exchange import Receive, Send
from trioserve.store.store import open_store
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted_context

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["AsgiApplication", "asgi_app", "cancel_on_disconnect"]

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
"""Those options of `trioserve serve` that concern neither an engine nor who listens."""

ENGINE_OPTIONS = frozenset(inspect.signature(open_engine).parameters) - {"model"}

OpensEngine = Callable[[], AbstractAsyncContextManager[Engine]]


def asgi_app(engine: Engine | AsyncioEngine | str | OpensEngine = "smollm2", **options: Any) -> AsgiApplication:
    """An ASGI application with the routes of `trioserve serve`, for a host on the engine's own loop: Hypercorn on Trio
    for an engine of trioserve.open_engine; Uvicorn, Hypercorn on asyncio, FastAPI and Starlette for one of
    trioserve.asyncio.open_engine. A client that leaves gives back what its request held, on all of them.

    Args:
        engine: an open one, whose scope outlives the application's requests; or the name of a model, or a function
            that opens an engine for Trio. The latter two are opened inside of the application's `lifespan`, which
            fits the loop that the host runs.
        options: those options of `trioserve serve` that concern the API, such as api_key, spelled as Python names; with
            the name of a model also those of open_engine.

    Raises:
        TypeError: an option is of somebody else's, such as `port`.
        StartupError: an option is out of range.
    """
    allowed = API_OPTIONS | ENGINE_OPTIONS if isinstance(engine, str) else API_OPTIONS
    if strangers := sorted(options.keys() - allowed):
        raise TypeError(
            f"asgi_app() takes no {', '.join(strangers)} here: the host listens, and an open engine has its own options"
        )
    if not (isinstance(engine, str | Engine | AsyncioEngine) or callable(engine)):
        raise TypeError(f"engine is {engine!r}, allowed is an engine, a model's name, or a function that opens one")
    config = make_config(**options, **({"model": engine} if isinstance(engine, str) else {}))
    check_front(config)
    return AsgiApplication(engine, config)


class AsgiApplication:
    """Made by asgi_app; speaks `http` and `lifespan`. Answers inside of its lifespan. Where the engine was open already
    it also does without, but keeps nothing beyond a request: no stored responses, files, batches, detached streams.

    Hosts run the lifespan of the application that they serve, and not of one that is mounted in it. There,
    `FastAPI(lifespan=llm.lifespan)` does, or `async with llm.lifespan():` in a lifespan of one's own.
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
        """The one whose API this is. Raises RuntimeError outside of the lifespan that opens it."""
        if self._engine is None:
            raise RuntimeError(
                "the engine of this application is opened by its lifespan, which did not begin: of a mounted one it is "
                "entered by hand, as with FastAPI(lifespan=llm.lifespan)"
            )
        return self._engine

    @asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Inside, it answers everything that the server does; an engine that is not open yet is opened, and closed at
        the end. Takes the application in which it is mounted, as hosts give it, and makes nothing of it. Raises what
        open_engine raises."""
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
    """The whole application, in the engine's Trio run."""
    async with open_store(optional_path(config.data_dir), store_settings(config)) as store:
        app = engine_app(engine, config, store, is_mounted=True)
        async with app.running():
            yield AsgiApp(around_app(app, config), frontend_limits(config))


def _serving_in_its_thread(engine: AsyncioEngine, config: Config) -> AbstractAsyncContextManager[AsgiApp]:
    return engine.thread.entered(lambda: _serving(engine.on_trio, config))


def _make_app(engine: Engine, config: Config) -> AsgiApp:
    """What needs no lifespan. To be called in the engine's Trio run."""
    return AsgiApp(around_app(engine_app(engine, config, None, is_mounted=True), config), frontend_limits(config))


@asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the body of the `async with` when the client of a Starlette or FastAPI handler leaves.

    For hosts on Trio, such as Hypercorn's Trio worker. `trioserve.asyncio.cancel_on_disconnect` is the same for hosts
    on asyncio. A framework cancels handlers that stream by itself, but not handlers that return a whole response.

    Args:
        request: the handler's own. Its body is read first, and stays available.

    Raises:
        HTTPException: with the status 499, after the body was cancelled. No traceback is logged for it.
        ClientDisconnect: the client left before its whole request was received.
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
    """Raises WrongLoop."""
    is_trio = trio.lowlevel.in_trio_task()
    if is_trio and isinstance(engine, AsyncioEngine):
        raise WrongLoop(
            "the host runs Trio, and this engine is one for asyncio: open it with trioserve.open_engine, or have "
            "asgi_app open it by the model's name"
        )
    if not is_trio and isinstance(engine, Engine):
        raise WrongLoop(
            "the host runs asyncio, and this engine is one for Trio: open it with trioserve.asyncio.open_engine, or "
            "have asgi_app open it by the model's name"
        )
