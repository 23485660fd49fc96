"""The books of a simulated router: who is in the queue, who has a lease where, and what follows from that for the next.

Kept from what was asked and told alone, never from what the router keeps. Lines, bounds and retries are settled here;
what one endpoint may be given in router_endpoint_book, whose turn it is in router_line_rules, what of a request may be
split in router_pair_book.
"""

from __future__ import annotations

import math
from collections import Counter

from trioserve.contracts.endpoint import PairOutcome, Stage
from trioserve.router.retry_budget import BURST_SECONDS
from trioserve.simulation.router.continued_book import ContinuedBook, may_try
from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.history import RouterWorld
from trioserve.simulation.router.pair_book import check_place, is_next_stage_there, may_do
from trioserve.simulation.router.queue_rules import ExpectedRequest, Fairness, check_turn

__all__ = ["RouterBooks"]

CLOSE_LOAD = 1e-9

LOST = frozenset({"unreachable", "broke", "hung", "leaving"})
"""Faults after which a request without a token waits for another endpoint, whatever the retry budget says."""


class RouterBooks:
    """live: requests that have not ended, in order of arrival. endpoints: those that are not gone. gone: those that
    went since this was emptied. checks_of_gone: the most that ever found one well that is gone. live_peak: the most
    that ever lived. pairs: what became of disaggregated requests. continued: of streams that broke off."""

    def __init__(self, world: RouterWorld, now: float) -> None:
        self.world = world
        self.now = now
        self.live: dict[str, ExpectedRequest] = {}
        self.live_peak = 0
        self.endpoints: dict[str, EndpointBook] = {}
        self.gone: list[str] = []
        self.checks_of_gone = 0
        self.is_draining = False
        self.entering: ExpectedRequest | None = None  # while the router is asked to take it
        self.pairs: Counter[PairOutcome] = Counter()
        self.continued = ContinuedBook(world, now)
        self._fairness: dict[tuple[str, Stage | None, int], Fairness] = {}
        self._failure_count = 0
        self._joined_count = 0
        self._tries = world.retries_per_second_min * BURST_SECONDS
        if world.retry_share_max or world.retries_per_second_min:
            self._tries = max(1.0, self._tries)
        self._tries_max = self._tries
        self._tries_at: float | None = None

    # --- looking up ---

    @property
    def waiting(self) -> list[ExpectedRequest]:
        return [entry for entry in self.live.values() if entry.state == "waiting"]

    @property
    def moving(self) -> list[ExpectedRequest]:
        """Who waits for room elsewhere, where they run."""
        return [entry for entry in self.live.values() if entry.is_moving]

    def to_leave(self, id: str) -> set[str]:
        """Who is to leave the endpoint at its deadline, without a lease elsewhere."""
        return {
            entry.name
            for entry in self.live.values()
            if entry.endpoint == id and entry.is_sent and entry.next is None and entry.request.pinned is None
            if (entry.can_go_on or not entry.has_token) and self.serving(entry)
        }

    def serving(self, entry: ExpectedRequest) -> list[EndpointBook]:
        """Endpoints that it may ever get, wherever it failed."""
        pinned, model = entry.request.pinned, entry.request.model
        return [book for book in self.endpoints.values() if book.serves(model) and pinned in (None, book.id)]

    def taking(self, entry: ExpectedRequest, now: float, *, sequences: int = 1) -> list[str]:
        """Endpoints that have to take so many of its sequences. It goes where one of them finds a seat."""
        return [
            book.id
            for book in self.serving(entry)
            if may_try(book, entry) and may_do(book, entry) and book.must_take(sequences, now)
            if entry.stage is not Stage.PREFILL or not self._is_handover_full(entry.request.model)
        ]

    def is_queue_full(self, entry: ExpectedRequest) -> bool:
        """Whether there is no place in the queue for one that is new."""
        beside = [other for other in self.waiting if other.is_beside(entry) and not other.is_continuing]
        tokens = sum(other.request.prompt_tokens for other in beside) + entry.request.prompt_tokens
        is_large = tokens > self.world.queue_prompt_tokens_max
        return len(beside) >= self.world.queue_requests_max or (bool(beside) and is_large)

    def is_most_in_queue(self, entry: ExpectedRequest, entering: ExpectedRequest) -> bool:
        """Whether it is the newest of a tenant that has most in a queue, and still more than that of one that comes, if
        it left for it."""
        if not (entry.is_queued and entry.is_beside(entering) and entry.request.priority == entering.request.priority):
            return False
        queued = [other for other in self.waiting if other.is_queued and other.is_beside(entering)]
        queued = [other for other in queued if other.request.priority == entry.request.priority]
        counts = Counter(other.request.tenant for other in queued)
        if counts[entry.request.tenant] < max(*counts.values(), counts[entering.request.tenant] + 2):
            return False
        return all(
            other.request.tenant != entry.request.tenant or other.queue_index <= entry.queue_index for other in queued
        )

    def makes_room(self, entry: ExpectedRequest, entering: ExpectedRequest) -> bool:
        """Whether one that comes has a place in the queue without it."""
        beside = [other for other in self.waiting if other.is_beside(entering) and other is not entry]
        beside = [other for other in beside if not other.is_continuing]
        tokens = sum(other.request.prompt_tokens for other in beside) + entering.request.prompt_tokens
        return len(beside) < self.world.queue_requests_max and tokens <= self.world.queue_prompt_tokens_max

    # --- what happens ---

    def enter(self, entry: ExpectedRequest) -> None:
        """The router has taken it, into its queue or beyond."""
        assert not self.is_draining, f"{entry.name} is taken by a router that leaves"
        self._tries = min(self._tries_max, self._tries + self.world.retry_share_max)
        self.live[entry.name] = entry
        self.live_peak = max(self.live_peak, len(self.live))

    def join(self, entry: ExpectedRequest) -> None:
        """It stands in a queue in which it did not stand before."""
        self._joined_count += 1
        entry.queue_index = self._joined_count
        self._fairness_of(entry).join(entry)

    def serve(self, entry: ExpectedRequest, id: str) -> None:
        """It gets a lease there, out of the queue. Asserts that it is its turn."""
        assert entry.state == "waiting", f"{entry.name} is {entry.state}, and gets a lease"
        self.check_class(entry, id)
        if entry.failed_index is None:
            check_turn(entry, self.live.values())
            self._fairness_of(entry).serve(entry)
            self._fairness_of(entry).leave(entry)
            self.continued.note_newcomer(entry)
        elif entry.is_continuing:
            assert not entry.is_on_trial, f"{entry.name} is on trial, and gets {id}"
            self.continued.note_granted(entry, self._are_newcomers_waiting(entry), self.now)
        elif entry.is_again:
            assert not entry.is_on_trial, f"{entry.name} is on trial, and gets {id}"
            self.continued.note_ahead(entry, self._are_newcomers_waiting(entry))

    def give(self, entry: ExpectedRequest, id: str) -> None:
        """It gets a lease there. Asserts that it may."""
        self._check_and_give(entry, id)
        if entry.has_token:
            self._note_moved(entry.left, id)
        entry.state, entry.endpoint, entry.failed_index = "leased", id, None
        entry.leased_at = self.now

    def give_next(self, entry: ExpectedRequest, id: str) -> None:
        """It gets a lease there, to move to. Asserts that it may."""
        assert entry.next is None, f"{entry.name} has a lease at {entry.next} to move to, and gets one at {id}"
        self.check_class(entry, id)
        self.continued.note_next(entry, self._are_newcomers_waiting(entry))
        self._check_and_give(entry, id)
        entry.next = id

    def take_up_next(self, entry: ExpectedRequest) -> None:
        """Its next lease is the one in hand, what it had before is back."""
        assert entry.next is not None
        self._note_moved(entry.endpoint, entry.next)
        entry.state, entry.endpoint, entry.next = "leased", entry.next, None
        entry.is_sent = entry.is_answered = False
        entry.stage = None

    def _note_moved(self, left: str | None, id: str) -> None:
        if left in self.endpoints:
            self.endpoints[left].moved_from += 1
        self.endpoints[id].moved_to += 1

    def drop_next(self, entry: ExpectedRequest) -> None:
        """It does not move after all."""
        entry.is_moving = False
        self.continued.on_the_way.discard(entry.name)
        if entry.next is not None:
            self._let_go(entry, entry.next)
            entry.next = None

    def _check_and_give(self, entry: ExpectedRequest, id: str) -> None:
        name, request = entry.name, entry.request
        assert id in self.endpoints, f"{name} has a lease at {id}, which is gone"
        book = self.endpoints[id]
        is_begun = entry.prefilled_by is not None or entry.has_token or entry.is_lost
        assert is_begun or not self.is_draining, f"{name} gets a lease of a router that leaves"
        assert book.serves(request.model), f"{name} asks for {request.model}, and gets {id}, {sorted(book.models)}"
        assert request.pinned in (None, id), f"{name} asks for {request.pinned}, and gets {id}"
        assert may_try(book, entry), f"{name} failed at {id}, and gets it again"
        objection = book.objection(1, self.now)
        assert objection is None, f"{name} gets a lease: {objection}"
        taking = self.taking(entry, self.now, sequences=request.sequences)
        if book.objection(request.sequences, self.now) is not None:
            assert not taking, f"{name} finds {request.sequences} seats at {taking}, and gets {id}, which has fewer"
            taking = self.taking(entry, self.now)
        if entry.stage is Stage.PREFILL:
            assert not self._is_handover_full(request.model), f"{name} is begun, and too many wait to be ended"
        if entry.has_token and entry.fingerprint is not None:
            alike = [other for other in taking if self.endpoints[other].fingerprint == entry.fingerprint]
            is_alike = book.fingerprint == entry.fingerprint
            assert is_alike or not alike, f"{name} goes on at {id}, and began as {alike} compute"
            if is_alike:  # it may be the only one, and one that need not have taken it
                taking = alike
        check_place(entry, book, [self.endpoints[other] for other in taking])
        if self.world.policy == "least_loaded" and not (entry.stage is None and id == entry.prefilled_by):
            self._check_least_loaded(entry, book, taking)
        book.give(name, request.sequences, is_suspect=bool(entry.broken))

    def fail(self, entry: ExpectedRequest, fault: str, book: EndpointBook, *, is_certain: bool) -> bool:
        """Its endpoint, which has been told of it, failed it, and it has no token. Returns whether it has to wait
        again, or to be told that it is the cause."""
        assert entry.endpoint is not None
        served_seconds = self.now - entry.leased_at
        entry.own_deadline += served_seconds
        entry.wait_ends_at += served_seconds
        if fault in ("broke", "hung"):
            self.continued.note_break(entry, fault, book, is_certain=is_certain)
        if fault in LOST:
            entry.is_lost = True
            entry.wait_ends_at = max(entry.wait_ends_at, self.now + self.world.continuation_seconds_max)
        elif fault != "busy":
            entry.failed_by.add(entry.endpoint)
            if fault == "refused":
                entry.refused_by.add(entry.endpoint)
        self.continued.judge(entry, self.endpoints)
        if entry.is_condemned or not self._is_tried_again(entry, fault):
            if entry.stage_fault is not None:
                self.note_pair(entry, entry.stage_fault)
            self.end(entry)
            return False
        self.wait_again(entry)
        return True

    def note_tried(self, entry: ExpectedRequest, book: EndpointBook) -> None:
        """This endpoint failed it."""
        entry.tried = {**entry.tried, book.id: book.checks}

    def break_off(self, entry: ExpectedRequest, fault: str, book: EndpointBook, *, is_certain: bool) -> str | None:
        """Its stream broke off, at an endpoint that has been told of it. Returns why it does not go on, if so;
        otherwise it waits again."""
        self.continued.note_break(entry, fault, book, is_certain=is_certain)
        reason = self.continued.refusal(entry, self.endpoints, is_served=bool(self.serving(entry)))
        if reason is not None:
            self.drop_next(entry)
            self.end(entry)
            return reason
        if entry.next is not None and not entry.is_on_trial:
            self.take_up_next(entry)
            self.continued.note_turn(entry, self.now)
            return None
        self.drop_next(entry)
        entry.stage, entry.own_deadline = None, math.inf
        entry.wait_ends_at = self.now + self.world.continuation_seconds_max
        self.wait_again(entry)
        return None

    def judge(self) -> None:
        """An endpoint has told something, or will tell no more: whose trial is over now."""
        on_trial = [entry for entry in self.waiting if entry.is_on_trial]
        for entry in sorted(on_trial, key=lambda entry: entry.failed_index or 0):
            self.continued.judge(entry, self.endpoints)
            if not entry.is_on_trial and not entry.is_condemned:
                self._failure_count += 1
                entry.failed_index = self._failure_count

    def wait_again(self, entry: ExpectedRequest) -> None:
        """It was elsewhere, and what it had there is back."""
        self._failure_count += 1
        self.continued.on_the_way.discard(entry.name)
        entry.left = entry.endpoint
        entry.state, entry.is_sent, entry.endpoint, entry.is_answered = "waiting", False, None, False
        entry.failed_index = self._failure_count

    def prefilled(self, entry: ExpectedRequest, outcome: PairOutcome | None) -> None:
        """Its prompt is computed, and what it had there is back."""
        served_seconds = self.now - entry.leased_at
        entry.own_deadline += served_seconds
        entry.wait_ends_at += served_seconds
        entry.prefilled_by, entry.stage_fault = entry.endpoint, None
        entry.stage, entry.is_held = Stage.DECODE, outcome is None
        if outcome is not None:
            entry.stage = None
            self.note_pair(entry, outcome)
        self.wait_again(entry)

    def forget_unserved(self) -> None:
        """What was noted of models that nobody serves, and nobody who is there asks for."""
        served = {name for book in self.endpoints.values() for name in book.models}
        self.continued.forget_all_but(served | {entry.request.model for entry in self.live.values()})

    def make_whole(self) -> None:
        """Whoever waits for a part that no endpoint may do now waits for one that does everything."""
        for stage in Stage:
            waiting = [entry for entry in self.waiting if entry.stage is stage]
            again = sorted(
                (entry for entry in waiting if not entry.is_queued), key=lambda entry: entry.failed_index or 0
            )
            queued = sorted((entry for entry in waiting if entry.is_queued), key=lambda entry: entry.index)
            for entry in (*again, *queued):
                # Who has no endpoint left at all is refused, and does not go on whole.
                if self._is_any_left(entry) and not is_next_stage_there(entry, self.serving(entry)):
                    self._make_whole(entry)

    def _make_whole(self, entry: ExpectedRequest) -> None:
        is_lost = entry.stage is Stage.DECODE and not entry.is_held
        self.note_pair(entry, entry.stage_fault or (PairOutcome.HOLD_LOST if is_lost else PairOutcome.NO_ENDPOINT))
        if entry.is_queued:
            self._fairness_of(entry).leave(entry)
            entry.stage = None
            self.join(entry)
        else:
            entry.stage = None

    def note_pair(self, entry: ExpectedRequest, outcome: PairOutcome) -> None:
        if entry.is_disaggregated and entry.outcome is None:
            entry.outcome = outcome
            self.pairs[outcome] += 1

    def release(self, entry: ExpectedRequest) -> None:
        """What it has is back, a lease that it was to move to apart."""
        if entry.is_queued:
            self._fairness_of(entry).leave(entry)
        elif entry.state in ("leased", "running_free"):
            assert entry.endpoint is not None
            entry.is_moving = False
            self._let_go(entry, entry.endpoint)

    def _let_go(self, entry: ExpectedRequest, id: str) -> None:
        book = self.endpoints[id]
        book.let_go(entry.name)
        self.note_drained(book)

    def end(self, entry: ExpectedRequest) -> None:
        self.drop_next(entry)
        entry.state = "ended"
        if self.live.pop(entry.name, None) is not None:
            self.note_pair(entry, PairOutcome.LEFT)

    def note_drained(self, book: EndpointBook) -> None:
        if book.health == "draining" and not book.in_flight:
            del self.endpoints[book.id]
            self.checks_of_gone = max(self.checks_of_gone, book.checks)
            self.continued.deadlines.pop(book.id, None)
            self.gone.append(book.id)

    # --- what has to hold ---

    def check_nobody_waits_in_vain(self, now: float) -> None:
        """Progress: whoever waits, first or last, waits because every endpoint that it may have is full."""
        for entry in self.waiting:
            if entry.is_on_trial or (entry.is_continuing and not self.continued.must_have_turn(now)):
                continue
            taking = self.taking(entry, now)
            assert not taking, f"{entry.name} waits{'' if entry.is_queued else ' again'}, and {taking} could take it"
        for entry in self.moving if self.continued.may_move else ():
            taking = self.taking(entry, now)
            assert not taking, f"{entry.name} is to leave {entry.endpoint}, and {taking} could take it"

    def check_nobody_is_hopeless(self) -> None:
        for entry in self.waiting:
            assert self._is_any_left(entry), f"{entry.name} waits, and no endpoint may ever take it"

    def check_class(self, entry: ExpectedRequest, id: str) -> None:
        """Check, as the request is about to get the endpoint, that none goes before it that could have had it."""
        for other in (*self.waiting, *self.moving):
            is_peer = other is not entry and other.request.model == entry.request.model
            if is_peer and self.continued.is_before(other, entry, self.now):
                assert id not in self.taking(other, self.now), f"{other.name} is before {entry.name}, which gets {id}"

    def _are_newcomers_waiting(self, entry: ExpectedRequest) -> bool:
        """Whether some do for its model."""
        entering, model = self.entering, entry.request.model
        if entering is not None and entering.is_behind and entering.request.model == model:
            return True
        return any(other.is_queued and other.request.model == model for other in self.waiting)

    def _check_least_loaded(self, entry: ExpectedRequest, book: EndpointBook, taking: list[str]) -> None:
        """Whoever is alone finds the one with the least to do. Beside others it compares two at least, so it never
        finds the one with most."""
        beside = [self.endpoints[other] for other in taking if other != book.id]
        if entry.stage is None and book.role != "prefill":
            beside = [other for other in beside if other.role != "prefill"]
        if not any(other.others for other in self.serving(entry)):
            calmer = [other.id for other in beside if other.load(self.now) < book.load(self.now)]
            assert not calmer, f"{entry.name} gets {book.id}, and {calmer} have less to do"
        elif beside:
            most = max(other.load_most(self.now) for other in beside)
            assert book.load(self.now) <= most + CLOSE_LOAD, (
                f"{entry.name} gets {book.id}, which has more to do than all others"
            )

    def _is_any_left(self, entry: ExpectedRequest) -> bool:
        return any(entry.has_token or book.id not in entry.failed_by for book in self.serving(entry))

    def _is_tried_again(self, entry: ExpectedRequest, fault: str) -> bool:
        if entry.request.pinned is not None:
            return False
        left = [book for book in self.serving(entry) if book.id not in entry.failed_by]
        if fault in LOST:  # an accepted request is never lost while an endpoint is there, or may come back
            return bool(left)
        if self.now >= entry.deadline:
            return False
        if fault == "invalid" and not self.is_draining:
            return bool(left)
        if fault == "refused" and not self.is_draining:
            return any(book.health != "ejected" for book in left)
        if self.is_draining or len(entry.failed_by) >= self.world.attempts_max:
            return False
        if fault == "busy":
            left = [book for book in left if book.health == "ejected" or may_try(book, entry)]
        else:
            left = [book for book in left if book.health != "ejected"]
        if not left:
            return False
        self._fill_tries()
        if self._tries < 1 - 1e-9:
            return False
        self._tries = max(0.0, self._tries - 1)
        return True

    def _fill_tries(self) -> None:
        if self._tries_at is not None:
            more = (self.now - self._tries_at) * self.world.retries_per_second_min
            self._tries = min(self._tries_max, self._tries + more)
        self._tries_at = self.now

    def _fairness_of(self, entry: ExpectedRequest) -> Fairness:
        return self._fairness.setdefault((entry.request.model, entry.stage, entry.request.priority), Fairness())

    def _is_handover_full(self, model: str) -> bool:
        waiting = [entry for entry in self.waiting if entry.stage is Stage.DECODE and entry.request.model == model]
        return len(waiting) >= self.world.handover_waiting_max
