"""One HTTP/2 stream as an exchange: what its handler may still send, what it has not read yet, and for whom it waits.

Bytes wait here, not in h2, until the connection's writer takes them: so their number is known and bounded, and all that
the streams of a connection have to say leaves in one write.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import trio

from trioserve.http.body_budget import BodyShare
from trioserve.http.body_pace import BodyPace
from trioserve.http.content_coding import decoded_body
from trioserve.http.exchange import BodyTimeout, Exchange, HeaderFields
from trioserve.http.limits import FrontendLimits
from trioserve.http.message_head import RequestHead, encode_fields
from trioserve.http.response_pace import ResponsePace
from trioserve.http.response_state import ResponseState

__all__ = ["H2Stream", "StreamOwner"]

CREDIT_BYTES_MIN = 16384  # window updates are worth sending for a quarter of the window, not for every frame
MERGED_BYTES_MAX = 4096
TURN_BYTES = 4096  # about 100 us of small events


class StreamOwner(Protocol):
    """What a stream asks of its connection. None of it waits."""

    def send_head(self, stream: H2Stream, fields: list[tuple[bytes, bytes]], *, end_stream: bool) -> None: ...

    def go_on(self, stream: H2Stream) -> None:
        """The client waits to be told before it sends the body."""

    def queue(self, stream: H2Stream) -> None:
        """The stream has something to send."""

    def credit(self, stream: H2Stream, byte_count: int) -> None:
        """The handler took so many bytes of the body: the client may send as many more."""

    def body_awaited(self, stream: H2Stream) -> None:
        """The handler waits for more of the body: if the server is leaving, refuse the stream and cancel its scope."""

    def body_too_slow(self) -> None:
        """To be counted: a body was given up."""

    def give_up(self, stream: H2Stream, *, takes_some: bool) -> None:
        """The client takes nothing, or too little: reset the stream and cancel its scope."""

    def unix_seconds(self) -> int:
        """The time of day."""


class H2Stream(Exchange):
    """`gone`: the stream is closed for both sides; whatever is still sent goes nowhere. `queued`: the writer knows.
    `is_known`: its caller is. `is_late`: it was opened after the drain was announced."""

    def __init__(
        self,
        owner: StreamOwner,
        stream_id: int,
        head: RequestHead,
        share: BodyShare,
        limits: FrontendLimits,
        *,
        request_ended: bool,
        is_known: bool,
        is_late: bool = False,
    ) -> None:
        self.id = stream_id
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.http_version = head.http_version
        self.peer = head.peer
        self.scope = trio.CancelScope()
        self.response = ResponseState(method=head.method)
        self.share = share
        self.is_known = is_known
        self.is_late = is_late
        self.request_ended = request_ended
        self.end_sent = False
        self.gone = False
        self.queued = False
        self.unsent_bytes = 0
        self._owner = owner
        self._limits = limits
        self._unsent: deque[bytes] = deque()
        self._arrived: deque[tuple[bytes, int]] = deque()
        self._changed: trio.Event | None = None
        self._pace: ResponsePace | None = None  # once the handler has waited for the client

    @property
    def started(self) -> bool:
        return self.response.started

    # --- for the handler ---

    async def body(self) -> bytes:
        self.response.check_body_readable()
        self.share.check_announced(self.headers)
        if not self.request_ended and (self.headers.get("expect") or "").lower() == "100-continue":
            self._owner.go_on(self)
        pace = BodyPace(self._limits, now=trio.current_time())
        with trio.CancelScope(deadline=pace.deadline) as patience:
            uncredited_bytes = 0
            while True:
                while self._arrived:
                    piece, window_bytes = self._arrived.popleft()
                    self.share.add(piece)
                    patience.deadline = pace.arrived(len(piece), now=trio.current_time())
                    uncredited_bytes += window_bytes
                if self.request_ended and not self.gone:
                    break
                if uncredited_bytes >= CREDIT_BYTES_MIN and not self.gone:
                    self._owner.credit(self, uncredited_bytes)
                    uncredited_bytes = 0
                self._owner.body_awaited(self)
                await self._change()
        if patience.cancelled_caught:
            self._owner.body_too_slow()
            raise BodyTimeout(pace.timeout_message)
        await trio.lowlevel.checkpoint()
        return await decoded_body(self.share, self.headers)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        self._start(status, headers, content_length=len(body), end_stream=not body)
        await self.finish(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._start(status, headers, content_length=None, end_stream=False)
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        self.response.check_open()
        await self._hold(data)
        if self.unsent_bytes < TURN_BYTES:
            # A turn for the others after each small event would cost as much as the event.
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        self.response.check_open()
        await self._hold(last)
        self.response.finish()
        if not (self.gone or self.end_sent or self.queued):
            self._owner.queue(self)
        await trio.lowlevel.checkpoint()

    # --- for the connection ---

    def take_unsent(self, byte_count_max: int) -> bytes:
        """The next bytes for one DATA frame, at most so many; room for the handler to go on."""
        unsent = self._unsent
        if self.unsent_bytes <= byte_count_max:
            taken = unsent[0] if len(unsent) == 1 else b"".join(unsent)
            unsent.clear()
        else:
            pieces = []
            wanted = byte_count_max
            while wanted:
                piece = unsent.popleft()
                if len(piece) > wanted:
                    unsent.appendleft(piece[wanted:])
                    piece = piece[:wanted]
                pieces.append(piece)
                wanted -= len(piece)
            taken = b"".join(pieces)
        self.unsent_bytes -= len(taken)
        if self._pace is not None and self._pace.is_running:
            if self.unsent_bytes:
                self._pace.taken(len(taken), trio.current_time())
            else:
                self._pace.stop(len(taken), trio.current_time())
        self.wake()
        return taken

    def data_arrived(self, data: bytes, window_bytes: int) -> None:
        """`window_bytes` counts padding, too. At most one flow-control window of it is held here at a time."""
        if self.gone or self.started:
            return
        if self._arrived and len(self._arrived[-1][0]) + len(data) <= MERGED_BYTES_MAX:
            # An entry for each byte would be a hundred times what the window allows.
            last, last_window_bytes = self._arrived.pop()
            data, window_bytes = last + data, last_window_bytes + window_bytes
        self._arrived.append((data, window_bytes))
        self.wake()

    def request_end_arrived(self) -> None:
        self.request_ended = True
        self.wake()

    def leave(self) -> None:
        """The stream is closed, whoever closed it: let go of its bytes and cancel its handler, now."""
        self.gone = True
        self._unsent.clear()
        self._arrived.clear()
        self.unsent_bytes = 0
        self.scope.cancel()
        self.wake()

    def wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def drained(self) -> None:
        """Wait until the end of the response was handed to the network; stalls count as in `send`."""
        while not (self.end_sent or self.gone):
            await self._progress()

    def _start(self, status: int, headers: HeaderFields, *, content_length: int | None, end_stream: bool) -> None:
        fields = encode_fields(headers, unix_seconds=self._owner.unix_seconds(), content_length=content_length)
        self.response.start(status)
        self._arrived.clear()  # nobody will read it
        fields.insert(0, (b":status", b"%d" % status))
        self._owner.send_head(self, fields, end_stream=end_stream or self.response.bodiless)

    async def _hold(self, data: bytes) -> None:
        """Waits only where the client is too slow for it."""
        if self.response.bodiless:
            return
        if self.unsent_bytes + len(data) <= self._limits.stream_buffer_bytes_max:
            self._push(data)
        else:
            await self._send_in_parts(data)

    def _push(self, data: bytes) -> None:
        if data and not self.gone:
            self._unsent.append(data)
            self.unsent_bytes += len(data)
            if not self.queued:
                self._owner.queue(self)

    async def _send_in_parts(self, data: bytes) -> None:
        position = 0
        while position < len(data) and not self.gone:
            room = self._limits.stream_buffer_bytes_max - self.unsent_bytes
            if room > 0:
                self._push(data[position : position + room])
                position += room
            else:
                await self._progress()

    async def _progress(self) -> None:
        """Wait until the writer took something, or give the stream up."""
        now = trio.current_time()
        if self._pace is None:
            self._pace = ResponsePace(self._limits, now=now)
        with trio.CancelScope(deadline=self._pace.run(now)) as patience:
            await self._change()
        if patience.cancelled_caught:
            self._owner.give_up(self, takes_some=self._pace.saw_progress)
            await trio.lowlevel.checkpoint()  # raises Cancelled

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()
