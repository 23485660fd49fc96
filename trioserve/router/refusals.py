"""The errors with which a router refuses requests, and their counts. Does not decide which requests are refused."""

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
    """Counts refusals.

    Attributes:
        totals: refusals since the start, by reason.
    """

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}

    def counted(self, error: TrioserveError) -> TrioserveError:
        """Count an error, and return it.

        Args:
            error: the error that ends a request.
        """
        reason = error.reason if isinstance(error, Overloaded) else "queue_timeout"
        self.totals[reason] = self.totals.get(reason, 0) + 1
        return error


def too_many_sequences(request: RoutedRequest, sequences_max: int) -> InvalidRequest:
    return InvalidRequest(
        f"the request asks for {request.sequences} responses (n times the number of prompts), allowed are 1 to "
        f"{sequences_max}: lower n, or split the request",
        param="n",
    )


def preparing_is_full(queue: Queue, count: int, slots: int, requests_max: int, now: float) -> Overloaded:
    """Return the error for a request that must not be prepared, because the queue would be full.

    Args:
        queue: the queue that the request would join.
        count: requests that wait or are being prepared.
        slots: free slots at endpoints.
        requests_max: limit of the queue.
        now: time in seconds.
    """
    seconds = queue.drain_rate.seconds_for(count + 1, now)
    return Overloaded(
        f"{count} requests wait for the model, the limit is {requests_max} plus {slots} free slots of endpoints: "
        f"try again in {math.ceil(seconds)} s",
        reason="queue_full",
        retry_after_seconds=seconds,
    )


def queue_was_full(settings: RouterSettings, queue: Queue, request: RoutedRequest, now: float) -> Overloaded | None:
    """Return the error for a request that just joined a full queue, or None if the queue was not full.

    Args:
        settings: limits of the queue.
        queue: the queue, including the request.
        now: time in seconds.
    """
    count, prompt_tokens = queue.count - 1, queue.prompt_tokens - request.prompt_tokens
    if count >= settings.queue_requests_max:
        message = f"{count} requests wait for the model, the limit is {settings.queue_requests_max}"
    elif prompt_tokens + request.prompt_tokens > settings.queue_prompt_tokens_max and count:
        message = (
            f"requests with {prompt_tokens} prompt tokens wait for the model, and this request has "
            f"{request.prompt_tokens} more, the limit is {settings.queue_prompt_tokens_max}"
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
            "the endpoint failed, and no other endpoint had room in time to continue the response: try again",
            reason="continuation_wait_over",
            retry_after_seconds=queue.drain_rate.seconds_for(queue.count + 1, now),
        )
    if ticket.is_lost and ticket.own_deadline > now:
        seconds = queue.drain_rate.seconds_for(queue.count + 1, now)
        return NoEndpoint(
            f"the endpoint of the request was lost, and no other endpoint had room in time: try again in "
            f"{math.ceil(seconds)} s",
            reason="endpoint_lost",
            retry_after_seconds=seconds,
        )
    if ticket.own_deadline <= now:
        return QueueWaitOver(f"the request waited {waited:.1f} s in the queue, until its own deadline")
    return Overloaded(
        f"the request waited {waited:.1f} s in the queue, the longest time allowed: try again",
        reason="queue_wait_over",
        retry_after_seconds=queue.drain_rate.seconds_for(queue.count + 1, now),
    )


def pinned_is_full(request: RoutedRequest, queue: Queue, now: float) -> Overloaded:
    return Overloaded(
        f'the endpoint "{request.pinned}" that the request asks for has no room: try again, or name no endpoint',
        reason="pinned_endpoint_overloaded",
        retry_after_seconds=queue.drain_rate.seconds_for(1, now),
    )


def draining() -> Draining:
    return Draining(
        "the server is shutting down and accepts no new requests: use another server",
        reason="draining",
        retry_after_seconds=DRAIN_RETRY_SECONDS,
    )


def no_endpoint(request: RoutedRequest, back_at: float | None, now: float) -> NoEndpoint:
    """Return the error for a request that no endpoint accepts now.

    Args:
        back_at: time in seconds when the first ejected endpoint of its model may get requests again. None: unknown.
        now: time in seconds.
    """
    if request.pinned is not None:
        message = f'no endpoint "{request.pinned}" accepts requests for the model "{request.model}" now'
    else:
        message = f'no endpoint accepts requests for the model "{request.model}" now'
    seconds = DRAIN_RETRY_SECONDS
    if back_at is not None and now < back_at < math.inf:
        # If the time is infinite, the endpoint returns when it passes its next health check.
        seconds = max(1.0, back_at - now)
    return NoEndpoint(
        f"{message}: try again in {math.ceil(seconds)} s", reason="no_endpoint", retry_after_seconds=seconds
    )
