"""How stages hand on hidden states: on sockets, from each rank of a stage to the rank in the same place of the next.

All ranks of a stage have the same hidden states, so each sends its own, and none has to ask another what came. What
lies in a socket is for one step behind the other; a thread that waits there holds no GIL.
"""

from __future__ import annotations

import socket
import struct
import time

import numpy as np

from trioserve.model.number_formats import Float32Array

__all__ = ["StageSockets"]

HEADER = struct.Struct("=?II")  # whether the step is abandoned, and else how many rows of how many numbers follow
BUFFER_BYTES = 1 << 20  # a decode step's, so that whoever sends is free for the next step
LOST_SECONDS = 1.0  # see _lost


class StageSockets:
    """A Handover. Its sockets, connected and blocking, are its own from then on."""

    def __init__(self, before: socket.socket | None, behind: socket.socket | None) -> None:
        """before: to the stage before; None: there is none, or it is taken later. behind: to the stage behind."""
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
        """See Handover. Raises ConnectionError, later than whoever sees the other one's end by itself."""
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
        assert self._before is not None, "the first stage is given nothing"
        received = 0
        while received < len(content):
            try:
                count = self._before.recv_into(content[received:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise _lost("before", error.strerror) from error
            if count == 0:
                raise _lost("before", None)
            received += count

    def send(self, hidden: Float32Array | None) -> None:
        """See Handover. Raises ConnectionError, as above."""
        assert self._behind is not None, "the last stage gives nothing"
        rows, columns = (0, 0) if hidden is None else hidden.shape
        try:
            self._behind.sendall(HEADER.pack(hidden is None, rows, columns))
            if hidden is not None:
                self._behind.sendall(hidden.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise _lost("behind", error.strerror) from error

    def close(self) -> None:
        for own in (self._before, self._behind):
            if own is not None:
                own.close()


def _lost(which: str, reason: str | None) -> ConnectionError:
    """Slowly: a process that has ended tells the server why, or the server sees it; what is said here is no more than
    what came of it, unless it is the connection that is lost."""
    time.sleep(LOST_SECONDS)
    return ConnectionError(
        f"the rank of the stage {which} this one is gone ({reason or 'it has closed its connection'})"
    )
