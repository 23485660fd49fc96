"""The error of a client that comes back for a stream which is not there any more, and would be another one."""

from __future__ import annotations

from trioserve.api.error_responses import Refusal, refusal

__all__ = ["not_the_same"]


def not_the_same(difference: object) -> Refusal:
    """difference: in half a sentence."""
    return refusal(
        "resume_mismatch",
        f"the stream is not there any more, and computed once more it is another one ({difference}): ask "
        "again without Last-Event-ID, under another X-Request-Id",
    )
