"""Program of one process of `route --router-processes`. The parent process starts it.

Usage: `python -m trioserve.commands.router_process FD`, where FD is a socket that is connected to the parent. The
process reads its start message, reports when it accepts requests, and ends when the parent ends.
"""

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
    """Route until SIGTERM, then drain. End at once when the parent ends.

    Args:
        file_descriptor: socket that is connected to the parent.

    Returns:
        Exit code of the process.
    """
    parent = socket.socket(fileno=file_descriptor)
    parent.set_inheritable(False)
    message = _line(parent)
    if message is None:
        return EXIT_FAILED  # The parent has already ended.
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    start = msgspec.json.decode(message, type=ProcessStart)

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
    """End this process when the parent ends. The kernel closes the connection even if the parent is killed.

    The function runs in a thread, so that it works even if the event loop hangs.
    """
    try:
        while parent.recv(RECEIVE_BYTES):
            pass
    except OSError:
        pass  # The kernel resets the connection if the parent ended before it had read all bytes.
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
