"""Which requests have their prompt computed at one endpoint and their response made at another, and what becomes of
those that cannot go on so.

Such a request has a prefill stage and then a decode stage (its stage), each with a queue of its own. Roles are hints,
so whatever does not come to pass that way, one endpoint does whole: the stage becomes None, for good.
"""

from __future__ import annotations

from trioserve.contracts.endpoint import PairOutcome, RoutedRequest, Stage
from trioserve.router.endpoint_state import Fault
from trioserve.router.endpoints import Endpoints
from trioserve.router.queues import ModelQueues, Queues
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket

__all__ = ["Disaggregation", "stage_fault"]


class Disaggregation:
    """outcomes_total: requests that were to be disaggregated, by what became of that."""

    def __init__(self, settings: RouterSettings, endpoints: Endpoints, queues: Queues) -> None:
        self.outcomes_total = dict.fromkeys(PairOutcome, 0)
        self._settings = settings
        self._endpoints = endpoints
        self._queues = queues

    def will_be_disaggregated(self, request: RoutedRequest) -> bool:
        """Whether it would be, if it entered now."""
        return request.can_be_disaggregated and request.pinned is None and self._endpoints.is_pair_there(request.model)

    def is_handover_full(self, model: str) -> bool:
        """Whether so many wait to be answered that no further prompt is begun."""
        return self._queues.of_model(model).queues[Stage.DECODE].count >= self._settings.handover_waiting_max

    def make_whole_what_cannot_be_split(self, name: str, model: ModelQueues) -> None:
        """Nobody waits for a part that no endpoint may do now: those one endpoint does whole."""
        for stage in Stage:
            queue = model.queues[stage]
            for line in queue.again.lines() if queue.again else ():
                is_there = self._is_next_stage_there(line[0])  # the same for all of them: they failed at the same
                for ticket in line:
                    if not is_there or (stage is Stage.DECODE and not ticket.is_held):
                        self._make_whole(ticket)
            if queue.newcomers.count and not self._endpoints.is_pair_there(name):
                for ticket in sorted(queue.newcomers, key=lambda ticket: ticket.index):
                    self._make_whole(ticket)

    def note_outcome(self, ticket: Ticket, outcome: PairOutcome) -> None:
        """Once for each request that was to be disaggregated."""
        if ticket.is_disaggregated and ticket.pair_outcome is None:
            ticket.pair_outcome = outcome
            self.outcomes_total[outcome] += 1

    def _is_next_stage_there(self, ticket: Ticket) -> bool:
        if ticket.stage is Stage.PREFILL:
            return self._endpoints.is_pair_there(ticket.request.model, ticket.tried)
        return self._endpoints.is_stage_there(ticket)

    def _make_whole(self, ticket: Ticket) -> None:
        was_elsewhere = ticket in self._queues.of(ticket).again
        self._queues.of(ticket).leave(ticket)
        fallback = ticket.stage_fault
        if fallback is None:
            is_lost = ticket.stage is Stage.DECODE and not ticket.is_held
            fallback = PairOutcome.HOLD_LOST if is_lost else PairOutcome.NO_ENDPOINT
        self.note_outcome(ticket, fallback)
        ticket.stage = None
        if was_elsewhere:
            self._queues.of(ticket).again.add(ticket)
        else:
            self._queues.of(ticket).newcomers.add(ticket)


def stage_fault(stage: Stage | None, fault: Fault) -> PairOutcome | None:
    """What becomes of a disaggregated request if nobody else takes the stage over that an endpoint has failed."""
    if stage is Stage.DECODE:
        return PairOutcome.TRANSFER_FAILED if fault is Fault.TRANSFER else PairOutcome.DECODE_FAILED
    return PairOutcome.PREFILL_FAILED if stage is Stage.PREFILL else None
