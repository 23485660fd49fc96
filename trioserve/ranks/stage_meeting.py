"""How ranks of two stages on different machines find each other: the one behind listens, and the one before it comes.

Where to, the server says, and with which key. It has that from nobody and tells it to all ranks, so who knows it is one
of them. It is sent as it is: like everything that ranks say, in a network of their own.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time

from trioserve.contracts.errors import StartupError
from trioserve.trio_tools.tcp_options import end_when_vanished

__all__ = ["KEY_BYTES", "RANK_VANISHED_SECONDS", "StageListener", "connect_stage", "make_blocking"]

KEY_BYTES = 32
MEETING_SECONDS_MAX = 60.0  # all ranks are told to meet when the last one has read its weights
STRANGERS_MAX = 64  # connections that have not shown the key, at a time
RETRY_SECONDS = 0.1
RANK_VANISHED_SECONDS = 12.0  # a rank holds up all others: sooner than other connections


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
        """Wait until the rank of the stage before has come and shown the key.

        All that connect are listened to at the same time, so a silent stranger keeps nobody out. There are at most
        STRANGERS_MAX of them: for another one, the oldest ends.

        Raises:
            StartupError: it has not come within MEETING_SECONDS_MAX.
        """
        until = time.monotonic() + MEETING_SECONDS_MAX
        said: dict[socket.socket, bytes] = {}  # in the order in which they came
        self._listener.setblocking(False)
        found: socket.socket | None = None
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while found is None:
                    ready = selector.select(max(0.0, until - time.monotonic()))
                    if not ready and time.monotonic() >= until:
                        raise StartupError(
                            f"the rank of the stage before has not come within {MEETING_SECONDS_MAX:g} s to port "
                            f"{self.port}, which has to be reachable for it"
                        )
                    for selected, _ in ready:
                        if selected.fileobj is self._listener:
                            self._accept(said, selector)
                            continue
                        connection = selected.fileobj
                        assert isinstance(connection, socket.socket)
                        if connection not in said:
                            continue  # it has ended for another one
                        if not _hear(connection, said):
                            _end(connection, said, selector)
                        elif len(said[connection]) == KEY_BYTES:
                            if secrets.compare_digest(said[connection], key):
                                selector.unregister(connection)
                                del said[connection]
                                found = connection
                                break
                            _end(connection, said, selector)
            finally:
                for connection in list(said):
                    _end(connection, said, selector)
        make_blocking(found)
        return found

    def _accept(self, said: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone already, or there are no files: another one may end
            if len(said) > 1:
                _end(next(iter(said)), said, selector)
            else:
                time.sleep(RETRY_SECONDS)
            return
        connection.setblocking(False)
        if len(said) >= STRANGERS_MAX:
            _end(next(iter(said)), said, selector)
        said[connection] = b""
        selector.register(connection, selectors.EVENT_READ)


def _hear(connection: socket.socket, said: dict[socket.socket, bytes]) -> bool:
    """Take what has come of the key. False: nothing more will."""
    try:
        part = connection.recv(KEY_BYTES - len(said[connection]))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said[connection] += part
    return bool(part)


def _end(connection: socket.socket, said: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
    del said[connection]
    selector.unregister(connection)
    connection.close()


def connect_stage(host: str, port: int, key: bytes) -> socket.socket:
    """To the rank of the next stage, which listens there. Raises StartupError if it cannot be reached."""
    try:
        connection = socket.create_connection((host, port), MEETING_SECONDS_MAX)
        connection.sendall(key)
    except OSError as error:
        raise StartupError(
            f"the next stage cannot be reached at {host}:{port}, a port that it has chosen: {error.strerror or error}"
        ) from error
    make_blocking(connection)
    return connection


def make_blocking(connection: socket.socket) -> None:
    """Make a connection to another rank's machine blocking and without delay, and have it break when that vanishes."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_vanished(connection, RANK_VANISHED_SECONDS)
