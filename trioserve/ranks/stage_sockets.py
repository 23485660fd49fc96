"""Sends hidden states from stage to stage over sockets. Each rank sends to its peer, the rank with the same number in
the next stage.

All ranks of a stage compute the same hidden states. So each rank sends its own copy, and no rank has to distribute
received states to other ranks. A socket carries the steps in order. A thread that waits for a socket releases the GIL.
"""

from __future__ import annotations

import socket
import struct
import time

import numpy as np

from trioserve.model.number_formats import Float32Array

__all__ = ["StageSockets"]

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
