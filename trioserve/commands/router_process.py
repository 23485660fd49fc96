"""One of the processes of `route --router-processes`: `python -m trioserve.commands.router_process FD`, where FD is its
connection to the parent, which starts it so. It is told what it is, says when it serves, and ends with its parent."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable

import msgspec
import trio

from trioserve.commands.program_end import EXIT_FAILED
from trioserve.commands.route import serve_router
from trioserve.commands.router_processes import SERVING, ProcessStart
from trioserve.commands.serving import run_until_signal
from trioserve.contracts.errors import TrioserveError

__all__ = ["main"]

RECEIVE_BYTES = 65536


def main(file_descriptor: int) -> int:
    """Route until SIGTERM, then drain; at once over when the parent is. Returns the exit code."""
    parent = socket.socket(fileno=file_descriptor)
    parent.set_inheritable(False)
    told = _line(parent)
    if told is None:
        return EXIT_FAILED  # the parent has gone already
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    start = msgspec.json.decode(told, type=ProcessStart)

    async def serve(orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]) -> None:
        await serve_router(start.config, orders, on_serving=announce, inherited=start.inherited)

    try:
        return run_until_signal(start.config, serve, what="a router", on_serving=lambda: parent.sendall(SERVING))
    except TrioserveError as error:
        print(f"trioserve: {error}", file=sys.stderr)
        return EXIT_FAILED


def _line(connection: socket.socket) -> bytes | None:
    held = b""
    while not held.endswith(b"\n"):
        received = connection.recv(RECEIVE_BYTES)
        if not received:
            return None
        held += received
    return held


def _end_with(parent: socket.socket) -> None:
    """In a thread: an event loop that hangs is to end, too. The kernel tells of the parent's end, even by SIGKILL."""
    try:
        while parent.recv(RECEIVE_BYTES):
            pass
    except OSError:
        pass  # it is reset where something was on its way
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
