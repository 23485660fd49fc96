"""Decides whether a broken engine is reopened, and in which order requests resume in it. No function in this module
waits.

A failed step computes many requests, and a fault of the machine can also break a step. So all requests of a failed step
are suspects. Only evidence shows which suspect is the cause:

- In the reopened engine the suspects begin one by one. The next suspect begins after the previous one produced a token.
- The first suspect begins alone. No other request runs until this suspect has passed the point where the step failed.
Suspects that were in the most failed steps come first. Suspects that have failed alone come last.
- A suspect is accused if it was in three failed steps, and alone in one of them. It is ended as soon as another request
completes a step in the reopened engine. That step shows that the machine works, so the accused request was the cause.
- A suspect that fails alone a second time is ended at once, even if there is no other request that can be compared.
- If two requests are accused, both are cleared. Then the machine is the cause, and `RestartBudget` counts its faults.
- If a request was ended as the cause, its faults do not count against the budget, because the budget limits faults of
the machine. Ending the engine instead would do more harm than the restarts that found the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from trioserve.engine.lifecycle.request_scope import AnyScope, RequestPart

__all__ = ["LONE_FAULTS_MAX", "Readmission", "RestartBudget"]

PERIOD_SECONDS = 600.0  # Older restarts do not count any more, because faults this far apart are independent.
FAULTS_IN_A_ROW_MAX = 3  # After this many restarts without any progress, another restart will not help either.
BACKOFF_SECONDS = 1.0  # Delay after the first restart without progress. The delay doubles with each further restart.
FAULTS_OF_ONE_MAX = 3  # A request is accused if it was in this many failed steps, and alone in one of them.
LONE_FAULTS_MAX = 2  # A request that was alone in this many failed steps is ended at once.


class RestartBudget:
    """Limits how often an engine is reopened. Times are seconds of any clock.

    Args:
        restarts_max: highest number of restarts within PERIOD_SECONDS. 0: the first fault ends the engine.

    Attributes:
        taken_count: number of all restarts so far.
        ended_by: why no further restart is allowed, as part of a sentence. Empty: restarts are still allowed, or were
            never enabled.
    """

    def __init__(self, restarts_max: int) -> None:
        self._restarts_max = restarts_max
        self._restarted_at: deque[float] = deque()
        self._in_a_row = 0  # Number of faults since a step last made progress.
        self.taken_count = 0
        self.ended_by = ""

    def take(self, now: float, *, has_progress: bool) -> float | None:
        """Count a fault, and decide whether the engine is restarted.

        Args:
            now: current time.
            has_progress: True if a step made progress since the engine was opened.

        Returns:
            Seconds to wait before the engine is reopened. None: the engine is not restarted, and `ended_by` has the
            reason.
        """
        if self.ended_by:
            return None
        self._in_a_row = 0 if has_progress else self._in_a_row + 1
        while self._restarted_at and now - self._restarted_at[0] >= PERIOD_SECONDS:
            self._restarted_at.popleft()
        if self._in_a_row >= FAULTS_IN_A_ROW_MAX:
            self.ended_by = f"{FAULTS_IN_A_ROW_MAX} times in a row it broke before it had computed anything"
        elif len(self._restarted_at) >= self._restarts_max > 0:
            count = len(self._restarted_at)
            self.ended_by = f"it was reopened {count} times within {PERIOD_SECONDS:g} s, and no more are allowed"
        if self.ended_by or not self._restarts_max:
            return None
        self._restarted_at.append(now)
        self.taken_count += 1
        return BACKOFF_SECONDS * 2 ** (self._in_a_row - 1) if self._in_a_row else 0.0

    def end(self, reason: str) -> None:
        """Allow no further restart.

        Args:
            reason: why, as part of a sentence.
        """
        self.ended_by = reason

    def forgive(self, count: int) -> None:
        """Remove the latest restarts from the count, because their cause was found and ended.

        Args:
            count: number of restarts.
        """
        for _ in range(min(count, len(self._restarted_at))):
            self._restarted_at.pop()


ScopeT = TypeVar("ScopeT", bound=AnyScope)


class Readmission(Generic[ScopeT]):
    """Decides when each request of the broken engine begins in the reopened engine.

    Args:
        begin: adds a request's sequences to the core.
        end: ends an accused request.
        has_progress: returns True if a step has made progress since the engine was opened.

    Attributes:
        is_settled: True if every request of the broken engine has begun or ended, so `advance` has nothing to do.
    """

    def __init__(
        self, begin: Callable[[ScopeT], None], *, end: Callable[[ScopeT], None], has_progress: Callable[[], bool]
    ) -> None:
        self._begin = begin
        self._end = end
        self._has_progress = has_progress
        self._suspects: deque[ScopeT] = deque()
        # Requests that were in no failed step. They wait only while a suspect runs alone.
        self._others: deque[ScopeT] = deque()
        self._accused: list[ScopeT] = []
        self.is_settled = True
        self._is_alone = False  # True while only the first suspect may run.
        self._on_trial: ScopeT | None = None  # The suspect that began last, until it produces a token or leaves.
        # For each choice of that suspect: its progress when the suspect began.
        self._tried: list[tuple[RequestPart[Any], int]] = []

    def start(self, requests: Iterable[ScopeT]) -> None:
        """Begin requests in a reopened engine.

        Args:
            requests: requests of the broken engine, in the order in which they should be computed.
        """
        self.stop()
        requests = [*requests]
        suspects = [request for request in requests if request.fault_count]
        others = [request for request in requests if not request.fault_count]
        if not suspects:
            for request in others:
                self._begin(request)
            return
        self._suspects.extend(sorted(suspects, key=lambda request: (request.lone_fault_count, -request.fault_count)))
        self._others.extend(others)
        self._accused = [request for request in suspects if _is_accused(request)]
        if suspects == self._accused and self._others:
            self._suspects.appendleft(self._others.popleft())  # This request shows whether the machine works.
        if len(self._accused) > 1:
            for request in self._accused:
                request.lone_fault_count = 0
            self._accused.clear()
        self._is_alone = True
        self.is_settled = False
        self.advance()

    def admit(self, request: ScopeT) -> None:
        """Begin a new request. While the first suspect runs alone, the new request waits instead."""
        if self._is_alone:
            self._others.append(request)
            self.advance()
        else:
            self._begin(request)

    def stop(self) -> list[ScopeT]:
        """Forget all state, because the engine broke again.

        Returns:
            The requests that have not begun yet.
        """
        waiting = [*self._suspects, *self._others]
        self._suspects.clear()
        self._others.clear()
        self._accused.clear()
        self._is_alone = False
        self.is_settled = True
        self._on_trial = None
        self._tried.clear()
        return waiting

    def advance(self) -> None:
        """Begin the next request of the failed step, if the request that began before it has produced a token or left.

        The engine calls this method after the results of a step were delivered, and when a request has left the core.
        """
        if self.is_settled:
            return
        while self._has_passed():
            if self._on_trial is not None:
                passed, self._on_trial = self._on_trial, None
                passed.clear_faults()
            if self._is_alone and (self._has_progress() or not self._suspects):
                self._begin_others()
                continue  # Check again, because ending a request may have let other requests begin.
            if not self._suspects:
                self.is_settled = True
                return
            request = self._suspects.popleft()
            if request.upcoming:  # A request without upcoming sequences has left meanwhile.
                self._on_trial = request
                self._tried = [(choice, choice.progress) for choice, _ in request.upcoming]
                self._begin(request)

    def _begin_others(self) -> None:
        """Let the other requests begin. If the machine works, end the accused requests."""
        self._is_alone = False
        accused, others = [*self._accused], [*self._others]
        self._accused.clear()
        self._others.clear()
        for request in accused:
            # An accused request that is no suspect any more has begun in the reopened engine, or has left.
            if request in self._suspects and self._has_progress():
                self._suspects.remove(request)
                self._end(request)
        for request in others:
            if request.upcoming:
                self._begin(request)

    def _has_passed(self) -> bool:
        """Return True if the next suspect may begin: the last one left the core, or all its sequences made progress or
        ended.
        """
        request = self._on_trial
        if request is None or not request.has_begun:
            return True
        return all(choice.is_ended or choice.progress > count for choice, count in self._tried)


def _is_accused(request: AnyScope) -> bool:
    return request.lone_fault_count > 0 and request.fault_count >= FAULTS_OF_ONE_MAX
