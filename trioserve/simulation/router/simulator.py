"""Runs one history with one router core. After every event, all rules are checked.

Independent records (books.py) decide whether a rule is broken. The core's counts are compared with these records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from trioserve.contracts.endpoint import EndpointId, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import InvalidRequest, Overloaded, RequestPoisoned, TrioserveError
from trioserve.contracts.ids import BlockHash
from trioserve.router.core import Fault, RouterCore
from trioserve.router.policies import POLICIES
from trioserve.router.silence import LOOK_SECONDS
from trioserve.router.ticket import SPARE_DEADLINES_MAX, Ticket, TicketFollower, TicketState
from trioserve.simulation.router.books import (
    RouterBooks,
    check_refused_at_the_door,
    check_refused_in_queue,
    check_taken_into_queue,
)
from trioserve.simulation.router.continued_book import has_pair
from trioserve.simulation.router.endpoint_book import CLOSE_SECONDS, EndpointBook
from trioserve.simulation.router.history import (
    Add,
    Arrive,
    Ask,
    Check,
    Compute,
    Crash,
    Crowd,
    Drain,
    Fail,
    Hang,
    Leave,
    Load,
    Lose,
    Models,
    Moved,
    Note,
    Probe,
    Remove,
    Replace,
    Response,
    Role,
    RouterEvent,
    RouterWorld,
    Send,
    Silence,
    Stay,
    Stopping,
    Store,
    Token,
    Unload,
    Wait,
)
from trioserve.simulation.router.queue_rules import ExpectedRequest, SimulatedStream
from trioserve.simulation.runs import EventSimulation, Trace

__all__ = ["RouterSimulation"]

BLOCK_TOKENS = 16
BEGAN_AT = 1000.1  # With this fraction, sums of times have rounding errors, as in reality.
ROUNDS_TO_END_MAX = 1_000
TICKS_IN_A_WAIT_MAX = 1_000
PROBE_COUNTS = {True: "well", False: "unwell", None: "refused"}
TOKENS_TO_END = 10_000  # more tokens than any stream has


class ReportedTickets(TicketFollower):
    """The states of all tickets that have not ended, as the core has reported them.

    Attributes:
        states: state of each ticket by its index. A running ticket counts as leased.
    """

    def __init__(self) -> None:
        self.states: dict[int, str] = {}

    def waits(self, ticket: Ticket) -> None:
        assert self.states.get(ticket.index) != "waiting", f"ticket {ticket.index} waits twice"
        self.states[ticket.index] = "waiting"

    def leased(self, ticket: Ticket) -> None:
        assert self.states.get(ticket.index) != "leased", f"ticket {ticket.index} is leased twice"
        self.states[ticket.index] = "leased"

    def ended(self, ticket: Ticket) -> None:
        assert self.states.pop(ticket.index, None), f"ticket {ticket.index} ends, but was not reported"


class RouterSimulation(EventSimulation[RouterWorld]):
    """Runs one history of a router, one event at a time.

    Args:
        world: the router's settings.
        trace: receives a line of text for each effect. None: no trace.

    Attributes:
        books: independent records of requests and endpoints.
        entries: all requests that the router has accepted, by name.
        core: the router core.
    """

    def __init__(self, world: RouterWorld, *, trace: Trace | None = None) -> None:
        super().__init__(world, trace)
        self.books = RouterBooks(world, BEGAN_AT)
        self.entries: dict[str, ExpectedRequest] = {}
        self.core = RouterCore(
            world,
            POLICIES[world.policy],
            on_change=self._changed,
            rng=Random(world.seed),
            on_gone=self._gone,
            on_move=self._on_move,
        )
        self._reported = ReportedTickets()
        self.core.host((), self._reported)
        self._entering: ExpectedRequest | None = None
        self._looked_at = BEGAN_AT
        self._is_tick_late = False  # True if the core's `next_tick` has passed and `tick` was not called
        self._reported_gone: list[str] = []
        self._asked_to_leave: set[str] = set()
        self._refusals: dict[str, int] = {}

    def apply(self, event: RouterEvent) -> None:
        """Apply one event. Raise AssertionError if a rule is broken. Errors of the core pass through."""
        _HANDLERS[type(event)](self, event)
        self._check()
        self._count("events")

    def run_to_end(self) -> None:
        """Run until every request is served or refused, then check that the router is empty."""
        books = self.books
        for _ in range(ROUNDS_TO_END_MAX):
            for entry in list(books.live.values()):
                if entry.state == "waiting" or self._is_silent(entry):
                    continue
                if entry.next is not None:
                    self.apply(Moved(name=entry.name))
                    continue
                if not entry.is_sent:
                    self.apply(Send(name=entry.name))
                elif entry.stage is Stage.PREFILL:
                    self.apply(Compute(name=entry.name))
                else:
                    is_over = entry.stream is not None and entry.stream.is_over
                    self.apply(Leave(name=entry.name) if is_over else Token(name=entry.name, count=TOKENS_TO_END))
            if not books.live:
                break
            if all(entry.state == "waiting" or self._is_silent(entry) for entry in books.live.values()):
                moment = min(self.core.next_tick(books.now), self._next_look())
                assert moment < math.inf, f"{', '.join(books.live)} wait, but no tick will come"
                self.apply(Wait(seconds=max(0.0, moment - books.now)))
        assert not books.live, f"these requests do not end: {', '.join(books.live)}"
        for id in list(books.endpoints):
            if books.endpoints[id].health != "draining":
                self.apply(Remove(id=id))
        assert self.core.next_tick(books.now) == math.inf, (
            "no request and no endpoint is left, but there is a next tick"
        )

    # --- Requests ---

    def _arrive(self, event: Arrive) -> None:
        if event.name not in self.entries:
            entry = self._enter(event)
            if entry is not None:
                self.entries[event.name] = entry

    def _crowd(self, event: Crowd) -> None:
        for number in range(event.count):
            name = f"crowd {len(self.entries)}.{number}"
            entry = self._enter(Arrive(name=name, model=event.model, tenant=event.tenant, patience=event.patience))
            if entry is not None:
                self._leave_now(entry)
                self._check()

    def _enter(self, event: Arrive) -> ExpectedRequest | None:
        books = self.books
        names = tuple(BlockHash(block.encode()) for block in event.blocks)
        request = RoutedRequest(
            model=event.model,
            tenant=event.tenant,
            priority=event.priority,
            sequences=event.sequences,
            prompt_tokens=event.prompt_tokens,
            session=event.session,
            pinned=None if event.pinned is None else EndpointId(event.pinned),
            prefix=names,
            blocks={BLOCK_TOKENS: names},
            queue_deadline=math.inf if event.patience is None else books.now + event.patience,
            can_be_disaggregated=event.can_be_disaggregated,
        )
        self._count("requests")
        wait_ends_at = books.now + self.world.queue_seconds_max
        entry = ExpectedRequest(event.name, request, self.counts["requests"], wait_ends_at=wait_ends_at)
        entry.is_disaggregated = event.can_be_disaggregated and event.pinned is None and has_pair(books.serving(entry))
        entry.stage = Stage.PREFILL if entry.is_disaggregated else None
        entry.is_behind = event.pinned is None and any(
            other.is_beside(entry) and not other.is_continuing for other in books.waiting
        )
        self._entering = books.entering = entry
        try:
            ticket = self.core.enter(request, books.now)
        except InvalidRequest:
            assert event.sequences > self.world.sequences_max, f"{entry.name} is refused without a reason"
            self._count("refused: too many sequences")
            return None
        except Overloaded as refusal:
            assert self._entering is entry, f"{entry.name} got a lease, but enter() refuses it"
            check_refused_at_the_door(books, entry, refusal)
            self._note_refusal(entry, refusal)
            return None
        finally:
            was_called = self._entering is None
            self._entering = books.entering = None
        assert event.sequences <= self.world.sequences_max, (
            f"{entry.name} has {event.sequences} sequences, but is accepted"
        )
        entry.ticket = ticket
        if ticket.state is TicketState.LEASED and not was_called:
            if request.pinned is None:
                waiting = [other.name for other in books.live.values() if other.is_queued and other.is_beside(entry)]
                assert not waiting, f"{entry.name} gets a lease at once, before {', '.join(waiting)}"
                books.check_class(entry, str(ticket.endpoint))
            self._take_lease(entry, ticket)
        elif ticket.state is TicketState.WAITING:
            assert request.pinned is None, f"{entry.name} is pinned, but waits"
            check_taken_into_queue(books, entry, is_served=False)
            books.join(entry)
        books.enter(entry)
        return entry

    def _send(self, event: Send) -> None:
        entry = self.books.live.get(event.name)
        if entry is None or entry.state != "leased" or entry.is_sent:
            return
        assert entry.ticket is not None
        self.core.sent(entry.ticket)
        entry.is_sent = True
        if entry.stage is not Stage.PREFILL:
            if entry.stream is None:
                entry.stream = SimulatedStream(entry.index, entry.request.sequences, count=self._count)
            entry.stream.begin()
        self._endpoint_of(entry).there[entry.name] = entry.request.sequences
        self._endpoint_of(entry).connections.open(entry.name, self.books.now)

    def _token(self, event: Token) -> None:
        entry = self.entries.get(event.name)
        if entry is None or (entry.state == "leased" and (not entry.is_sent or entry.stage is Stage.PREFILL)):
            return
        assert entry.ticket is not None
        if self._is_silent(entry):
            return
        if entry.state in ("leased", "running_free"):
            self._endpoint_of(entry).connections.hear(entry.name, self.books.now)
            assert entry.stream is not None
            entry.stream.come(event.count, event.part)
            entry.tokens = entry.stream.token_count
        if entry.state == "leased" and not entry.is_answered:
            if not entry.has_token:
                entry.fingerprint = self._endpoint_of(entry).fingerprint
                self._note_refused_wrongly(entry)
            entry.has_token = entry.is_answered = True
            entry.can_resume = event.can_resume
            self.books.note_pair(entry, PairOutcome.PAIRED)
            is_lease_over = self.world.lease_until == "first_token"
            self._endpoint_of(entry).record_token(entry.name, self.books.now, is_lease_over=is_lease_over)
            if is_lease_over:
                entry.state = "running_free"
            self.books.continued.note_answered(entry)
        self.core.first_token(entry.ticket, self.books.now, can_resume=event.can_resume)

    def _moved(self, event: Moved) -> None:
        entry = self.entries.get(event.name)
        if entry is None:
            return
        assert entry.ticket is not None
        if self._is_silent(entry):
            return  # The connection is silent, so the endpoint cannot be asked to hand over the stream.
        if entry.next is not None:
            self._count("moves")
            assert entry.stream is not None
            if entry.stream.is_over:
                self._leave_now(entry)
                return
            if event.is_given:
                entry.stream.hand_over()
            entry.stream.break_off()
            self.books.release(entry)
            self.books.record_move(entry)
        self.core.moved(entry.ticket, self.books.now)

    def _stay(self, event: Stay) -> None:
        entry = self.entries.get(event.name)
        if entry is None:
            return
        assert entry.ticket is not None
        if entry.next is not None:
            self.books.drop_next(entry)
        entry.is_moving = entry.can_resume = False
        self.core.stays(entry.ticket, self.books.now)

    def _compute(self, event: Compute) -> None:
        entry = self.entries.get(event.name)
        if entry is None or (entry.stage is Stage.PREFILL and entry.state == "leased" and not entry.is_sent):
            return
        assert entry.ticket is not None
        if self._is_silent(entry):
            return
        outcome = None if event.outcome is None else PairOutcome(event.outcome)
        if entry.stage is Stage.PREFILL and entry.state == "leased":
            self._count(f"prompts computed: {event.outcome or 'held'}")
            self._endpoint_of(entry).note_success(self.books.now)
            self.books.release(entry)
            self.books.prefilled(entry, outcome)
        self.core.prefilled(entry.ticket, self.books.now, outcome=outcome)

    def _lose(self, event: Lose) -> None:
        entry = self.entries.get(event.name)
        if entry is None:
            return
        assert entry.ticket is not None
        entry.is_held = False
        if entry.stage is Stage.DECODE and entry.state == "leased" and not entry.is_sent:
            self.books.release(entry)
            self.books.wait_again(entry)
        self.core.hold_lost(entry.ticket, self.books.now)

    def _leave(self, event: Leave) -> None:
        entry = self.entries.get(event.name)
        if entry is not None:
            self._leave_now(entry)

    def _leave_now(self, entry: ExpectedRequest) -> None:
        assert entry.ticket is not None
        self._count(f"leaves: {entry.moment}")
        self.books.release(entry)
        self.books.end(entry)
        self.core.leave(entry.ticket, self.books.now)

    def _fail(self, event: Fail) -> None:
        entry = self.entries.get(event.name)
        if entry is None or (entry.state == "leased" and not entry.is_sent):
            return
        assert entry.ticket is not None
        fault, now = Fault(event.fault), self.books.now
        if entry.state in ("leased", "running_free") and entry.stream is not None:
            if entry.stream.is_over:  # A complete stream need not be resumed.
                self._leave_now(entry)
                return
            entry.stream.break_off()
        if entry.state not in ("leased", "running_free"):
            assert not self.core.failed(entry.ticket, fault, now), f"{entry.name} has no lease, but is retried"
            return
        endpoint = self._endpoint_of(entry)
        self.books.release(entry)
        if fault is Fault.UNREACHABLE:
            endpoint.note_lost(now)
        elif fault in (Fault.BROKE, Fault.FAILED, Fault.INVALID):
            endpoint.note_broke(now)
        elif fault in (Fault.BUSY, Fault.LEAVING):
            endpoint.note_busy(now, event.busy_seconds)
        self.books.note_tried(entry, endpoint)
        if entry.has_token:
            self._break_off(entry, event, endpoint)
            return
        entry.stage_fault = None
        if entry.stage is Stage.PREFILL:
            entry.stage_fault = PairOutcome.PREFILL_FAILED
        elif entry.stage is Stage.DECODE:
            is_transfer = fault is Fault.TRANSFER
            entry.stage_fault = PairOutcome.TRANSFER_FAILED if is_transfer else PairOutcome.DECODE_FAILED
        waits_again = self.books.fail(entry, event.fault, endpoint, is_certain=event.is_certain)
        self._count(f"faults: {event.fault}")
        self._count("retries" if waits_again else "given up")
        self._count("requests without a token put on trial", entry.is_on_trial)
        self._count("requests without a token treated as the cause", entry.is_condemned)
        may_retry = self.core.failed(
            entry.ticket, fault, now, busy_seconds=event.busy_seconds, is_certain=event.is_certain
        )
        is_poisoned = isinstance(entry.ticket.refusal, RequestPoisoned)
        assert is_poisoned == entry.is_condemned, f"{entry.name} gets {entry.ticket.refusal!r}"
        assert may_retry == waits_again, (
            f"{entry.name} failed at {entry.tried}, and is {'' if may_retry else 'not '}retried"
        )

    def _break_off(self, entry: ExpectedRequest, event: Fail, endpoint: EndpointBook) -> None:
        ticket = entry.ticket
        assert ticket is not None
        reason = self.books.break_off(entry, event.fault, endpoint, is_certain=event.is_certain)
        self._count("streams put on trial", entry.is_on_trial)
        self._count(f"streams broken off: {event.fault}")
        self._count(f"streams that cannot resume: {reason}" if reason else "streams that can resume")
        may_retry = self.core.failed(
            ticket,
            Fault(event.fault),
            self.books.now,
            busy_seconds=event.busy_seconds,
            token_count=entry.tokens,
            is_certain=event.is_certain,
        )
        assert may_retry == (reason is None), f"{entry.name} {'is resumed' if may_retry else 'ends'}: {reason}"
        is_poisoned = isinstance(ticket.refusal, RequestPoisoned)
        assert is_poisoned == (reason == "poisoned"), f"{entry.name} gets {ticket.refusal!r}: {reason}"

    def _crash(self, event: Crash) -> None:
        book = self.books.endpoints.get(event.id)
        for name in () if book is None else list(book.there):
            entry = self.entries[name]
            if entry.endpoint == event.id and entry.is_sent:
                self._fail(Fail(name=name, fault=event.fault))
                self._check()
        if book is not None and event.is_over:
            book.begin_process()

    def _note_refused_wrongly(self, entry: ExpectedRequest) -> None:
        """Record that an endpoint serves a request that other endpoints have refused."""
        for id in entry.refused_by & self.books.endpoints.keys():
            self.books.endpoints[id].note_broke(self.books.now)
            self._count("refusals that were wrong")

    # --- Connections ---

    def _silence(self, event: Silence) -> None:
        entry = self.books.live.get(event.name)
        if entry is not None and entry.endpoint is not None:
            self._endpoint_of(entry).connections.silence(event.name)

    def _replace(self, event: Replace) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.connections.replace()

    def _is_silent(self, entry: ExpectedRequest) -> bool:
        is_there = entry.is_sent and entry.endpoint in self.books.endpoints
        return is_there and self._endpoint_of(entry).connections.is_silent(entry.name)

    def _next_look(self) -> float:
        """Return the time at which the router next checks its connections, or math.inf if it reads no response."""
        is_any_read = any(book.connections.is_any_read for book in self.books.endpoints.values())
        return self._looked_at + LOOK_SECONDS if is_any_read else math.inf

    def _look(self) -> None:
        """Let the router check its connections. Requests whose connection is given up wait again or end."""
        self._looked_at = self.books.now
        lost = [
            (id, name) for id, book in self.books.endpoints.items() for name in book.connections.look(self.books.now)
        ]
        for id, name in lost:
            if self.entries[name].endpoint == id and self.entries[name].is_sent:
                self._fail(Fail(name=name, fault="hung"))
                self._check()

    # --- Endpoints ---

    def _add(self, event: Add) -> None:
        endpoints = self.books.endpoints
        book = endpoints.get(event.id)
        if book is not None and book.health != "draining":
            return  # The router's caller never adds an endpoint that the router already has.
        if book is None:
            has_others = any(other.health == "healthy" for other in endpoints.values())
            checks = self.books.checks_of_gone
            endpoints[event.id] = EndpointBook(
                event, self.world, starts_slowly=has_others, checks=checks, count=self._count
            )
        else:
            book.come_back(event)
            self._stop_moving(event.id)
            self._count("endpoints that return")
        self.core.add_endpoint(
            EndpointId(event.id), event.models, self.books.now, leases_max=event.leases_max, role=event.role
        )
        self.core.note_fingerprint(EndpointId(event.id), event.fingerprint)

    def _role(self, event: Role) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.role = event.role
        self.core.set_role(EndpointId(event.id), event.role, self.books.now)

    def _models(self, event: Models) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.models = frozenset(event.models)
        self.core.set_models(EndpointId(event.id), event.models, self.books.now)

    def _load(self, event: Load) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            self._count("adapters loaded", event.adapter not in book.models)
            self._models(Models(id=event.id, models=tuple(sorted(book.models | {event.adapter}))))

    def _unload(self, event: Unload) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None and event.adapter in book.models:
            users = [entry for entry in self.books.live.values() if entry.request.model == event.adapter]
            self._count("adapters unloaded, and not requested", not users)
            self._count("adapters unloaded, and requested", any(entry.state == "waiting" for entry in users))
            self._count("adapters unloaded, and in use there", any(entry.endpoint == event.id for entry in users))
            self._models(Models(id=event.id, models=tuple(sorted(book.models - {event.adapter}))))

    def _remove(self, event: Remove) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.drain()
            self.books.note_drained(book)
            self._judge()
            self._begin_moving(book, event.move_seconds)
            self.core.drain_endpoint(EndpointId(event.id), self.books.now, move_seconds=event.move_seconds)

    def _check_health(self, event: Check) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None and book.health != "draining":
            book.note_check(event.is_well, self.books.now)
            if event.is_well:
                self._stop_moving(event.id)
        self.core.note_health(EndpointId(event.id), event.is_well, self.books.now)

    def _probe(self, event: Probe) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            self._count(f"probes: {PROBE_COUNTS[event.is_well]}", book.waits_for_probe)
            book.note_probe(event.is_well, self.books.now)
        self.core.note_probe(EndpointId(event.id), event.is_well, self.books.now)

    def _hang(self, event: Hang) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.note_left(self.books.now)
        self.core.note_health(EndpointId(event.id), False, self.books.now, is_hung=True)

    def _stopping(self, event: Stopping) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None and book.health == "starting":
            book.note_check(False, self.books.now)
        elif book is not None and book.health != "draining":
            book.note_left(self.books.now)
            if event.id not in self.books.continued.deadlines:
                self._begin_moving(book, event.move_seconds)
        self.core.note_leaving(EndpointId(event.id), self.books.now, move_seconds=event.move_seconds)

    def _begin_moving(self, book: EndpointBook, seconds: float | None) -> None:
        if seconds is not None and book.in_flight:
            self.books.continued.deadlines[book.id] = self.books.now + seconds
            for entry in self.books.live.values():
                self.books.continued.note_movable(entry)

    def _stop_moving(self, id: str) -> None:
        self.books.continued.deadlines.pop(id, None)
        for entry in self.books.moving:
            entry.is_moving = entry.is_moving and entry.endpoint != id

    def _ask(self, event: Ask) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.ask(self.core.sent_total, self.books.now)

    def _response(self, event: Response) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.response(event.lie)

    def _note(self, event: Note) -> None:
        book = self.books.endpoints.get(event.id)
        question = None if book is None else book.question
        if book is None or question is None or question.response is None:
            return
        book.note(self.books.now)
        self._count("reports: false" if question.is_lie else "reports: true")
        self._judge()
        self.core.note_load(
            EndpointId(event.id), question.response, self.books.now, sent_when_asked=question.sent_total
        )

    def _judge(self) -> None:
        on_trial = [entry for entry in self.books.waiting if entry.is_on_trial]
        self.books.judge()
        for entry in on_trial:
            self._count("trials: the cause", entry.is_condemned)
            self._count("trials: cleared", not entry.is_on_trial and not entry.is_condemned)

    def _store(self, event: Store) -> None:
        blocks = [BlockHash(block.encode()) for block in event.blocks]
        id, policy = EndpointId(event.id), self.core.policy
        if policy.resident_count(id) is None:
            policy.note_resident(id, BLOCK_TOKENS, blocks)
        elif not event.is_removed:
            policy.note_stored(id, blocks)
        else:
            policy.note_removed(id, blocks)
            if policy.resident_count(id) == 0:
                policy.note_unknown(id)

    # --- Time ---

    def _wait(self, event: Wait) -> None:
        books = self.books
        end = books.now + event.seconds
        if event.is_late:
            self._is_tick_late |= self.core.next_tick(books.now) <= end
            books.now = end
            return
        if self._is_tick_late:
            self._tick()
        for _ in range(TICKS_IN_A_WAIT_MAX):
            tick_moment = self.core.next_tick(books.now)
            moment = min(tick_moment, self._next_look())
            just_before = min(moment, end) - 2 * CLOSE_SECONDS
            if just_before > books.now:
                # Between two ticks, the passing of time alone must not make capacity available for a waiting request.
                books.check_no_request_waits_forever(just_before)
            if moment > end:
                books.now = end
                return
            books.now = max(books.now, moment)
            if self._next_look() <= books.now:
                self._look()
            if tick_moment <= books.now:
                self._tick()
            self._check()
        raise AssertionError(f"{TICKS_IN_A_WAIT_MAX} ticks, but the time is only {books.now}")

    def _tick(self) -> None:
        books = self.books
        self._is_tick_late = False
        for book in books.endpoints.values():
            book.tick(books.now)
        self._asked_to_leave.clear()
        self.core.tick(books.now)
        to_leave = set()
        for id, deadline in books.continued.deadlines.items():
            if deadline is not None and deadline <= books.now:
                books.continued.deadlines[id] = None
                to_leave |= books.to_leave(id)
        assert self._asked_to_leave == to_leave, f"{self._asked_to_leave} are asked to leave, expected {to_leave}"
        self._count("ticks")
        late = [entry.name for entry in books.waiting if entry.deadline <= books.now]
        assert not late, f"the wait of {', '.join(late)} is over, but they still wait"
        assert self.core.next_tick(books.now) > books.now, "after a tick, the next tick is due at once"

    def _drain(self, _event: Drain) -> None:
        self.books.is_draining = True
        self.core.drain(self.books.now)
        live = self.books.live.values()
        begun = {
            entry.name
            for entry in live
            if entry.is_sent or entry.has_token or entry.is_lost or entry.prefilled_by is not None
        }
        unsent = [entry.name for entry in live if entry.name not in begun]
        assert not unsent, f"the router drains, but {', '.join(unsent)} were not refused"

    # --- Callbacks of the core ---

    def _changed(self, ticket: Ticket) -> None:
        books, entering = self.books, self._entering
        books.make_whole()
        if entering is not None and ticket.request is entering.request:
            self._entering = None
            check_taken_into_queue(books, entering, is_served=True)
            books.join(entering)
            entry = entering
        else:
            found = [entry for entry in books.live.values() if entry.ticket is ticket]
            assert found, f"a callback for an unknown or ended ticket: {ticket.state}"
            entry = found[0]
        if ticket.state is TicketState.LEASED:
            books.serve(entry, str(ticket.endpoint))
            self._take_lease(entry, ticket)
        else:
            assert ticket.state is TicketState.ENDED, f"a callback for {entry.name}, which is {ticket.state}"
            check_refused_in_queue(books, entry, ticket.refusal)
            if isinstance(ticket.refusal, RequestPoisoned):
                self._note_poisoned(entry)
            else:
                self._note_refusal(entry, ticket.refusal)
            books.release(entry)
            books.end(entry)

    def _on_move(self, ticket: Ticket) -> None:
        books = self.books
        books.make_whole()
        entry = next((entry for entry in books.live.values() if entry.ticket is ticket), None)
        assert entry is not None, "an unknown or ended ticket must move"
        if ticket.next_lease is None:
            self._asked_to_leave.add(entry.name)
            self._count("streams that leave at a deadline")
            return
        id = ticket.next_lease.endpoint
        assert id is not None, f"{entry.name} has a lease without an endpoint"
        books.grant_next(entry, id)
        self._count("grants")
        self._log_line(f"  {entry.name}: {entry.endpoint} -> {id}")

    def _gone(self, id: EndpointId) -> None:
        self._reported_gone.append(id)

    def _take_lease(self, entry: ExpectedRequest, ticket: Ticket) -> None:
        assert ticket.endpoint is not None, f"{entry.name} has a lease without an endpoint"
        self.books.grant(entry, ticket.endpoint)
        self._count("grants")
        if self._endpoint_of(entry).claims > self._endpoint_of(entry).leases_max:
            self._count("grants: fewer slots than sequences")
        self._log_line(f"  {entry.name} -> {ticket.endpoint}")

    def _note_poisoned(self, entry: ExpectedRequest) -> None:
        if not entry.is_condemned:
            self.books.continued.refused["poisoned"] += 1
            self._count("trials: too long")

    def _note_refusal(self, entry: ExpectedRequest, refusal: TrioserveError | None) -> None:
        reason = refusal.reason if isinstance(refusal, Overloaded) else "queue_timeout"
        self._refusals[reason] = self._refusals.get(reason, 0) + 1
        self._count(f"refused: {reason}")
        self._log_line(f"  {entry.name} refused: {reason}")

    # --- Rules after every event ---

    def _check(self) -> None:
        self._count("checks of all rules")
        books = self.books
        books.make_whole()
        books.forget_unserved()
        self._check_counts()
        self._check_tickets()
        assert sorted(self._reported_gone) == sorted(books.gone), (
            f"{books.gone} are gone, but {self._reported_gone} are reported"
        )
        self._reported_gone.clear()
        books.gone.clear()
        books.check_no_hopeless_request_waits()
        moment = self.core.next_tick(books.now)
        for entry in books.waiting:
            assert moment <= entry.deadline, (
                f"the next tick is at {moment}, but {entry.name} waits until {entry.deadline}"
            )
        for book in books.endpoints.values():
            end = book.ejection_ends_at
            assert end is None or moment <= end, f"the next tick is at {moment}, but {book.id} may be probed at {end}"
        for id, deadline in books.continued.deadlines.items():
            assert deadline is None or moment <= deadline, (
                f"the next tick is at {moment}, but {id} has its deadline at {deadline}"
            )
        if not self._is_tick_late:
            books.check_no_request_waits_forever(books.now)

    def _check_counts(self) -> None:
        stats, books = self.core.stats(), self.books
        leases = {id: book.leases for id, book in books.endpoints.items()}
        assert stats.leases == leases, f"leases are {stats.leases}, expected {leases}"
        health = {id: book.health for id, book in books.endpoints.items()}
        assert {id: one.value for id, one in stats.health.items()} == health, f"{stats.health}, expected {health}"
        for id, book in books.endpoints.items():
            state = self.core.endpoints[EndpointId(id)]
            assert state.in_flight == book.in_flight, f"{state.in_flight} in flight at {id}, expected {book.in_flight}"
            moved = (state.moved_from_total, state.moved_to_total)
            expected = (book.moved_from, book.moved_to)
            assert moved == expected, f"{moved} streams moved from and to {id}, expected {expected}"
        waiting = books.waiting
        assert stats.waiting == len(waiting), f"{stats.waiting} wait, expected {len(waiting)}"
        tokens = sum(entry.request.prompt_tokens for entry in waiting)
        assert stats.waiting_prompt_tokens == tokens, f"{stats.waiting_prompt_tokens} tokens wait, expected {tokens}"
        grants, retries = self.counts.get("grants", 0), self.counts.get("retries", 0)
        assert stats.admissions_total == grants, f"{stats.admissions_total} admissions, but {grants} grants"
        assert stats.retries_total == retries, f"{stats.retries_total} retries, expected {retries}"
        continuing = sum(entry.is_continuing for entry in waiting)
        assert stats.continuing == continuing, f"{stats.continuing} wait to be resumed, expected {continuing}"
        total = books.continued.total
        assert stats.continuations_total == total, f"{stats.continuations_total} were resumed, expected {total}"
        moving, moves = len(books.moving), books.continued.moves
        assert stats.moving == moving, f"{stats.moving} must move, expected {moving}"
        assert stats.moves_total == moves, f"{stats.moves_total} moved, expected {moves}"
        refused = dict(books.continued.refused)
        assert stats.continuations_refused_total == refused, f"{stats.continuations_refused_total}, expected {refused}"
        pairs = {outcome: books.pairs[outcome] for outcome in PairOutcome}
        assert stats.pairs_total == pairs, f"pairs are {stats.pairs_total}, expected {pairs}"
        assert stats.rejections_total == self._refusals, f"{stats.rejections_total}, expected {self._refusals}"

    def _check_tickets(self) -> None:
        books = self.books
        for entry in books.live.values():
            ticket = entry.ticket
            assert ticket is not None
            assert ticket.state.value == entry.state, f"{entry.name} is {ticket.state}, expected {entry.state}"
            is_there = ticket.endpoint == entry.endpoint or entry.state == "waiting"
            assert is_there, f"{entry.name} is at {ticket.endpoint}, expected {entry.endpoint}"
            assert not entry.is_condemned, f"{entry.name} counts as the cause of broken endpoints, but was not ended"
            assert ticket.is_on_trial == entry.is_on_trial, f"{entry.name} is on trial: {ticket.is_on_trial}"
            broken = tuple(entry.broken)
            assert ticket.broken == broken, f"{entry.name} has the breaks {ticket.broken}, expected {broken}"
            assert ticket.stage is entry.stage, f"{entry.name} is in stage {ticket.stage}, expected {entry.stage}"
            assert ticket.tried == entry.tried, f"{entry.name} failed at {ticket.tried}, expected {entry.tried}"
            next_id = None if ticket.next_lease is None else ticket.next_lease.endpoint
            assert next_id == entry.next, f"{entry.name} has its next lease at {next_id}, expected {entry.next}"
            assert ticket.is_moving == entry.is_moving, (
                f"{entry.name} must move: {ticket.is_moving}, expected {entry.is_moving}"
            )
            assert ticket.continuations == entry.continuations, (
                f"{entry.name} was resumed {ticket.continuations} times, expected {entry.continuations}"
            )
        expected = {
            entry.ticket.index: "waiting" if entry.state == "waiting" else "leased"
            for entry in books.live.values()
            if entry.ticket is not None
        }
        assert self._reported.states == expected, f"reported are {self._reported.states}, expected {expected}"
        served = {name for book in books.endpoints.values() for name in book.models}
        names = set(self.core.model_names())
        assert names == served, f"{sorted(names)} are listed, but {sorted(served)} are served"
        # No public count shows if ended requests stay in memory for too long, so this check reads private state.
        known = set(self.core._queues.models)
        left = known - served - {entry.request.model for entry in books.live.values()}
        assert not left, f"there are queues for {sorted(left)}, which no endpoint serves and no request needs"
        deadline_count = len(self.core._deadlines)
        assert deadline_count <= 2 * books.live_peak + SPARE_DEADLINES_MAX + 1, f"{deadline_count} deadlines are kept"
        assert len(self.core._live) == len(books.live), f"{len(self.core._live)} live, expected {len(books.live)}"

    def _endpoint_of(self, entry: ExpectedRequest) -> EndpointBook:
        assert entry.endpoint is not None
        return self.books.endpoints[entry.endpoint]

    def _count(self, what: str, count: int = 1) -> None:
        if count:
            super()._count(what, count)


_HANDLERS: dict[type[RouterEvent], Callable[[RouterSimulation, Any], None]] = {
    Add: RouterSimulation._add,
    Models: RouterSimulation._models,
    Load: RouterSimulation._load,
    Unload: RouterSimulation._unload,
    Role: RouterSimulation._role,
    Remove: RouterSimulation._remove,
    Check: RouterSimulation._check_health,
    Hang: RouterSimulation._hang,
    Probe: RouterSimulation._probe,
    Stopping: RouterSimulation._stopping,
    Ask: RouterSimulation._ask,
    Response: RouterSimulation._response,
    Note: RouterSimulation._note,
    Store: RouterSimulation._store,
    Arrive: RouterSimulation._arrive,
    Crowd: RouterSimulation._crowd,
    Send: RouterSimulation._send,
    Token: RouterSimulation._token,
    Compute: RouterSimulation._compute,
    Lose: RouterSimulation._lose,
    Leave: RouterSimulation._leave,
    Fail: RouterSimulation._fail,
    Crash: RouterSimulation._crash,
    Silence: RouterSimulation._silence,
    Replace: RouterSimulation._replace,
    Moved: RouterSimulation._moved,
    Stay: RouterSimulation._stay,
    Wait: RouterSimulation._wait,
    Drain: RouterSimulation._drain,
}
