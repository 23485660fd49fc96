"""The exchange of one ASGI http request, with a bounded buffer and a separate task that passes bytes to the host.

Because of the separate task, a handler never waits in the host's `send`, which may not be cancellable (Hypercorn's
`send` is not). So the handler can always be cancelled at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import trio

from trioserve.contracts.errors import Overloaded
from trioserve.http.body_budget import BodyShare, decoded_body
from trioserve.http.exchange import (
    BodyTimeout,
    BodyTooLarge,
    ClockAndIds,
    Exchange,
    HeaderFields,
    RequestHead,
    ResponseState,
    encode_fields,
)
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import BodyPace, ResponsePace

__all__ = ["AsgiExchange", "Message", "Receive", "Send"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class AsgiExchange(Exchange):
    """The exchange of one ASGI http request. AsgiApp creates the exchange, enters its scope, and runs `watch` and
    `forward`.

    Args:
        head: the head of the request.
        share: holds the request body and counts its bytes.
        limits: limits of the app.

    Attributes:
        draining: set when the app starts to drain.
        gone: True once the client has left.
        stalled: True once the client has read nothing for stall_seconds_max, or too slowly.
        slow_reader: True if `stalled` and the client has read some bytes.
        body_too_slow: True if the request body missed its deadline.
    """

    def __init__(self, head: RequestHead, share: BodyShare, limits: FrontendLimits) -> None:
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.http_version = head.http_version
        self.peer = head.peer
        self.is_websocket = head.is_websocket
        self.draining = trio.Event()
        self.scope = trio.CancelScope()
        self.response = ResponseState(method=head.method, is_websocket=head.is_websocket)
        self.gone = False
        self.stalled = False
        self.slow_reader = False
        self.body_too_slow = False
        self._share = share
        self._limits = limits
        self._clock_and_ids = ClockAndIds()
        self._body_ended = False
        self._body_error: Exception | None = None
        self._body_bytes_total = 0
        self._head: Message | None = None
        self._unsent = bytearray()
        self._end_passed = False  # True once the end of the response was passed to the host's `send`.
        self._end_sent = False  # True once the host's `send` has returned from the call with the end of the response.
        self._changed: trio.Event | None = None
        self._pace = ResponsePace(limits, now=trio.current_time())

    @property
    def started(self) -> bool:
        return self.response.started

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    # --- methods for the handler ---

    async def body(self) -> bytes:
        self.response.check_body_readable()
        self._share.check_announced(self.headers)
        pace = BodyPace(self._limits, now=trio.current_time())
        bytes_seen = self._body_bytes_total
        with trio.CancelScope(deadline=pace.deadline) as timeout:
            while not self._body_ended and self._body_error is None:
                await self._wait_for_change()
                timeout.deadline = pace.arrived(self._body_bytes_total - bytes_seen, now=trio.current_time())
                bytes_seen = self._body_bytes_total
        if timeout.cancelled_caught:
            self.body_too_slow = True
            raise BodyTimeout(pace.timeout_message)
        if self._body_error is not None:
            raise self._body_error
        await trio.lowlevel.checkpoint()
        return await decoded_body(self._share, self.headers)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        self._start(status, headers, content_length=len(body))
        await self.finish(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._start(status, headers, content_length=None)
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        self.response.check_open()
        if not self.response.bodiless:
            await self._buffer(data)
        await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        self.response.check_open()
        if not self.response.bodiless:
            await self._buffer(last)
        self.response.finish()
        self._notify_change()
        await trio.lowlevel.checkpoint()

    # --- methods for the app ---

    async def watch(self, receive: Receive) -> None:
        """Receive all messages of the host until it reports a disconnect.

        Hypercorn's queue of messages is short, and a full queue blocks the whole connection. So this task always waits
        in `receive`.

        Args:
            receive: ASGI's `receive`.
        """
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                if not self._end_passed:  # A host also reports a disconnect after a complete response.
                    self.gone = True
                    self.scope.cancel()
                return
            if self._body_error is None and not self.started:
                piece = message.get("body", b"")
                self._body_bytes_total += len(piece)
                try:
                    self._share.add(piece)
                except (BodyTooLarge, Overloaded) as error:  # The method `body` raises this error to the handler.
                    self._body_error = error
            self._body_ended = self._body_ended or not message.get("more_body", False)
            self._notify_change()

    async def forward(self, send: Send) -> None:
        """Pass each part of the response to the host as soon as the handler sends it. If the host is slow, one message
        contains several parts.

        Args:
            send: ASGI's `send`.
        """
        while not self._end_sent:
            if self._head is not None:
                head, self._head = self._head, None
                await send(head)
            elif self._unsent or self.response.finished:
                data = bytes(self._unsent)
                self._unsent.clear()
                ends = self.response.finished
                self._end_passed = ends
                await send({"type": "http.response.body", "body": data, "more_body": not ends})
                if self._pace.is_running:
                    now = trio.current_time()
                    if self._unsent:
                        self._pace.advance(len(data), now)
                    else:
                        self._pace.stop(len(data), now)
                self._end_sent = ends
                self._notify_change()
            else:
                await self._wait_for_change()

    async def drained(self) -> None:
        """Wait until the host has the whole response. The deadline for slow clients applies, as in `send`."""
        while not self._end_sent:
            await self._wait_for_client()

    async def send_last_messages(self) -> None:
        """Wait until the host has the last messages of a websocket, at most close_seconds_max."""

    def _start(self, status: int, headers: HeaderFields, *, content_length: int | None) -> None:
        fields = encode_fields(headers, unix_seconds=self._clock_and_ids.unix_seconds(), content_length=content_length)
        self.response.start(status)
        self._head = {"type": "http.response.start", "status": status, "headers": fields}
        self._notify_change()

    async def _buffer(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            free_bytes = self._limits.stream_buffer_bytes_max - len(self._unsent)
            if free_bytes > 0:
                self._unsent += data[position : position + free_bytes]
                position += free_bytes
                self._notify_change()
            else:
                await self._wait_for_client()

    async def _wait_for_client(self) -> None:
        with trio.CancelScope(deadline=self._pace.start(trio.current_time())) as timeout:
            await self._wait_for_change()
        if timeout.cancelled_caught:
            self.stalled = True
            self.slow_reader = self._pace.saw_progress
            self.scope.cancel()
            await trio.lowlevel.checkpoint()  # This checkpoint raises Cancelled.

    async def _wait_for_change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def _notify_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
