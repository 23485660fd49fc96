"""Whole JSON responses with an early head, followed by white space until the body is ready.

JSON may begin with white space, so clients read such a response like any other. The head has status 200 before the
outcome is known. A later error is the body.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trioserve.http.exchange import Beats, Exchange, HeaderFields

__all__ = ["WhiteSpaceExchange"]

JSON_TYPE = "application/json"
WHITE_SPACE = b" "
NOT_BUFFERED = ("x-accel-buffering", "no")
"""Header against buffering proxies (nginx), which would delay the white space."""


class WhiteSpaceExchange(Exchange):
    """An exchange that may send its head early. The handler answers as usual, and does not see the early head.

    After `fill_silence`, a task sends the head and then a space after each `seconds` of silence. The handler's response
    ends the spaces, and becomes the body after this head. Its own status and headers are dropped.

    Args:
        exchange: exchange of the connection.
        nursery: runs the task. It must end before the exchange does.
        seconds: silence before each space.
        head: makes the header fields of a JSON response.

    Attributes:
        has_begun: True if the head was sent early, with status 200.
    """

    def __init__(
        self, exchange: Exchange, nursery: trio.Nursery, seconds: float, head: Callable[[], HeaderFields]
    ) -> None:
        self.method, self.path, self.query = exchange.method, exchange.path, exchange.query
        self.headers, self.http_version, self.peer = exchange.headers, exchange.http_version, exchange.peer
        self.has_begun = False
        self._exchange = exchange
        self._nursery = nursery
        self._seconds = seconds
        self._head = head
        self._is_filling = False
        self._has_response = False  # True once the handler's response has begun
        self._sending = trio.Lock()  # lets a space finish before the response

    def fill_silence(self) -> None:
        if not self._is_filling:
            self._is_filling = True
            self._nursery.start_soon(self._fill)

    async def _fill(self) -> None:
        while True:
            await trio.sleep(self._seconds)
            async with self._sending:
                if self._has_response:
                    return
                if not self.has_begun:
                    self.has_begun = True
                    await self._exchange.start(200, [*self._head(), NOT_BUFFERED])
                await self._exchange.send(WHITE_SPACE)

    def expect_beats(self, beats: Beats) -> bool:
        return self._exchange.expect_beats(beats)

    def beat(self) -> None:
        self._exchange.beat()

    @property
    def started(self) -> bool:
        """True if the handler's response has begun. Before that, an error is sent as a separate response."""
        return self._has_response or (self._exchange.started and not self.has_begun)

    async def body(self) -> bytes:
        return await self._exchange.body()

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self._end_white_space(headers)
        if self.has_begun:
            await self._exchange.finish(body)
        else:
            await self._exchange.respond(status, headers, body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        await self._end_white_space(headers)
        if not self.has_begun:
            await self._exchange.start(status, headers)

    async def send(self, data: bytes) -> None:
        await self._exchange.send(data)

    async def finish(self, last: bytes = b"") -> None:
        await self._exchange.finish(last)

    async def _end_white_space(self, headers: HeaderFields) -> None:
        """Wait until the current space was sent. After that only the handler sends.

        Args:
            headers: header fields of the response.

        Raises:
            RuntimeError: the response is not JSON, but the early head said so.
        """
        async with self._sending:
            media_type = next((value for name, value in headers if name.lower() == "content-type"), JSON_TYPE)
            if self.has_begun and media_type.partition(";")[0].strip().lower() != JSON_TYPE:
                raise RuntimeError(f"a response of type {media_type[:80]!r} after the head of a JSON response")
            self._has_response = True
