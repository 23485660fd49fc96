"""The queues of each model. There is one queue for each stage that a request may wait for. Does not decide whether a
request may be served.
"""

from __future__ import annotations

from trioserve.contracts.endpoint import Stage
from trioserve.router.continued_queue import ContinuedQueue
from trioserve.router.drain_rate import DrainRate
from trioserve.router.ticket import Ticket
from trioserve.router.waiting_queue import FairQueue

__all__ = ["ModelQueues", "Queue", "Queues"]


class Queue:
    """The queue of one model for one stage."""

    def __init__(self) -> None:
        self.newcomers = FairQueue()
        # Requests that wait again after an endpoint failed them or computed their prompt.
        self.again = ContinuedQueue()
        self.drain_rate = DrainRate()

    @property
    def count(self) -> int:
        return self.newcomers.count + len(self.again)

    @property
    def prompt_tokens(self) -> int:
        return self.newcomers.prompt_tokens + self.again.prompt_tokens

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket that was not served.

        Args:
            ticket: a ticket of this queue.
        """
        if ticket in self.again:
            self.again.remove(ticket)
        else:
            self.newcomers.remove(ticket)


class ModelQueues:
    """The queues of one model.

    Attributes:
        queues: the queues, by stage.
        live_count: requests that have entered and not ended, in any state.
        preparing: requests that are read before they enter.
        continued: number of streams that broke off and wait to resume at another endpoint. They had a lease before, so
            they do not count against the limit for newcomers.
        moving: streams that still run and wait for a lease at another endpoint.
        streams_in_a_row: leases granted in a row to streams or to requests that wait again, while newcomers waited.
    """

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
    def has_waiting(self) -> bool:
        """True if a request waits for a lease. It is fast, because it is checked at every event."""
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
        """Record that a stream, or a request that waits again, got a lease.

        Args:
            are_newcomers_waiting: True if newcomers wait for a lease.
        """
        self.streams_in_a_row = self.streams_in_a_row + 1 if are_newcomers_waiting else 0

    def waiting_again(self) -> list[tuple[Queue, Ticket]]:
        """Return the first request of each line of requests that wait again, in no order, without requests on trial."""
        return [(queue, ticket) for queue in self.queues.values() if queue.again for ticket in queue.again.heads()]

    def on_trial(self) -> list[Ticket]:
        """Return requests on trial, in the order in which their trials began."""
        queues = (self.continued, *(queue.again for queue in self.queues.values()))
        found = [ticket for queue in queues if queue for ticket in queue.on_trial()]
        return sorted(found, key=lambda ticket: ticket.again_index)

    def heads(self) -> list[tuple[Queue, Ticket]]:
        """Return the next newcomer of each queue, by priority and then in order of arrival."""
        heads = [(queue, head) for queue in self.queues.values() if (head := queue.newcomers.head()) is not None]
        return sorted(heads, key=lambda entry: (entry[1].request.priority, entry[1].index))


class Queues:
    """The queues of all models.

    Attributes:
        models: the queues by model name.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelQueues] = {}
        self._again_total = 0

    def of_model(self, name: str) -> ModelQueues:
        model = self.models.get(name)
        if model is None:
            model = self.models[name] = ModelQueues()
        return model

    def of(self, ticket: Ticket) -> Queue:
        """Return the queue of a ticket, also while it has a lease.

        Args:
            ticket: the ticket.
        """
        return self.of_model(ticket.request.model).queues[ticket.stage]

    def forget_unused(self, name: str) -> None:
        """Delete the queues of a model that has no requests left.

        Call this when no endpoint serves the model. Otherwise the names of loaded and unloaded adapters would
        accumulate, and every event looks at all queues.

        Args:
            name: model name.
        """
        model = self.models.get(name)
        if model is not None and not model.live_count and not model.preparing:
            del self.models[name]

    def wait_again(self, ticket: Ticket) -> None:
        """Add a ticket that left an endpoint, after the tickets that already wait again.

        Args:
            ticket: the ticket.
        """
        self._note_again(ticket)
        if ticket.has_token:
            self.of_model(ticket.request.model).continued.add(ticket)
        else:
            self.of(ticket).again.add(ticket)

    def wait_to_move(self, ticket: Ticket) -> None:
        """Add a running stream that has to move, after the streams that already wait to move.

        Args:
            ticket: the stream's ticket.
        """
        self._note_again(ticket)
        self.of_model(ticket.request.model).moving.add(ticket)

    def end_wait_to_move(self, ticket: Ticket) -> None:
        self.of_model(ticket.request.model).moving.remove(ticket)

    def _note_again(self, ticket: Ticket) -> None:
        self._again_total += 1
        ticket.again_index = self._again_total

    def end_trial(self, ticket: Ticket) -> None:
        """Move a ticket whose trial ended to the end of its line.

        Args:
            ticket: the ticket.
        """
        self.leave(ticket)
        self.wait_again(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket that was not served.

        Args:
            ticket: a waiting ticket.
        """
        if ticket.has_token:
            self.of_model(ticket.request.model).continued.remove(ticket)
        else:
            self.of(ticket).leave(ticket)

    def all_waiting(self) -> list[Ticket]:
        """Return all waiting tickets, in no order, without running streams that wait to move."""
        queues = [queue for model in self.models.values() for queue in model.queues.values()]
        continued = [ticket for model in self.models.values() for ticket in model.continued]
        return continued + [ticket for queue in queues for ticket in (*queue.again, *queue.newcomers)]
