"""`python -m trioserve serve`: an engine, a front end, and the signals that stop them. Its nursery is the program."""

from __future__ import annotations

import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio

from trioserve.assemble import default_served_name, open_configured_engine, runtime_settings
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.frontend.api_keys import ApiKeys
from trioserve.frontend.counter_metrics import show_counters
from trioserve.frontend.cross_origin import CrossOrigin, checked_origins
from trioserve.frontend.exchange import Handler
from trioserve.frontend.hypercorn_server import serve_with_hypercorn
from trioserve.frontend.limits import FrontendLimits
from trioserve.frontend.listener import addresses, open_listeners, tls_context
from trioserve.frontend.routes import App
from trioserve.frontend.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.runtime.errors_unwrapped import errors_unwrapped
from trioserve.runtime.interpreter import keep_what_is_loaded, prepare_interpreter
from trioserve.runtime.serve import FrontEnd, Service
from trioserve.terminal import EXIT_INTERRUPTED, LoadingBar

__all__ = ["run_server", "serve_configured"]

_IMPORTED_AT = time.perf_counter()
ORDERS_MAX = 8  # signals that wait to be obeyed; more say nothing new


def run_server(config: Config) -> int:
    """Serve until Ctrl-C or SIGTERM, then drain. Returns the exit code; raises StartupError and EngineFault."""
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for library in ("h2", "hpack"):  # a line for each header field says nothing of a request
        logging.getLogger(library).setLevel(logging.WARNING)
    prepare_interpreter()
    return trio.run(_serve_until_signal, config)


async def _serve_until_signal(config: Config) -> int:
    sender, orders = trio.open_memory_channel[object](ORDERS_MAX)
    is_serving = trio.Event()

    async def relay_signals(everything: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if not is_serving.is_set():
                    everything.cancel()
                elif orders.statistics().current_buffer_used < ORDERS_MAX:
                    sender.send_nowait(number)

    def announce(urls: list[str]) -> None:
        keep_what_is_loaded()
        is_serving.set()
        seconds = _process_seconds()
        for url in urls:
            print(
                f"serving {', '.join(_names(config))} at {url} (ready after {seconds:.1f} s; Ctrl-C stops)",
                file=sys.stderr,
                flush=True,
            )

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(relay_signals, nursery.cancel_scope)
            await serve_configured(config, orders, on_serving=announce)
            print("stopped", file=sys.stderr)
            nursery.cancel_scope.cancel()
    return 0 if is_serving.is_set() else EXIT_INTERRUPTED


def _process_seconds() -> float:
    """How long this process has lived: what is waited for at a start is also Python itself and every module."""
    if sys.platform != "linux":
        return time.perf_counter() - _IMPORTED_AT
    # Clock ticks from the start of the system to that of the process; field 22 as proc(5) counts, two stand before ")".
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


async def serve_configured(
    config: Config,
    orders: trio.MemoryReceiveChannel[object],
    *,
    on_serving: Callable[[list[str]], None] = lambda urls: None,
) -> None:
    """The whole server in the caller's scope, until an item comes in `orders` and it has drained. Installs no signal
    handlers. on_serving is told the URLs. Cancelling it ends everything at once."""
    # First of all, so that what cannot be is told before a model is loaded.
    ApiKeys(config.api_key, admin_key=config.admin_api_key)
    checked_origins(config.cors_origin)
    limits = _limits(config)
    ssl_context = _ssl_context(config)
    # Who connects early waits in the backlog.
    listeners = await open_listeners(config.host, config.port, limits=limits)
    try:
        scheme = "http" if ssl_context is None else "https"
        urls = [f"{scheme}://{address}" for address in addresses(listeners)]
        bar = LoadingBar(config.model)
        async with open_configured_engine(config, on_progress=bar.progress, on_loaded=bar.loaded) as engine:
            app = App(
                engine,
                api_keys=config.api_key,
                admin_api_key=config.admin_api_key,
                trust_request_chat_template=config.trust_request_chat_template,
            )
            handler: Handler = app
            if config.cors_origin:
                handler = CrossOrigin(app, config.cors_origin, on_preflight=app.note_preflight)
            front_end: FrontEnd
            if config.frontend == "hypercorn":
                front_end = _HypercornFrontEnd(handler, listeners, config)
            else:
                server = FrontendServer(handler, limits=limits, ssl_context=ssl_context)
                front_end = _NativeFrontEnd(server, listeners, engine.metrics)
            service = Service(engine, front_end, runtime_settings(config))
            with errors_unwrapped():
                async with trio.open_nursery() as nursery:
                    await nursery.start(service.run, orders)
                    on_serving(urls)
    finally:
        for listener in listeners:
            listener.socket.close()


class _NativeFrontEnd:
    """Our own front end, as the order of stopping sees it."""

    def __init__(self, server: FrontendServer, listeners: list[trio.SocketListener], metrics: Metrics) -> None:
        self._server = server
        self._listeners = listeners
        self.drain = server.drain
        show_counters(metrics, server.counters)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._server.serve(self._listeners, task_status=task_status)


class _HypercornFrontEnd:
    """Hypercorn's Trio worker, the same."""

    def __init__(self, handler: Handler, listeners: list[trio.SocketListener], config: Config) -> None:
        self._handler = handler
        self._listeners = listeners
        self._config = config
        self._is_draining = trio.Event()
        self.drain = self._is_draining.set

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        config = self._config
        await serve_with_hypercorn(
            self._handler,
            self._listeners,
            shutdown_trigger=self._is_draining.wait,
            # Its own deadline comes after ours, so that requests end with an error event before they are cut.
            drain_seconds_max=config.drain_timeout + 2 * runtime_settings(config).last_words_seconds_max,
            limits=_limits(config),
            certificate=_path(config.ssl_certfile),
            key=_path(config.ssl_keyfile),
            ca_certificates=_path(config.ssl_ca_certs),
            client_certificates=config.ssl_client_certs,
            task_status=task_status,
        )


def _limits(config: Config) -> FrontendLimits:
    return FrontendLimits(
        connections_max=config.max_connections,
        body_bytes_max=config.max_body_bytes,
        stall_seconds_max=config.stall_timeout,
    )


def _ssl_context(config: Config) -> ssl.SSLContext | None:
    """None without TLS."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise StartupError(f"{flag} is set, but --ssl-certfile is not: give both for TLS, or neither")
        if config.ssl_client_certs != "none":
            raise StartupError("--ssl-client-certs is set, but --ssl-certfile is not: only TLS knows certificates")
        return None
    return tls_context(
        Path(config.ssl_certfile),
        _path(config.ssl_keyfile),
        ca_certificates=_path(config.ssl_ca_certs),
        client_certificates=config.ssl_client_certs,
    )


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _names(config: Config) -> list[str]:
    return list(config.served_model_name) or [default_served_name(config.model)]
