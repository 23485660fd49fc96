"""The scope of one request: it waits for its lease, and runs its attempts at endpoints."""

from __future__ import annotations

import bisect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import trio

from trioserve.contracts.endpoint import EndpointId, PairOutcome, Stage
from trioserve.contracts.errors import EndpointLost, TrioserveError
from trioserve.router.core import RouterCore
from trioserve.router.endpoint_state import Fault
from trioserve.router.ticket import Ticket, TicketState
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["AdmissionScope", "SentTimes", "Withdrawn"]


class Withdrawn(EndpointLost):
    """Raised when the router withdraws a request from its endpoint.

    Args:
        message: Explanation for the log and the client.
        fault: Why the request is withdrawn.
    """

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


KEPT_SECONDS = 10.0  # The router uses a load report for two seconds.


class SentTimes:
    """The times at which recent requests were sent, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._before = 0  # Number of requests that were sent before the first time in the deque.

    def note(self, now: float) -> None:
        """Note that a request is being sent.

        Args:
            now: Current time.
        """
        self._times.append(now)
        if len(self._times) > 64 and self._times[len(self._times) // 2] < now - KEPT_SECONDS:
            half = len(self._times) // 2
            self._before += half
            del self._times[:half]

    def count_at(self, moment: float) -> int:
        """Return the number of requests that were sent before a given time.

        Args:
            moment: A recent time. If it is earlier than all stored times, the count is unknown, and 0 is returned.
        """
        if self._before and self._times and moment < self._times[0]:
            return 0
        return self._before + bisect.bisect_right(self._times, moment)


class Dispatching(Protocol):
    """The methods of `Dispatch` that a scope calls. `Dispatch` documents them."""

    on_wait_over: Callable[[float], object]
    on_paired: Callable[[float], object]
    sent_times: SentTimes

    def retime(self) -> None: ...


@uninterrupted
class AdmissionScope:
    """One request, from its entry into the queue until its response is complete.

    Attributes:
        ticket: State of the request in the router core.
        id: Id under which the request may be seen and aborted. None for a request without an id.
        owner: Owner of the request. None if clients are not distinguished.
        can_resume: Called after the first token. Returns True if another endpoint could resume the stream.
        note_reasoning_ended: Called when the endpoint has ended the reasoning at the client's request.
        headers: Returns the HTTP headers that the router sends when it asks the endpoint about this request for the
            client.
        gives_partial: True if the client needs the partial result, even if another client or an operator aborts the
            request.
        withdrawn_for: Reason why the current attempt must end. None if the attempt may continue.
        is_sending: True while data is sent to the client. A withdrawn attempt ends only after the data is sent, see
            `send`.
        attempts: Number of attempts that have started.
    """

    def __init__(
        self, dispatch: Dispatching, core: RouterCore, ticket: Ticket, *, id: str | None, owner: str | None
    ) -> None:
        self.ticket = ticket
        self.id = id
        self.owner = owner
        self.can_resume: Callable[[], bool] = lambda: False
        self.note_reasoning_ended: Callable[[], None] = lambda: None
        self.headers: Callable[[], list[tuple[str, str]]] = list
        self.gives_partial = False
        self._dispatch = dispatch
        self._core = core
        self._changed = trio.Event()
        self._attempt: trio.CancelScope | None = None
        self._end: TrioserveError | None = None
        self.withdrawn_for: Fault | None = None
        self.is_sending = False
        self.attempts = 0
        self._is_attempt_over = trio.Event()

    async def lease(self) -> EndpointId:
        """Wait for a lease and return its endpoint.

        Raises:
            Overloaded: the request waited too long in this queue.
            QueueWaitOver: the request's own queue deadline passed.
            Draining: the server drains.
            NoEndpoint: no endpoint can serve the request any more.
            RequestAborted: the request was aborted.
        """
        ticket = self.ticket
        while ticket.state is TicketState.WAITING and self._end is None:
            self._changed = trio.Event()
            await self._changed.wait()
        if self._end is not None:
            raise self._end
        if ticket.prefilled_by is None and not ticket.has_token:
            self._dispatch.on_wait_over(trio.current_time() - ticket.entered_at)
        if ticket.refusal is not None:
            raise ticket.refusal
        assert ticket.endpoint is not None
        return ticket.endpoint

    @property
    def index(self) -> int:
        """Return the request's number in order of arrival at this router."""
        return self.ticket.index

    @property
    def model(self) -> str:
        return self.ticket.request.model

    @property
    def priority(self) -> int:
        return self.ticket.request.priority

    @property
    def tenant(self) -> str:
        """Return the tenant to which the request belongs. All requests of one tenant share one turn in the queue."""
        return self.ticket.request.tenant

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, counted or estimated when the request entered."""
        return self.ticket.request.prompt_tokens

    @property
    def sequence_count(self) -> int:
        return self.ticket.request.sequences

    @property
    def is_pinned(self) -> bool:
        """Return True if the request may run at only one endpoint."""
        return self.ticket.request.pinned is not None

    @property
    def entered_at(self) -> float:
        return self.ticket.entered_at

    @property
    def leased_at(self) -> float:
        """Return the time at which the current lease was granted, in seconds of Trio's clock."""
        return self.ticket.leased_at

    @property
    def endpoint(self) -> EndpointId | None:
        """Return the endpoint of the current lease. At the first token the lease is returned, but this value stays."""
        return self.ticket.endpoint

    @property
    def prefilled_by(self) -> EndpointId | None:
        """Return the endpoint that computed the prompt, if another endpoint decodes."""
        return self.ticket.prefilled_by

    @property
    def pair_outcome(self) -> PairOutcome | None:
        """Return how the split of a disaggregated request ended. None for other requests, or until it has ended."""
        return self.ticket.pair_outcome

    @property
    def has_token(self) -> bool:
        """Return True if the client has received a token."""
        return self.ticket.has_token

    @property
    def stage(self) -> Stage | None:
        """Return the stage of a disaggregated request for which the current lease was granted. None if the lease is for
        the whole request. Each call of `lease` may change the value.
        """
        return self.ticket.stage

    @property
    def state(self) -> str:
        """Return the state of the request as one word.

        The usual states are "waiting" and "running". A disaggregated request has the states "waiting", "prefill",
        "handover" (it waits for its decode endpoint) and "decode".
        """
        if self.ticket.stage is Stage.DECODE:
            return "handover" if self.is_queued else "decode"
        if self.is_queued:
            return "waiting"
        return "running" if self.ticket.stage is None else "prefill"

    @property
    def is_waiting(self) -> bool:
        """Return True if the request waits for a lease."""
        return self.ticket.state is TicketState.WAITING

    @property
    def is_queued(self) -> bool:
        """Return True if the request waits for a lease, or has a lease but was not sent yet."""
        ticket = self.ticket
        return ticket.state in (TicketState.WAITING, TicketState.LEASED) and ticket.sent_index is None

    def sent(self) -> None:
        """Note that the request is being sent to its endpoint. For callers that do not use `attempt`."""
        self._core.sent(self.ticket)
        self._dispatch.sent_times.note(trio.current_time())

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run one attempt at the endpoint of the lease.

        Raises:
            Withdrawn: the router withdrew the request from the endpoint.
            TrioserveError: the request was ended, for example with RequestAborted or Draining.
        """
        self.sent()
        self.withdrawn_for, self.is_sending = None, False
        self.attempts += 1
        self._is_attempt_over = trio.Event()
        with trio.CancelScope() as scope:
            self._attempt = scope
            try:
                yield
            finally:
                self._attempt = None  # From here on, the end of the request does not cancel this scope any more.
                self._is_attempt_over.set()
        if scope.cancelled_caught:
            raise self._end or self._withdrawn()

    async def wait_for_end(self, attempt: int) -> None:
        """Wait until an attempt has ended.

        Args:
            attempt: Number of the attempt, see `attempts`.
        """
        if self.attempts == attempt:
            await self._is_attempt_over.wait()

    def check_withdrawn(self) -> None:
        """Check that data from the endpoint may still be sent to the client. Call this method for all data that
        arrives.

        Raises:
            Withdrawn: the data must be discarded.
        """
        if self.withdrawn_for is not None and self._end is None:
            raise self._withdrawn()

    async def send(self, sending: Awaitable[None], *, is_last: bool = False) -> None:
        """Send data to the client. The attempt does not end while data is being sent, so the client never gets half of
        an event.

        Args:
            sending: Awaitable that sends the data.
            is_last: True if no more data follows. Then the attempt is not withdrawn after the data is sent.

        Raises:
            Withdrawn: the request was withdrawn while the data was sent.
        """
        self.is_sending = True
        await sending
        if not is_last:
            self.is_sending = False
            self.check_withdrawn()

    def _withdrawn(self) -> Withdrawn:
        fault = self.withdrawn_for or Fault.HUNG
        reason = "drains" if fault is Fault.LEAVING else "does not answer any more"
        return Withdrawn(f'the endpoint "{self.ticket.endpoint}" {reason}', fault)

    def first_token(self, *, is_last: bool = False) -> None:
        """Note that the endpoint has begun its response.

        Args:
            is_last: True if the response arrived as a whole, so that the time of its first token is not known.
        """
        ticket, now = self.ticket, trio.current_time()
        if ticket.stage is Stage.DECODE and not ticket.has_token and not is_last:
            self._dispatch.on_paired(now - ticket.prefilled_at)
        self._core.first_token(ticket, now, can_resume=self.can_resume())
        self._dispatch.retime()

    def prefilled(self, *, outcome: PairOutcome | None = None) -> None:
        """Note that the endpoint has computed the prompt and freed its slot. The caller must call `lease` again before
        the decode.

        Args:
            outcome: Reason why one endpoint must serve the rest of the request. None if the blocks are held for a
                decode endpoint.
        """
        self._core.prefilled(self.ticket, trio.current_time(), outcome=outcome)
        self._dispatch.retime()

    def hold_lost(self) -> None:
        """Note that the prefill endpoint does not hold the request's blocks any more. Allowed at any time."""
        self._core.hold_lost(self.ticket, trio.current_time())
        self._dispatch.retime()

    def failed(
        self,
        fault: Fault,
        *,
        busy_seconds: float = 1.0,
        token_count: int = 0,
        is_certain: bool = False,
        reason: str | None = None,
    ) -> bool:
        """Note that the attempt failed, before its response or in the middle of a stream that can resume.

        Args:
            fault: Kind of the failure.
            busy_seconds: Seconds for which a busy or leaving endpoint gets no requests.
            token_count: Number of tokens that the client has received.
            is_certain: True if the endpoint itself reported that the failure is its fault.
            reason: Label of the failure for metrics. None for the default of the fault.

        Returns:
            True if the caller may call `lease` again. False if the router gives up the request. `refusal` then has the
            reason.
        """
        if fault is Fault.LEAVING and self.ticket.next_lease is not None:
            self._core.moved(self.ticket, trio.current_time())
            self._dispatch.retime()
            return True
        is_waiting = self._core.failed(
            self.ticket,
            fault,
            trio.current_time(),
            busy_seconds=busy_seconds,
            token_count=token_count,
            is_certain=is_certain,
            reason=reason,
        )
        self._dispatch.retime()
        return is_waiting

    def note_client_fault(self) -> bool:
        """Note that the endpoint refused the request as invalid.

        Returns:
            True if another endpoint must confirm the refusal.
        """
        return self._core.note_client_fault(self.ticket)

    def wake(self) -> None:
        self._changed.set()

    def withdraw_from(self, id: EndpointId, fault: Fault, *, unbegun: bool, streams: bool) -> None:
        """End the attempt if it runs at the given endpoint.

        Args:
            id: The endpoint.
            fault: Why the attempt ends.
            unbegun: True to end the attempt if it has no response yet.
            streams: True to end the attempt if another endpoint can resume its stream.
        """
        if self._attempt is None or self.ticket.endpoint != id:
            return
        if (streams and self.can_resume()) if self.ticket.has_token else unbegun:
            self.withdraw(fault)

    def withdraw(self, fault: Fault = Fault.LEAVING) -> None:
        """End the attempt with Withdrawn, as soon as no data is being sent to the client. This call has no effect if
        there is no attempt.

        Args:
            fault: Why the attempt ends.
        """
        if self._attempt is not None:
            self.withdrawn_for = fault
            if not self.is_sending:
                self._attempt.cancel()

    @property
    def refusal(self) -> TrioserveError | None:
        """Return the reason why the router does not continue the request. None if the router continues it."""
        return self.ticket.refusal

    @property
    def end_reason(self) -> TrioserveError | None:
        """Return the reason that was passed to `end`. None if `end` was not called."""
        return self._end

    @property
    def is_ended(self) -> bool:
        """Return True if `end` was called, or if the request was refused in the queue."""
        return self._end is not None or self.ticket.state is TicketState.ENDED

    def end(self, reason: TrioserveError) -> None:
        """End the request. In the queue, its queue position is free at once. At an endpoint, its attempt is cancelled.

        Args:
            reason: Error that is raised in the request's task.
        """
        self._end = reason
        if self._attempt is not None:
            self._attempt.cancel()
        else:
            self._core.leave(self.ticket, trio.current_time())
            self.wake()
