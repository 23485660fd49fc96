"""Chooses the HTTP front end of a server with an engine: the native front end or Hypercorn."""

from __future__ import annotations

import logging
import ssl
from typing import Any

import trio

from trioserve.api.app import BaseApp
from trioserve.commands.serving import NativeFrontEnd, frontend_limits, optional_path
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.asgi.hypercorn_server import serve_with_hypercorn
from trioserve.http.exchange import Handler
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.service import FrontEnd

__all__ = ["check_front_end", "chosen_front_end"]

logger = logging.getLogger(__name__)


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
