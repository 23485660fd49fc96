"""The error of a client that comes back for a stream which is not there any more, and would be another one."""

from __future__ import annotations

from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal

__all__ = ["not_the_same"]


def not_the_same(difference: object) -> Refusal:
    """difference: in half a sentence."""
    return Refusal(
        ErrorResponse(
            status=409,
            type="invalid_request_error",
            code="resume_mismatch",
            message=f"the stream is not there any more, and computed once more it is another one ({difference}): ask "
            "again without Last-Event-ID, under another X-Request-Id",
            headers=((REASON_HEADER, "resume_mismatch"),),
        )
    )
