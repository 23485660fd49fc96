"""What an HTTP/2 connection has to write, and in which order: control frames and heads first, then a piece of each
stream in turn, as far as the windows go. Never waits and does no I/O; the connection's writer does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trioserve.http.http2.frames import FrameGate
from trioserve.http.http2.protocol import H2Protocol
from trioserve.http.http2.stream import H2Stream

__all__ = ["H2Outbox"]


class H2Outbox:
    """on_more: called whenever there may be something to write."""

    def __init__(self, protocol: H2Protocol, gate: FrameGate, on_more: Callable[[], None]) -> None:
        self._on_more = on_more
        self._protocol = protocol
        self._gate = gate
        self._framed = bytearray()
        self._ready: deque[H2Stream] = deque()  # with something to send and, as far as known, a window to send it in

    @property
    def framed_bytes(self) -> int:
        return len(self._framed)

    def queue(self, stream: H2Stream) -> None:
        """The stream, which is not queued, has data or its end to send."""
        stream.queued = True
        self._ready.append(stream)
        self._on_more()

    def collect(self, extra: bytes = b"") -> None:
        """Take what h2 wants to be sent, and then `extra`. To be called after whatever may make h2 want it."""
        self._framed += self._protocol.data_to_send()
        self._framed += extra
        self._on_more()

    def take(self) -> bytes:
        """Everything that is framed, for one write."""
        taken = bytes(self._framed)
        self._framed.clear()
        return taken

    def frame_ready_streams(self, byte_count_max: int) -> bool:
        """Turn what streams hold into DATA frames, one of each in turn, as far as the windows and byte_count_max go.

        Returns whether more could be framed at once.
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
                room = min(protocol.window_of(stream.id), protocol.max_outbound_frame_size, left)
                if room <= 0:
                    if protocol.outbound_flow_control_window <= 0:
                        window_closed = True  # the connection's, so all of them wait
                        break
                    ready.popleft()
                    stream.queued = False  # until its window opens
                    continue
                data = stream.take_unsent(room)
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
