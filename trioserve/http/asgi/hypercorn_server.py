"""The optional Hypercorn front end: it runs an AsgiApp under Hypercorn's Trio worker, and logs its limitations."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import ClientCertificates

__all__ = ["HYPERCORN_LIMITS", "serve_with_hypercorn"]

logger = logging.getLogger(__name__)

HYPERCORN_LIMITS = (
    "it buffers without bound for an HTTP/2 client that does not read, and does not notice that the client stalls",
    "it disconnects an HTTP/1.1 client that stops reading only at the end of the drain",
    "it notices a disconnect behind a pipelined HTTP/1.1 request late, or never while nothing is sent",
    "one DATA frame after an early response can end the whole server",
    "it reserves no connections for clients that have shown a key",
    "at shutdown, it sends no GOAWAY to clients, and no REFUSED_STREAM to late streams",
)
"""Limitations of Hypercorn 0.18 on Trio, found by experiment. The built-in front end has none of these limitations."""


async def serve_with_hypercorn(
    app: AsgiApp,
    listeners: Sequence[trio.SocketListener],
    *,
    shutdown_trigger: Callable[[], Awaitable[None]],
    drain_seconds_max: float,
    limits: FrontendLimits | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    ca_certificates: Path | None = None,
    client_certificates: ClientCertificates = "none",
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run an app under Hypercorn until it is shut down. Logs HYPERCORN_LIMITS as a warning.

    Args:
        app: answers each request.
        listeners: listening sockets. This function closes them, and Hypercorn gets copies.
        shutdown_trigger: returns when the server must stop.
        drain_seconds_max: time in seconds that running requests may take after `shutdown_trigger` returned.
        limits: limits of the server. If None, the default limits.
        certificate, key, ca_certificates, client_certificates: see tls_context.
        task_status: reported as started when Hypercorn accepts connections.

    Raises:
        StartupError: Hypercorn is not installed.
    """
    try:
        import hypercorn.trio
        from hypercorn.config import Config
    except ImportError:
        raise StartupError(
            f"the hypercorn front end needs Hypercorn, which is not installed: {install_command('asgi')}"
        ) from None
    limits = limits or FrontendLimits()
    logger.warning("the HTTP front end is Hypercorn. Its limitations: %s", "; ".join(HYPERCORN_LIMITS))
    config = Config()
    config.accesslog = None
    config.errorlog = logger
    config.include_server_header = False
    config.include_date_header = False  # AsgiExchange adds the date.
    config.h2_max_concurrent_streams = limits.streams_max
    config.h2_max_header_list_size = limits.head_bytes_max
    config.h11_max_incomplete_size = limits.head_bytes_max
    config.keep_alive_timeout = limits.idle_seconds_max
    config.ssl_handshake_timeout = limits.tls_handshake_seconds_max
    config.graceful_timeout = drain_seconds_max
    config.websocket_max_message_size = limits.websocket_message_bytes_max
    config.websocket_ping_interval = limits.websocket_ping_seconds
    if certificate is not None:
        config.certfile = str(certificate)
        config.keyfile = str(key or certificate)
    if ca_certificates is not None:
        config.ca_certs = str(ca_certificates)
        config.verify_mode = ssl.CERT_REQUIRED if client_certificates == "required" else ssl.CERT_OPTIONAL
    # Hypercorn gets open sockets by their file descriptors, and owns them.
    config.bind = [f"fd://{os.dup(listener.socket.fileno())}" for listener in listeners]
    ports = {listener.socket.getsockname()[1] for listener in listeners}
    for listener in listeners:
        listener.socket.close()
    serve = functools.partial(hypercorn.trio.serve, app, config, shutdown_trigger=shutdown_trigger)
    # The import is here, because the module imports Hypercorn, which is optional.
    from trioserve.http.asgi.hypercorn_bounds import bounded

    with bounded(limits):
        await _serve(serve, ports, task_status)


async def _serve(serve: Callable[..., Awaitable[None]], ports: set[int], task_status: trio.TaskStatus[None]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_shut_down_connections_at_exit, ports)
        async with trio.open_nursery() as serving:
            await serving.start(serve)
            task_status.started()
        nursery.cancel_scope.cancel()


async def _shut_down_connections_at_exit(ports: set[int]) -> None:
    """Wait for cancellation, then shut down all TCP connections at these ports.

    Hypercorn shields its sends from cancellation, so a client that stops reading could block the exit. After the
    shutdown of the sockets, these sends fail.
    """
    try:
        await trio.sleep_forever()
    finally:
        for descriptor in _open_descriptors():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)


def _open_descriptors() -> list[int]:
    """Return the open file descriptors of this process, or an empty list if the system has no /proc."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
