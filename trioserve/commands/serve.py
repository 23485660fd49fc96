"""`python -m trioserve serve`: runs an engine and an HTTP front end in one Trio nursery.

`engine_app` also makes the HTTP app for other hosts such as ASGI.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from trioserve.admission.local_endpoint import LOCAL_ENDPOINT, WAITING_DEPTH_MAX
from trioserve.api.caller import AccessRules
from trioserve.api.page import PageSettings
from trioserve.api.routes import App
from trioserve.assemble import Loaded, open_configured_engine
from trioserve.assemble_model import LoadReport, default_served_name
from trioserve.commands.child_processes import ParentProcess
from trioserve.commands.log_lines import show_dropped_lines
from trioserve.commands.route import Routing, serve_router
from trioserve.commands.serving import (
    access_rules,
    around_app,
    check_front,
    check_front_end,
    chosen_front_end,
    frontend_limits,
    open_places,
    open_tracing,
    optional_path,
    page_settings,
    run_until_signal,
    server_tls,
)
from trioserve.commands.terminal import LoadingBar
from trioserve.config import Config, make_config
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import StartupError
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.engine.engine import Engine
from trioserve.engine.lifecycle.step_times import StepTime, StepTimes, step_trace
from trioserve.http.server import FrontendServer
from trioserve.model.device import pick_device, torch_now
from trioserve.model.diffusion.directory import is_image_model
from trioserve.model.settings import ModelSettings
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.proxy.router_app import RouterApp
from trioserve.store.store import Store, open_store
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.service import Service, Worker

__all__ = ["check_profile_directory", "engine_app", "profiling", "run_server", "serve", "serve_configured"]


def engine_app(
    engine: Engine,
    config: Config,
    store: Store | None,
    *,
    tracer: Tracer = NO_TRACER,
    is_behind_router: bool = False,
    is_mounted: bool = False,
) -> App:
    """Create the HTTP app of an engine.

    Args:
        engine: open engine.
        config: options of the server.
        store: keeps responses, files and batches. None keeps nothing after a request.
        tracer: records spans of requests.
        is_behind_router: True if a router in this process checks API keys, shows the page and logs requests.
        is_mounted: True if another program listens for the app. Other machines may reach the app, because the address
            is unknown.
    """
    return App(
        engine,
        api_keys=() if is_behind_router else config.api_key,
        admin_api_key=None if is_behind_router else config.admin_api_key,
        access=None if is_behind_router else _access_rules(config, is_mounted=is_mounted),
        trust_request_chat_template=config.trust_request_chat_template,
        tenant_header=config.tenant_header,
        store=store,
        background=config.background_settings(),
        connections=config.connection_settings(),
        batches=config.batch_settings(),
        detaching=config.detach_settings(),
        router_grace=config.router_grace_settings(),
        page=PageSettings(is_shown=False) if is_behind_router else page_settings(config),
        tracer=tracer,
        logs_requests=config.access_log and not is_behind_router,
    )


def _access_rules(config: Config, *, is_mounted: bool) -> AccessRules:
    rules = msgspec.structs.replace(access_rules(config), loads_adapters=config.allow_runtime_lora_updating)
    if is_mounted:
        rules = msgspec.structs.replace(rules, operates_without_key=config.allow_operator_without_key)
    return rules


logger = logging.getLogger(__name__)


def import_modules() -> None:
    """Import the modules that a server with a language model would import later, when it loads the model."""
    import trioserve.model.loaded_models
    import trioserve.model.runner  # noqa: F401 (the import is the effect)

    if pick_device(ModelSettings()) == "cuda":
        torch_now()


def run_server(config: Config) -> int:
    """Serve a model until Ctrl-C or SIGTERM, then drain.

    Args:
        config: options of the server.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: an option is wrong, or the model or the address cannot be used.
        EngineFault: the engine broke.
    """

    parent = ParentProcess.of_environment()
    parent.stop_with_it()
    parent.name_process(", ".join(_names(config)))
    if config.hosts_models:
        # This import is late, because a server with one model needs none of the imported modules.
        from trioserve.commands.hosting import Hosting

        hosting = Hosting(config, serve_model)

        async def serve_hosted(
            orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]
        ) -> None:
            await serve_router(config, orders, on_serving=announce, hosting=hosting)

        return run_until_signal(config, serve_hosted, what=hosting.what)

    async def serve_one(orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]) -> None:
        await serve_model(config, orders, on_serving=announce, on_progress=parent.report)

    return run_until_signal(config, serve_one, what=", ".join(_names(config)))


async def serve_model(
    config: Config,
    orders: trio.MemoryReceiveChannel[object],
    *,
    on_serving: Callable[[list[str]], None],
    on_progress: LoadReport,
) -> None:
    """Serve a model for text or for images, see `serve_configured`.

    Args:
        config: options of the server.
        orders: stops the server.
        on_serving: receives the URLs once the server accepts requests.
        on_progress: receives the progress of loading.
    """
    if is_image_model(config.model):
        # This import is late, because language models need none of the imported packages.
        from trioserve.commands.serve_images import serve_images

        await serve_images(config, orders, on_serving=on_serving, on_progress=on_progress)
    else:
        await serve_configured(config, orders, on_serving=on_serving, on_progress=on_progress)


class OpenEngine(Protocol):
    """Type of functions that open the engine. They have the signature of `open_configured_engine`."""

    def __call__(
        self, config: Config, *, on_progress: LoadReport, on_loaded: Callable[[Loaded], None]
    ) -> AbstractAsyncContextManager[Engine]: ...


async def serve_configured(
    config: Config,
    orders: trio.MemoryReceiveChannel[object],
    *,
    on_serving: Callable[[list[str]], None] = lambda urls: None,
    on_progress: LoadReport = lambda progress: None,
    open_engine: OpenEngine = open_configured_engine,
    opened: Engine | None = None,
) -> None:
    """Run the whole server in the caller's scope, until `orders` yields an item and the server has drained.

    Installs no signal handlers. If this function is cancelled, the server ends at once.

    Args:
        config: options of the server.
        orders: stops the server. See `Service.run` for its items.
        on_serving: receives the URLs once the server accepts requests.
        on_progress: receives the progress of loading.
        open_engine: opens the engine. Tests and other hosts pass another function.
        opened: an engine that the caller has opened and will close. None opens an engine with `open_engine`.

    Raises:
        StartupError: an option is wrong, or the model or the address cannot be used.
        EngineFault: the engine broke.
    """
    # Check the options first, so that errors appear before a model is loaded.
    check_front(config)
    check_front_end(config)
    limits = frontend_limits(config)
    ssl_context = server_tls(config)
    routing = Routing(config)
    profiles = check_profile_directory(config.profile)
    async with open_places(config, limits) as (listeners, urls), AsyncExitStack() as scopes:
        bar = None if opened else scopes.enter_context(contextlib.closing(LoadingBar(config.model, on_progress)))
        tracing = await scopes.enter_async_context(open_tracing(config))
        store = await scopes.enter_async_context(open_store(optional_path(config.data_dir), config.store_settings()))
        engine = opened
        if bar is not None:
            with_engine = open_engine(config, on_progress=bar.progress, on_loaded=bar.loaded)
            engine = await scopes.enter_async_context(with_engine)
        assert engine is not None
        app: App | RouterApp
        app = engines_app = engine_app(
            engine, config, store, tracer=tracing.tracer, is_behind_router=routing.has_endpoints
        )
        engine.tracer = tracing.tracer
        await scopes.enter_async_context(engines_app.running())
        worker: Worker = engine
        metrics = engine.metrics
        if routing.has_endpoints:
            naming = await scopes.enter_async_context(routing.naming(config.tokenizer or config.model))
            await scopes.enter_async_context(_engine_as_endpoint(engines_app, routing, config, engine.load()))
            app = routing.app(
                naming=naming,
                more_metrics=lambda: engine.metrics.expose(part="engine"),
                tracer=tracing.tracer,
            )
            await scopes.enter_async_context(app.page.running())
            worker, metrics = routing.dispatch, routing.metrics
        tracing.show(metrics)
        show_dropped_lines(metrics)
        await scopes.enter_async_context(profiling(profiles, engine.step_times))
        handler = around_app(app, config)
        front_end = chosen_front_end(app, handler, listeners, config, ssl_context, metrics)
        stoppable = _WorkerWithBackgroundWork(worker, engines_app, engine)
        service = Service(stoppable, front_end, config.stopping_settings(), wait_for_rest=stoppable.wait_until_idle)
        engine.on_fault = service.pass_on_fault
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run, orders)
                on_serving(urls)


async def serve(
    engine: Engine, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED, **options: Any
) -> None:
    """Serve an open engine over HTTP inside of a Trio program, until this function is cancelled.

    Start the server in a nursery: `urls = await nursery.start(functools.partial(trioserve.serve, engine, port=8000))`.
    The engine can still be used from Python, and stays open when the server ends. A cancel ends all connections at
    once. To let running requests finish first, call `engine.drain()` and wait for `engine.wait_until_idle()`.

    Args:
        engine: engine that `trioserve.open_engine` opened.
        options: options of the front end of `trioserve serve`, spelled with `_`: `host`, `port`, `api_key` and so on.
            Options of the engine have no effect.

    Raises:
        StartupError: an option is wrong, or the server cannot listen at the address.
        EngineFault: the engine broke.
    """
    sender, orders = trio.open_memory_channel[object](1)
    config = make_config(model=engine.model.source, **options)
    async with sender, orders:
        await serve_configured(config, orders, on_serving=task_status.started, opened=engine)


@asynccontextmanager
async def _engine_as_endpoint(app: App, routing: Routing, config: Config, load: EndpointLoad) -> AsyncIterator[None]:
    """Run the router with this process's engine as one of its endpoints.

    The router reaches the engine over a connection inside of this process. So a request is cancelled in the same way as
    at remote endpoints: the connection closes.
    """
    server = FrontendServer(app, limits=frontend_limits(config))
    async with trio.open_nursery() as connections:

        async def connect() -> trio.abc.Stream:
            router_end, engine_end = trio.socket.socketpair()
            connections.start_soon(server.serve_connection, trio.SocketStream(engine_end))
            return trio.SocketStream(router_end)

        address = EndpointAddress.parse("http://" + LOCAL_ENDPOINT)
        routing.fleet.add(
            EndpointSpec(url=str(address), id=LOCAL_ENDPOINT, leases_max=(load.max_num_seqs or 0) + WAITING_DEPTH_MAX),
            source="this process",
            remote=RemoteEndpoint(LOCAL_ENDPOINT, address, open_stream=connect),
        )
        async with routing.running():
            yield
        connections.cancel_scope.cancel()


class _WorkerWithBackgroundWork:
    """A worker that also stops work of the engine's app which continues after its HTTP request, such as batches."""

    def __init__(self, worker: Worker, app: App, engine: Engine) -> None:
        self._worker = worker
        self._app = app
        self._engine = engine

    def drain(self) -> None:
        self._worker.drain()
        self._app.drain()

    def abort_all(self, message: str) -> None:
        if self._worker is not self._engine:
            self._worker.abort_all(message)
        # The engine must also stop behind a router, because the router does not know the batches and the background
        # responses of the engine's app.
        self._engine.abort_all(message, hands_over=True)

    async def wait_until_idle(self) -> None:
        await self._app.wait_until_idle()
        await self._engine.wait_until_idle()


def _names(config: Config) -> list[str]:
    return list(config.served_model_name) or [default_served_name(config.model)]


def check_profile_directory(directory: str | None) -> Path | None:
    """Check that files can be written into the profile directory.

    Args:
        directory: value of --profile. None writes no files.

    Returns:
        The directory, or None.

    Raises:
        StartupError: the directory does not exist, or is not writable.
    """
    if directory is None:
        return None
    path = Path(directory)
    if not (path.is_dir() and os.access(path, os.W_OK)):
        raise StartupError(f'--profile is "{directory}", which is not a writable directory')
    return path


@asynccontextmanager
async def profiling(directory: Path | None, steps: StepTimes) -> AsyncIterator[None]:
    """Write a step file at each SIGUSR2 inside of the scope. Works only in the main thread.

    Args:
        directory: directory for the files. None ignores the signal.
        steps: times of the latest steps.
    """
    if directory is None:
        yield
        return
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(_write_at_signals, directory, steps)
            yield
            nursery.cancel_scope.cancel()


async def _write_at_signals(
    directory: Path, steps: StepTimes, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGUSR2) as signals:
        task_status.started()
        async for _ in signals:
            path = directory / f"steps-{os.getpid()}-{time.time_ns() // 1_000_000}.json"
            try:
                await trio.to_thread.run_sync(partial(_write_steps, path, steps.latest()))
            except OSError as error:
                logger.warning("the steps were not written file=%s: %s", path, error.strerror)
            else:
                logger.info("steps written file=%s", path)


def _write_steps(path: Path, steps: Iterable[StepTime]) -> None:
    """Write the file with a temporary name, then rename it, so that readers never see an incomplete file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(step_trace(steps))
    unfinished.replace(path)
