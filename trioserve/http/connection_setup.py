"""Objects that all connections of one server share: exchange slots, the flusher, the timer of websockets, and ways to
close a connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import heapq
import math
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol

import trio

from trioserve.contracts.errors import Overloaded
from trioserve.http.body_budget import BodyBudget
from trioserve.http.counters import StreamRefusal, Tally
from trioserve.http.exchange import ClockAndIds, Handler, Headers, RequestHead
from trioserve.http.limits import FrontendLimits
from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = [
    "RETRY_SECONDS",
    "TOO_MANY",
    "ConnectionSetup",
    "ExchangeSlots",
    "Flusher",
    "KnowsCaller",
    "TIMER_SECONDS",
    "WebSocketTimer",
    "break_off",
    "close_after",
    "close_now",
]

RETRY_SECONDS = 1
TOO_MANY = {
    StreamRefusal.EXCHANGES_MAX: (503, "too many requests are running: try again shortly"),
    StreamRefusal.UNKNOWN_CALLERS: (
        503,
        "too many requests without a key are running: send a key, or try again shortly",
    ),
    StreamRefusal.WEBSOCKETS_MAX: (503, "too many websockets are open: use HTTP requests, or try again shortly"),
    StreamRefusal.WEBSOCKETS_PER_CALLER: (429, "too many websockets of this caller are open: close one of them"),
}
"""Status and message of an error response for each refusal of ExchangeSlots."""
KnowsCaller = Callable[[Headers], bool]
"""A function that returns True if the header fields of a request show a valid API key. It is called once for each
request.
"""


class ExchangeSlots:
    """The exchange slots of one server. Before an exchange, a connection calls `refusal` and takes a slot. After the
    exchange, it releases the slot.

    An open websocket has no slot, except while one of its responses runs. The number of websockets has its own limit.

    Args:
        limits: contains the number of slots, the share of slots for callers without an API key, and the numbers of
            websockets of the server and of one caller.
        tally: counts open exchanges.
        knows_caller: returns True for callers with an API key. None if the server requires no keys.
    """

    def __init__(self, limits: FrontendLimits, tally: Tally, knows_caller: KnowsCaller | None) -> None:
        self._tally = tally
        self.knows_caller = knows_caller
        self._open_max = limits.exchanges_max
        self._unknown_max = max(1, int(limits.exchanges_max * limits.unknown_exchanges_share_max))
        # If True, new exchanges are late, and the exit of the server does not wait for late exchanges.
        self.is_draining = False
        self._early_open = 0  # The number of open exchanges that began before the drain.
        self._early_ended = trio.Event()
        self._websockets_max = limits.websockets_max
        self._websockets_per_caller_max = limits.websockets_per_caller_max
        self._websocket_count = 0  # Open websockets, and requests that may open one.
        self._websockets: dict[str, int] = {}  # Each caller's count of these.

    @property
    def treats_callers_equally(self) -> bool:
        """True if the server requires no keys."""
        return self.knows_caller is None

    def websocket_caller(self, head: RequestHead, *, is_known: bool) -> str:
        """Return the caller to whom a websocket counts.

        Args:
            head: the head of the request, which opens a websocket.
            is_known: True if the caller has shown an API key, or the server requires none.

        Returns:
            A digest of the API key, or the client's address. It is empty for a connection without an address.
        """
        if is_known and not self.treats_callers_equally:
            key = head.headers.get("authorization") or head.headers.get("x-api-key") or ""
            return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return head.peer.rpartition(":")[0]

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
        if websocket_caller is not None:
            if self._websocket_count >= self._websockets_max:
                return StreamRefusal.WEBSOCKETS_MAX
            if websocket_caller and self._websockets.get(websocket_caller, 0) >= self._websockets_per_caller_max:
                return StreamRefusal.WEBSOCKETS_PER_CALLER
        return None

    def take(self, *, is_known: bool, websocket_caller: str | None = None) -> None:
        if websocket_caller is not None:
            self._websocket_count += 1
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
            self._websocket_count -= 1
            self._websockets[websocket_caller] -= 1
            if not self._websockets[websocket_caller]:
                del self._websockets[websocket_caller]
        self._tally.exchanges_open -= 1
        self._tally.exchanges_unknown_open -= not is_known
        if self.is_draining and not is_late:
            self._early_open -= 1
            self._note_early_end()

    def open_websocket(self, *, is_known: bool) -> None:
        """Count a websocket, and free the slot of the exchange that has accepted it.

        Args:
            is_known: the same value as in the call of `take`.
        """
        self._tally.websockets_open += 1
        self._tally.websockets_total += 1
        self._tally.exchanges_open -= 1
        self._tally.exchanges_unknown_open -= not is_known

    def close_websocket(self, *, is_known: bool) -> None:
        """Undo `open_websocket`. The connection calls `release` right after this method, so no limit applies.

        Args:
            is_known: the same value as in the call of `take`.
        """
        self._tally.websockets_open -= 1
        self._tally.exchanges_open += 1
        self._tally.exchanges_unknown_open += not is_known

    def take_for_response(self, *, is_known: bool) -> Callable[[], None]:
        """Take a slot while a response of a websocket runs.

        Args:
            is_known: the same value as in the call of `take`.

        Returns:
            A function that releases the slot. Call it once.

        Raises:
            Overloaded: too many requests are running.
        """
        refusal = self.refusal(is_known=is_known)
        if refusal is not None:
            self._tally.streams_refused_total[refusal] += 1
            is_full = refusal is StreamRefusal.EXCHANGES_MAX
            raise Overloaded(
                TOO_MANY[refusal][1],
                reason="exchanges_max" if is_full else "unknown_callers",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.take(is_known=is_known)
        return partial(self.release, is_known=is_known, is_late=self.is_draining)

    def begin_drain(self) -> None:
        """Remember which exchanges are open now. `wait_until_early_ended` ignores exchanges that begin later."""
        if not self.is_draining:
            self.is_draining = True
            self._early_open = self._tally.exchanges_open + self._tally.websockets_open
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


class Timed(Protocol):
    def check(self, now: float) -> float:
        """Act on every deadline that has passed, and return the time of the next check. Raises nothing.

        Args:
            now: current time, in Trio's seconds.
        """


TIMER_SECONDS = 0.25  # Checks of the same quarter of a second run together, so that thousands wake few tasks.
CHECKS_A_PIECE_MAX = 32  # Such a number of checks takes less than a millisecond. Then other tasks run.


class WebSocketTimer:
    """The deadlines of all websockets of one server, and the task that checks them.

    The task runs in the nursery of one websocket. When this websocket ends, the task restarts in the nursery of another
    one.
    """

    def __init__(self) -> None:
        self._nurseries: dict[Timed, trio.Nursery] = {}
        self._ticks: dict[Timed, int] = {}  # The next check of each websocket, counted in TIMER_SECONDS.
        self._due: dict[int, dict[Timed, None]] = {}  # The websockets of each tick. A dict keeps their order.
        self._next: list[int] = []  # A heap of the keys of _due.
        self._leader: Timed | None = None  # The task runs in the nursery of this websocket.
        self._run_scope = trio.CancelScope()
        self._pause = trio.CancelScope()  # The scope contains the sleep of the task.

    def add(self, websocket: Timed, at: float, nursery: trio.Nursery) -> None:
        """Check a websocket until it is removed.

        Args:
            at: time of its first check.
            nursery: a nursery that stays open until the websocket is removed.
        """
        self._nurseries[websocket] = nursery
        self.check_by(websocket, at)
        if self._leader is None:
            self._lead(websocket)

    def check_by(self, websocket: Timed, at: float) -> None:
        """Check a websocket at a time, unless an earlier check is due.

        Args:
            websocket: the websocket. If it has been removed, this method does nothing.
            at: time of the check. The check may be TIMER_SECONDS late.
        """
        if at == math.inf or websocket not in self._nurseries:
            return
        tick = math.ceil(at / TIMER_SECONDS)
        if tick >= self._ticks.get(websocket, math.inf):
            return
        self._forget(websocket)
        self._ticks[websocket] = tick
        if tick not in self._due:
            self._due[tick] = {}
            heapq.heappush(self._next, tick)
            self._pause.deadline = min(self._pause.deadline, tick * TIMER_SECONDS)
        self._due[tick][websocket] = None

    def remove(self, websocket: Timed) -> None:
        """End the checks of a websocket."""
        self._forget(websocket)
        del self._nurseries[websocket]
        if websocket is self._leader:
            self._run_scope.cancel()
            self._leader = None
            if self._nurseries:
                self._lead(next(iter(self._nurseries)))

    def _forget(self, websocket: Timed) -> None:
        tick = self._ticks.pop(websocket, None)
        if tick is not None:
            del self._due[tick][websocket]  # The task removes empty ticks, when their time has come.

    def _lead(self, websocket: Timed) -> None:
        self._leader = websocket
        self._run_scope = trio.CancelScope()
        self._nurseries[websocket].start_soon(self._run, self._run_scope)

    async def _run(self, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                deadline = self._next[0] * TIMER_SECONDS if self._next else math.inf
                with trio.CancelScope(deadline=deadline) as self._pause:
                    await trio.sleep_forever()
                await self._check_due()

    async def _check_due(self) -> None:
        checked_count = 0
        while self._next and self._next[0] * TIMER_SECONDS <= trio.current_time():
            tick = self._next[0]
            due = self._due[tick]
            while due:
                websocket, now = next(iter(due)), trio.current_time()
                self._forget(websocket)
                self.check_by(websocket, max(websocket.check(now), now + TIMER_SECONDS))
                checked_count += 1
                if checked_count % CHECKS_A_PIECE_MAX == 0:
                    await trio.lowlevel.checkpoint()
            if self._next[0] == tick:  # Else an earlier check was added while other tasks ran.
                del self._due[heapq.heappop(self._next)]


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
    websocket_timer: WebSocketTimer
