"""The bytes that an HTTP/2 connection has to write, in order.

Control frames and heads are written first, then one DATA frame of each stream in turn, as far as the flow-control
windows allow. This module does no I/O and never waits: the connection writes the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trioserve.http.http2.frames import FrameGate
from trioserve.http.http2.protocol import H2Protocol
from trioserve.http.http2.stream import H2Stream

__all__ = ["H2Outbox"]


class H2Outbox:
    """The outgoing bytes of one connection.

    Args:
        protocol: h2's connection.
        gate: the frame filter, which counts the DATA frames that were sent.
        on_more: called when there may be bytes to write.
    """

    def __init__(self, protocol: H2Protocol, gate: FrameGate, on_more: Callable[[], None]) -> None:
        self._on_more = on_more
        self._protocol = protocol
        self._gate = gate
        self._framed = bytearray()
        self._ready: deque[H2Stream] = deque()  # streams with bytes to send, and probably a window to send them in

    @property
    def framed_bytes(self) -> int:
        return len(self._framed)

    def queue(self, stream: H2Stream) -> None:
        """Queue a stream that has data or its end to send.

        Args:
            stream: the stream. It must not be queued already.
        """
        stream.queued = True
        self._ready.append(stream)
        self._on_more()

    def collect(self, extra: bytes = b"") -> None:
        """Append the bytes that h2 wants to send, then `extra`. Call this after each call of h2 that may produce bytes.

        Args:
            extra: encoded frames that were created without h2.
        """
        self._framed += self._protocol.data_to_send()
        self._framed += extra
        self._on_more()

    def take(self) -> bytes:
        """Remove and return all bytes of frames, for one write."""
        taken = bytes(self._framed)
        self._framed.clear()
        return taken

    def frame_ready_streams(self, byte_count_max: int) -> bool:
        """Turn bytes of the queued streams into DATA frames, one frame of each stream in turn.

        Args:
            byte_count_max: maximum number of body bytes in all frames together. The windows may allow fewer.

        Returns:
            True if the windows allow more frames now.
        """
        protocol = self._protocol
        gate = self._gate
        ready = self._ready
        left = byte_count_max
        window_closed = False
        framed = self._framed
        while ready and left > 0:
            stream = ready[0]
            if stream.gone:
                ready.popleft()
                continue
            data = b""
            if stream.unsent_bytes:
                size_max = min(protocol.window_of(stream.id), protocol.max_outbound_frame_size, left)
                if size_max <= 0:
                    if protocol.outbound_flow_control_window <= 0:
                        window_closed = True  # the window of the connection is closed, so all streams wait
                        break
                    ready.popleft()
                    stream.queued = False  # the stream is queued again when its window opens
                    continue
                data = stream.take_unsent(size_max)
            ready.popleft()
            ends = stream.response.finished and not stream.unsent_bytes
            framed += protocol.data_frame(stream.id, data, end_stream=ends)
            gate.data_frames_sent += 1
            left -= len(data)
            if stream.unsent_bytes:
                ready.append(stream)
            else:
                stream.queued = False
            if ends:
                stream.end_sent = True
                stream.wake()
        return bool(ready) and not window_closed
