"""What went wrong with something that was asked for, as an error, for those who want all of it or none."""

from __future__ import annotations

from trioserve.contracts.errors import DeadlinePassed, RequestAborted, RequestFailed, TrioserveError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import AnyDelta

__all__ = ["error_of"]


def error_of(delta: AnyDelta) -> TrioserveError | None:
    """Of what gave nothing; None for what has ended well, or goes on."""
    if delta.finish_reason is FinishReason.DEADLINE:
        return DeadlinePassed(delta.message or "the request's deadline has passed")
    if delta.finish_reason is FinishReason.ABORT:
        return RequestAborted(delta.message or "the request was aborted")
    if delta.finish_reason is FinishReason.ERROR:
        return RequestFailed(delta.message or "the engine could not go on with this request")
    return None
