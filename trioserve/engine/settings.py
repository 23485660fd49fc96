"""Settings of the server code around an engine's core, with their units and reasons."""

from __future__ import annotations

from trioserve.contracts.deadlines import Deadlines, StoppingSettings
from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = ["RESTARTS_MAX", "EngineSettings", "deadlines_of"]

RESTARTS_MAX = 100  # Limit within ten minutes. An engine that breaks more often is useless.


class EngineSettings(StoppingSettings, frozen=True, kw_only=True):
    """Settings of the server code around an engine's core.

    Attributes:
        waiting_requests_max: highest number of requests that wait, in addition to the running requests. More requests
            are refused.
        waiting_prompt_tokens_max: highest number of prompt tokens of all waiting requests together.
        waiting_seconds_max: longest wait of a request in the queue, in seconds.
        deadlines: deadlines of requests that have no deadlines of their own.
        deadlines_max: highest deadlines that a request may have.
        step_seconds_max: highest age of the step in flight, in seconds. If a step is older, the engine refuses new
            requests and is not ready. None: 60 s or ten times the longest step so far, whichever is larger. 0: no
            limit.
        kv_events_max: number of prefix cache changes that the engine keeps for subscribers. 0: subscribers are
            disabled.
        restarts_max: highest number of restarts after faults within ten minutes. 0: a fault ends the engine.
        seed: random source for the seeds of requests that have no seed. None: these seeds are unpredictable.
        session_idle_seconds: time without requests after which a named session ends, in seconds. A session that ends
            early loses its place in the cache, so the default is twice the idle time of `Retention`.
    """

    waiting_requests_max: int = 256
    waiting_prompt_tokens_max: int = 1_000_000
    waiting_seconds_max: float = 300.0
    deadlines: Deadlines = Deadlines()
    deadlines_max: Deadlines = Deadlines()
    step_seconds_max: float | None = None
    kv_events_max: int = 0
    restarts_max: int = 0
    seed: int | None = None
    session_idle_seconds: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.waiting_requests_max < 0:
            raise StartupError(f"waiting_requests_max is {self.waiting_requests_max}, it must be 0 or more")
        if self.kv_events_max < 0:
            raise StartupError(f"kv_events_max is {self.kv_events_max}, it must be 0 or more")
        if not 0 <= self.restarts_max <= RESTARTS_MAX:
            raise StartupError(f"restarts_max is {self.restarts_max}, it must be 0 to {RESTARTS_MAX}")
        if not 0 < self.session_idle_seconds <= 86_400:
            raise StartupError(
                f"session_idle_seconds is {self.session_idle_seconds}, it must be above 0 and at most 86400 seconds"
            )
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
