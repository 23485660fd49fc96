"""One history against one router core: every event is applied, and after every event all that it promises is checked.

The verdict comes from books of its own (router_books), and the core's counts are compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import EndpointId, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import InvalidRequest, Overloaded, TrioserveError
from trioserve.router.core import SPARE_DEADLINES_MAX, Fault, RouterCore
from trioserve.router.policies import POLICIES
from trioserve.router.ticket import Ticket, TicketState
from trioserve.simulation.router.books import RouterBooks
from trioserve.simulation.router.endpoint_book import CLOSE_SECONDS, EndpointBook
from trioserve.simulation.router.history import (
    Add,
    Arrive,
    Ask,
    Check,
    Compute,
    Crowd,
    Drain,
    Fail,
    Leave,
    Lose,
    Models,
    Note,
    Remove,
    Response,
    Role,
    RouterEvent,
    RouterWorld,
    Send,
    Store,
    Token,
    Wait,
)
from trioserve.simulation.router.pair_book import is_pair_there
from trioserve.simulation.router.queue_rules import RoutedStory
from trioserve.simulation.router.refusals import (
    check_refused_at_the_door,
    check_refused_in_line,
    check_taken_into_line,
)

__all__ = ["RouterSimulation"]

BLOCK_TOKENS = 16
BEGAN_AT = 1000.1  # no round number: sums of times have rounding errors in real life, too
ROUNDS_TO_END_MAX = 1_000
TICKS_IN_A_WAIT_MAX = 1_000


class RouterSimulation:
    """stories: of all requests that were taken, by name. counts: of what came to pass. trace: is told every effect, as
    a line."""

    def __init__(self, world: RouterWorld, *, trace: Callable[[str], None] | None = None) -> None:
        self.world = world
        self.books = RouterBooks(world, BEGAN_AT)
        self.stories: dict[str, RoutedStory] = {}
        self.counts: dict[str, int] = {}
        self.core = RouterCore(
            world, POLICIES[world.policy], on_change=self._changed, rng=Random(world.seed), on_gone=self._gone
        )
        self._trace = trace
        self._entering: RoutedStory | None = None
        self._is_tick_late = False  # next_tick has passed without a tick
        self._gone_told: list[str] = []
        self._refusals: dict[str, int] = {}

    def apply(self, event: RouterEvent) -> None:
        """Let one event happen. Raises whatever the core raises, and AssertionError when a promise is broken."""
        _HANDLERS[type(event)](self, event)
        self._check()
        self._count("events")

    def run_to_end(self) -> None:
        """Let everybody be served or refused; then nothing may be left."""
        books = self.books
        for _ in range(ROUNDS_TO_END_MAX):
            for story in list(books.live.values()):
                if story.state == "waiting":
                    continue
                if not story.is_sent:
                    self.apply(Send(name=story.name))
                elif story.stage is Stage.PREFILL:
                    self.apply(Compute(name=story.name))
                else:
                    self.apply(Token(name=story.name) if not story.has_token else Leave(name=story.name))
            if not books.live:
                break
            if len(books.waiting) == len(books.live):
                moment = self.core.next_tick(books.now)
                assert moment < math.inf, f"{', '.join(books.live)} wait, and nothing will come"
                self.apply(Wait(seconds=max(0.0, moment - books.now)))
        assert not books.live, f"no end is in sight for {', '.join(books.live)}"
        for id in list(books.endpoints):
            if books.endpoints[id].health != "draining":
                self.apply(Remove(id=id))
        assert self.core.next_tick(books.now) == math.inf, "nobody and nothing is left, and there is a next tick"

    # --- requests ---

    def _arrive(self, event: Arrive) -> None:
        if event.name not in self.stories:
            story = self._enter(event)
            if story is not None:
                self.stories[event.name] = story

    def _crowd(self, event: Crowd) -> None:
        for number in range(event.count):
            name = f"crowd {len(self.stories)}.{number}"
            story = self._enter(Arrive(name=name, model=event.model, tenant=event.tenant, patience=event.patience))
            if story is not None:
                self._leave_now(story)
                self._check()

    def _enter(self, event: Arrive) -> RoutedStory | None:
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
        story = RoutedStory(event.name, request, self.counts["requests"], wait_ends_at=wait_ends_at)
        story.is_disaggregated = (
            event.can_be_disaggregated and event.pinned is None and is_pair_there(books.serving(story))
        )
        story.stage = Stage.PREFILL if story.is_disaggregated else None
        self._entering = books.entering = story
        try:
            ticket = self.core.enter(request, books.now)
        except InvalidRequest:
            assert event.sequences > self.world.sequences_max, f"{story.name} is refused for nothing"
            self._count("refused: too many sequences")
            return None
        except Overloaded as refusal:
            assert self._entering is story, f"{story.name} got a lease, and is refused at the door"
            check_refused_at_the_door(books, story, refusal)
            self._note_refusal(story, refusal)
            return None
        finally:
            was_told = self._entering is None
            self._entering = books.entering = None
        assert event.sequences <= self.world.sequences_max, f"{story.name} has {event.sequences} sequences, and enters"
        story.ticket = ticket
        if ticket.state is TicketState.LEASED and not was_told:
            if request.pinned is None:
                waiting = [other.name for other in books.live.values() if other.is_in_line and other.is_beside(story)]
                assert not waiting, f"{story.name} gets a lease at once, before {', '.join(waiting)}"
            self._take_lease(story, ticket)
        elif ticket.state is TicketState.WAITING:
            assert request.pinned is None, f"{story.name} is pinned, and waits"
            check_taken_into_line(books, story, is_served=False)
            books.join(story)
        books.enter(story)
        return story

    def _send(self, event: Send) -> None:
        story = self.books.live.get(event.name)
        if story is None or story.state != "leased" or story.is_sent:
            return
        assert story.ticket is not None
        self.core.sent(story.ticket)
        story.is_sent = True
        self._endpoint_of(story).there[story.name] = story.request.sequences

    def _token(self, event: Token) -> None:
        story = self.stories.get(event.name)
        if story is None or (story.state == "leased" and (not story.is_sent or story.stage is Stage.PREFILL)):
            return
        assert story.ticket is not None
        if story.state == "leased" and not story.has_token:
            story.has_token = True
            self.books.note_pair(story, PairOutcome.PAIRED)
            is_lease_over = self.world.lease_until == "first_token"
            self._endpoint_of(story).take_token(story.name, self.books.now, is_lease_over=is_lease_over)
            if is_lease_over:
                story.state = "running_free"
        self.core.first_token(story.ticket, self.books.now)

    def _compute(self, event: Compute) -> None:
        story = self.stories.get(event.name)
        if story is None or (story.stage is Stage.PREFILL and story.state == "leased" and not story.is_sent):
            return
        assert story.ticket is not None
        outcome = None if event.outcome is None else PairOutcome(event.outcome)
        if story.stage is Stage.PREFILL and story.state == "leased":
            self._count(f"prompts computed: {event.outcome or 'held'}")
            self._endpoint_of(story).note_success(self.books.now)
            self.books.release(story)
            self.books.prefilled(story, outcome)
        self.core.prefilled(story.ticket, self.books.now, outcome=outcome)

    def _lose(self, event: Lose) -> None:
        story = self.stories.get(event.name)
        if story is None:
            return
        assert story.ticket is not None
        story.is_held = False
        if story.stage is Stage.DECODE and story.state == "leased" and not story.is_sent:
            self.books.release(story)
            self.books.wait_again(story)
        self.core.hold_lost(story.ticket, self.books.now)

    def _leave(self, event: Leave) -> None:
        story = self.stories.get(event.name)
        if story is not None:
            self._leave_now(story)

    def _leave_now(self, story: RoutedStory) -> None:
        assert story.ticket is not None
        self._count(f"leaves: {story.moment}")
        self.books.release(story)
        self.books.end(story)
        self.core.leave(story.ticket, self.books.now)

    def _fail(self, event: Fail) -> None:
        story = self.stories.get(event.name)
        if story is None or (story.state == "leased" and (story.has_token or not story.is_sent)):
            return
        assert story.ticket is not None
        fault, now = Fault(event.fault), self.books.now
        if story.state != "leased":
            assert not self.core.failed(story.ticket, fault, now), f"{story.name} is tried again"
            return
        endpoint = self._endpoint_of(story)
        self.books.release(story)
        if fault is Fault.UNREACHABLE:
            endpoint.note_lost(now)
        elif fault is Fault.BROKE:
            endpoint.note_broke(now)
        elif fault is Fault.BUSY:
            endpoint.note_busy(now, event.busy_seconds)
        story.stage_fault = None
        if story.stage is Stage.PREFILL:
            story.stage_fault = PairOutcome.PREFILL_FAILED
        elif story.stage is Stage.DECODE:
            is_transfer = fault is Fault.TRANSFER
            story.stage_fault = PairOutcome.TRANSFER_FAILED if is_transfer else PairOutcome.DECODE_FAILED
        waits_again = self.books.fail(story)
        self._count(f"faults: {event.fault}")
        self._count("retries" if waits_again else "given up")
        said = self.core.failed(story.ticket, fault, now, busy_seconds=event.busy_seconds)
        assert said == waits_again, f"{story.name} failed at {story.tried}, and is {'' if said else 'not '}tried again"

    # --- endpoints ---

    def _add(self, event: Add) -> None:
        endpoints = self.books.endpoints
        book = endpoints.get(event.id)
        if book is not None and book.health != "draining":
            return  # whoever adds endpoints knows which there are
        if book is None:
            has_others = any(other.health == "healthy" for other in endpoints.values())
            endpoints[event.id] = EndpointBook(event, self.world, starts_slowly=has_others)
        else:
            book.come_back(event)
            self._count("endpoints come back")
        self.core.add_endpoint(
            EndpointId(event.id), event.models, self.books.now, leases_max=event.leases_max, role=event.role
        )

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

    def _remove(self, event: Remove) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.drain()
            self.books.note_drained(book)
            self.core.drain_endpoint(EndpointId(event.id), self.books.now)

    def _check_health(self, event: Check) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None and book.health != "draining":
            book.note_check(event.is_well, self.books.now)
        self.core.note_health(EndpointId(event.id), event.is_well, self.books.now)

    def _ask(self, event: Ask) -> None:
        book = self.books.endpoints.get(event.id)
        if book is not None:
            book.ask(self.core.sent_total)

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
        self._count("reports: a lie" if question.is_lie else "reports: true")
        self.core.note_load(
            EndpointId(event.id), question.response, self.books.now, sent_when_asked=question.sent_total
        )

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

    # --- time ---

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
            moment = self.core.next_tick(books.now)
            just_before = min(moment, end) - 2 * CLOSE_SECONDS
            if just_before > books.now:
                books.check_nobody_waits_in_vain(just_before)  # until then nothing may come of time alone
            if moment > end:
                books.now = end
                return
            books.now = max(books.now, moment)
            self._tick()
            self._check()
        raise AssertionError(f"{TICKS_IN_A_WAIT_MAX} ticks, and it is only {books.now}")

    def _tick(self) -> None:
        books = self.books
        self._is_tick_late = False
        for book in books.endpoints.values():
            book.tick(books.now)
        self.core.tick(books.now)
        self._count("ticks")
        late = [story.name for story in books.waiting if story.deadline <= books.now]
        assert not late, f"the wait of {', '.join(late)} is over, and they wait"
        assert self.core.next_tick(books.now) > books.now, "a tick has left something to do at once"

    def _drain(self, _event: Drain) -> None:
        self.books.is_draining = True
        self.core.drain(self.books.now)
        unsent = [story.name for story in self.books.live.values() if not story.is_sent and story.prefilled_by is None]
        assert not unsent, f"the router leaves, and {', '.join(unsent)} were not refused"

    # --- what the core tells ---

    def _changed(self, ticket: Ticket) -> None:
        books, entering = self.books, self._entering
        books.make_whole()
        if entering is not None and ticket.request is entering.request:
            self._entering = None
            check_taken_into_line(books, entering, is_served=True)
            books.join(entering)
            story = entering
        else:
            found = [story for story in books.live.values() if story.ticket is ticket]
            assert found, f"a ticket that has ended, or never was, is told: {ticket.state}"
            story = found[0]
        if ticket.state is TicketState.LEASED:
            books.serve(story)
            self._take_lease(story, ticket)
        else:
            assert ticket.state is TicketState.ENDED, f"{story.name} is told of a change, and is {ticket.state}"
            check_refused_in_line(books, story, ticket.refusal)
            self._note_refusal(story, ticket.refusal)
            books.release(story)
            books.end(story)

    def _gone(self, id: EndpointId) -> None:
        self._gone_told.append(id)

    def _take_lease(self, story: RoutedStory, ticket: Ticket) -> None:
        assert ticket.endpoint is not None, f"{story.name} has a lease nowhere"
        self.books.give(story, ticket.endpoint)
        self._count("grants")
        if self._endpoint_of(story).claims > self._endpoint_of(story).leases_max:
            self._count("grants: of fewer seats than sequences")
        self._say(f"  {story.name} -> {ticket.endpoint}")

    def _note_refusal(self, story: RoutedStory, refusal: TrioserveError | None) -> None:
        reason = refusal.reason if isinstance(refusal, Overloaded) else "queue_timeout"
        self._refusals[reason] = self._refusals.get(reason, 0) + 1
        self._count(f"refused: {reason}")
        self._say(f"  {story.name} refused: {reason}")

    # --- what holds after every event ---

    def _check(self) -> None:
        self._count("checks of every promise")
        books = self.books
        books.make_whole()
        self._check_counts()
        self._check_tickets()
        assert self._gone_told == books.gone, f"{books.gone} are gone, told is that {self._gone_told} are"
        self._gone_told.clear()
        books.gone.clear()
        books.check_nobody_is_hopeless()
        moment = self.core.next_tick(books.now)
        for story in books.waiting:
            assert moment <= story.deadline, f"the next tick is at {moment}, {story.name} waits until {story.deadline}"
        for book in books.endpoints.values():
            end = book.ejection_ends_at
            assert end is None or moment <= end, f"the next tick is at {moment}, {book.id} may be probed at {end}"
        if not self._is_tick_late:
            books.check_nobody_waits_in_vain(books.now)

    def _check_counts(self) -> None:
        stats, books = self.core.stats(), self.books
        leases = {id: book.leases for id, book in books.endpoints.items()}
        assert stats.leases == leases, f"leases are {stats.leases}, expected {leases}"
        health = {id: book.health for id, book in books.endpoints.items()}
        assert {id: one.value for id, one in stats.health.items()} == health, f"{stats.health}, expected {health}"
        for id, book in books.endpoints.items():
            in_flight = self.core.endpoints[EndpointId(id)].in_flight
            assert in_flight == book.in_flight, f"{in_flight} in flight at {id}, expected {book.in_flight}"
        waiting = books.waiting
        assert stats.waiting == len(waiting), f"{stats.waiting} wait, expected {len(waiting)}"
        tokens = sum(story.request.prompt_tokens for story in waiting)
        assert stats.waiting_prompt_tokens == tokens, f"{stats.waiting_prompt_tokens} tokens wait, expected {tokens}"
        grants, retries = self.counts.get("grants", 0), self.counts.get("retries", 0)
        assert stats.admissions_total == grants, f"{stats.admissions_total} admissions, and {grants} grants"
        assert stats.retries_total == retries, f"{stats.retries_total} retries, expected {retries}"
        pairs = {outcome: books.pairs[outcome] for outcome in PairOutcome}
        assert stats.pairs_total == pairs, f"pairs are {stats.pairs_total}, expected {pairs}"
        assert stats.rejections_total == self._refusals, f"{stats.rejections_total}, expected {self._refusals}"

    def _check_tickets(self) -> None:
        books = self.books
        for story in books.live.values():
            ticket = story.ticket
            assert ticket is not None
            assert ticket.state.value == story.state, f"{story.name} is {ticket.state}, expected {story.state}"
            is_there = ticket.endpoint == story.endpoint or story.state == "waiting"
            assert is_there, f"{story.name} is at {ticket.endpoint}, expected {story.endpoint}"
            assert ticket.stage is story.stage, f"{story.name} is to be {ticket.stage}, expected {story.stage}"
            assert ticket.tried == story.tried, f"{story.name} failed at {ticket.tried}, expected {story.tried}"
        # The only look inside: what has ended must not be remembered for long, which no count tells.
        deadline_count = len(self.core._deadlines)
        assert deadline_count <= 2 * books.live_peak + SPARE_DEADLINES_MAX + 1, f"{deadline_count} deadlines are kept"
        assert len(self.core._live) == len(books.live), f"{len(self.core._live)} live, expected {len(books.live)}"

    def _endpoint_of(self, story: RoutedStory) -> EndpointBook:
        assert story.endpoint is not None
        return self.books.endpoints[story.endpoint]

    def _say(self, line: str) -> None:
        if self._trace is not None:
            self._trace(line)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


_HANDLERS: dict[type[RouterEvent], Callable[[RouterSimulation, Any], None]] = {
    Add: RouterSimulation._add,
    Models: RouterSimulation._models,
    Role: RouterSimulation._role,
    Remove: RouterSimulation._remove,
    Check: RouterSimulation._check_health,
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
    Wait: RouterSimulation._wait,
    Drain: RouterSimulation._drain,
}
