"""Measures how fast bytes go from one process to another over a plain socket, for comparison with KV transfers.

`python -m trioserve.bench.disagg.socket_copy BYTES` is the sending process. It listens, prints its port, and sends that
many bytes to each connection, until its input ends. Sender and receiver each use one buffer with the size of a large
read.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["copying_process", "seconds_to_receive"]

BUFFER_BYTES = 1 << 20
SECONDS_MAX = 60.0


@contextlib.contextmanager
def copying_process(byte_count: int) -> Iterator[int]:
    """Start a process that sends bytes to every connection. Yield its port. The process ends with the context.

    Args:
        byte_count: bytes to send to each connection.
    """
    command = [sys.executable, "-m", "trioserve.bench.disagg.socket_copy", str(byte_count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def seconds_to_receive(port: int, byte_count: int) -> float:
    """Return the seconds from the connection to the last byte.

    Args:
        port: port of the sending process.
        byte_count: bytes to receive.

    Raises:
        OSError: the connection failed, or too few bytes came.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    began = time.perf_counter()
    left = byte_count
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX) as connection:
        while left:
            received = connection.recv_into(buffer[: min(left, BUFFER_BYTES)])
            if received == 0:
                raise ConnectionError(f"{left} of {byte_count} bytes did not come")
            left -= received
    return time.perf_counter() - began


def _send(listener: socket.socket, byte_count: int) -> None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while True:
        connection, _address = listener.accept()
        with connection:
            for begin in range(0, byte_count, BUFFER_BYTES):
                connection.sendall(buffer[: min(BUFFER_BYTES, byte_count - begin)])


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_send, args=(listener, int(sys.argv[1])), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
