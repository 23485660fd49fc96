"""Error for a client that asks for the rest of a stream which no longer exists and cannot be computed identically."""

from __future__ import annotations

from trioserve.api.error_responses import Refusal, refusal

__all__ = ["not_the_same"]


def not_the_same(difference: object) -> Refusal:
    """Make the error.

    Args:
        difference: Half a sentence that names the difference between the streams.
    """
    return refusal(
        "resume_mismatch",
        f"the stream no longer exists, and computing it again gave another response ({difference}): send the "
        "request without Last-Event-ID, with another X-Request-Id",
    )
