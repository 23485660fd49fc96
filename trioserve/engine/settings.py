"""Limits of an engine's shell, each with its unit and its reason."""

from __future__ import annotations

from trioserve.admission.settings import AdmissionSettings
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = ["RESTARTS_MAX", "EngineSettings", "deadlines_of"]

RESTARTS_MAX = 100  # within ten minutes. An engine that breaks more often is of no use.


class EngineSettings(AdmissionSettings, frozen=True, kw_only=True):
    """Settings of an engine's shell.

    Attributes:
        step_seconds_max: age in seconds of the step in flight above which the engine refuses new requests and is not
            ready. None: 60 s or ten times the longest step so far, the larger of both. 0: no limit.
        kv_events_max: changes of the prefix cache that the engine keeps for subscribers. 0: no events, no subscribers.
        restarts_max: how often within ten minutes the engine may be reopened after a fault. 0: a fault ends the engine.
        seed: source of the seeds of requests that name no seed. None: those seeds are unpredictable.
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
    """Make deadlines from three options.

    Args:
        queue: longest time in the queue, in seconds. None: no such deadline.
        first_token: longest time until the first token, in seconds. None: no such deadline.
        total: longest time until the end of the response, in seconds. None: no such deadline.

    Raises:
        StartupError: an option is out of range.
    """
    try:
        return Deadlines(queue_timeout=queue, ttft_timeout=first_token, timeout=total)
    except InvalidRequest as error:
        raise StartupError(str(error)) from None
