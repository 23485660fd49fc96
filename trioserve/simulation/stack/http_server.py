"""The front end of a simulated stack, and books about its exchanges: who began, who is inside, who has left and when.

Whatever has to hold about exchanges at any moment, and after the last of them, is asserted here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from hashlib import blake2b

import trio

from trioserve.api.routes import App
from trioserve.contracts.events import AbortOutcome
from trioserve.http.clock_and_ids import ClockAndIds
from trioserve.http.exchange import Exchange
from trioserve.http.http2.stream import H2Stream
from trioserve.http.server import FrontendServer
from trioserve.simulation.stack.http_connection import WatchedEnd
from trioserve.simulation.stack.http_plan import Ask, Front
from trioserve.simulation.stack.http_requests import KEY, key_of
from trioserve.testing.fake_engine import FakeEngine
from trioserve.testing.memory_stream import MemoryEnd, memory_connection

__all__ = ["MADE_UP", "MOMENT_SECONDS", "HttpServer"]

BEGAN_AT = 1_700_000_000  # the time of day when a simulation begins
MOMENT_SECONDS = 0.001  # everybody has done what could be done without waiting
ROUNDING_SECONDS = 1e-6
MADE_UP = "made-"  # ids of those who send none begin so


class HttpServer:
    """tell, count: of the simulation. check: what has to hold at any moment. before_abort: hears of an id that an
    operator aborts, and says whether clients who do not come over HTTP have used it.

    Keys name who asks: h1 is ask number 1, d1 an operator. begun: whose exchange has begun. untold: who waits for an
    answer. excused: who may not take it, and need not be told of a fault. left_at: who has left. sent_at: when the last
    byte of a request was sent; inf: not yet. ended_ids: by a pause, or by leaving in a pause.
    """

    def __init__(
        self,
        fake: FakeEngine,
        front: Front,
        asks: Iterable[Ask],
        nursery: trio.Nursery,
        *,
        tell: Callable[[str], None],
        count: Callable[[str], None],
        check: Callable[[], None],
        before_abort: Callable[[str], bool],
    ) -> None:
        ids = map((MADE_UP + "{}").format, itertools.count())
        clock_and_ids = ClockAndIds(
            wall_clock=lambda: BEGAN_AT + trio.current_time(),
            new_request_id=lambda: next(ids),
            cpu_clock=lambda: 0.0,  # the real one would have a seed end differently on a slower machine
        )
        self.fake = fake
        self.nursery = nursery
        self.tell, self.count, self.check_all = tell, count, check
        self.limits = front.limits()
        self.begun: set[str] = set()
        self.inside: dict[str, Exchange] = {}
        self.untold: set[str] = set()
        self.left_at: dict[str, float] = {}
        self.excused: set[str] = set()
        self.sent_at: dict[str, float] = {}
        self.promised: dict[str, set[AbortOutcome]] = {}  # to operators, whatever the response says must be among it
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

    # --- connections ---

    def connect(self, number: int) -> MemoryEnd:
        """A client's end of a new connection."""
        ours, theirs = memory_connection(buffer_bytes=self._wire_bytes)

        def told(what: str, data: bytes) -> None:
            digest = f" {len(data)} {blake2b(data, digest_size=8).hexdigest()}" if data else ""
            self.tell(f"server {what} on {number}{digest}")

        self.nursery.start_soon(self._serve, WatchedEnd(theirs, told))
        return ours

    @property
    def is_leaving(self) -> bool:
        return self._server.draining or self.fake.draining or self.fake.fault is not None

    async def wait_until_closed(self) -> None:
        """Returns when no connection is left. For an engine that broke, after drain()."""
        while self._open_count:
            await self._all_closed.wait()

    def drain(self) -> None:
        if self.drained_at is None:
            self.drained_at = trio.current_time()
            self.nursery.start_soon(self._check_halves_are_gone)
        self._server.drain()

    def came_too_late(self, key: str) -> bool:
        """Whether its request was not whole when the server began to leave."""
        return self.drained_at is not None and self.sent_at.get(key, math.inf) >= self.drained_at - ROUNDING_SECONDS

    async def _check_halves_are_gone(self) -> None:
        await trio.sleep(MOMENT_SECONDS)
        halves = [key for key in self.inside if self.sent_at.get(key) == math.inf]
        assert not halves, f"clients {halves} have sent half a request, and the server that leaves waits for the rest"

    async def _serve(self, end: WatchedEnd) -> None:
        self._open_count += 1
        try:
            await self._server.serve_connection(end)
        finally:
            self._open_count -= 1
            if not self._open_count:
                self._all_closed.set()
                self._all_closed = trio.Event()

    # --- the handler ---

    async def _handle(self, exchange: Exchange) -> None:
        key = exchange.headers.get(KEY)
        assert key is not None
        assert key not in self.begun, f"client {key} asked once, and is answered twice"
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
                    self._check_let_go(ask)
                self.check_all()
            except AssertionError as error:  # the front end would take it for a fault of its handler's
                self.nursery.start_soon(_fail, error)

    def _promises_for(self, request_id: str) -> set[AbortOutcome]:
        """What an abort by this id, which comes right now, may be answered with."""
        was_used = self._before_abort(request_id)
        views = [view for view in self.fake.live_requests() if view.id == request_id]
        if any(view.state != "finished" for view in views):
            self.aborted_ids.add(request_id)
            return {AbortOutcome.ABORTED}
        if views or was_used:
            return {AbortOutcome.ALREADY_FINISHED}
        # Of who has come over HTTP it is not known whether it was refused before it was entered.
        return {AbortOutcome.UNKNOWN, *([AbortOutcome.ALREADY_FINISHED] if request_id in self.begun else [])}

    # --- what has to hold ---

    def check_told(self) -> None:
        """After the engine broke."""
        assert not self.untold, f"the engine broke, and clients {sorted(self.untold)} were not told"

    def check(self) -> None:
        """At any moment."""
        limits = self.limits
        for key, exchange in self.inside.items():
            if isinstance(exchange, H2Stream):
                held = exchange.unsent_bytes
                assert held <= limits.stream_buffer_bytes_max, f"{held} bytes are held for client {key}"
        for view in self.fake.live_requests():
            if view.id.startswith("h"):
                assert view.id in self.inside, f"{view.id} lives on, and its exchange has ended"
                timeout = self._asks[view.id].timeout
                is_over = timeout is not None and view.age_seconds > timeout + MOMENT_SECONDS / 2
                assert not is_over or view.state == "finished", f"{view.id} has outlived its deadline"

    def check_step(self, ids: Iterable[str], planned_at: float) -> None:
        """What a step computes that was planned then."""
        for name in ids:
            request_id = name.split("/")[1]
            left_at = self.left_at.get(request_id, math.inf) if request_id.startswith("h") else math.inf
            assert planned_at <= left_at + ROUNDING_SECONDS, (
                f"{name} left at {left_at:.3f}, and is computed by a step that was planned at {planned_at:.3f}"
            )

    def check_over(self) -> None:
        """After everybody has left."""
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

    def _check_let_go(self, ask: Ask) -> None:
        """Its exchange has ended, however: nothing of it computes but the step in flight."""
        for live in self.fake.current_core.live_requests():
            if ask.id is not None and live.request.id.split("/")[1] == ask.id:
                is_marked = live.steps_in_flight and live.abort_reason is not None
                assert is_marked, f"the exchange of {ask.id} has ended, and {live.request.id} goes on"


async def _fail(error: AssertionError) -> None:
    raise error
