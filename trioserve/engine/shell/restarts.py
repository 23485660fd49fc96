"""Whether an engine that broke is opened anew, and who goes on in it when. Nothing here waits.

A step has many requests, and most often none of them is to blame. Those that were in the step which failed are
suspects: in the new engine they begin one by one, each when the one before has brought a token. So if a step fails
again, the one on trial has done it, or at least was there both times. It is ended, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from trioserve.engine.shell.request_scope import AnyScope, RequestPart

__all__ = ["FAULTS_OF_ONE_MAX", "Readmission", "RestartBudget"]

PERIOD_SECONDS = 600.0  # faults that lie further apart than this many restarts say nothing of each other
FAULTS_IN_A_ROW_MAX = 3  # that many openings which brought nothing: another one will not either
BACKOFF_SECONDS = 1.0  # after the first one that brought nothing; twice as long after each further one
FAULTS_OF_ONE_MAX = 2  # as many steps with it may fail before a request is ended


class RestartBudget:
    """restarts_max: within PERIOD_SECONDS; 0: the first fault ends the engine. Times are seconds of any clock.
    taken_count: all there were."""

    def __init__(self, restarts_max: int) -> None:
        self._restarts_max = restarts_max
        self._restarted_at: deque[float] = deque()
        self._in_a_row = 0  # faults since something was brought
        self.taken_count = 0
        self.ended_by = ""

    def take(self, now: float, *, has_progress: bool) -> float | None:
        """The engine broke: how many seconds to wait before it is opened anew. None: no more, and ended_by says why; ""
        where it was never to be. has_progress: it had brought something since it was opened last."""
        self._in_a_row = 0 if has_progress else self._in_a_row + 1
        while self._restarted_at and now - self._restarted_at[0] >= PERIOD_SECONDS:
            self._restarted_at.popleft()
        if self._in_a_row >= FAULTS_IN_A_ROW_MAX:
            self.ended_by = f"{FAULTS_IN_A_ROW_MAX} times in a row it broke before it had computed anything"
        elif len(self._restarted_at) >= self._restarts_max > 0:
            count = len(self._restarted_at)
            self.ended_by = f"it was opened anew {count} times within {PERIOD_SECONDS:g} s, and no more are allowed"
        if self.ended_by or not self._restarts_max:
            return None
        self._restarted_at.append(now)
        self.taken_count += 1
        return BACKOFF_SECONDS * 2 ** (self._in_a_row - 1) if self._in_a_row else 0.0


ScopeT = TypeVar("ScopeT", bound=AnyScope)


class Readmission(Generic[ScopeT]):
    """Who still has to begin in an engine that was opened anew. begin: hands a request's sequences to the core."""

    def __init__(self, begin: Callable[[ScopeT], None]) -> None:
        self._begin = begin
        self._suspects: deque[ScopeT] = deque()
        self._on_trial: ScopeT | None = None
        self._tried: list[tuple[RequestPart[Any], int]] = []  # its choices, and how far each was

    def start(self, requests: Iterable[ScopeT]) -> None:
        """The engine runs: whoever was in no step that failed begins at once. In the order in which they are to be
        computed."""
        self.stop()
        for request in requests:
            if request.fault_count:
                self._suspects.append(request)
            else:
                self._begin(request)
        self.look()

    def stop(self) -> list[ScopeT]:
        """It broke again. Returns who had not begun yet."""
        waiting = [*self._suspects]
        self._suspects.clear()
        self._on_trial = None
        self._tried.clear()
        return waiting

    def look(self) -> None:
        """Begin the next suspect if the one on trial has passed: to be called when a step was delivered, and when a
        request has left the core."""
        while self._has_passed():
            if self._on_trial is not None:
                self._on_trial.fault_count = 0
                self._on_trial = None
            if not self._suspects:
                return
            request = self._suspects.popleft()
            if request.upcoming:  # otherwise it has left meanwhile
                self._on_trial = request
                self._tried = [(choice, choice.progress) for choice, _ in request.upcoming]
                self._begin(request)

    def _has_passed(self) -> bool:
        """The core has none of it any more, or each of its sequences has gone beyond where it was, or is over."""
        request = self._on_trial
        if request is None or not request.has_begun:
            return True
        return all(choice.is_ended or choice.progress > count for choice, count in self._tried)
