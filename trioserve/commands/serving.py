"""What every server program does: logging, signals that stop it, TLS, our own front end in the order of stopping."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import trio

from trioserve.api.api_keys import ApiKeys
from trioserve.api.app import BaseApp
from trioserve.api.caller import AccessRules
from trioserve.api.gate import checked_host_names, is_loopback_host
from trioserve.api.page.settings import PageSettings
from trioserve.commands.log_lines import announce, logging_to
from trioserve.commands.program_end import StopSignals
from trioserve.config import Config, ServerConfig
from trioserve.contracts.errors import StartupError
from trioserve.http.counter_metrics import show_counters
from trioserve.http.cross_origin import CrossOrigin, checked_origins
from trioserve.http.exchange import Handler
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners, open_unix_listener, tls_context
from trioserve.http.root_path import RootPath, checked_root_path
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.file_limit import connections_within
from trioserve.trio_tools.interpreter import freeze_loaded_objects, prepare_interpreter

__all__ = [
    "NativeFrontEnd",
    "Places",
    "Serve",
    "access_rules",
    "around_app",
    "check_front",
    "frontend_limits",
    "open_places",
    "optional_path",
    "page_settings",
    "run_until_signal",
    "server_tls",
    "server_urls",
    "tell_serving",
    "tls_files",
]

logger = logging.getLogger(__name__)

SLOW_LINK_BYTES_PER_SECOND = 62_500  # half a Mbit/s: the slowest upload of a body that is as large as allowed

_IMPORTED_AT = time.perf_counter()
ORDERS_MAX = 8  # signals that wait to be obeyed; more say nothing new
TLS_LOOK_SECONDS = 10.0  # between two looks whether the files of certificates and keys have changed

Serve = Callable[[trio.MemoryReceiveChannel[object], Callable[[list[str]], None]], Awaitable[None]]
"""Serves until an item comes, and then drains; tells the URLs at which it does."""


def run_until_signal(
    config: ServerConfig, serve: Serve, *, what: str, on_serving: Callable[[], None] | None = None
) -> int:
    """Serve until Ctrl-C or SIGTERM, then drain. Returns the exit code; raises what `serve` raises. what: is served.
    on_serving: called when it is, instead of telling people."""
    for library in ("h2", "hpack"):  # a line for each header field says nothing of a request
        logging.getLogger(library).setLevel(logging.WARNING)
    prepare_interpreter()
    with StopSignals() as signals, logging_to(level=config.log_level, form=config.log_format):
        return trio.run(_serve_until_signal, serve, signals, what, config, on_serving)


async def _serve_until_signal(
    serve: Serve, signals: StopSignals, what: str, config: ServerConfig, on_serving: Callable[[], None] | None
) -> int:
    sender, orders = trio.open_memory_channel[object](ORDERS_MAX)
    is_serving = trio.Event()
    exit_code = 0

    async def relay_signals(everything: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        nonlocal exit_code
        async for number in signals.receive(task_status=task_status):
            if number == signal.SIGHUP and not is_serving.is_set():
                continue  # certificates are read again when serving begins
            if not is_serving.is_set():
                exit_code = 128 + number  # as shells show it: what was asked for was not done
                everything.cancel()
            elif orders.statistics().current_buffer_used < ORDERS_MAX:
                sender.send_nowait(number)

    def note_serving(urls: list[str]) -> None:
        freeze_loaded_objects()
        is_serving.set()
        if on_serving is not None:
            on_serving()
        else:
            tell_serving(what, urls, config)

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(relay_signals, nursery.cancel_scope)
            await serve(orders, note_serving)
            if on_serving is None:
                announce("stopped")
            nursery.cancel_scope.cancel()
    return exit_code


def tell_serving(what: str, urls: list[str], config: ServerConfig) -> None:
    """Tell people on stderr where `what` is served, and what strangers may do there."""
    seconds = _process_seconds()
    for url in urls:
        announce(f"serving {what} at {url} (ready after {seconds:.1f} s; Ctrl-C stops)")
        if config.ui and url.startswith("http"):
            announce(f"watch it in a browser: {url}/")
    warning = strangers_warning(config)
    if warning is not None:
        announce(warning)


def _process_seconds() -> float:
    """How long this process has lived: what is waited for at a start is also Python itself and every module."""
    if sys.platform != "linux":
        return time.perf_counter() - _IMPORTED_AT
    # Clock ticks from the start of the system to that of the process; field 22 as proc(5) counts, two stand before ")".
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Places(NamedTuple):
    """listeners: open. urls: how clients reach each."""

    listeners: list[trio.SocketListener]
    urls: list[str]


class NativeFrontEnd:
    """Our own front end, as the order of stopping sees it.

    With TLS it reads certificates and keys again when `reload` is called, and when one of their files has changed.
    """

    def __init__(
        self, server: FrontendServer, listeners: list[trio.SocketListener], metrics: Metrics, config: ServerConfig
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
        """Use certificates and keys again when they change. What cannot be used is one line in the log.

        The first look is at once: loading a model takes time, in which the files may have changed.
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
    """What changes when a file is written or replaced; None for a file that cannot be read."""

    def stamp(path: Path) -> tuple[int, int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    return [stamp(path) for path in paths]


def access_rules(config: ServerConfig) -> AccessRules:
    """What callers may do, beside the keys."""
    names = None
    if config.uds is None:  # no browser reaches a Unix domain socket by itself
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


def _own_names(config: ServerConfig) -> tuple[str, ...]:
    """By which other machines know this one, where they reach the server: --host, and the machine's name."""
    if is_loopback_host(config.host):
        return ()
    return tuple(filter(None, (config.host.strip("[]").lower(), socket.gethostname().lower())))


def _is_reached_by_others(config: ServerConfig) -> bool:
    """Whether other machines may reach the server."""
    return config.uds is None and not is_loopback_host(config.host)


def strangers_warning(config: ServerConfig) -> str | None:
    """What anybody may do who reaches the server; None where there are keys, or only this machine reaches it."""
    if config.api_key or config.gateway_api_key or not _is_reached_by_others(config):
        return None
    operates = (
        "They may also operate it: pause it, put it to sleep, load weights and adapters, have a router send prompts to "
        "another server (--allow-operator-without-key)."
        if config.allow_operator_without_key
        else "What operates the server is off (--allow-operator-without-key)."
    )
    return (
        f"warning: there is no --api-key, and other machines may reach {config.host}. Anybody who does may send "
        f"requests, and read and delete what others have stored here. {operates}"
    )


def page_settings(config: ServerConfig) -> PageSettings:
    return PageSettings(is_shown=config.ui)


def frontend_limits(config: ServerConfig) -> FrontendLimits:
    """The front end's limits, with no more connections than the limit of open files allows."""
    file_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections_max = connections_within(config.max_connections, file_limit, files_each=_files_each(config))
    of_address = config.max_connections_per_address
    return FrontendLimits(
        connections_max=connections_max,
        connections_per_address_max=of_address or max(1, connections_max - max(1, connections_max // 64)),
        body_bytes_max=config.max_body_bytes,
        body_seconds_max=config.body_timeout
        or max(FrontendLimits().body_seconds_max, config.max_body_bytes / SLOW_LINK_BYTES_PER_SECOND),
        stall_seconds_max=config.stall_timeout,
        idle_seconds_max=config.keep_alive_timeout,
        ping_seconds=config.ping_interval,
        ping_answer_seconds_max=config.ping_timeout,
        vanished_seconds_max=config.vanished_timeout,
    )


def _files_each(config: ServerConfig) -> int:
    """Files for one client's connection and what is opened for its request."""
    if not isinstance(config, Config):
        return 2  # a router, with a connection to an endpoint
    routes = (
        config.endpoint
        or config.prefill_endpoint
        or config.decode_endpoint
        or config.endpoints_file
        or config.endpoints_dns
        or config.endpoints_kubernetes
        or config.endpoints_ray
    )
    return 3 if routes else 1  # the engine beside a router is reached over a socket pair


@asynccontextmanager
async def open_places(config: ServerConfig, limits: FrontendLimits) -> AsyncIterator[Places]:
    """Where the server listens. Who connects early waits in the backlog. Closed at the end. Raises StartupError."""
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


def server_urls(config: ServerConfig, listeners: Sequence[trio.SocketListener]) -> list[str]:
    """How clients reach each."""
    scheme = "unix" if config.uds is not None else "http" if config.ssl_certfile is None else "https"
    return [f"{scheme}://{address}" for address in addresses(listeners)]


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def around_app(app: BaseApp[Any], config: ServerConfig) -> Handler:
    """The app behind what web pages and proxies want of it."""
    handler: Handler = app
    if config.cors_origin:
        handler = CrossOrigin(app, config.cors_origin, on_preflight=app.note_preflight)
    prefix = checked_root_path(config.root_path)
    return RootPath(handler, prefix) if prefix else handler


def check_front(config: ServerConfig) -> None:
    """What cannot be is told before a model is loaded. Raises StartupError."""
    ApiKeys(config.api_key, admin_key=config.admin_api_key, rules=access_rules(config))
    checked_origins(config.cors_origin)
    checked_root_path(config.root_path)


def server_tls(config: ServerConfig) -> ssl.SSLContext | None:
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
        optional_path(config.ssl_keyfile),
        ca_certificates=optional_path(config.ssl_ca_certs),
        client_certificates=config.ssl_client_certs,
    )


def tls_files(config: ServerConfig) -> list[Path]:
    """The files that `server_tls` reads."""
    names = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    return [Path(name) for name in names if name is not None]


def optional_path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
