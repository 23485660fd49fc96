"""The error that corresponds to the failed end of a request, for callers that need the whole result."""

from __future__ import annotations

from trioserve.contracts.errors import DeadlinePassed, RequestAborted, RequestFailed, TrioserveError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import AnyDelta

__all__ = ["error_of"]


def error_of(delta: AnyDelta) -> TrioserveError | None:
    """Return the error for the last delta of a request or part that failed.

    Args:
        delta: any delta.

    Returns:
        The error, or None if the delta has no finish reason or a successful one.
    """
    if delta.finish_reason is FinishReason.DEADLINE:
        return DeadlinePassed(delta.message or "the request's deadline has passed")
    if delta.finish_reason is FinishReason.ABORT:
        return RequestAborted(delta.message or "the request was aborted")
    if delta.finish_reason is FinishReason.ERROR:
        return RequestFailed(delta.message or "the engine could not continue this request")
    return None
