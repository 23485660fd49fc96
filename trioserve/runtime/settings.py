"""The bounds of the runtime, each with its unit and its reason."""

from __future__ import annotations

import msgspec

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import StartupError

__all__ = ["RuntimeSettings"]


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """waiting_requests_max: requests that may wait beside those that run; beyond that new ones are refused at once.
    waiting_prompt_tokens_max: what their prompts may have together. waiting_seconds_max: how long anybody waits.
    drain_seconds_max: how long running requests may go on after the order to stop.
    last_words_seconds_max: after that, or after a fault, how long clients have to be told.
    step_seconds_max: how old the step in flight may get before new requests are refused and readiness turns; None: 60
    s, or ten times the longest step so far, if that is more; 0: as old as it likes.
    kv_events_max: changes of the prefix cache that are kept for those who read them; 0: nobody may, and none are.
    deadlines: of requests that bring none. deadlines_max: what any request may have at most.
    """

    waiting_requests_max: int = 256
    waiting_prompt_tokens_max: int = 1_000_000
    waiting_seconds_max: float = 600.0
    drain_seconds_max: float = 30.0
    last_words_seconds_max: float = 2.0
    step_seconds_max: float | None = None
    kv_events_max: int = 0
    deadlines: Deadlines = Deadlines()
    deadlines_max: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        for name in ("waiting_requests_max", "kv_events_max"):
            if getattr(self, name) < 0:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be 0 or more")
        if self.step_seconds_max is not None and not 0 <= self.step_seconds_max <= 86_400:
            raise StartupError(f"step_seconds_max is {self.step_seconds_max}, it must be 0 to 86400 seconds")
        for name in ("drain_seconds_max", "last_words_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= 86_400:
                raise StartupError(f"{name} is {value}, it must be 0 to 86400 seconds")
