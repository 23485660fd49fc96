"""Who waits for which model: a queue for each part of a request that may be next, and the order between those.

Whether anybody may be served is not asked here.
"""

from __future__ import annotations

from trioserve.contracts.endpoint import Stage
from trioserve.router.continued_queue import ContinuedQueue
from trioserve.router.drain_rate import DrainRate
from trioserve.router.ticket import Ticket
from trioserve.router.waiting_queue import FairQueue

__all__ = ["ModelQueues", "Queue", "Queues"]


class Queue:
    """One model's queue for one stage."""

    def __init__(self) -> None:
        self.newcomers = FairQueue()
        # Requests that were at an endpoint, which failed them or computed their prompt, and wait again.
        self.again = ContinuedQueue()
        self.drain_rate = DrainRate()

    @property
    def count(self) -> int:
        return self.newcomers.count + len(self.again)

    @property
    def prompt_tokens(self) -> int:
        return self.newcomers.prompt_tokens + self.again.prompt_tokens

    def leave(self, ticket: Ticket) -> None:
        """It waits no longer, and was not served."""
        if ticket in self.again:
            self.again.remove(ticket)
        else:
            self.newcomers.remove(ticket)


class ModelQueues:
    """One model's. live_count: requests that have entered and not ended, wherever they are. preparing: requests that
    are read before they enter. continued: streams that broke off, and go on elsewhere; they take no places from those
    who have not begun, as each has had a lease already. moving: streams that run where they are to leave.
    streams_in_a_row: of both, and of requests that wait again, that got a lease since a newcomer did, while some
    waited."""

    def __init__(self) -> None:
        self.queues: dict[Stage | None, Queue] = {stage: Queue() for stage in (Stage.DECODE, Stage.PREFILL, None)}
        self.live_count = 0
        self.preparing = 0
        self.continued = ContinuedQueue()
        self.moving = ContinuedQueue()
        self.streams_in_a_row = 0

    @property
    def count(self) -> int:
        return len(self.continued) + sum(queue.count for queue in self.queues.values())

    @property
    def prompt_tokens(self) -> int:
        return self.continued.prompt_tokens + sum(queue.prompt_tokens for queue in self.queues.values())

    @property
    def is_anybody_waiting(self) -> bool:
        """For a lease. Asked at every event, and mostly not so."""
        decode, prefill, whole = self.queues.values()
        return bool(
            whole.newcomers.count
            or whole.again
            or prefill.newcomers.count
            or prefill.again
            or decode.newcomers.count
            or decode.again
            or self.continued
            or self.moving
        )

    def note_stream(self, *, are_newcomers_waiting: bool) -> None:
        """One got a lease to go on with."""
        self.streams_in_a_row = self.streams_in_a_row + 1 if are_newcomers_waiting else 0

    def waiting_again(self) -> list[tuple[Queue, Ticket]]:
        """The first of each line of requests that wait again, without those on trial, in no order."""
        return [(queue, ticket) for queue in self.queues.values() if queue.again for ticket in queue.again.heads()]

    def on_trial(self) -> list[Ticket]:
        """Requests on trial, in the order in which their trials began."""
        queues = (self.continued, *(queue.again for queue in self.queues.values()))
        found = [ticket for queue in queues if queue for ticket in queue.on_trial()]
        return sorted(found, key=lambda ticket: ticket.again_index)

    def heads(self) -> list[tuple[Queue, Ticket]]:
        """Who is next in each queue. Where queues want the same endpoint, the one who came first goes first."""
        heads = [(queue, head) for queue in self.queues.values() if (head := queue.newcomers.head()) is not None]
        return sorted(heads, key=lambda entry: (entry[1].request.priority, entry[1].index))


class Queues:
    """All of them. models: by name."""

    def __init__(self) -> None:
        self.models: dict[str, ModelQueues] = {}
        self._again_total = 0

    def of_model(self, name: str) -> ModelQueues:
        model = self.models.get(name)
        if model is None:
            model = self.models[name] = ModelQueues()
        return model

    def of(self, ticket: Ticket) -> Queue:
        """The one in which it is, or was before it got its lease."""
        return self.of_model(ticket.request.model).queues[ticket.stage]

    def forget_unused(self, name: str) -> None:
        """Let its queues go if no request for it is left. To be called when nobody serves it: names of adapters come
        and go without end, and each event looks at all queues."""
        model = self.models.get(name)
        if model is not None and not model.live_count and not model.preparing:
            del self.models[name]

    def wait_again(self, ticket: Ticket) -> None:
        """It was elsewhere, and comes after those who wait again already."""
        self._note_again(ticket)
        if ticket.has_token:
            self.of_model(ticket.request.model).continued.add(ticket)
        else:
            self.of(ticket).again.add(ticket)

    def wait_to_move(self, ticket: Ticket) -> None:
        """It runs, and waits for room elsewhere after those who do already."""
        self._note_again(ticket)
        self.of_model(ticket.request.model).moving.add(ticket)

    def end_wait_to_move(self, ticket: Ticket) -> None:
        self.of_model(ticket.request.model).moving.remove(ticket)

    def _note_again(self, ticket: Ticket) -> None:
        self._again_total += 1
        ticket.again_index = self._again_total

    def end_trial(self, ticket: Ticket) -> None:
        """It is on trial no longer, and takes the last place of its line."""
        self.leave(ticket)
        self.wait_again(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It waits no longer, and was not served."""
        if ticket.has_token:
            self.of_model(ticket.request.model).continued.remove(ticket)
        else:
            self.of(ticket).leave(ticket)

    def everybody(self) -> list[Ticket]:
        """Who waits, in no order."""
        queues = [queue for model in self.models.values() for queue in model.queues.values()]
        continued = [ticket for model in self.models.values() for ticket in model.continued]
        return continued + [ticket for queue in queues for ticket in (*queue.again, *queue.newcomers)]
