"""What a router says to those whom it does not serve, and how often it has. Who that is, is decided elsewhere."""

from __future__ import annotations

import math

from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import (
    Draining,
    InvalidRequest,
    NoEndpoint,
    Overloaded,
    QueueWaitOver,
    TrioserveError,
)
from trioserve.router.queues import Queue
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket

__all__ = [
    "Refusals",
    "draining",
    "no_endpoint",
    "pinned_is_full",
    "preparing_is_full",
    "queue_was_full",
    "too_many_sequences",
    "wait_over",
]

DRAIN_RETRY_SECONDS = 5.0


class Refusals:
    """totals: since the start, by reason."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}

    def counted(self, error: TrioserveError) -> TrioserveError:
        """The same, counted."""
        reason = error.reason if isinstance(error, Overloaded) else "queue_timeout"
        self.totals[reason] = self.totals.get(reason, 0) + 1
        return error


def too_many_sequences(request: RoutedRequest, sequences_max: int) -> InvalidRequest:
    return InvalidRequest(
        f"the request asks for {request.sequences} responses, its n times its prompts, and one request may "
        f"have 1 to {sequences_max}: ask for fewer of them, or in several requests",
        param="n",
    )


def preparing_is_full(queue: Queue, count: int, slots: int, requests_max: int, now: float) -> Overloaded:
    """count: who waits, and who is read before."""
    seconds = queue.drain_rate.seconds_for(count + 1, now)
    return Overloaded(
        f"{count} requests wait for the model, {requests_max} may and {slots} find "
        f"room at an endpoint: try again in {math.ceil(seconds)} s",
        reason="queue_full",
        retry_after_seconds=seconds,
    )


def queue_was_full(settings: RouterSettings, queue: Queue, request: RoutedRequest, now: float) -> Overloaded | None:
    """Whether the queue that the request has just joined had no place for it."""
    count, prompt_tokens = queue.count - 1, queue.prompt_tokens - request.prompt_tokens
    if count >= settings.queue_requests_max:
        message = f"{count} requests wait for the model, {settings.queue_requests_max} may"
    elif prompt_tokens + request.prompt_tokens > settings.queue_prompt_tokens_max and count:
        message = (
            f"requests with {prompt_tokens} prompt tokens wait for the model, and with the "
            f"{request.prompt_tokens} of this one there would be more than {settings.queue_prompt_tokens_max}"
        )
    else:
        return None
    seconds = queue.drain_rate.seconds_for(count + 1, now)
    return Overloaded(
        f"{message}: try again in {math.ceil(seconds)} s", reason="queue_full", retry_after_seconds=seconds
    )


def wait_over(ticket: Ticket, queue: Queue, now: float) -> TrioserveError:
    waited = now - ticket.entered_at
    if ticket.has_token:
        return Overloaded(
            "the endpoint failed, and no other had room for the rest of the response in time: try again",
            reason="continuation_wait_over",
            retry_after_seconds=queue.drain_rate.seconds_for(queue.count + 1, now),
        )
    if ticket.is_lost and ticket.own_deadline > now:
        seconds = queue.drain_rate.seconds_for(queue.count + 1, now)
        return NoEndpoint(
            f"the endpoint that had the request was lost, and no other took it in time: try again in "
            f"{math.ceil(seconds)} s",
            reason="endpoint_lost",
            retry_after_seconds=seconds,
        )
    if ticket.own_deadline <= now:
        return QueueWaitOver(f"the request waited {waited:.1f} s in the queue, and that was all the time it had")
    return Overloaded(
        f"the request waited {waited:.1f} s in the queue, nobody waits longer: try again",
        reason="queue_wait_over",
        retry_after_seconds=queue.drain_rate.seconds_for(queue.count + 1, now),
    )


def pinned_is_full(request: RoutedRequest, queue: Queue, now: float) -> Overloaded:
    return Overloaded(
        f'the endpoint "{request.pinned}" that the request asks for has no room: try again, or ask for none',
        reason="pinned_endpoint_overloaded",
        retry_after_seconds=queue.drain_rate.seconds_for(1, now),
    )


def draining() -> Draining:
    return Draining(
        "the server is leaving and takes no new requests: ask another one",
        reason="draining",
        retry_after_seconds=DRAIN_RETRY_SECONDS,
    )


def no_endpoint(request: RoutedRequest, back_at: float | None, now: float) -> NoEndpoint:
    """back_at: when the first of those that serve its model may be given requests again, if that is known."""
    if request.pinned is not None:
        message = f'no endpoint "{request.pinned}" takes requests for the model "{request.model}" now'
    else:
        message = f'no endpoint takes requests for the model "{request.model}" now'
    seconds = DRAIN_RETRY_SECONDS
    if back_at is not None and now < back_at < math.inf:  # one that has stopped is back when it is well, whenever
        seconds = max(1.0, back_at - now)
    return NoEndpoint(
        f"{message}: try again in {math.ceil(seconds)} s", reason="no_endpoint", retry_after_seconds=seconds
    )
