"""Several router cores before the same endpoints, in virtual time. The cores are real, all else is simulated.

Each router knows what its own clients ask for and what endpoints tell it, and, where they have shares, which other
routers are alive. A history is a function of its settings, of which one is the seed.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable
from random import Random

from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import Overloaded
from trioserve.router.core import RouterCore
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings
from trioserve.router.shares import lease_share
from trioserve.router.ticket import Ticket, TicketState
from trioserve.simulation.routers.books import RoutersBooks
from trioserve.simulation.routers.endpoint import SimulatedEndpoint
from trioserve.simulation.routers.figures import Figures
from trioserve.simulation.routers.world import RoutersWorld

__all__ = ["RoutersSimulation"]

BEGAN_AT = 1000.0
RETRY_SECONDS = 0.1  # until a client whose router has died asks another one
BACK_AFTER = 0.3  # of the whole time
END_SECONDS_MAX = 300.0


class _Request:
    """One of a client. service_seconds: drawn when it came, so that it is the same wherever it goes."""

    def __init__(self, number: int, came_at: float, service_seconds: float, tenant: str) -> None:
        self.number = number
        self.came_at = came_at
        self.service_seconds = service_seconds
        self.tenant = tenant
        self.router: _Router | None = None
        self.ticket: Ticket | None = None
        self.endpoint: EndpointId | None = None
        self.turn = 0  # counts its tries: what was on its way for one before is nothing to it any more


class _Router:
    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"router {number}"
        self.is_alive = True
        self.known = {self.name}
        self.core: RouterCore
        self.by_ticket: dict[int, _Request] = {}
        self.sent_at: list[float] = []  # of each request that was sent anywhere, in order
        self.ticks_at = math.inf


class RoutersSimulation:
    """figures: what came of it. Raises AssertionError where a promise is broken."""

    def __init__(self, world: RoutersWorld) -> None:
        self.world = world
        self.figures = Figures(world)
        self.books = RoutersBooks(world)
        self.now = BEGAN_AT
        self._rng = Random(world.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._request_count = 0
        self._open_count = 0
        self._requests: dict[int, _Request] = {}
        self._endpoints = {
            EndpointId(f"e{index}"): SimulatedEndpoint(EndpointId(f"e{index}"), world.seats)
            for index in range(world.endpoints)
        }
        self._routers = [_Router(number) for number in range(world.routers)]
        for router in self._routers:
            self._open(router)
        if world.shares:
            self._tell_all()

    def run(self) -> None:
        world = self.world
        self._open_with_one_each()
        for router in self._routers:
            self._at(self._gap(), lambda router=router: self._arrive(router))  # type: ignore[misc]
        for endpoint in self._endpoints.values():
            offset = self._rng.random() * world.report_seconds
            self._at(offset, lambda endpoint=endpoint: self._report(endpoint))  # type: ignore[misc]
        if world.dies:
            self._at(world.seconds / 2, lambda: self._die(self._routers[-1]))
        end = BEGAN_AT + world.seconds + END_SECONDS_MAX
        while self._events:
            moment, _, happens = heapq.heappop(self._events)
            assert moment < end, f"{self._open_count} requests have no end"
            self.figures.pass_time(moment - self.now)
            self.now = moment
            happens()
        self.books.check_end(self._request_count)
        for endpoint in self._endpoints.values():
            assert not endpoint.count, f"{endpoint.count} are left at {endpoint.id}"
        for router in self._routers:
            stats = router.core.stats()
            assert not stats.waiting, f"{stats.waiting} wait at {router.name} for ever"
            assert not any(stats.leases.values()), f"{router.name} has leases of nobody"
            assert not any(state.in_flight for state in router.core.endpoints.values()), f"{router.name} counts on"
        self.figures.end(self._endpoints.values())

    # --- clients ---

    def _open_with_one_each(self) -> None:
        """Before anything else is there, every router gets a request."""
        for router in self._routers:
            request = self._new_request()
            self._enter(router, request)
            assert request.endpoint is not None, f"{router.name} has idle endpoints, and a request waits"
            self.books.note_first_choice(request.endpoint)

    def _gap(self) -> float:
        """Until the next request at one router."""
        world = self.world
        rate = world.load * world.endpoints * world.seats / world.service_seconds / world.routers
        return self._rng.expovariate(rate)

    def _arrive(self, router: _Router) -> None:
        if self.now >= BEGAN_AT + self.world.seconds:
            return
        self._at(self._gap(), lambda: self._arrive(router))
        self._enter(router if router.is_alive else self._another(router), self._new_request())

    def _new_request(self) -> _Request:
        self._request_count += 1
        self._open_count += 1
        service_seconds = self._rng.expovariate(1 / self.world.service_seconds)
        # One tenant asks for most, as it happens; fair queueing is to keep the other from waiting for it.
        tenant = "much" if self._rng.random() < 0.8 else "little"
        request = _Request(self._request_count, self.now, service_seconds, tenant)
        self._requests[request.number] = request
        return request

    def _enter(self, router: _Router, request: _Request) -> None:
        request.router = router
        request.turn += 1
        try:
            ticket = router.core.enter(RoutedRequest(model="m", tenant=request.tenant), self.now)
        except Overloaded:
            self.figures.note_refused()
            self._end(request)
            return
        request.ticket = ticket
        router.by_ticket[ticket.index] = request
        if ticket.state is TicketState.LEASED:
            self._send(router, request)
        else:
            self.figures.note_waiting(1)
        self._retime(router)

    def _another(self, router: _Router) -> _Router:
        alive = [other for other in self._routers if other.is_alive and other is not router]
        return alive[self._rng.randrange(len(alive))]

    def _end(self, request: _Request) -> None:
        self.books.end(request.number)
        self._open_count -= 1
        del self._requests[request.number]

    # --- routers ---

    def _open(self, router: _Router) -> None:
        world = self.world
        settings = RouterSettings(
            leases_max=world.leases_max,
            waiting_depth_max=world.waiting_depth_max,
            slow_start_seconds=0,
            queue_requests_max=100_000,
            queue_seconds_max=END_SECONDS_MAX,
        )
        router.core = RouterCore(
            settings,
            POLICIES[world.policy],
            on_change=lambda ticket: self._changed(router, ticket),
            rng=Random(self._rng.randrange(1 << 32)),
        )
        router.by_ticket.clear()
        router.sent_at.clear()
        router.ticks_at = math.inf
        for id in self._endpoints:
            router.core.add_endpoint(id, ["m"], self.now)
            router.core.note_health(id, True, self.now)

    def _changed(self, router: _Router, ticket: Ticket) -> None:
        request = router.by_ticket[ticket.index]
        self.figures.note_waiting(-1)
        if ticket.state is TicketState.LEASED:
            self._send(router, request)
        else:
            del router.by_ticket[ticket.index]
            self.figures.note_refused()
            self._end(request)

    def _send(self, router: _Router, request: _Request) -> None:
        assert request.ticket is not None
        assert request.ticket.endpoint is not None
        endpoint = request.endpoint = request.ticket.endpoint
        self.books.give(router.number, endpoint)
        router.core.sent(request.ticket)
        router.sent_at.append(self.now)
        turn = request.turn
        self._at(self.world.wire_seconds, lambda: self._come(request, turn))

    def _served(self, request: _Request, turn: int) -> None:
        """The response has come."""
        router, ticket = request.router, request.ticket
        if request.turn != turn or router is None or ticket is None:
            return
        assert request.endpoint is not None
        self.books.take_back(router.number, request.endpoint)
        del router.by_ticket[ticket.index]
        self._end(request)
        router.core.first_token(ticket, self.now)
        router.core.leave(ticket, self.now)
        self._retime(router)

    def _retime(self, router: _Router) -> None:
        moment = router.core.next_tick(self.now)
        if moment < router.ticks_at:
            router.ticks_at = moment
            core = router.core
            self._at(max(0.0, moment - self.now), lambda: self._tick(router, core))

    def _tick(self, router: _Router, core: RouterCore) -> None:
        if router.core is core and router.is_alive:
            router.ticks_at = math.inf
            core.tick(self.now)
            if self._open_count:
                self._retime(router)

    # --- routers that come and go ---

    def _die(self, router: _Router) -> None:
        """Its connections break: what it has at endpoints ends there, and its clients ask another router."""
        router.is_alive = False
        for request in list(router.by_ticket.values()):
            assert request.ticket is not None
            if request.ticket.state is TicketState.WAITING:
                self.figures.note_waiting(-1)
            else:
                assert request.endpoint is not None
                self.books.take_back(router.number, request.endpoint)
                self._leave_endpoint(self._endpoints[request.endpoint], request.number)
            request.turn += 1
            request.router = request.ticket = request.endpoint = None
            self._at(RETRY_SECONDS, lambda request=request: self._enter(self._another(router), request))  # type: ignore[misc]
        self._open(router)
        self._at(self.world.notice_seconds, self._tell_all)
        self._at(BACK_AFTER * self.world.seconds, lambda: self._come_back(router))

    def _come_back(self, router: _Router) -> None:
        """It begins with what it knows: itself. The others are told at once, and it of them."""
        router.is_alive = True
        self._tell_all()

    def _tell_all(self) -> None:
        """Every router that is alive knows who is."""
        if not self.world.shares:
            return
        alive = {router.name for router in self._routers if router.is_alive}
        for router in self._routers:
            if router.is_alive:
                router.known = set(alive)
        for id in self._endpoints:
            shares = {
                router.number: lease_share(router.name, router.known, id, self.world.leases_max)
                for router in self._routers
                if router.is_alive
            }
            self.books.set_shares(id, shares)
            for router in self._routers:
                if router.is_alive:
                    router.core.set_lease_share(id, shares[router.number], self.now)

    # --- endpoints ---

    def _come(self, request: _Request, turn: int) -> None:
        if request.turn != turn:
            return
        assert request.endpoint is not None
        if self._endpoints[request.endpoint].come(request.number):
            self._run(request)

    def _run(self, request: _Request) -> None:
        assert request.router is not None
        self.figures.note_began(request.router.number, request.tenant, self.now - request.came_at)
        turn = request.turn
        self._at(request.service_seconds, lambda: self._finish(request, turn))

    def _finish(self, request: _Request, turn: int) -> None:
        if request.turn != turn:
            return
        assert request.endpoint is not None
        self._leave_endpoint(self._endpoints[request.endpoint], request.number)
        self._at(self.world.wire_seconds, lambda: self._served(request, turn))

    def _leave_endpoint(self, endpoint: SimulatedEndpoint, number: int) -> None:
        if number in endpoint.running:
            self.figures.note_left_seat()
        following = endpoint.go(number)
        if following is not None:
            self._run(self._requests[following])

    def _report(self, endpoint: SimulatedEndpoint) -> None:
        """It tells every router. What a router sent less than one way ago is not in it, as in a response to a question
        of that moment."""
        if not self._open_count and self.now >= BEGAN_AT + self.world.seconds:
            return
        load, told_at = endpoint.load(), self.now
        self._at(self.world.wire_seconds, lambda: self._noted(endpoint.id, load, told_at))
        self._at(self.world.report_seconds, lambda: self._report(endpoint))

    def _noted(self, id: EndpointId, load: object, told_at: float) -> None:
        for router in self._routers:
            if router.is_alive:
                known = bisect.bisect_right(router.sent_at, told_at - self.world.wire_seconds)
                router.core.note_load(id, load, self.now, sent_when_asked=known)  # type: ignore[arg-type]
                self._retime(router)

    # --- time ---

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (self.now + seconds, self._event_count, happens))
