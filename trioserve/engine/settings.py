"""The bounds of an engine's shell, each with its unit and its reason."""

from __future__ import annotations

from trioserve.admission.settings import AdmissionSettings
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = ["RESTARTS_MAX", "EngineSettings", "deadlines_of"]

RESTARTS_MAX = 100  # within ten minutes; an engine that breaks more often serves nobody


class EngineSettings(AdmissionSettings, frozen=True, kw_only=True):
    """step_seconds_max: how old the step in flight may get before new requests are refused and readiness turns; None:
    60 s, or ten times the longest step so far, if that is more; 0: as old as it likes.
    kv_events_max: changes of the prefix cache that are kept for those who read them; 0: nobody may, and none are.
    restarts_max: how often within ten minutes the engine may be opened anew after a fault; 0: a fault ends it.
    seed: from which the seeds of requests come that name none; None: they cannot be foreseen.
    """

    step_seconds_max: float | None = None
    kv_events_max: int = 0
    restarts_max: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_events_max < 0:
            raise StartupError(f"kv_events_max is {self.kv_events_max}, it must be 0 or more")
        if not 0 <= self.restarts_max <= RESTARTS_MAX:
            raise StartupError(f"restarts_max is {self.restarts_max}, it must be 0 to {RESTARTS_MAX}")
        if self.step_seconds_max is not None and not 0 <= self.step_seconds_max <= 86_400:
            raise StartupError(f"step_seconds_max is {self.step_seconds_max}, it must be 0 to 86400 seconds")


def deadlines_of(queue: float | None, first_token: float | None, total: float | None) -> Deadlines:
    """Make deadlines of three options.

    Args:
        queue, first_token, total: seconds. None: no such deadline.

    Raises:
        StartupError: one of them is out of range.
    """
    try:
        return Deadlines(queue_timeout=queue, ttft_timeout=first_token, timeout=total)
    except InvalidRequest as error:
        raise StartupError(str(error)) from None
