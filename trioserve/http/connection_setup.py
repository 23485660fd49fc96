"""Objects that all connections of one server share: exchange slots, the flusher, and ways to close a connection."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
import struct
from collections.abc import Callable
from typing import Protocol

import trio

from trioserve.http.body_budget import BodyBudget
from trioserve.http.clock_and_ids import ClockAndIds
from trioserve.http.counters import StreamRefusal, Tally
from trioserve.http.exchange import Handler, Headers
from trioserve.http.limits import FrontendLimits
from trioserve.http.message_head import RequestHead
from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = ["ConnectionSetup", "ExchangeSlots", "Flusher", "KnowsCaller", "break_off", "close_after", "close_now"]

KnowsCaller = Callable[[Headers], bool]
"""A function that returns True if the header fields of a request show a valid API key. It is called once for each
request.
"""


class ExchangeSlots:
    """The exchange slots of one server. Before an exchange, a connection calls `refusal` and takes a slot. After the
    exchange, it releases the slot.

    Args:
        limits: contains the number of slots, the share of slots for callers without an API key, and the number of
            websockets of one caller.
        tally: counts open exchanges.
        knows_caller: returns True for callers with an API key. None if the server requires no keys.
    """

    def __init__(self, limits: FrontendLimits, tally: Tally, knows_caller: KnowsCaller | None) -> None:
        self._tally = tally
        self._knows_caller = knows_caller
        self._open_max = limits.exchanges_max
        self._unknown_max = max(1, int(limits.exchanges_max * limits.unknown_exchanges_share_max))
        # If True, new exchanges are late, and the exit of the server does not wait for late exchanges.
        self.is_draining = False
        self._early_open = 0  # The number of open exchanges that began before the drain.
        self._early_ended = trio.Event()
        self._websockets_max = limits.websockets_per_caller_max
        self._websockets: dict[str, int] = {}  # The number of open websockets of each caller.

    @property
    def treats_callers_equally(self) -> bool:
        """True if the server requires no keys."""
        return self._knows_caller is None

    def knows(self, headers: Headers) -> bool:
        return self._knows_caller is None or self._knows_caller(headers)

    def websocket_caller(self, head: RequestHead, *, is_known: bool) -> str | None:
        """Return the caller to whom a websocket counts, or None if the request opens none.

        Args:
            head: the head of the request.
            is_known: True if the caller has shown an API key, or the server requires none.

        Returns:
            A digest of the API key, or the client's address. None for a connection without an address.
        """
        if not head.is_websocket:
            return None
        if is_known and not self.treats_callers_equally:
            key = head.headers.get("authorization") or head.headers.get("x-api-key") or ""
            return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return head.peer.rpartition(":")[0] or None

    def refusal(self, *, is_known: bool, websocket_caller: str | None = None) -> StreamRefusal | None:
        """Return the reason to refuse a new exchange now, or None if the exchange can begin.

        Args:
            is_known: True if the caller has shown an API key, or the server requires none.
            websocket_caller: see the method of this name.

        Returns:
            The reason, or None if the exchange can begin.
        """
        if self._tally.exchanges_open >= self._open_max:
            return StreamRefusal.EXCHANGES_MAX
        if not is_known and self._tally.exchanges_unknown_open >= self._unknown_max:
            return StreamRefusal.UNKNOWN_CALLERS
        if websocket_caller is not None and self._websockets.get(websocket_caller, 0) >= self._websockets_max:
            return StreamRefusal.WEBSOCKETS_PER_CALLER
        return None

    def take(self, *, is_known: bool, websocket_caller: str | None = None) -> None:
        if websocket_caller is not None:
            self._websockets[websocket_caller] = self._websockets.get(websocket_caller, 0) + 1
        self._tally.exchanges_total += 1
        self._tally.exchanges_open += 1
        self._tally.exchanges_unknown_open += not is_known

    def release(self, *, is_known: bool, is_late: bool, websocket_caller: str | None = None) -> None:
        """Release the slot of an exchange that has ended.

        Args:
            is_known: the same value as in the call of `refusal`.
            is_late: True if the exchange began after `begin_drain`.
            websocket_caller: the same value as in the call of `take`.
        """
        if websocket_caller is not None:
            self._websockets[websocket_caller] -= 1
            if not self._websockets[websocket_caller]:
                del self._websockets[websocket_caller]
        self._tally.exchanges_open -= 1
        self._tally.exchanges_unknown_open -= not is_known
        if self.is_draining and not is_late:
            self._early_open -= 1
            self._note_early_end()

    def begin_drain(self) -> None:
        """Remember which exchanges are open now. `wait_until_early_ended` ignores exchanges that begin later."""
        if not self.is_draining:
            self.is_draining = True
            self._early_open = self._tally.exchanges_open
            self._note_early_end()

    async def wait_until_early_ended(self) -> None:
        """Return when every exchange that was open at `begin_drain` has ended."""
        await self._early_ended.wait()

    def _note_early_end(self) -> None:
        if self._early_open == 0:
            self._early_ended.set()


class Flushable(Protocol):
    def flush(self) -> None:
        """Write without waiting. This method raises nothing: the connection handles its own errors."""


class Flusher:
    """A list of connections that have bytes to write, and the task that writes them."""

    def __init__(self) -> None:
        self._waiting: list[Flushable] = []
        self._wake = trio.Event()

    def add(self, connection: Flushable) -> None:
        """Flush a connection in the next pass of the scheduler, when all handlers of this pass have run.

        Args:
            connection: the connection. It must not be added again before it was flushed.
        """
        self._waiting.append(connection)
        self._wake.set()

    async def run(self) -> None:
        """Flush connections until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                connection.flush()


# After the server's last byte, at most this number of bytes is read from the client. A client that sends more is in the
# middle of an upload.
LINGER_BYTES_MAX = 1024 * 1024


async def close_after(stream: trio.abc.Stream, final_bytes: bytes, *, seconds_max: float, more_expected: bool) -> None:
    """Send the final bytes, close our sending half, and read until the client closes.

    If we closed without reading, TCP would answer unread bytes with a reset. The reset may arrive before the final
    bytes (RFC 9112, 9.6). TLS cannot close only the sending half. With TLS, reading would only delay the close, which
    may mark the end of a response. So a TLS stream is read only if `more_expected` is true. The stream is always
    closed, also on cancellation.

    Args:
        stream: the connection.
        final_bytes: bytes to send first.
        seconds_max: time limit for sending and reading. Closing may take the same time again.
        more_expected: True if the client may still send bytes.
    """
    try:
        with (
            trio.move_on_after(seconds_max),
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError),
        ):
            if final_bytes:
                await stream.send_all(final_bytes)
            if isinstance(stream, trio.abc.HalfCloseableStream):
                await stream.send_eof()
                more_expected = True
            left = LINGER_BYTES_MAX if more_expected else 0
            while left > 0:
                received = await stream.receive_some(16384)
                if not received:
                    break
                left -= len(received)
    finally:
        await close_now(stream, b"", seconds_max=seconds_max)


async def close_now(stream: trio.abc.Stream, final_bytes: bytes, *, seconds_max: float) -> None:
    """Send the final bytes and close the connection, even if the calling task is cancelled.

    Args:
        stream: the connection.
        final_bytes: bytes to send first.
        seconds_max: time limit, which also bounds the shield against cancellation.
    """
    with trio.CancelScope(deadline=trio.current_time() + seconds_max, shield=True):
        try:
            if final_bytes:
                await stream.send_all(final_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # The client has already closed the connection.
        finally:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.aclose()


async def break_off(stream: trio.abc.Stream) -> None:
    """Close the connection with a TCP reset and without TLS close_notify, so that a partial response does not look
    complete.

    Args:
        stream: the connection.
    """
    transport: object = stream
    while isinstance(transport, trio.SSLStream):
        transport = transport.transport_stream
    if isinstance(transport, (trio.SocketStream, TcpStream)):
        with contextlib.suppress(OSError):  # The connection may already be closed.
            transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionSetup:
    handler: Handler
    limits: FrontendLimits
    tally: Tally
    slots: ExchangeSlots
    body_budget: BodyBudget
    clock_and_ids: ClockAndIds
    flusher: Flusher
