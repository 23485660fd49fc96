"""Decides which requests compute their prompt at one endpoint and their response at another.

A disaggregated request has a prefill stage and then a decode stage (`Ticket.stage`). Each stage has a queue of its own.
Roles of endpoints are hints. If a split cannot be completed, one endpoint does the whole request: the stage becomes
None and stays None.
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
        return request.can_be_disaggregated and request.pinned is None and self._endpoints.is_pair_there(request.model)

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
                is_there = self._is_next_stage_there(line[0])
                for ticket in line:
                    if not is_there or (stage is Stage.DECODE and not ticket.is_held):
                        self._undo_split(ticket)
            if queue.newcomers.count and not self._endpoints.is_pair_there(name):
                for ticket in sorted(queue.newcomers, key=lambda ticket: ticket.index):
                    self._undo_split(ticket)

    def note_outcome(self, ticket: Ticket, outcome: PairOutcome) -> None:
        """Count the outcome of a request that should have been disaggregated. Later outcomes of the request are
        ignored.

        Args:
            ticket: the request. Ignored if it was never disaggregated.
            outcome: the outcome.
        """
        if ticket.is_disaggregated and ticket.pair_outcome is None:
            ticket.pair_outcome = outcome
            self.outcomes_total[outcome] += 1

    def _is_next_stage_there(self, ticket: Ticket) -> bool:
        if ticket.stage is Stage.PREFILL:
            return self._endpoints.is_pair_there(ticket.request.model, ticket.tried)
        return self._endpoints.is_stage_there(ticket)

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
