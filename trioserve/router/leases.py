"""Grants free slots of endpoints to waiting requests, and releases leases.

A disaggregated request computes its prompt at one endpoint and its response at another, so it has one lease after the
other: a prefill stage and then a decode stage (`Ticket.stage`). Each stage has a queue of its own. Roles of endpoints
are hints. If a split cannot be completed, one endpoint does the whole request: the stage becomes None and stays None.

Moving takes streams away from an endpoint on purpose, so that the endpoint can be stopped. A stream first gets a lease
at another endpoint, and only then is asked to move. Until then, the stream runs at its old endpoint. The number of
streams that move at a time is limited, since the new endpoint has to compute the prompt of each stream again. At the
deadline, the remaining streams are asked to leave without a lease, if another endpoint serves their model. Such a
stream resumes as if its endpoint had failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trioserve.contracts.endpoint import EndpointId, PairOutcome, RoutedRequest, Stage
from trioserve.router.continuation import Continuations
from trioserve.router.endpoint_state import Fault
from trioserve.router.endpoints import Endpoints
from trioserve.router.queues import ModelQueues, Queue, Queues
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Lease, Ticket, TicketFollower, TicketState

__all__ = ["Disaggregation", "Leases", "Moving", "stage_fault"]


class Moving:
    """The endpoints that are being emptied, and the streams that move.

    Args:
        settings: limits.
        queues: the queues of all models.

    Attributes:
        total: streams that got a lease at another endpoint, in order to move there.
    """

    def __init__(self, settings: RouterSettings, queues: Queues) -> None:
        self.total = 0
        self._settings = settings
        self._queues = queues
        # The deadline of each endpoint that is being emptied. math.inf after the deadline has passed.
        self._deadlines: dict[EndpointId, float] = {}
        self._on_the_way: set[int] = set()

    @property
    def has_room(self) -> bool:
        """True if one more stream may move now."""
        return len(self._on_the_way) < self._settings.moves_at_once_max

    def begin(self, id: EndpointId, deadline: float) -> None:
        """Start emptying an endpoint. The caller then calls `join` for each request at this endpoint.

        Args:
            id: name of the endpoint.
            deadline: time in seconds after which all requests must leave.
        """
        self._deadlines[id] = deadline

    def is_emptied(self, id: EndpointId) -> bool:
        return id in self._deadlines

    def end(self, id: EndpointId) -> None:
        """Stop emptying an endpoint, because it was removed or accepts requests again. Streams that already have a
        lease at another endpoint still move.

        Args:
            id: name of the endpoint.
        """
        if self._deadlines.pop(id, None) is not None:
            for model in self._queues.models.values():
                for ticket in [ticket for ticket in model.moving if ticket.endpoint == id]:
                    self.leave(ticket)

    def join(self, ticket: Ticket) -> None:
        """Let a stream wait for a slot at another endpoint, if the stream has to move and can. Call this whenever the
        condition may have become true.

        Args:
            ticket: the request. Does nothing if the request need not or cannot move.
        """
        if (
            ticket.endpoint in self._deadlines
            and ticket.can_resume
            and ticket.is_answered
            and ticket.state in (TicketState.LEASED, TicketState.RUNNING_FREE)
            and not ticket.is_moving
            and ticket.next_lease is None
            and ticket.request.pinned is None
        ):
            ticket.is_moving = True
            ticket.stage = None  # The next endpoint computes the whole rest of the response.
            self._queues.wait_to_move(ticket)

    def leave(self, ticket: Ticket) -> None:
        """End a stream's wait for a slot at another endpoint. Does nothing if the stream does not wait for one.

        Args:
            ticket: the stream's request.
        """
        if ticket.is_moving:
            ticket.is_moving = False
            self._queues.end_wait_to_move(ticket)

    def note_leased(self, ticket: Ticket) -> None:
        """Record that a stream got a lease at another endpoint.

        Args:
            ticket: the stream's request.
        """
        self.leave(ticket)
        self._on_the_way.add(ticket.index)
        self.total += 1

    def note_arrived(self, ticket: Ticket) -> None:
        """Record that a stream resumed at its new endpoint, or ended.

        Args:
            ticket: the stream's request.
        """
        self._on_the_way.discard(ticket.index)

    def next_deadline(self) -> float:
        return min(self._deadlines.values(), default=math.inf)

    def pop_passed(self, now: float) -> list[EndpointId]:
        """Return the endpoints whose deadline has passed. Each endpoint is returned once.

        Args:
            now: time in seconds.
        """
        over = [id for id, deadline in self._deadlines.items() if deadline <= now]
        for id in over:
            self._deadlines[id] = math.inf
        return over


class Disaggregation:
    """Decides whether to split requests into two stages, and counts the outcomes.

    Args:
        settings: limits.
        endpoints: all endpoints.
        queues: the queues of all models.

    Attributes:
        outcomes_total: requests that should have been disaggregated, by outcome.
    """

    def __init__(self, settings: RouterSettings, endpoints: Endpoints, queues: Queues) -> None:
        self.outcomes_total = dict.fromkeys(PairOutcome, 0)
        self._settings = settings
        self._endpoints = endpoints
        self._queues = queues

    def will_be_disaggregated(self, request: RoutedRequest) -> bool:
        """Return whether the request would be disaggregated if it entered now.

        Args:
            request: a request that has not entered.
        """
        return request.can_be_disaggregated and request.pinned is None and self._endpoints.has_pair(request.model)

    def is_handover_full(self, model: str) -> bool:
        """Return whether so many requests wait for a decode endpoint that no further prompt may start.

        Args:
            model: model name.
        """
        return self._queues.of_model(model).queues[Stage.DECODE].count >= self._settings.handover_waiting_max

    def undo_impossible_splits(self, name: str, model: ModelQueues) -> None:
        """Undo the split of waiting requests whose next stage cannot be done by any endpoint now.

        Args:
            name: model name.
            model: the queues of that model.
        """
        for stage in Stage:
            queue = model.queues[stage]
            for line in queue.again.lines() if queue.again else ():
                # All requests of a line failed at the same endpoints, so the result is the same for all of them.
                is_there = self._has_next_stage(line[0])
                for ticket in line:
                    if not is_there or (stage is Stage.DECODE and not ticket.is_held):
                        self._undo_split(ticket)
            if queue.newcomers.count and not self._endpoints.has_pair(name):
                for ticket in sorted(queue.newcomers, key=lambda ticket: ticket.index):
                    self._undo_split(ticket)

    def note_outcome(self, ticket: Ticket, outcome: PairOutcome) -> None:
        """Count the outcome of a request that should have been disaggregated. Later outcomes of the request are
        ignored.

        Args:
            ticket: the request. Ignored if it was never disaggregated.
        """
        if ticket.is_disaggregated and ticket.pair_outcome is None:
            ticket.pair_outcome = outcome
            self.outcomes_total[outcome] += 1

    def _has_next_stage(self, ticket: Ticket) -> bool:
        if ticket.stage is Stage.PREFILL:
            return self._endpoints.has_pair(ticket.request.model, ticket.tried)
        return self._endpoints.has_stage_endpoint(ticket)

    def _undo_split(self, ticket: Ticket) -> None:
        waits_again = ticket in self._queues.of(ticket).again
        self._queues.of(ticket).leave(ticket)
        fallback = ticket.stage_fault
        if fallback is None:
            is_lost = ticket.stage is Stage.DECODE and not ticket.is_held
            fallback = PairOutcome.HOLD_LOST if is_lost else PairOutcome.NO_ENDPOINT
        self.note_outcome(ticket, fallback)
        ticket.stage = None
        if waits_again:
            self._queues.of(ticket).again.add(ticket)
        else:
            self._queues.of(ticket).newcomers.add(ticket)


def stage_fault(stage: Stage | None, fault: Fault) -> PairOutcome | None:
    """Return the outcome to count if no other endpoint takes over the failed stage of a request. None if the request
    was not split.

    Args:
        stage: the stage that failed, or None if the request was not split.
        fault: how the endpoint failed.
    """
    if stage is Stage.DECODE:
        return PairOutcome.TRANSFER_FAILED if fault is Fault.TRANSFER else PairOutcome.DECODE_FAILED
    return PairOutcome.PREFILL_FAILED if stage is Stage.PREFILL else None


class Leases:
    """The leases of all requests, and the order in which waiting requests get them.

    Args:
        settings: limits.
        fleet: all endpoints.
        queues: the queues of all models.
        continuations: streams that resume at another endpoint.
        moving: streams that move away from an endpoint that is being emptied.
        disaggregation: requests that are split into two stages.
        on_change: called when a waiting ticket gets a lease.
        on_move: called when a stream gets its next lease, at the endpoint to which it has to move.

    Attributes:
        granted_total: leases that were granted.
        follower: follows the tickets.
    """

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Endpoints,
        queues: Queues,
        continuations: Continuations,
        moving: Moving,
        disaggregation: Disaggregation,
        *,
        on_change: Callable[[Ticket], None],
        on_move: Callable[[Ticket], None],
    ) -> None:
        self.granted_total = 0
        self.follower = TicketFollower()
        self._settings = settings
        self._fleet = fleet
        self._queues = queues
        self._continuations = continuations
        self._moving = moving
        self._disaggregation = disaggregation
        self._on_change = on_change
        self._on_move = on_move

    def grant(self, ticket: Ticket, queue: Queue, now: float) -> bool:
        """Grant a lease to a ticket if an endpoint has a free slot.

        Args:
            ticket: the request. It must not be in any queue.
            queue: the queue of the ticket's model and stage.
            now: time in seconds.

        Returns:
            True if the lease was granted.
        """
        if ticket.stage is Stage.PREFILL and self._disaggregation.is_handover_full(ticket.request.model):
            return False
        before = ticket.endpoint
        if not self._fleet.grant(ticket, now):
            return False
        if ticket.has_token:
            self._continuations.note(ticket, now)
            self._fleet.note_moved(before, ticket)
        ticket.leased_at = now
        ticket.move(TicketState.LEASED)
        self.follower.leased(ticket)
        queue.drain_rate.note_begin(now)
        self.granted_total += 1
        return True

    def hand_over(self, now: float) -> None:
        """Grant free slots to waiting requests, in the order of their queues.

        Args:
            now: time in seconds.
        """
        for name, model in self._queues.models.items():
            if model.has_waiting:
                self._disaggregation.undo_impossible_splits(name, model)
                while self._serve_one(model, now):
                    pass

    def use_next(self, ticket: Ticket, lease: Lease) -> None:
        """Make the next lease the current lease, after the old lease was released.

        Args:
            ticket: the stream's request.
            lease: the next lease, which the ticket no longer has.
        """
        before = ticket.exchange(lease).endpoint
        self._fleet.note_moved(before, ticket)
        ticket.is_answered, ticket.stage = False, None
        if ticket.state is not TicketState.LEASED:
            ticket.move(TicketState.LEASED)

    def drop_next(self, ticket: Ticket) -> None:
        """Release the ticket's next lease, if the ticket has one.

        Args:
            ticket: the stream's request.
        """
        if ticket.next_lease is None:
            return
        in_hand = ticket.exchange(ticket.next_lease)
        ticket.next_lease = None
        self._fleet.end_lease(ticket)
        self._fleet.end_probe(ticket)
        self._fleet.end_flight(ticket)
        ticket.exchange(in_hand)

    def release(self, ticket: Ticket, now: float) -> None:
        """Release the ticket's queue position or leases.

        Args:
            ticket: the request.
            now: time in seconds.
        """
        if ticket.state is TicketState.WAITING:
            self._queues.leave(ticket)
            return
        self._moving.leave(ticket)
        self.drop_next(ticket)
        if ticket.state is TicketState.LEASED:
            self._fleet.end_lease(ticket)
            self._fleet.end_probe(ticket)
        is_idle = self._fleet.end_flight(ticket)
        drain_rate = self._queues.of(ticket).drain_rate
        drain_rate.note(now)
        if is_idle:
            drain_rate.note_idle(now)

    def _grant_next(self, ticket: Ticket, now: float) -> bool:
        """Grant a second lease to a stream that has to leave its endpoint, if another endpoint has a free slot. Return
        True if the lease was granted.
        """
        in_hand = ticket.exchange(Lease(at=now))
        accepts_requests = self._fleet.grant(ticket, now)  # A stream that moves has no stage.
        lease = ticket.exchange(in_hand)
        if accepts_requests:
            ticket.next_lease = lease
            self._moving.note_leased(ticket)
            self.granted_total += 1
        return accepts_requests

    def _serve_one(self, model: ModelQueues, now: float) -> bool:
        """Grant a lease to the first request that can get a lease. Return False if no request can get a lease.

        The caller calls this again after each grant: if a request moves from prefill to decode, another prompt may
        start.
        """
        newcomers = model.heads()
        for ticket, queue in self._in_turn(model, newcomers, now):
            if ticket.is_moving:
                if not self._grant_next(ticket, now):
                    continue
                model.note_stream(are_newcomers_waiting=bool(newcomers))
                self._on_move(ticket)
                return True
            if self.grant(ticket, self._queues.of(ticket), now):
                if queue is None:
                    model.continued.remove(ticket)
                    model.note_stream(are_newcomers_waiting=bool(newcomers))
                elif ticket in queue.again:
                    queue.again.remove(ticket)
                    model.note_stream(are_newcomers_waiting=bool(newcomers))
                else:
                    queue.newcomers.take()
                    model.streams_in_a_row = 0
                self._on_change(ticket)
                return True
        return False

    def _in_turn(
        self, model: ModelQueues, newcomers: list[tuple[Queue, Ticket]], now: float
    ) -> list[tuple[Ticket, Queue | None]]:
        """List the requests that may get the next lease, each with its queue, in the order in which they are tried. A
        stream that waits again has no queue, so its entry has None.

        Within a priority, the list begins with requests and streams that wait for a second time, because they lost
        their endpoint, or their prompt was computed for another endpoint. The one that waits longest is first. Streams
        that have to move follow, and newcomers are last. After several grants in a row to requests that are not
        newcomers, a newcomer is first.
        """
        again = model.waiting_again()
        continued = model.continued.heads() if model.continued and self._continuations.has_turn(now) else []
        moving = model.moving.heads() if model.moving and self._moving.has_room else []
        if not continued and not moving and not again:
            return [(ticket, queue) for queue, ticket in newcomers]
        newcomers_class = 0 if model.streams_in_a_row >= self._settings.continuations_in_a_row_max else 3
        turns: list[tuple[tuple[int, int, int], Ticket, Queue | None]] = []
        turns += [((ticket.request.priority, 1, ticket.again_index), ticket, queue) for queue, ticket in again]
        turns += [((ticket.request.priority, 1, ticket.again_index), ticket, None) for ticket in continued]
        turns += [((ticket.request.priority, 2, ticket.again_index), ticket, None) for ticket in moving]
        turns += [
            ((ticket.request.priority, newcomers_class, ticket.index), ticket, queue) for queue, ticket in newcomers
        ]
        return [(ticket, queue) for _, ticket, queue in sorted(turns, key=lambda turn: turn[0])]
