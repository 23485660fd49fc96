"""Independent records of a simulated router: its queues, leases, limits and retries.

The records use only requests and reports, never the router's own state. endpoint_book.py has the records of an
endpoint's capacity. queue_rules.py has the rules for the order of the queue. continued_book.py has the records of
streams that are resumed, and the rules for the stages of a request.
"""

from __future__ import annotations

import math
from collections import Counter

from trioserve.contracts.endpoint import PairOutcome, Stage
from trioserve.contracts.errors import Draining, NoEndpoint, Overloaded, QueueWaitOver, RequestPoisoned, TrioserveError
from trioserve.router.continuation import BURST_SECONDS
from trioserve.simulation.router.continued_book import ContinuedBook, check_place, has_next_stage, may_do, may_try
from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.history import RouterWorld
from trioserve.simulation.router.queue_rules import ExpectedRequest, Fairness, check_turn

__all__ = ["RouterBooks", "check_refused_at_the_door", "check_refused_in_queue", "check_taken_into_queue"]

CLOSE_LOAD = 1e-9

LOST = frozenset({"unreachable", "broke", "hung", "leaving"})
"""Faults after which a request without output waits for another endpoint, whatever the retry budget is."""


class RouterBooks:
    """Records of a simulated router, which also check its decisions.

    Args:
        world: the router's settings.
        now: start time.

    Attributes:
        live: requests that have not ended, in order of arrival.
        live_peak: maximum number of live requests so far.
        endpoints: endpoints that the router has, by id.
        gone: endpoints that the router has removed since this list was last emptied.
        checks_of_gone: maximum number of successful health checks of a removed endpoint.
        is_draining: True if the router drains.
        entering: request that is being passed to the router's `enter` now, or None.
        pairs: number of disaggregated requests by outcome.
        continued: records of streams that break off or are moved.
    """

    def __init__(self, world: RouterWorld, now: float) -> None:
        self.world = world
        self.now = now
        self.live: dict[str, ExpectedRequest] = {}
        self.live_peak = 0
        self.endpoints: dict[str, EndpointBook] = {}
        self.gone: list[str] = []
        self.checks_of_gone = 0
        self.is_draining = False
        self.entering: ExpectedRequest | None = None
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

    # --- Queries ---

    @property
    def waiting(self) -> list[ExpectedRequest]:
        return [entry for entry in self.live.values() if entry.state == "waiting"]

    @property
    def moving(self) -> list[ExpectedRequest]:
        """Running streams that wait for a lease at another endpoint."""
        return [entry for entry in self.live.values() if entry.is_moving]

    def to_leave(self, id: str) -> set[str]:
        """Return the requests that must leave an endpoint at its deadline, because they have no lease at another one.

        Args:
            id: the endpoint.
        """
        return {
            entry.name
            for entry in self.live.values()
            if entry.endpoint == id and entry.is_sent and entry.next is None and entry.request.pinned is None
            if (entry.can_resume or not entry.has_token) and self.serving(entry)
        }

    def serving(self, entry: ExpectedRequest) -> list[EndpointBook]:
        """Return the endpoints that serve a request's model, including endpoints at which the request has failed.

        Args:
            entry: the request.
        """
        pinned, model = entry.request.pinned, entry.request.model
        return [book for book in self.endpoints.values() if book.serves(model) and pinned in (None, book.id)]

    def taking(self, entry: ExpectedRequest, now: float, *, sequences: int = 1) -> list[str]:
        """Return the endpoints that must accept a request now.

        Args:
            entry: the request.
            now: the time.
            sequences: number of sequences for which an endpoint must have slots. One is enough for a lease.
        """
        return [
            book.id
            for book in self.serving(entry)
            if may_try(book, entry) and may_do(book, entry) and book.must_take(sequences, now)
            if entry.stage is not Stage.PREFILL or not self._is_handover_full(entry.request.model)
        ]

    def is_queue_full(self, entry: ExpectedRequest) -> bool:
        """Return True if the queue is too full for a new request.

        Args:
            entry: the request.
        """
        beside = [other for other in self.waiting if other.is_beside(entry) and not other.is_continuing]
        tokens = sum(other.request.prompt_tokens for other in beside) + entry.request.prompt_tokens
        is_large = tokens > self.world.queue_prompt_tokens_max
        return len(beside) >= self.world.queue_requests_max or (bool(beside) and is_large)

    def is_most_in_queue(self, entry: ExpectedRequest, entering: ExpectedRequest) -> bool:
        """Return True if a request may be removed from the queue in favour of an entering request.

        It must be the newest request of the tenant with the most requests in the queue. After the exchange, that tenant
        must have at least as many requests in the queue as the tenant of the entering request.

        Args:
            entry: a request in the queue.
            entering: the entering request.
        """
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

    def frees_place(self, entry: ExpectedRequest, entering: ExpectedRequest) -> bool:
        """Return True if the queue has room for an entering request once `entry` is removed.

        Args:
            entry: a request in the queue.
            entering: the entering request.
        """
        beside = [other for other in self.waiting if other.is_beside(entering) and other is not entry]
        beside = [other for other in beside if not other.is_continuing]
        tokens = sum(other.request.prompt_tokens for other in beside) + entering.request.prompt_tokens
        return len(beside) < self.world.queue_requests_max and tokens <= self.world.queue_prompt_tokens_max

    # --- Events ---

    def enter(self, entry: ExpectedRequest) -> None:
        """Record that the router has accepted a request.

        Args:
            entry: the request.
        """
        assert not self.is_draining, f"{entry.name} is accepted by a router that drains"
        self._tries = min(self._tries_max, self._tries + self.world.retry_share_max)
        self.live[entry.name] = entry
        self.live_peak = max(self.live_peak, len(self.live))

    def join(self, entry: ExpectedRequest) -> None:
        """Record that a request joins a queue.

        Args:
            entry: the request.
        """
        self._joined_count += 1
        entry.queue_index = self._joined_count
        self._fairness_of(entry).join(entry)

    def serve(self, entry: ExpectedRequest, id: str) -> None:
        """Record that a request from the queue gets a lease. Assert that it is the request's turn.

        Args:
            entry: the request.
            id: the endpoint.
        """
        assert entry.state == "waiting", f"{entry.name} is {entry.state}, but gets a lease"
        self.check_class(entry, id)
        if entry.failed_index is None:
            check_turn(entry, self.live.values())
            self._fairness_of(entry).serve(entry)
            self._fairness_of(entry).leave(entry)
            self.continued.note_newcomer(entry)
        elif entry.is_continuing:
            assert not entry.is_on_trial, f"{entry.name} is on trial, but gets {id}"
            self.continued.note_granted(entry, self._are_newcomers_waiting(entry), self.now)
        elif entry.is_again:
            assert not entry.is_on_trial, f"{entry.name} is on trial, but gets {id}"
            self.continued.note_ahead(entry, self._are_newcomers_waiting(entry))

    def grant(self, entry: ExpectedRequest, id: str) -> None:
        """Record that a request gets a lease. Assert that the lease is allowed.

        Args:
            entry: the request.
            id: the endpoint.
        """
        self._check_and_grant(entry, id)
        if entry.has_token:
            self._note_moved(entry.left, id)
        entry.state, entry.endpoint, entry.failed_index = "leased", id, None
        entry.leased_at = self.now

    def grant_next(self, entry: ExpectedRequest, id: str) -> None:
        """Record that a stream gets a second lease, to move to another endpoint. Assert that the lease is allowed.

        Args:
            entry: the request.
            id: the endpoint.
        """
        assert entry.next is None, f"{entry.name} has a second lease at {entry.next}, but gets another one at {id}"
        self.check_class(entry, id)
        self.continued.note_next(entry, self._are_newcomers_waiting(entry))
        self._check_and_grant(entry, id)
        entry.next = id

    def record_move(self, entry: ExpectedRequest) -> None:
        """Record that a stream uses its second lease. Its first lease has been returned before.

        Args:
            entry: the request.
        """
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
        """Return the second lease of a stream that is not moved.

        Args:
            entry: the request.
        """
        entry.is_moving = False
        self.continued.on_the_way.discard(entry.name)
        if entry.next is not None:
            self._release(entry, entry.next)
            entry.next = None

    def _check_and_grant(self, entry: ExpectedRequest, id: str) -> None:
        name, request = entry.name, entry.request
        assert id in self.endpoints, f"{name} has a lease at {id}, but that endpoint is gone"
        book = self.endpoints[id]
        is_begun = entry.prefilled_by is not None or entry.has_token or entry.is_lost
        assert is_begun or not self.is_draining, f"{name} gets a lease from a router that drains"
        assert book.serves(request.model), f"{name} requests {request.model}, but gets {id} with {sorted(book.models)}"
        assert request.pinned in (None, id), f"{name} is pinned to {request.pinned}, but gets {id}"
        assert may_try(book, entry), f"{name} failed at {id}, but gets it again"
        objection = book.objection(1, self.now)
        assert objection is None, f"{name} gets a lease: {objection}"
        taking = self.taking(entry, self.now, sequences=request.sequences)
        if book.objection(request.sequences, self.now) is not None:
            assert not taking, f"{name} finds {request.sequences} slots at {taking}, but gets {id}, which has fewer"
            taking = self.taking(entry, self.now)
        if entry.stage is Stage.PREFILL:
            assert not self._is_handover_full(request.model), (
                f"{name} begins its prefill, although too many requests wait for decode"
            )
        if entry.has_token and entry.fingerprint is not None:
            alike = [other for other in taking if self.endpoints[other].fingerprint == entry.fingerprint]
            is_alike = book.fingerprint == entry.fingerprint
            assert is_alike or not alike, (
                f"{name} is resumed at {id}, but {alike} have the fingerprint of its beginning"
            )
            # `id` may be the only endpoint with this fingerprint, and may be chosen although it need not accept the
            # request.
            if is_alike:
                taking = alike
        check_place(entry, book, [self.endpoints[other] for other in taking])
        if self.world.policy == "least_loaded" and not (entry.stage is None and id == entry.prefilled_by):
            self._check_least_loaded(entry, book, taking)
        book.grant(name, request.sequences, is_suspect=bool(entry.broken))

    def fail(self, entry: ExpectedRequest, fault: str, book: EndpointBook, *, is_certain: bool) -> bool:
        """Record that an endpoint failed a request before its first token. Call this after the endpoint's own record.

        Args:
            entry: the request.
            fault: name of the fault.
            book: the endpoint.
            is_certain: True if the endpoint reported this request as the cause.

        Returns:
            True if the request waits again. False if it has ended.
        """
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
        """Record that an endpoint failed a request.

        Args:
            entry: the request.
            book: the endpoint.
        """
        entry.tried = {**entry.tried, book.id: book.checks}

    def break_off(self, entry: ExpectedRequest, fault: str, book: EndpointBook, *, is_certain: bool) -> str | None:
        """Record that a stream broke off at an endpoint. Call this after the endpoint's own record.

        Args:
            entry: the request.
            fault: name of the fault.
            book: the endpoint.
            is_certain: True if the endpoint reported this request as the cause.

        Returns:
            The reason why the stream is not resumed. None: it is resumed, or waits to be resumed.
        """
        self.continued.note_break(entry, fault, book, is_certain=is_certain)
        reason = self.continued.refusal(entry, self.endpoints, is_served=bool(self.serving(entry)))
        if reason is not None:
            self.drop_next(entry)
            self.end(entry)
            return reason
        if entry.next is not None and not entry.is_on_trial:
            self.record_move(entry)
            self.continued.note_turn(entry, self.now)
            return None
        self.drop_next(entry)
        entry.stage, entry.own_deadline = None, math.inf
        entry.wait_ends_at = self.now + self.world.continuation_seconds_max
        self.wait_again(entry)
        return None

    def judge(self) -> None:
        """Decide again for each request on trial whether it is the cause of its endpoints' failures.

        Call this method after a report of an endpoint, and when an endpoint is removed."""
        on_trial = [entry for entry in self.waiting if entry.is_on_trial]
        for entry in sorted(on_trial, key=lambda entry: entry.failed_index or 0):
            self.continued.judge(entry, self.endpoints)
            if not entry.is_on_trial and not entry.is_condemned:
                self._failure_count += 1
                entry.failed_index = self._failure_count

    def wait_again(self, entry: ExpectedRequest) -> None:
        """Record that a request waits again after its lease has been returned.

        Args:
            entry: the request.
        """
        self._failure_count += 1
        self.continued.on_the_way.discard(entry.name)
        entry.left = entry.endpoint
        entry.state, entry.is_sent, entry.endpoint, entry.is_answered = "waiting", False, None, False
        entry.failed_index = self._failure_count

    def prefilled(self, entry: ExpectedRequest, outcome: PairOutcome | None) -> None:
        """Record that the prompt of a disaggregated request is computed. Its lease for the prompt has been returned.

        Args:
            entry: the request.
            outcome: reason why one endpoint must compute the whole request. None: another endpoint may decode.
        """
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
        """Delete records of models that no endpoint serves and no live request needs."""
        served = {name for book in self.endpoints.values() for name in book.models}
        self.continued.forget_all_but(served | {entry.request.model for entry in self.live.values()})

    def make_whole(self) -> None:
        """End disaggregation for waiting requests whose next stage no endpoint offers.

        One endpoint then computes the whole request.
        """
        for stage in Stage:
            waiting = [entry for entry in self.waiting if entry.stage is stage]
            again = sorted(
                (entry for entry in waiting if not entry.is_queued), key=lambda entry: entry.failed_index or 0
            )
            queued = sorted((entry for entry in waiting if entry.is_queued), key=lambda entry: entry.index)
            for entry in (*again, *queued):
                # The router refuses a request that has no endpoint left at all.
                if self._is_any_left(entry) and not has_next_stage(entry, self.serving(entry)):
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
        """Give back the first lease of a request, or remove the request from its queue. If the request has a second
        lease, it keeps that one.

        Args:
            entry: the request.
        """
        if entry.is_queued:
            self._fairness_of(entry).leave(entry)
        elif entry.state in ("leased", "running_free"):
            assert entry.endpoint is not None
            entry.is_moving = False
            self._release(entry, entry.endpoint)

    def _release(self, entry: ExpectedRequest, id: str) -> None:
        book = self.endpoints[id]
        book.release(entry.name)
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

    # --- Rules ---

    def check_no_request_waits_forever(self, now: float) -> None:
        """Check that no request waits although an endpoint must accept it.

        Args:
            now: the time.
        """
        for entry in self.waiting:
            if entry.is_on_trial or (entry.is_continuing and not self.continued.must_have_turn(now)):
                continue
            taking = self.taking(entry, now)
            assert not taking, f"{entry.name} waits{'' if entry.is_queued else ' again'}, but {taking} could accept it"
        for entry in self.moving if self.continued.may_move else ():
            taking = self.taking(entry, now)
            assert not taking, f"{entry.name} must leave {entry.endpoint}, and {taking} could accept it"

    def check_no_hopeless_request_waits(self) -> None:
        for entry in self.waiting:
            assert self._is_any_left(entry), f"{entry.name} waits, but no endpoint can ever accept it"

    def check_class(self, entry: ExpectedRequest, id: str) -> None:
        """Check that a request gets no endpoint that must accept an earlier request first.

        Args:
            entry: the request.
            id: the endpoint that it is about to get.
        """
        for other in (*self.waiting, *self.moving):
            is_peer = other is not entry and other.request.model == entry.request.model
            if is_peer and self.continued.is_before(other, entry, self.now):
                assert id not in self.taking(other, self.now), (
                    f"{other.name} goes before {entry.name}, but {entry.name} gets {id}"
                )

    def _are_newcomers_waiting(self, entry: ExpectedRequest) -> bool:
        """Return True if newcomers wait for the request's model."""
        entering, model = self.entering, entry.request.model
        if entering is not None and entering.is_behind and entering.request.model == model:
            return True
        return any(other.is_queued and other.request.model == model for other in self.waiting)

    def _check_least_loaded(self, entry: ExpectedRequest, book: EndpointBook, taking: list[str]) -> None:
        """Check the choice of the policy least_loaded.

        A single router chooses the endpoint with the lowest load. If there are other routers, a router compares only
        some endpoints. These are at least two, so it never chooses the endpoint with the highest load.
        """
        beside = [self.endpoints[other] for other in taking if other != book.id]
        if entry.stage is None and book.role != "prefill":
            beside = [other for other in beside if other.role != "prefill"]
        if not any(other.others for other in self.serving(entry)):
            calmer = [other.id for other in beside if other.load(self.now) < book.load(self.now)]
            assert not calmer, f"{entry.name} gets {book.id}, but {calmer} have a lower load"
        elif beside:
            most = max(other.load_most(self.now) for other in beside)
            assert book.load(self.now) <= most + CLOSE_LOAD, f"{entry.name} gets {book.id}, which has the highest load"

    def _is_any_left(self, entry: ExpectedRequest) -> bool:
        return any(entry.has_token or book.id not in entry.failed_by for book in self.serving(entry))

    def _is_tried_again(self, entry: ExpectedRequest, fault: str) -> bool:
        if entry.request.pinned is not None:
            return False
        left = [book for book in self.serving(entry) if book.id not in entry.failed_by]
        # The router never fails an accepted request while an endpoint is left that exists or may come back.
        if fault in LOST:
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


RETRY_SECONDS_MAX = 60.0


def check_refused_at_the_door(books: RouterBooks, entry: ExpectedRequest, refusal: Overloaded) -> None:
    """Check the error with which the router's `enter` refused a request.

    Args:
        books: the records.
        entry: the request.
        refusal: the error.
    """
    name, reason = entry.name, refusal.reason
    _check_retry_after(refusal)
    serving = books.serving(entry)
    if isinstance(refusal, Draining) or books.is_draining:
        assert isinstance(refusal, Draining), f"{name} is refused with {reason} by a router that drains"
        assert books.is_draining, f"{name} is refused as if the router drained"
        return
    if reason == "no_endpoint":
        usable = [book.id for book in serving if book.health != "ejected"]
        is_starting = entry.request.pinned is not None and serving and not serving[0].is_given
        assert not usable or is_starting, f"{name} is refused since there is no endpoint, but there are {usable}"
        return
    if entry.request.pinned is not None:
        assert reason == "pinned_endpoint_overloaded", f"{name} is pinned, but refused with {reason}"
        assert serving, f"{name} is refused since {entry.request.pinned} is full, which does not serve its model"
        assert serving[0].is_given, f"{name} is refused since {serving[0].id} is full, which is {serving[0].health}"
    else:
        assert reason == "queue_full", f"{name} is refused with {reason}"
        assert books.is_queue_full(entry), f"{name} is refused since the queue is full, but it is not"
        most = [other for other in books.waiting if books.is_most_in_queue(other, entry)]
        must_displace = bool(most) and all(books.frees_place(other, entry) for other in most)
        assert not must_displace, (
            f"{name} is refused, but {most[0].name} should have been removed from the queue for it"
        )
    taking = books.taking(entry, books.now)
    assert not taking, f"{name} is refused, but {taking} could accept it"


def check_taken_into_queue(books: RouterBooks, entry: ExpectedRequest, *, is_served: bool) -> None:
    """Check that the router had a reason to put a request into the queue.

    Args:
        books: the records.
        entry: the request.
        is_served: True if the request has already left the queue with a lease.
    """
    assert is_served or not books.is_queue_full(entry), f"{entry.name} was put into a full queue"
    usable = [book for book in books.serving(entry) if book.health != "ejected"]
    assert usable, f"{entry.name} waits, but no endpoint can ever accept it"


def check_refused_in_queue(books: RouterBooks, entry: ExpectedRequest, refusal: TrioserveError | None) -> None:
    """Check the error with which the router refused a request that it had accepted and not sent.

    Args:
        books: the records.
        entry: the request.
        refusal: the error.
    """
    name = entry.name
    assert refusal is not None, f"{name} has ended without a reason"
    if isinstance(refusal, Draining):
        assert books.is_draining, f"{name} is refused as if the router drained"
        assert not entry.is_sent, f"{name} is at its endpoint, but is refused"
        assert entry.prefilled_by is None, f"{name} has its prompt computed, but is refused"
        assert not entry.has_token, f"the stream of {name} must be resumed, but it is refused"
        assert not entry.is_lost, f"{name} lost its endpoint, but is refused"
        return
    assert entry.state == "waiting", f"{name} is {entry.state}, but is refused"
    if isinstance(refusal, RequestPoisoned):
        is_over = entry.is_on_trial and entry.deadline <= books.now
        assert entry.is_condemned or is_over, f"{name} is refused as the cause of broken endpoints, but it is not"
        return
    assert not entry.is_condemned, f"{name} is the cause of broken endpoints, but is refused with {refusal!r}"
    if isinstance(refusal, QueueWaitOver):
        assert entry.own_deadline <= books.now, f"{name} is refused since its deadline has passed, but it has not"
        assert not entry.has_token, f"{name} has a token, but is refused since its queue deadline has passed"
        return
    assert isinstance(refusal, Overloaded), f"{name} is refused with {refusal!r}"
    _check_retry_after(refusal)
    if isinstance(refusal, NoEndpoint) and refusal.reason == "endpoint_lost":
        assert entry.is_lost, f"{name} is refused since its endpoint was lost, but it was not"
        assert not entry.has_token, f"{name} has a token, but is refused like a request without a token"
        assert entry.wait_ends_at <= books.now, (
            f"{name} is refused since it waited too long for another endpoint, but it has time left"
        )
        return
    if isinstance(refusal, NoEndpoint):
        left = [book.id for book in books.serving(entry) if entry.has_token or book.id not in entry.failed_by]
        assert not left, f"{name} is refused since there is no endpoint, but there are {left}"
        return
    if refusal.reason == "queue_full":
        entering = books.entering
        assert entering is not None, f"{name} is removed from the queue, but no request arrives"
        assert books.is_queue_full(entering), f"{name} is removed from a queue that is not full"
        assert books.is_most_in_queue(entry, entering), f"{name} is wrongly removed from the queue for {entering.name}"
        assert books.frees_place(entry, entering), f"{name} is removed from the queue, but {entering.name} does not fit"
        return
    reason = "continuation_wait_over" if entry.has_token else "queue_wait_over"
    assert refusal.reason == reason, f"{name} is refused with {refusal.reason}, expected {reason}"
    assert entry.wait_ends_at <= books.now, f"{name} is refused since it waited too long, but it has time left"
    assert not entry.is_on_trial, f"{name} is on trial, but is refused since it waited too long"


def _check_retry_after(refusal: Overloaded) -> None:
    seconds = refusal.retry_after_seconds
    assert 1 <= seconds <= RETRY_SECONDS_MAX, f"{refusal.reason}: try again in {seconds} s"
