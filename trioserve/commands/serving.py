"""Parts that all server commands share: logging, stop signals, TLS, listeners and the native front end."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from trioserve.api.app import BaseApp
from trioserve.api.caller import AccessRules, ApiKeys
from trioserve.api.gate import checked_host_names, is_loopback_host
from trioserve.api.page import PageSettings
from trioserve.commands.log_lines import announce, logging_to
from trioserve.commands.program_end import StopSignals
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.asgi.hypercorn_server import serve_with_hypercorn
from trioserve.http.counters import show_counters
from trioserve.http.exchange import Handler
from trioserve.http.handler_call import CrossOrigin, RootPath, checked_origins, checked_root_path
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners, open_unix_listener, tls_context
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.options.server import ServerOptions
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interpreter import connections_within, freeze_loaded_objects, prepare_interpreter
from trioserve.trio_tools.service import FrontEnd
from trioserve.trio_tools.worker_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.tracing.otel import SpanCounts

__all__ = [
    "NativeFrontEnd",
    "Places",
    "Serve",
    "Tracing",
    "access_rules",
    "announce_serving",
    "around_app",
    "check_front",
    "check_front_end",
    "chosen_front_end",
    "frontend_limits",
    "open_places",
    "open_tracing",
    "optional_path",
    "page_settings",
    "run_until_signal",
    "server_tls",
    "server_urls",
    "tls_files",
]

logger = logging.getLogger(__name__)


# 0.5 Mbit/s: the slowest connection at which a body of the maximum size still arrives within the time limit.
SLOW_LINK_BYTES_PER_SECOND = 62_500

_IMPORTED_AT = time.perf_counter()
ORDERS_MAX = 8  # Maximum number of waiting signals. A dropped signal would only repeat an earlier signal.
TLS_LOOK_SECONDS = 10.0  # interval between two checks for changed certificate and key files

Serve = Callable[[trio.MemoryReceiveChannel[object], Callable[[list[str]], None]], Awaitable[None]]
"""Serves until the channel yields an item, then drains.

Calls the second argument with the URLs as soon as it accepts requests.
"""


def run_until_signal(
    config: ServerOptions, serve: Serve, *, what: str, on_serving: Callable[[], None] | None = None
) -> int:
    """Serve until Ctrl-C or SIGTERM, then drain.

    Args:
        config: options of the server. Only the options for logs and status messages are read.
        serve: runs the server. This function raises all exceptions of `serve`.
        what: noun for the server in status messages.
        on_serving: called once the server accepts requests. If None, status messages announce the URLs and the end.

    Returns:
        0, or 128 + signal number if a signal ended the program before it accepted requests.
    """
    for library in ("h2", "hpack"):  # These libraries log each header field, which does not help to find a request.
        logging.getLogger(library).setLevel(logging.WARNING)
    prepare_interpreter()
    with StopSignals() as signals, logging_to(level=config.log_level, form=config.log_format):
        return trio.run(_serve_until_signal, serve, signals, what, config, on_serving)


async def _serve_until_signal(
    serve: Serve, signals: StopSignals, what: str, config: ServerOptions, on_serving: Callable[[], None] | None
) -> int:
    sender, orders = trio.open_memory_channel[object](ORDERS_MAX)
    is_serving = trio.Event()
    exit_code = 0

    async def relay_signals(everything: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        nonlocal exit_code
        async for number in signals.receive(task_status=task_status):
            if number == signal.SIGHUP and not is_serving.is_set():
                continue  # The front end will read the certificates when it begins to serve.
            if not is_serving.is_set():
                exit_code = 128 + number  # Shells use this code, too. The signal ended the program before it served.
                everything.cancel()
            elif orders.statistics().current_buffer_used < ORDERS_MAX:
                sender.send_nowait(number)

    def note_serving(urls: list[str]) -> None:
        freeze_loaded_objects()
        is_serving.set()
        if on_serving is not None:
            on_serving()
        else:
            announce_serving(what, urls, config)

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(relay_signals, nursery.cancel_scope)
            await serve(orders, note_serving)
            if on_serving is None:
                announce("stopped")
            nursery.cancel_scope.cancel()
    return exit_code


def announce_serving(what: str, urls: list[str], config: ServerOptions) -> None:
    """Print the URLs on stderr, and a warning if clients without a key may use the server.

    Args:
        what: name of the served thing, such as the model.
        urls: addresses at which the server accepts requests.
        config: options of the server.
    """
    seconds = _process_seconds()
    for url in urls:
        announce(f"serving {what} at {url} (ready after {seconds:.1f} s; Ctrl-C stops)")
        if config.ui and url.startswith("http"):
            announce(f"watch it in a browser: {url}/")
    warning = strangers_warning(config)
    if warning is not None:
        announce(warning)


def _process_seconds() -> float:
    """Return the age of this process in seconds, which includes the start of Python and all imports."""
    if sys.platform != "linux":
        return time.perf_counter() - _IMPORTED_AT
    # Field 22 is the start time of the process in clock ticks since boot (see proc(5)). The first two fields end at
    # ")".
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Places(NamedTuple):
    """Open listening sockets and their URLs.

    Attributes:
        listeners: open listeners.
        urls: one URL per listener, in the same order.
    """

    listeners: list[trio.SocketListener]
    urls: list[str]


class NativeFrontEnd:
    """The native HTTP front end, with the methods that `Service` calls to serve, drain and stop.

    With TLS, the front end reads certificates and keys again after a call of `reload` and after a change of their
    files.

    Args:
        server: HTTP server that handles the connections.
        listeners: open listeners. The caller closes them.
        metrics: registry that exposes the server's counters.
        config: options of the server, of which only the TLS files are read.
    """

    def __init__(
        self, server: FrontendServer, listeners: list[trio.SocketListener], metrics: Metrics, config: ServerOptions
    ) -> None:
        self._server = server
        self._listeners = listeners
        self._config = config
        self._reload_asked = trio.Event()
        self.announce_drain = server.announce_drain
        self.wait_until_answered = server.wait_until_answered
        self.drain = server.drain
        show_counters(metrics, server.counters)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            if self._config.ssl_certfile is not None:
                nursery.start_soon(self._keep_tls_current)
            await self._server.serve(self._listeners, task_status=task_status)
            nursery.cancel_scope.cancel()

    def reload(self) -> None:
        if self._config.ssl_certfile is None:
            logger.info("SIGHUP: there is nothing to reload, since the server has no TLS certificate")
        self._reload_asked.set()

    async def _keep_tls_current(self) -> None:
        """Read certificates and keys again when their files change. If they cannot be read, log one line.

        The first check is made at once, because the files may have changed while the model was loading.
        """
        files = tls_files(self._config)
        seen: list[tuple[int, int, int] | None] | None = None
        while True:
            is_asked, self._reload_asked = self._reload_asked.is_set(), trio.Event()
            found = await trio.to_thread.run_sync(_file_stamps, files)
            if is_asked or found != seen:
                await self._read_tls(files, is_first=seen is None)
                seen = found
            with trio.move_on_after(TLS_LOOK_SECONDS):
                await self._reload_asked.wait()

    async def _read_tls(self, files: list[Path], *, is_first: bool) -> None:
        try:
            context = await trio.to_thread.run_sync(server_tls, self._config)
        except StartupError as error:
            logger.error("TLS certificates not reloaded, the earlier ones stay in use error=%s", error)
        else:
            assert context is not None
            self._server.use_tls(context)
            if not is_first:
                logger.info("TLS certificates reloaded files=%s", ",".join(map(str, files)))


def _file_stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Return modification time, size and inode of each file, or None for a file that cannot be accessed."""

    def stamp(path: Path) -> tuple[int, int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    return [stamp(path) for path in paths]


def access_rules(config: ServerOptions) -> AccessRules:
    """Return the access rules for callers that follow from the options. API keys are not part of the rules.

    Args:
        config: options of the server.
    """
    names = None
    if config.uds is None:  # The check of host names protects browsers, which cannot connect to a Unix domain socket.
        names = (*_own_names(config), *checked_host_names(config.allowed_host))
    return AccessRules(
        gateway_api_keys=config.gateway_api_key,
        priority_min=config.priority_min,
        shares_prefix_cache=config.share_prefix_cache,
        metrics_need_key=config.metrics_need_key,
        load_needs_key=config.load_needs_key,
        model_is_required=config.require_model,
        response_bytes_max=config.max_response_bytes,
        responses_bytes_max=config.max_responses_bytes,
        keep_alive_seconds=config.keep_alive_comments,
        keep_alive_json=config.keep_alive_json,
        host_names=names,
        has_network_names=_is_reached_by_others(config),
        page_origins=config.cors_origin,
        operates_without_key=config.allow_operator_without_key or not _is_reached_by_others(config),
    )


def _own_names(config: ServerOptions) -> tuple[str, ...]:
    """Return the host names that other machines may use for this server: `--host` and the machine's name."""
    if is_loopback_host(config.host):
        return ()
    return tuple(filter(None, (config.host.strip("[]").lower(), socket.gethostname().lower())))


def _is_reached_by_others(config: ServerOptions) -> bool:
    """Return True if the server listens at an address that other machines can reach."""
    return config.uds is None and not is_loopback_host(config.host)


def strangers_warning(config: ServerOptions) -> str | None:
    """Return a warning that lists the rights of clients without a key.

    Args:
        config: options of the server.

    Returns:
        The warning. None if the server has keys, or if only this machine can reach the server.
    """
    if config.api_key or config.gateway_api_key or not _is_reached_by_others(config):
        return None
    operates = (
        "They may also operate it: pause it, put it to sleep, load weights and adapters, have a router send prompts to "
        "another server (--allow-operator-without-key)."
        if config.allow_operator_without_key
        else "Operating the server is off (--allow-operator-without-key)."
    )
    return (
        f"warning: there is no --api-key, and other machines may reach {config.host}. Their users may send "
        f"requests, and read and delete the stored objects of other users. {operates}"
    )


def page_settings(config: ServerOptions) -> PageSettings:
    return PageSettings(is_shown=config.ui)


def frontend_limits(config: ServerOptions) -> FrontendLimits:
    """Return the limits of the front end. The process's limit on open files also limits the number of connections.

    Args:
        config: options of the server.
    """
    file_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections_max = connections_within(config.max_connections, file_limit, files_each=_files_each(config))
    of_address = config.max_connections_per_address
    of_caller = config.max_websockets_per_caller
    if len(config.api_key) + len(config.gateway_api_key) > 1:
        of_caller = min(of_caller, max(1, config.max_websockets // 2))
    return FrontendLimits(
        connections_max=connections_max,
        connections_per_address_max=of_address or max(1, connections_max - max(1, connections_max // 64)),
        websockets_max=config.max_websockets,
        websockets_per_caller_max=of_caller,
        websocket_idle_seconds_max=config.websocket_idle_timeout,
        body_bytes_max=config.max_body_bytes,
        body_seconds_max=config.body_timeout
        or max(FrontendLimits().body_seconds_max, config.max_body_bytes / SLOW_LINK_BYTES_PER_SECOND),
        stall_seconds_max=config.stall_timeout,
        idle_seconds_max=config.keep_alive_timeout,
        ping_seconds=config.ping_interval,
        ping_answer_seconds_max=config.ping_timeout,
        vanished_seconds_max=config.vanished_timeout,
    )


def _files_each(config: ServerOptions) -> int:
    """Return how many open files one client needs: its connection, and the files that its request opens."""
    if not isinstance(config, Config):
        return 2  # This is a router, which needs another connection to an endpoint.
    routes = (
        config.endpoint
        or config.prefill_endpoint
        or config.decode_endpoint
        or config.endpoints_file
        or config.endpoints_dns
        or config.endpoints_kubernetes
        or config.endpoints_ray
    )
    return 3 if routes else 1  # A router with an engine in the same process connects to it with a socket pair.


@asynccontextmanager
async def open_places(config: ServerOptions, limits: FrontendLimits) -> AsyncIterator[Places]:
    """Listen at the configured address, and close the listeners at the end of the scope.

    Clients that connect before the server accepts connections wait in the backlog of the listener.

    Args:
        config: options of the server.
        limits: limits of the front end.

    Raises:
        StartupError: the server cannot listen at the address.
    """
    if config.uds is None:
        listeners = await open_listeners(config.host, config.port, limits=limits)
    else:
        listeners = [await open_unix_listener(Path(config.uds), limits=limits)]
    try:
        yield Places(listeners, server_urls(config, listeners))
    finally:
        for listener in listeners:
            listener.socket.close()
        if config.uds is not None:
            _remove(config.uds)


def server_urls(config: ServerOptions, listeners: Sequence[trio.SocketListener]) -> list[str]:
    """Return one URL per listener.

    Args:
        config: options of the server, which determine the scheme of the URLs.
        listeners: open listeners.
    """
    scheme = "unix" if config.uds is not None else "http" if config.ssl_certfile is None else "https"
    return [f"{scheme}://{address}" for address in addresses(listeners)]


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def around_app(app: BaseApp[Any], config: ServerOptions) -> Handler:
    """Wrap an app in the handlers for CORS and the root path, if the options enable them.

    Args:
        app: handles the requests.
        config: options of the server.
    """
    handler: Handler = app
    if config.cors_origin:
        handler = CrossOrigin(app, config.cors_origin, on_preflight=app.note_preflight)
    prefix = checked_root_path(config.root_path)
    return RootPath(handler, prefix) if prefix else handler


def check_front(config: ServerOptions) -> None:
    """Check options of the front end before a model is loaded.

    Args:
        config: options of the server.

    Raises:
        StartupError: a key, host name, origin, root path or access rule is not valid.
    """
    ApiKeys(config.api_key, admin_key=config.admin_api_key, rules=access_rules(config))
    checked_origins(config.cors_origin)
    checked_root_path(config.root_path)


def server_tls(config: ServerOptions) -> ssl.SSLContext | None:
    """Load the TLS certificates and keys.

    Args:
        config: options of the server.

    Returns:
        The TLS context, or None if TLS is off.

    Raises:
        StartupError: the TLS options contradict each other, or a file cannot be used.
    """
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise StartupError(f"{flag} is set, but --ssl-certfile is not: set both for TLS, or neither")
        if config.ssl_client_certs != "none":
            raise StartupError("--ssl-client-certs is set, but --ssl-certfile is not: client certificates need TLS")
        return None
    return tls_context(
        Path(config.ssl_certfile),
        optional_path(config.ssl_keyfile),
        ca_certificates=optional_path(config.ssl_ca_certs),
        client_certificates=config.ssl_client_certs,
    )


def tls_files(config: ServerOptions) -> list[Path]:
    """Return the files that `server_tls` reads.

    Args:
        config: options of the server.
    """
    names = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    return [Path(name) for name in names if name is not None]


def optional_path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def check_front_end(config: Config) -> None:
    """Check the options of the front end before a model is loaded.

    Args:
        config: options of the server.

    Raises:
        StartupError: Hypercorn cannot serve a Unix domain socket.
    """
    if config.uds is not None and config.frontend == "hypercorn":
        raise StartupError("--uds is for the native front end: remove --frontend hypercorn, or use --host and --port")


def chosen_front_end(
    app: BaseApp[Any],
    handler: Handler,
    listeners: list[trio.SocketListener],
    config: Config,
    ssl_context: ssl.SSLContext | None,
    metrics: Metrics,
) -> FrontEnd:
    """Create the front end that the options select.

    Args:
        app: HTTP app, which checks the API keys of callers.
        handler: the same app, wrapped for CORS and the root path.
        listeners: open listeners. The caller closes them.
        config: options of the server.
        ssl_context: TLS of the native front end. None without TLS.
        metrics: registry that exposes the counters of the native front end.
    """
    if config.frontend == "hypercorn":
        return _HypercornFrontEnd(handler, listeners, config)
    server = FrontendServer(
        handler, limits=frontend_limits(config), ssl_context=ssl_context, knows_caller=app.knows_caller
    )
    return NativeFrontEnd(server, listeners, metrics, config)


class _HypercornFrontEnd:
    """Hypercorn's Trio worker as a front end.

    Hypercorn reads certificates only at its start. While it drains, its responses do not have `Connection: close`.
    """

    def __init__(self, handler: Handler, listeners: list[trio.SocketListener], config: Config) -> None:
        self._app = AsgiApp(handler, frontend_limits(config))
        self._listeners = listeners
        self._config = config
        self._is_draining = trio.Event()
        self.drain = self._is_draining.set
        self.announce_drain = self._app.announce_drain
        self.wait_until_answered = self._app.wait_until_answered

    def reload(self) -> None:
        logger.warning("SIGHUP: Hypercorn reads certificates at its start only, restart the server for new ones")

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        config = self._config
        await serve_with_hypercorn(
            self._app,
            self._listeners,
            shutdown_trigger=self._is_draining.wait,
            # Hypercorn's deadline is later than the deadline of the service, which first ends each request with an
            # error event.
            drain_seconds_max=config.drain_timeout + 2 * config.stopping_settings().grace_seconds_max,
            limits=frontend_limits(config),
            certificate=optional_path(config.ssl_certfile),
            key=optional_path(config.ssl_keyfile),
            ca_certificates=optional_path(config.ssl_ca_certs),
            client_certificates=config.ssl_client_certs,
            task_status=task_status,
        )


ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Time limit for sending the last spans. A collector that hangs must not block the end of the process.
CLOSE_SECONDS_MAX = 5.0


class Tracing:
    """Tracing that is switched off. Its tracer records nothing."""

    tracer: Tracer = NO_TRACER

    def show(self, metrics: Metrics) -> None:
        """Update the span metrics at each scrape. Does nothing if tracing is off.

        Args:
            metrics: registry that exposes the metrics.
        """


class _Exported(Tracing):
    def __init__(self, tracer: Tracer, counts: Callable[[], SpanCounts]) -> None:
        self.tracer = tracer
        self._counts = counts

    def show(self, metrics: Metrics) -> None:
        shown = {"exported": 0, "failed": 0, "dropped": 0}

        def show() -> None:
            for outcome, count in self._counts()._asdict().items():
                metrics.trace_spans_total.labels(outcome).inc(count - shown[outcome])
                shown[outcome] = count

        metrics.on_scrape(show)


@asynccontextmanager
async def open_tracing(config: ServerOptions, environment: Mapping[str, str] = os.environ) -> AsyncIterator[Tracing]:
    """Send spans of requests to the collector inside of the scope, if tracing is on.

    The exit of the scope waits up to CLOSE_SECONDS_MAX until the last spans are sent. A cancelled scope drops them.

    Args:
        config: options of the server.
        environment: environment variables.

    Raises:
        StartupError: --otlp-endpoint is set, but OpenTelemetry is not installed.
    """
    if not _is_on(config, environment):
        yield Tracing()
        return
    try:
        from trioserve.tracing.otel import OtelTracing
    except ImportError as error:
        if config.otlp_endpoint is not None:
            raise StartupError(
                f"--otlp-endpoint is set, and {error.name} is not installed: {install_command('otel')}"
            ) from None
        logger.warning("requests are not traced: %s is not installed (%s)", error.name, install_command("otel"))
        yield Tracing()
        return
    otel = OtelTracing(endpoint=config.otlp_endpoint, sample=config.trace_sample)
    try:
        yield _Exported(otel.tracer, otel.counts)
    finally:
        with trio.move_on_after(CLOSE_SECONDS_MAX) as closing:
            await call_abandonable(otel.close, thread_name="trace-export-end")
        if closing.cancelled_caught:
            logger.warning("the last spans were not sent: the collector did not accept them in %g s", CLOSE_SECONDS_MAX)


def _is_on(config: ServerOptions, environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if config.otlp_endpoint is not None:
        return True
    return environment.get("OTEL_TRACES_EXPORTER") != "none" and any(map(environment.get, ENDPOINT_VARIABLES))
