"""Socket options that detect a TCP connection whose other end has vanished. All connections use these options, in both
directions.

A machine that loses power or network sends no FIN. A NAT or load balancer that forgets a connection drops its packets
silently. Without these options, such a connection stays open for hours (if we send) or forever (if we only receive).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from typing import Any, Protocol

__all__ = ["VANISHED_SECONDS", "delivered_bytes", "end_when_vanished"]

VANISHED_SECONDS = 20.0
"""Default time until a connection breaks. It is longer than interruptions from which a network recovers (a few
retransmissions), and shorter than clients wait.
"""
PROBES = 3
TCP_INFO_BYTES = 136
ACKNOWLEDGED_AT = 120  # offset of tcpi_bytes_acked (64 bits) in struct tcp_info (linux/tcp.h)


class _Socket(Protocol):
    def setsockopt(self, level: int, option: int, value: int, /) -> Any: ...


def end_when_vanished(connection: _Socket, seconds: float = VANISHED_SECONDS, *, unread_seconds: float = 0.0) -> None:
    """Make the kernel break a connection whose other end acknowledges nothing.

    The first keepalive probe is sent after half of the time. Two more probes follow, a sixth of the time apart.
    Unacknowledged data breaks the connection after the same time. Options that this system lacks are skipped.

    Args:
        connection: A TCP socket, or an object with a socket's `setsockopt`. Sockets of other families raise OSError.
        seconds: Time until the connection breaks, at least 6. Keepalive counts in whole seconds.
        unread_seconds: Time for which the other end may acknowledge probes without reading data (a window of zero). The
            kernel has a single timeout for this case and for unacknowledged data, so the larger value is used.
    """
    idle, interval = max(1, round(seconds / 2)), max(1, round(seconds / 6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", round(max(seconds, unread_seconds) * 1000)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def delivered_bytes(connection: socket.socket) -> tuple[int, int] | None:
    """Return the number of bytes that the other end's kernel has acknowledged, and of bytes in flight.

    Args:
        connection: A TCP socket.

    Returns:
        Both numbers, or None if they are unknown: not on Linux, not a TCP socket, or a closed socket.
    """
    if sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    with contextlib.suppress(OSError, struct.error):
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        waiting = array.array("i", [0])
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
        return struct.unpack_from("Q", tcp_info, ACKNOWLEDGED_AT)[0], waiting[0]
    return None
