"""Clients and operators over HTTP in a simulated stack. They check what they receive.

When a client disconnects, the server must end its exchange at once, and no later step may compute its request. A client
that does not disconnect, stop reading or come too late must get a complete response, or an error with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import trio

from trioserve.contracts.events import AbortOutcome
from trioserve.simulation.stack.http_connection import FOR_GOOD_SECONDS, Ask, Caller, Connection, Delete, Response
from trioserve.simulation.stack.http_requests import (
    BROKEN_OFF,
    COMPLETE,
    KEY,
    expected_tokens,
    key_of,
    outcome_of,
    path_of,
    request_of,
)
from trioserve.simulation.stack.http_server import MOMENT_SECONDS, HttpServer

__all__ = ["HttpClients"]


class HttpClients:
    """All clients over HTTP of one plan.

    Args:
        server: server under test.
        asks: the requests.
        connections: planned connections. Each sends its requests in order.
        family: format of tool calls.
    """

    def __init__(
        self, server: HttpServer, asks: Iterable[Ask], connections: Iterable[Connection], *, family: str = ""
    ) -> None:
        self._server = server
        self._family = family
        self._asks: dict[int, list[Ask]] = {}  # requests of each connection, by number of the connection
        for ask in asks:
            self._asks.setdefault(ask.connection, []).append(ask)
        self._connections = {connection.number: connection for connection in connections}
        self._cut: set[int] = set()  # numbers of connections that may end early
        every = [ask for of_connection in self._asks.values() for ask in of_connection]
        server.excused.update(key_of(ask) for ask in every if self._stall_seconds(ask))

    def start(self, nursery: trio.Nursery) -> None:
        """Start the tasks of all clients.

        Args:
            nursery: runs the tasks.
        """
        for number, asks in self._asks.items():
            connection = self._connections.get(number, Connection(number=number))
            nursery.start_soon(self._be_connection, connection, asks)

    async def run_operator(self, order: Delete, number: int) -> None:
        await trio.sleep(order.at)
        key = f"d{number}"
        caller = self._connect(Connection(number=-1 - number, http=1))
        response = Response()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.read)
            await caller.begin(response, "DELETE", f"/v1/requests/{order.id}", [(KEY, key)], b"")
            while not response.is_over:
                await caller.changed.park()
            caller.end.close()
        if response.lost is not None:
            is_excused = key not in self._server.begun and self._server.is_leaving
            assert is_excused, f"the abort of {order.id}: {response.lost}"
            return
        outcome = AbortOutcome.UNKNOWN
        if response.status != 404:
            assert response.status == 200, f"the abort of {order.id} has status {response.status}"
            outcome = AbortOutcome(msgspec.json.decode(response.body)["result"])
        promised = self._server.promised[key]
        assert outcome in promised, f"the abort of {order.id} returns {outcome.value}, expected is one of {promised}"
        self._server.log_line(f"delete {order.id}: {outcome.value}")
        self._server.count(f"deletes: {outcome.value}")

    # --- Tasks of a client ---

    async def _be_connection(self, connection: Connection, asks: list[Ask]) -> None:
        await trio.sleep(connection.at)
        caller = self._connect(connection, asks)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.read)
            if connection.stalls_at is not None:
                nursery.start_soon(self._stall_connection, caller, asks)
            async with trio.open_nursery() as asking:
                for ask in asks:
                    if connection.http == 1:
                        await trio.sleep(ask.at)
                        response = await self._begin(caller, ask)
                        if connection.is_pipelined and not ask.withheld:
                            asking.start_soon(self._await_response, caller, ask, response)
                        else:
                            await self._await_response(caller, ask, response)
                    else:
                        asking.start_soon(self._ask_on_stream, caller, ask)
            await self._hang_up(caller, stalls=any(self._stall_seconds(ask) for ask in asks))
            nursery.cancel_scope.cancel()

    async def _ask_on_stream(self, caller: Caller, ask: Ask) -> None:
        await trio.sleep(ask.at)
        begun = await self._begin(caller, ask)
        caller.asks_left -= 1
        if not caller.asks_left and caller.connection.ends == "goaway":
            await caller.send_goaway()
        await self._await_response(caller, ask, begun)

    async def _begin(self, caller: Caller, ask: Ask) -> tuple[Response, float]:
        """Send the request. Return the response, and the time at which the client gives up."""
        response = Response()
        leaves_at = math.inf if ask.patience is None else trio.current_time() + ask.patience
        if caller.is_over:
            response.lost = "the connection was already closed"
            return response, leaves_at
        self._server.count("requests")
        if ask.has_tools:
            self._server.count("requests with tools")
        if ask.known_count:
            self._server.count("requests that resume a response")
        if ask.stops:
            self._server.count("requests with stop strings")
        body, fields = request_of(ask, expected_tokens(ask, self._server.fake.executor.model))
        middle = len(body) // 2
        self._server.sent_at[key_of(ask)] = math.inf
        await caller.begin(response, "POST", path_of(ask), fields, body[:middle])
        with trio.move_on_at(leaves_at):
            await trio.sleep(ask.pause)
        rest = body[middle : -1 if ask.withheld else len(body)]
        await caller.send_body(response, rest, is_last=not ask.withheld)
        if not ask.withheld:
            self._server.sent_at[key_of(ask)] = trio.current_time()
        return response, leaves_at

    async def _await_response(self, caller: Caller, ask: Ask, begun: tuple[Response, float]) -> None:
        response, leaves_at = begun
        key, has_stalled, leaves = key_of(ask), False, False
        with trio.move_on_at(leaves_at) as patience:
            while not response.is_over and not leaves:
                if ask.stalls_after is not None and len(response.body) >= ask.stalls_after and not has_stalled:
                    has_stalled = True
                    self._server.nursery.start_soon(self._stall, caller, ask, response)
                leaves = ask.leaves_after is not None and len(response.body) >= ask.leaves_after
                if not leaves:
                    await caller.changed.park()
        if not response.is_over and key not in self._server.left_at:
            assert leaves or patience.cancelled_caught
            await self._leave(caller, ask, response)
        self._server.untold.discard(key)
        self._judge(caller, ask, response)

    async def _stall(self, caller: Caller, ask: Ask, response: Response) -> None:
        self._server.count("stalls")
        if not caller.protocol.withhold_credit(response):
            caller.stop_reading(ask.stall_seconds)
            await trio.sleep(ask.stall_seconds)
        elif ask.trickles:
            await self._trickle(caller, ask, response)
        else:
            await trio.sleep(ask.stall_seconds)
        if ask.stall_seconds >= FOR_GOOD_SECONDS:
            self._check_abandoned([ask])
        caller.protocol.grant_credit(response)
        await caller.flush()

    async def _trickle(self, caller: Caller, ask: Ask, response: Response) -> None:
        self._server.count("clients that read very slowly")
        ends_at = trio.current_time() + ask.stall_seconds
        while trio.current_time() < ends_at:
            await trio.sleep_until(min(ends_at, trio.current_time() + 0.8 * self._server.limits.stall_seconds_max))
            if not response.is_over:
                caller.protocol.grant_one_byte(response)
                await caller.flush()

    async def _stall_connection(self, caller: Caller, asks: list[Ask]) -> None:
        connection = caller.connection
        assert connection.stalls_at is not None
        await trio.sleep(connection.stalls_at)
        self._server.count("connections stalled")
        caller.stop_reading(connection.stall_seconds)
        await trio.sleep(connection.stall_seconds)
        if connection.stall_seconds >= FOR_GOOD_SECONDS:
            self._check_abandoned(asks)

    async def _leave(self, caller: Caller, ask: Ask, response: Response) -> None:
        way = ask.way if caller.connection.http == 2 or ask.way != "reset" else "close"
        if way == "reset":
            caller.protocol.reset(response)
            await caller.flush()
            keys = [key_of(ask)]
        else:
            keys = [key_of(other) for other in self._asks[ask.connection]]
            self._cut.add(ask.connection)
            if way == "goaway":
                await caller.send_goaway()
            if way == "half-close":
                await caller.end_sending()
            elif way == "abort":
                caller.end.abort()
            else:
                caller.end.close()
        now = trio.current_time()
        for key in keys:
            self._server.left_at.setdefault(key, now)
            self._server.untold.discard(key)
        self._server.log_line(f"client {key_of(ask)} leaves: {way}")
        self._server.count(f"ways to leave: {way}, HTTP/{caller.connection.http}")
        await trio.sleep(MOMENT_SECONDS)
        for key in keys:
            assert key not in self._server.inside, f"client {key} has left by {way}, but its exchange has not ended"
        self._server.check_all()

    async def _hang_up(self, caller: Caller, *, stalls: bool) -> None:
        """End the connection after all responses have come. Assert that the server ends its side in time."""
        ends, began_at = caller.connection.ends, trio.current_time()
        if ends == "half-close" or (ends == "goaway" and caller.connection.http == 1):
            await caller.end_sending()
        elif ends == "abort":
            caller.end.abort()
        elif ends == "close":
            caller.end.close()
        while not caller.is_over:
            await caller.changed.park()
        caller.end.close()
        over_at = trio.current_time()
        limit = began_at + (self._server.limits.idle_seconds_max if ends == "wait" else 0.0)
        if self._server.drained_at is not None:
            limit = min(limit, max(began_at, self._server.drained_at))
        is_late = over_at > limit + MOMENT_SECONDS and not stalls
        assert not is_late, f"connection {caller.connection.number} must end at {limit:.3f}, but ends at {over_at:.3f}"

    def _connect(self, connection: Connection, asks: Sequence[Ask] = ()) -> Caller:
        self._server.count(f"connections: HTTP/{connection.http}")
        return Caller(self._server.connect(connection.number), connection, ask_count=len(asks))

    # --- Checks after the end ---

    def _check_abandoned(self, asks: list[Ask]) -> None:
        for ask in asks:
            key = key_of(ask)
            assert key not in self._server.inside, f"client {key} never reads, but its exchange was not given up"

    def _stall_seconds(self, ask: Ask) -> float:
        """Return the total seconds for which a client does not read."""
        connection = self._connections.get(ask.connection, Connection(number=ask.connection))
        asks = self._asks[ask.connection] if connection.http == 1 else [ask]
        return connection.stall_seconds + sum(one.stall_seconds for one in asks if one.stalls_after is not None)

    def _judge(self, caller: Caller, ask: Ask, response: Response) -> None:
        key, connection = key_of(ask), caller.connection.number
        expected = expected_tokens(ask, self._server.fake.executor.model)
        outcome = outcome_of(ask, response, expected, family=self._family)
        self._server.log_line(f"client {key}: {outcome}{'' if response.lost is None else f' ({response.lost})'}")
        self._server.count(f"answers: {outcome}")
        if ask.has_tools:
            self._server.count(f"answers with tools: {outcome}")
        if outcome == COMPLETE or key in self._server.left_at:
            return
        stalls = self._stall_seconds(ask) >= self._server.limits.stall_seconds_max
        if outcome == BROKEN_OFF:
            if stalls:
                self._cut.add(connection)
            is_late = self._server.came_too_late(key)
            may_end = is_late or (
                key not in self._server.begun and (self._server.is_leaving or connection in self._cut)
            )
            assert stalls or may_end, f"client {key}: its response broke off: {response.lost}"
            return
        if outcome.startswith("408") and caller.connection.http == 1:
            self._cut.add(connection)
        engine = self._server.fake
        reasons = {
            "429 queue_full": True,
            "503 draining": engine.draining or self._server.came_too_late(key),
            "200 draining": engine.draining and len(ask.prompts) > 1,
            "408 body_timeout": ask.withheld or ask.pause >= self._server.limits.body_wait_seconds_max,
        }
        is_aborted = response.headers.get("x-request-id") in self._server.aborted_ids
        reasons |= dict.fromkeys(("503 request_aborted", "200 request_aborted"), is_aborted)
        for reason, ids in self._server.ended_ids.items():
            is_ended = response.headers.get("x-request-id") in ids
            reasons |= dict.fromkeys((f"503 {reason}", f"200 {reason}"), is_ended)
        reasons |= dict.fromkeys(("500 engine_fault", "200 engine_fault"), engine.fault is not None)
        reasons |= dict.fromkeys(("504 timeout", "200 timeout"), ask.timeout is not None)
        reasons |= dict.fromkeys(("504 queue_timeout", "200 queue_timeout"), ask.queue_timeout is not None)
        assert reasons.get(outcome, False), f"client {key} gets {outcome} without a reason"
