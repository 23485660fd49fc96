"""The HTTP front end of a simulated stack, with independent records of its exchanges.

This module checks the rules for exchanges, both at any time and after the last exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from hashlib import blake2b

import trio

from trioserve.api.routes import App
from trioserve.contracts.events import AbortOutcome
from trioserve.http.exchange import ClockAndIds, Exchange
from trioserve.http.http2.stream import H2Stream
from trioserve.http.server import FrontendServer
from trioserve.simulation.stack.http_connection import Ask, Front, WatchedEnd
from trioserve.simulation.stack.http_requests import KEY, key_of
from trioserve.testing.fake_engine import FakeEngine
from trioserve.testing.memory_client import MemoryEnd, memory_connection

__all__ = ["MADE_UP", "MOMENT_SECONDS", "HttpServer"]

BEGAN_AT = 1_700_000_000  # Unix time at the start of the run
MOMENT_SECONDS = 0.001  # After this time, every task has done all work that needs no waiting.
ROUNDING_SECONDS = 1e-6
MADE_UP = "made-"  # prefix of the ids that the server makes for requests without an id


class HttpServer:
    """The front end and its records. Keys identify clients: h1 sends request number 1, and d1 is an operator.

    Args:
        fake: the engine.
        front: settings of the front end.
        asks: all requests.
        nursery: runs the connections.
        log_line: receives trace lines.
        count: counts occurrences.
        check: checks the rules that must hold at any time.
        before_abort: called with an id that an operator aborts. Returns True if clients of the engine have used it.

    Attributes:
        begun: clients whose exchange has begun.
        inside: running exchanges, by client.
        untold: clients that wait for a response or an error.
        excused: clients that may stop reading, so they need not receive an error after a fault.
        left_at: times at which clients disconnected.
        sent_at: times at which the last bytes of requests were sent. inf: the last byte was not sent yet.
        promised: allowed results of aborts by operators.
        aborted_ids: aborted requests.
        ended_ids: requests that were ended by a pause or by a drain during a pause, by stop reason.
        drained_at: time at which the drain began, or None.
    """

    def __init__(
        self,
        fake: FakeEngine,
        front: Front,
        asks: Iterable[Ask],
        nursery: trio.Nursery,
        *,
        log_line: Callable[[str], None],
        count: Callable[[str], None],
        check: Callable[[], None],
        before_abort: Callable[[str], bool],
    ) -> None:
        ids = map((MADE_UP + "{}").format, itertools.count())
        clock_and_ids = ClockAndIds(
            wall_clock=lambda: BEGAN_AT + trio.current_time(),
            new_request_id=lambda: next(ids),
            cpu_clock=lambda: 0.0,  # With the real clock, a run would depend on the speed of the machine.
        )
        self.fake = fake
        self.nursery = nursery
        self.log_line, self.count, self.check_all = log_line, count, check
        self.limits = front.limits()
        self.begun: set[str] = set()
        self.inside: dict[str, Exchange] = {}
        self.untold: set[str] = set()
        self.left_at: dict[str, float] = {}
        self.excused: set[str] = set()
        self.sent_at: dict[str, float] = {}
        self.promised: dict[str, set[AbortOutcome]] = {}
        self.aborted_ids: set[str] = set()
        self.ended_ids: dict[str, set[str]] = {"paused": set(), "server_stopping": set()}
        self.drained_at: float | None = None
        self._server = FrontendServer(self._handle, limits=self.limits, clock_and_ids=clock_and_ids)
        self._app = App(fake, clock_and_ids=clock_and_ids)
        self._asks = {key_of(ask): ask for ask in asks}
        self._wire_bytes = front.wire_bytes
        self._before_abort = before_abort
        self._open_count = 0
        self._all_closed = trio.Event()

    # --- Connections ---

    def connect(self, number: int) -> MemoryEnd:
        """Return the client's end of a new connection.

        Args:
            number: number of the connection.
        """
        ours, theirs = memory_connection(buffer_bytes=self._wire_bytes)

        def note(what: str, data: bytes) -> None:
            digest = f" {len(data)} {blake2b(data, digest_size=8).hexdigest()}" if data else ""
            self.log_line(f"server {what} on {number}{digest}")

        self.nursery.start_soon(self._serve, WatchedEnd(theirs, note))
        return ours

    @property
    def is_leaving(self) -> bool:
        return self._server.draining or self.fake.draining or self.fake.fault is not None

    async def wait_until_closed(self) -> None:
        """Wait until no connection is open. Call this method after drain(), when the engine broke."""
        while self._open_count:
            await self._all_closed.wait()

    def drain(self) -> None:
        if self.drained_at is None:
            self.drained_at = trio.current_time()
            self.nursery.start_soon(self._check_incomplete_are_cancelled)
        self._server.drain()

    def came_too_late(self, key: str) -> bool:
        """Return True if the server began to drain before it had the complete request.

        Args:
            key: the client.
        """
        return self.drained_at is not None and self.sent_at.get(key, math.inf) >= self.drained_at - ROUNDING_SECONDS

    async def _check_incomplete_are_cancelled(self) -> None:
        await trio.sleep(MOMENT_SECONDS)
        halves = [key for key in self.inside if self.sent_at.get(key) == math.inf]
        assert not halves, f"clients {halves} have sent half a request, but the draining server waits for the rest"

    async def _serve(self, end: WatchedEnd) -> None:
        self._open_count += 1
        try:
            await self._server.serve_connection(end)
        finally:
            self._open_count -= 1
            if not self._open_count:
                self._all_closed.set()
                self._all_closed = trio.Event()

    # --- Handler of exchanges ---

    async def _handle(self, exchange: Exchange) -> None:
        key = exchange.headers.get(KEY)
        assert key is not None
        assert key not in self.begun, f"client {key} sent one request, but it is handled twice"
        self.begun.add(key)
        ask = self._asks.get(key)
        if ask is None:
            self.promised[key] = self._promises_for(exchange.path.rpartition("/")[2])
        else:
            self.inside[key] = exchange
            if key not in self.excused and key not in self.left_at:
                self.untold.add(key)
        try:
            await self._app(exchange)
        finally:
            self.inside.pop(key, None)
            try:
                if ask is not None:
                    self._check_released(ask)
                self.check_all()
            # The front end would treat a failed check as a fault of its handler, so another task raises the error.
            except AssertionError as error:
                self.nursery.start_soon(_fail, error)

    def _promises_for(self, request_id: str) -> set[AbortOutcome]:
        """Return the allowed results of an abort by id that arrives now."""
        was_used = self._before_abort(request_id)
        views = [view for view in self.fake.live_requests() if view.id == request_id]
        if any(view.state != "finished" for view in views):
            self.aborted_ids.add(request_id)
            return {AbortOutcome.ABORTED}
        if views or was_used:
            return {AbortOutcome.ALREADY_FINISHED}
        # This object does not know whether a request over HTTP was refused before it entered the engine.
        return {AbortOutcome.UNKNOWN, *([AbortOutcome.ALREADY_FINISHED] if request_id in self.begun else [])}

    # --- Rules ---

    def check_faults_reported(self) -> None:
        """Check, after the engine broke, that no client still waits for a response or an error."""
        assert not self.untold, f"the engine broke, but clients {sorted(self.untold)} got no error"

    def check(self) -> None:
        """Check the rules that must hold at any time."""
        limits = self.limits
        for key, exchange in self.inside.items():
            if isinstance(exchange, H2Stream):
                held = exchange.unsent_bytes
                assert held <= limits.stream_buffer_bytes_max, f"{held} bytes are held for client {key}"
        for view in self.fake.live_requests():
            if view.id.startswith("h"):
                assert view.id in self.inside, f"{view.id} has not ended, but its exchange has"
                timeout = self._asks[view.id].timeout
                is_over = timeout is not None and view.age_seconds > timeout + MOMENT_SECONDS / 2
                assert not is_over or view.state == "finished", f"{view.id} has outlived its deadline"

    def check_step(self, ids: Iterable[str], planned_at: float) -> None:
        """Check that a step computes no request whose client had disconnected before the step was planned.

        Args:
            ids: sequences of the step.
            planned_at: time of the plan.
        """
        for name in ids:
            request_id = name.split("/")[1]
            left_at = self.left_at.get(request_id, math.inf) if request_id.startswith("h") else math.inf
            assert planned_at <= left_at + ROUNDING_SECONDS, (
                f"{name} left at {left_at:.3f}, but is computed by a step that was planned at {planned_at:.3f}"
            )

    def check_over(self) -> None:
        """Check the rules that must hold after all clients have left."""
        counters = self._server.counters()
        failed = (counters.exchanges_failed_total, counters.connections_failed_total)
        assert failed == (0, 0), f"exchanges and connections that failed by a fault of the server: {failed}"
        left = (counters.connections_open, counters.exchanges_open, counters.request_body_bytes_held)
        assert left == (0, 0, 0), f"connections, exchanges and bytes of bodies that are left: {left}"
        assert counters.answer_bytes_held == 0
        for what in ("exchanges_left_total", "exchanges_stalled_total"):
            for _ in range(getattr(counters, what)):
                self.count(f"server: {what}")
        assert self._open_count == 0, f"{self._open_count} connections have a task"
        assert not self.inside

    def _check_released(self, ask: Ask) -> None:
        """Check that at most the step in flight computes a request whose exchange has ended."""
        for live in self.fake.current_core.live_requests():
            if ask.id is not None and live.request.id.split("/")[1] == ask.id:
                is_marked = live.steps_in_flight and live.abort_reason is not None
                assert is_marked, f"the exchange of {ask.id} has ended, but {live.request.id} is still computed"


async def _fail(error: AssertionError) -> None:
    raise error
