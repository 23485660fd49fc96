"""Sends hidden states from stage to stage over sockets. Each rank sends to its peer, the rank with the same number in
the next stage.

All ranks of a stage compute the same hidden states. So each rank sends its own copy, and no rank has to distribute
received states to other ranks. A socket carries the steps in order. A thread that waits for a socket releases the GIL.

If two stages are on different machines, the rank of the later stage listens, and its peer connects. The server sends
the address and a key to the ranks. The key is new and random, so only the ranks of this group know the key. The key is
sent unencrypted, because ranks need a private network in any case.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time

import numpy as np

from trioserve.contracts.errors import StartupError
from trioserve.model.number_formats import Float32Array
from trioserve.trio_tools.tcp_stream import end_when_vanished

__all__ = ["KEY_BYTES", "RANK_VANISHED_SECONDS", "StageListener", "StageSockets", "connect_stage", "make_blocking"]

KEY_BYTES = 32
MEETING_SECONDS_MAX = 60.0  # All ranks connect soon, because the server has waited until they have read their weights.
STRANGERS_MAX = 64  # maximum number of connections that have not sent the key yet
RETRY_SECONDS = 0.1
RANK_VANISHED_SECONDS = 12.0  # Shorter than for other connections, because a lost rank blocks all other ranks.


class StageListener:
    """Listens at a free port for the peer of the previous stage. `wait` closes the listener."""

    def __init__(self) -> None:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=has_both)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def wait(self, key: bytes) -> socket.socket:
        """Wait until the peer of the previous stage has connected and sent the key.

        Reads all connections at the same time, so that a silent connection does not block the peer. At most
        STRANGERS_MAX connections wait at a time. A further connection closes the oldest connection.

        Args:
            key: KEY_BYTES, from the server.

        Returns:
            The blocking connection to the peer. The caller closes it.

        Raises:
            StartupError: the peer has not connected within MEETING_SECONDS_MAX.
        """
        until = time.monotonic() + MEETING_SECONDS_MAX
        received: dict[socket.socket, bytes] = {}  # received bytes by connection, oldest connection first
        self._listener.setblocking(False)
        found: socket.socket | None = None
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while found is None:
                    ready = selector.select(max(0.0, until - time.monotonic()))
                    if not ready and time.monotonic() >= until:
                        raise StartupError(
                            f"the rank of the previous stage has not connected to port {self.port} within "
                            f"{MEETING_SECONDS_MAX:g} s; let its machine reach all TCP ports of this one"
                        )
                    for selected, _ in ready:
                        if selected.fileobj is self._listener:
                            self._accept(received, selector)
                            continue
                        connection = selected.fileobj
                        assert isinstance(connection, socket.socket)
                        if connection not in received:
                            continue  # `_accept` has closed this connection in favor of a newer connection.
                        if not _receive_key(connection, received):
                            _end(connection, received, selector)
                        elif len(received[connection]) == KEY_BYTES:
                            if secrets.compare_digest(received[connection], key):
                                selector.unregister(connection)
                                del received[connection]
                                found = connection
                                break
                            _end(connection, received, selector)
            finally:
                for connection in list(received):
                    _end(connection, received, selector)
        make_blocking(found)
        return found

    def _accept(self, received: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The peer has closed the connection, or no file descriptor is free. Closing the oldest connection frees
            # one.
            if len(received) > 1:
                _end(next(iter(received)), received, selector)
            else:
                time.sleep(RETRY_SECONDS)
            return
        connection.setblocking(False)
        if len(received) >= STRANGERS_MAX:
            _end(next(iter(received)), received, selector)
        received[connection] = b""
        selector.register(connection, selectors.EVENT_READ)


def _receive_key(connection: socket.socket, received: dict[socket.socket, bytes]) -> bool:
    """Receive more of the key. Return False if the connection has ended."""
    try:
        part = connection.recv(KEY_BYTES - len(received[connection]))
    except BlockingIOError:
        return True
    except OSError:
        return False
    received[connection] += part
    return bool(part)


def _end(connection: socket.socket, received: dict[socket.socket, bytes], selector: selectors.BaseSelector) -> None:
    del received[connection]
    selector.unregister(connection)
    connection.close()


def connect_stage(host: str, port: int, key: bytes) -> socket.socket:
    """Connect to the peer of the next stage and send the key.

    Args:
        host: address of the peer's machine.
        port: port of its StageListener.
        key: KEY_BYTES, from the server.

    Returns:
        A blocking connection. The caller closes it.

    Raises:
        StartupError: the peer cannot be reached.
    """
    try:
        connection = socket.create_connection((host, port), MEETING_SECONDS_MAX)
        connection.sendall(key)
    except OSError as error:
        raise StartupError(
            f"the next stage cannot be reached at {host}:{port}: {error.strerror or error}; let this machine reach all "
            "TCP ports of that one"
        ) from error
    make_blocking(connection)
    return connection


def make_blocking(connection: socket.socket) -> None:
    """Set the options of a connection to another rank's machine.

    Calls of the connection block, small messages are sent at once, and the connection fails RANK_VANISHED_SECONDS
    after the other machine vanishes.

    Args:
        connection: a TCP connection.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_vanished(connection, RANK_VANISHED_SECONDS)


HEADER = struct.Struct("=?II")  # The fields are: whether the step is abandoned, number of rows, numbers per row.
BUFFER_BYTES = 1 << 20  # A decode step fits into the buffer, so that its sender need not wait for the receiver.
LOST_SECONDS = 1.0  # delay before the loss of a peer is reported (see `_lost`)


class StageSockets:
    """A Handover over connected, blocking sockets. This object owns the sockets.

    Args:
        before: socket to the previous stage. None if there is no previous stage, or if take_before is called later.
        behind: socket to the next stage. None if there is no next stage, or if take_behind is called later.
    """

    def __init__(self, before: socket.socket | None, behind: socket.socket | None) -> None:
        self._before = before
        self._behind: socket.socket | None = None
        if behind is not None:
            self.take_behind(behind)

    def take_before(self, before: socket.socket) -> None:
        self._before = before

    def take_behind(self, behind: socket.socket) -> None:
        behind.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._behind = behind

    def receive(self, row_count: int, hidden_size: int) -> Float32Array | None:
        """Receive the hidden states of a step. Blocks the thread.

        Args:
            row_count: rows of the step.
            hidden_size: numbers per row.

        Returns:
            float32 [row_count, hidden_size]. None if the previous stage abandoned the step.

        Raises:
            ConnectionError: the peer is lost. Raised with a delay, see _lost.
        """
        header = bytearray(HEADER.size)
        self._fill(memoryview(header))
        is_abandoned, rows, columns = HEADER.unpack(header)
        if is_abandoned:
            return None
        assert (rows, columns) == (row_count, hidden_size), "both stages compute the same step"
        hidden = np.empty((rows, columns), dtype=np.float32)
        self._fill(hidden.reshape(-1).view(np.uint8).data)
        return hidden

    def _fill(self, content: memoryview) -> None:
        assert self._before is not None, "the first stage receives nothing"
        received = 0
        while received < len(content):
            try:
                count = self._before.recv_into(content[received:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _lost("previous", error.strerror) from error
            if count == 0:
                raise _lost("previous", None)
            received += count

    def send(self, hidden: Float32Array | None) -> None:
        """Send the hidden states of a step. Blocks the thread while the socket's buffer is full.

        Args:
            hidden: float32 [rows, hidden_size]. None if the step is abandoned.

        Raises:
            ConnectionError: the peer is lost. Raised with a delay, see _lost.
        """
        assert self._behind is not None, "the last stage sends nothing"
        rows, columns = (0, 0) if hidden is None else hidden.shape
        try:
            self._behind.sendall(HEADER.pack(hidden is None, rows, columns))
            if hidden is not None:
                self._behind.sendall(hidden.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise _lost("next", error.strerror) from error

    def close(self) -> None:
        for own in (self._before, self._behind):
            if own is not None:
                own.close()


def _lost(which: str, reason: str | None) -> ConnectionError:
    """Return the error for a lost peer, after a delay.

    The delay lets the server notice the real cause first: the peer reports its own fault, or its process ends. This
    error is the cause only if neither happens and only the connection is lost.
    """
    time.sleep(LOST_SECONDS)
    return ConnectionError(f"the rank of the {which} stage is lost ({reason or 'it has closed its connection'})")
