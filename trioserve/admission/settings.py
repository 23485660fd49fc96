"""Limits for requests that wait, and for stopping the server."""

from __future__ import annotations

from trioserve.contracts.deadlines import Deadlines, StoppingSettings
from trioserve.contracts.errors import StartupError

__all__ = ["AdmissionSettings"]


class AdmissionSettings(StoppingSettings, frozen=True, kw_only=True):
    """Limits of the local engine's queue.

    Attributes:
        waiting_requests_max: Highest number of requests that wait, in addition to the running requests. More requests
            are refused.
        waiting_prompt_tokens_max: Highest number of prompt tokens of all waiting requests together.
        waiting_seconds_max: Longest wait of a request in the queue, in seconds.
        deadlines: Deadlines of requests that have no deadlines of their own.
        deadlines_max: Highest deadlines that a request may have.

    Raises:
        StartupError: a value is out of range.
    """

    waiting_requests_max: int = 256
    waiting_prompt_tokens_max: int = 1_000_000
    waiting_seconds_max: float = 300.0
    deadlines: Deadlines = Deadlines()
    deadlines_max: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.waiting_requests_max < 0:
            raise StartupError(f"waiting_requests_max is {self.waiting_requests_max}, it must be 0 or more")
