"""How fast bytes go from one process to another over a plain socket of this machine: what a transfer is compared with.

`python -m trioserve.bench.disagg.socket_copy BYTES` is the other process: it listens, tells its port on standard
output, and sends so many bytes to each connection, until its input ends. Sender and receiver use one buffer each, of
the size of a large read, and do nothing else.
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
    """The port of a process that sends `byte_count` bytes to whoever connects; it ends with this scope."""
    command = [sys.executable, "-m", "trioserve.bench.disagg.socket_copy", str(byte_count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def seconds_to_receive(port: int, byte_count: int) -> float:
    """From the connection to the last byte. Raises OSError, also when fewer come."""
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
