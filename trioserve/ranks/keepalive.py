"""A connection to another machine that is to show when that is gone."""

from __future__ import annotations

import socket

__all__ = ["keep_alive"]

# A machine that is gone without a word is noticed within so many seconds, also while nothing is said.
KEEPALIVE_SECONDS, KEEPALIVE_INTERVAL, KEEPALIVE_TRIES, UNACKNOWLEDGED_SECONDS_MAX = 5, 2, 3, 12


def keep_alive(connection: socket.socket) -> None:
    """From now on it is blocking, delays nothing, and breaks when the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
        (socket.TCP_KEEPCNT, KEEPALIVE_TRIES),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS_MAX * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
