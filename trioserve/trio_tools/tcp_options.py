"""Socket options that show a TCP connection whose other end has vanished. Used on every connection, both ways.

A machine without power or network sends no FIN, and a NAT or load balancer that forgets a flow drops packets without a
word. Without these options, such a connection stays open for hours (sends) or for ever (receives).
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
"""Default. Longer than any pause of a network that recovers by itself (a few retransmissions), shorter than a client's
patience."""
PROBES = 3
TCP_INFO_BYTES = 136
ACKNOWLEDGED_AT = 120  # of tcpi_bytes_acked in struct tcp_info (linux/tcp.h), 64 bits


class _Socket(Protocol):
    def setsockopt(self, level: int, option: int, value: int, /) -> Any: ...


def end_when_vanished(connection: _Socket, seconds: float = VANISHED_SECONDS, *, unread_seconds: float = 0.0) -> None:
    """Have the kernel break a connection whose other end acknowledges nothing.

    Half of the time passes before the first keepalive probe, a sixth between two of three probes. Sent bytes that
    nobody acknowledges break the connection after the same time. Options that this system lacks are left out.

    Args:
        connection: a socket, or anything with its `setsockopt`. Another family than TCP raises OSError.
        seconds: until the connection breaks, at least 6; keepalive counts in whole seconds.
        unread_seconds: how long the other end may acknowledge probes and take no data (a window of zero). The kernel
            has one time for this and for sent bytes that nobody acknowledges: the longer of the two.
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
    """Count the bytes of a TCP connection that the other end's kernel has acknowledged, and those still on their way.

    Returns:
        None where this cannot be known: another system than Linux, another family than TCP, a closed socket.
    """
    if sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    with contextlib.suppress(OSError, struct.error):
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        waiting = array.array("i", [0])
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
        return struct.unpack_from("Q", told, ACKNOWLEDGED_AT)[0], waiting[0]
    return None
