"""The bounds of waiting before a request runs, and of leaving, each with its unit and its reason."""

from __future__ import annotations

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import StartupError
from trioserve.trio_tools.settings import StoppingSettings

__all__ = ["AdmissionSettings"]


class AdmissionSettings(StoppingSettings, frozen=True, kw_only=True):
    """waiting_requests_max: requests that may wait beside those that run; beyond that new ones are refused at once.
    waiting_prompt_tokens_max: what their prompts may have together. waiting_seconds_max: how long anybody waits.
    deadlines: of requests that bring none. deadlines_max: what any request may have at most.
    """

    waiting_requests_max: int = 256
    waiting_prompt_tokens_max: int = 1_000_000
    waiting_seconds_max: float = 600.0
    deadlines: Deadlines = Deadlines()
    deadlines_max: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.waiting_requests_max < 0:
            raise StartupError(f"waiting_requests_max is {self.waiting_requests_max}, it must be 0 or more")
