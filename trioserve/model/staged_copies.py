"""Copies weights to a device through a few host buffers. Reading, conversion and copying overlap.

Threads read pieces of weights, convert them, and put them into free buffers. The calling thread starts the copy of each
full buffer, and is the only thread that uses the device. A buffer is free again when its copy has ended. So the host
memory is bounded by the buffers and by what the threads read at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from trioserve.model.loading.stored_tensor import Bytes

__all__ = ["BUFFER_BYTES", "BUFFER_COUNT", "READ_BYTES_MAX", "Piece", "StagedWeight", "Staging", "copied"]

# A copy of 16 MiB takes 0.3 to 1.3 ms by PCIe, so its start costs little. With 8 buffers, threads fill some of them
# while the device reads others.
BUFFER_BYTES, BUFFER_COUNT = 2**24, 8
READ_BYTES_MAX = 2**29  # Bytes that threads read at the same time. A larger piece is read alone.


class Staging(Protocol):
    """Host buffers, and their copies to a device."""

    @property
    def buffers(self) -> Sequence[Bytes]:
        """Buffers of equal size. The first access allocates them."""
        ...

    def reserve(self, byte_count: int) -> Any:
        """Return memory of the device.

        Args:
            byte_count: size of the memory.
        """
        ...

    def send(self, buffer: int, byte_count: int, to: Any, offset: int) -> Callable[[], object]:
        """Start a copy to the device, and do not wait for its end.

        Args:
            buffer: index of the buffer.
            byte_count: number of bytes to copy from the start of the buffer.
            to: result of reserve.
            offset: position of the first byte in `to`.

        Returns:
            Function that waits for the end of the copy.
        """
        ...


class Piece(NamedTuple):
    """Part of a weight that one thread reads.

    Attributes:
        offset: position of the first byte in the weight on the device.
        bytes_max: upper limit of the bytes that `read` returns.
        read: function that reads and converts the bytes, a one-dimensional array.
        counts_as: bytes that are reported as done after the piece.
    """

    offset: int
    bytes_max: int
    read: Callable[[], Bytes]
    counts_as: int


class StagedWeight(NamedTuple):
    """A weight to copy.

    Attributes:
        pieces: pieces that make up the weight.
        byte_count: bytes of all pieces. None: there is one piece, and its size is known after reading.
        fill: function that copies the weight to its destination. The argument is memory of the device with all bytes.
            The function may return before the device has executed the copies.
    """

    pieces: Sequence[Piece]
    byte_count: int | None
    fill: Callable[[Any], object]


class _Open:
    """A weight of which some bytes were not sent yet."""

    def __init__(self, weight: StagedWeight) -> None:
        self.fill = weight.fill
        self.byte_count = weight.byte_count
        self.sent_bytes = 0
        self.memory: Any = None


class _Full(NamedTuple):
    """A buffer that a thread has filled.

    Attributes:
        offset: position of the first byte in the weight.
        weight_bytes: size of the weight.
        ended: the piece, if it ends with this buffer.
    """

    weight: _Open
    buffer: int
    byte_count: int
    offset: int
    weight_bytes: int
    ended: Piece | None


def copied(weights: Iterable[StagedWeight], staging: Staging, thread_count: int) -> Generator[int, None, None]:
    """Copy weights, and yield the bytes to report after each piece.

    Closing the generator, or an error, ends the copying: no further piece is read, and the threads end after the pieces
    that they are reading.

    Args:
        weights: weights to copy. The first pieces are read first, and each weight is filled when it is complete.
        staging: buffers and device.
        thread_count: number of threads that read.

    Raises:
        ModelLoadError: a piece cannot be read.
    """
    waiting = deque((piece, opened) for weight in weights for opened in [_Open(weight)] for piece in weight.pieces)
    free: SimpleQueue[int | None] = SimpleQueue()
    full: SimpleQueue[_Full | BaseException] = SimpleQueue()
    buffers = staging.buffers
    for index in range(len(buffers)):
        free.put(index)
    sent: deque[tuple[int, Callable[[], object]]] = deque()
    reading_bytes = 0
    with ThreadPoolExecutor(thread_count, "trioserve-load") as pool:
        try:
            while waiting or reading_bytes:
                while waiting and (not reading_bytes or reading_bytes + waiting[0][0].bytes_max <= READ_BYTES_MAX):
                    reading_bytes += waiting[0][0].bytes_max
                    pool.submit(_read, *waiting.popleft(), buffers, free, full)
                # If no buffer is full, all threads may be waiting for one of those that the device reads.
                while sent and (full.empty() or len(sent) == len(buffers)):
                    _recycle(sent, free)
                found = full.get()
                if isinstance(found, BaseException):
                    raise found
                weight = found.weight
                if weight.memory is None:
                    weight.memory = staging.reserve(found.weight_bytes)
                sent.append((found.buffer, staging.send(found.buffer, found.byte_count, weight.memory, found.offset)))
                weight.sent_bytes += found.byte_count
                if weight.sent_bytes == found.weight_bytes:
                    weight.fill(weight.memory)
                    weight.memory = None
                if found.ended is not None:
                    reading_bytes -= found.ended.bytes_max
                    yield found.ended.counts_as
            while sent:
                _recycle(sent, free)
        finally:
            # From here on, no thread begins another piece. So each thread takes at most one None.
            pool.shutdown(wait=False, cancel_futures=True)
            for _ in range(thread_count):
                free.put(None)


def _recycle(sent: deque[tuple[int, Callable[[], object]]], free: SimpleQueue[int | None]) -> None:
    buffer, wait = sent.popleft()
    wait()
    free.put(buffer)


def _read(
    piece: Piece,
    weight: _Open,
    buffers: Sequence[Bytes],
    free: SimpleQueue[int | None],
    full: SimpleQueue[_Full | BaseException],
) -> None:
    """Read a piece, and put it into buffers. Called in a thread."""
    try:
        content = piece.read()
        weight_bytes = len(content) if weight.byte_count is None else weight.byte_count
        for first in range(0, len(content), len(buffers[0])):
            part = content[first : first + len(buffers[0])]
            buffer = free.get()
            if buffer is None:
                return
            buffers[buffer][: len(part)] = part
            ended = piece if first + len(part) == len(content) else None
            full.put(_Full(weight, buffer, len(part), piece.offset + first, weight_bytes, ended))
    except BaseException as error:  # The calling thread raises it.
        full.put(error)
