"""How ranks of two stages on different machines find each other: the one behind listens, and the one before it comes.

Where to, the server says, and with which key. It has that from nobody and tells it to all ranks, so who knows it is one
of them. It is sent as it is: like everything that ranks say, in a network of their own.
"""

from __future__ import annotations

import secrets
import socket

from trioserve.contracts.errors import StartupError
from trioserve.ranks.keepalive import keep_alive

__all__ = ["KEY_BYTES", "StageListener", "connect_stage"]

KEY_BYTES = 32
MEETING_SECONDS_MAX = 60.0  # all ranks are told to meet when the last one has read its weights
GREETING_SECONDS_MAX = 5.0


class StageListener:
    """Of a rank whose stage is behind one on another machine. Closed once somebody has come, or with its process."""

    def __init__(self) -> None:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=has_both)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def wait(self, key: bytes) -> socket.socket:
        """Until the rank of the stage before has come. Raises StartupError if it does not."""
        self._listener.settimeout(MEETING_SECONDS_MAX)
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    raise StartupError(
                        f"the rank of the stage before has not come within {MEETING_SECONDS_MAX:g} s to port "
                        f"{self.port}, which has to be reachable for it"
                    ) from None
                if _knows(connection, key):
                    return connection
                connection.close()


def _knows(connection: socket.socket, key: bytes) -> bool:
    connection.settimeout(GREETING_SECONDS_MAX)
    said = b""
    try:
        while len(said) < KEY_BYTES and (part := connection.recv(KEY_BYTES - len(said))):
            said += part
    except OSError:
        return False
    keep_alive(connection)
    return secrets.compare_digest(said, key)


def connect_stage(host: str, port: int, key: bytes) -> socket.socket:
    """To the rank of the next stage, which listens there. Raises StartupError if it cannot be reached."""
    try:
        connection = socket.create_connection((host, port), MEETING_SECONDS_MAX)
        connection.sendall(key)
    except OSError as error:
        raise StartupError(
            f"the next stage cannot be reached at {host}:{port}, a port that it has chosen: {error.strerror or error}"
        ) from error
    keep_alive(connection)
    return connection
