"""The app under Hypercorn's Trio worker, for those who want Hypercorn; what it cannot promise is said at start."""

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
from trioserve.http.asgi.app import AsgiApp
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import ClientCertificates

__all__ = ["HYPERCORN_LIMITS", "serve_with_hypercorn"]

logger = logging.getLogger(__name__)

HYPERCORN_LIMITS = (
    "an HTTP/2 client that does not read makes it buffer without bound, and is not noticed as stalled",
    "an HTTP/1.1 client that stops reading is cut off only at the end of the drain",
    "a disconnect behind a pipelined HTTP/1.1 request is noticed late, or never while nothing is sent",
    "one DATA frame after an early response can end the whole server",
    "connections that have shown a key have no places of their own",
    "at shutdown clients get no GOAWAY, and late streams no REFUSED_STREAM",
)
"""Measured with Hypercorn 0.18 on Trio. Our own front end has none of them."""


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
    """Serve until `shutdown_trigger` returns, and then at most drain_seconds_max more. Takes over the listeners.

    Raises StartupError if Hypercorn is not installed. Warns once, with HYPERCORN_LIMITS.
    """
    try:
        import hypercorn.trio
        from hypercorn.config import Config
    except ImportError:
        raise StartupError(
            "the hypercorn front end needs Hypercorn, which is not installed: pip install 'trioserve[asgi]'"
        ) from None
    limits = limits or FrontendLimits()
    logger.warning("Hypercorn speaks HTTP. What it cannot promise: %s", "; ".join(HYPERCORN_LIMITS))
    config = Config()
    config.accesslog = None
    config.errorlog = logger
    config.include_server_header = False
    config.include_date_header = False  # the handler's responses have one
    config.h2_max_concurrent_streams = limits.streams_max
    config.h2_max_header_list_size = limits.head_bytes_max
    config.h11_max_incomplete_size = limits.head_bytes_max
    config.keep_alive_timeout = limits.idle_seconds_max
    config.ssl_handshake_timeout = limits.tls_handshake_seconds_max
    config.graceful_timeout = drain_seconds_max
    if certificate is not None:
        config.certfile = str(certificate)
        config.keyfile = str(key or certificate)
    if ca_certificates is not None:
        config.ca_certs = str(ca_certificates)
        config.verify_mode = ssl.CERT_REQUIRED if client_certificates == "required" else ssl.CERT_OPTIONAL
    # Hypercorn takes open sockets by number, and owns them from then on.
    config.bind = [f"fd://{os.dup(listener.socket.fileno())}" for listener in listeners]
    ports = {listener.socket.getsockname()[1] for listener in listeners}
    for listener in listeners:
        listener.socket.close()
    serve = functools.partial(hypercorn.trio.serve, app, config, shutdown_trigger=shutdown_trigger)
    from trioserve.http.asgi.hypercorn_bounds import bounded  # which needs Hypercorn

    with bounded(limits):
        await _serve(serve, ports, task_status)


async def _serve(serve: Callable[..., Awaitable[None]], ports: set[int], task_status: trio.TaskStatus[None]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cut_connections_at_the_end, ports)
        async with trio.open_nursery() as serving:
            await serving.start(serve)
            task_status.started()
        nursery.cancel_scope.cancel()


async def _cut_connections_at_the_end(ports: set[int]) -> None:
    """Hypercorn shields what it sends, so a client that stops reading would hold up the end for as long as it likes.
    Cancelled, this shuts the connections down below it, and its sends fail."""
    try:
        await trio.sleep_forever()
    finally:
        for descriptor in _open_descriptors():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)


def _open_descriptors() -> list[int]:
    """Of this process; none where the system does not tell."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
