"""Decides whether a broken engine is reopened, and in which order requests resume in it. Nothing here waits.

A failed step has many requests, and a fault can also be the machine's. So all requests of a failed step are suspects.
Only evidence turns a suspect into the cause:

- In the reopened engine the suspects begin one by one. The next suspect begins after the previous one produced a token.
- The first suspect begins alone. No other request is in the engine until this suspect has passed the point where the
  step failed. Suspects that were in the most failed steps come first. Suspects that have failed alone come last.
- A suspect that was in three failed steps, and alone in one of them, is accused. It is ended as soon as another request
  completes a step in the reopened engine: the machine works, so the accused request was the cause.
- A suspect that fails alone a second time is ended at once. This happens when there is no other request to compare.
- Two accused requests clear each other. Then the machine is the cause, and `RestartBudget` counts its faults.
- A request that was ended as the cause costs the budget nothing, because the budget is for faults of the machine.
  Ending the engine instead would do more harm than the restarts that found the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from trioserve.engine.lifecycle.request_scope import AnyScope, RequestPart

__all__ = ["LONE_FAULTS_MAX", "Readmission", "RestartBudget"]

PERIOD_SECONDS = 600.0  # older restarts no longer count, because faults this far apart are independent
FAULTS_IN_A_ROW_MAX = 3  # after this many restarts without any progress, another restart will not help either
BACKOFF_SECONDS = 1.0  # delay after the first restart without progress. It doubles with each further one.
FAULTS_OF_ONE_MAX = 3  # a request that was in this many failed steps, and alone in one of them, is accused
LONE_FAULTS_MAX = 2  # a request that was alone in this many failed steps is ended at once


class RestartBudget:
    """Limits how often an engine is reopened. Times are seconds of any clock.

    Args:
        restarts_max: restarts within PERIOD_SECONDS. 0: the first fault ends the engine.

    Attributes:
        taken_count: all restarts so far.
        ended_by: reason why no further restart is allowed, as part of a sentence. Empty: restarts were never enabled,
            or are still allowed.
    """

    def __init__(self, restarts_max: int) -> None:
        self._restarts_max = restarts_max
        self._restarted_at: deque[float] = deque()
        self._in_a_row = 0  # faults since a step last made progress
        self.taken_count = 0
        self.ended_by = ""

    def take(self, now: float, *, has_progress: bool) -> float | None:
        """Count a fault, and decide about a restart.

        Args:
            now: current time.
            has_progress: True if a step made progress since the engine was opened.

        Returns:
            Seconds to wait before the engine is reopened. None: no further restart, and `ended_by` has the reason.
        """
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

    def forgive(self, count: int) -> None:
        """Return the latest restarts to the budget, because their cause was found and has ended.

        Args:
            count: number of restarts.
        """
        for _ in range(min(count, len(self._restarted_at))):
            self._restarted_at.pop()


ScopeT = TypeVar("ScopeT", bound=AnyScope)


class Readmission(Generic[ScopeT]):
    """Decides when carried requests begin in a reopened engine.

    Args:
        begin: hands a request's sequences to the core.
        end: ends an accused request.
        has_brought: returns True if a step made progress since the engine was opened.
    """

    def __init__(
        self, begin: Callable[[ScopeT], None], *, end: Callable[[ScopeT], None], has_brought: Callable[[], bool]
    ) -> None:
        self._begin = begin
        self._end = end
        self._has_brought = has_brought
        self._suspects: deque[ScopeT] = deque()
        self._others: deque[ScopeT] = deque()  # were in no failed step, and wait only while a suspect runs alone
        self._accused: list[ScopeT] = []
        self._is_alone = False  # the request on trial has the engine for itself
        self._on_trial: ScopeT | None = None
        # Progress of each choice of the request when its trial began.
        self._tried: list[tuple[RequestPart[Any], int]] = []

    def start(self, requests: Iterable[ScopeT]) -> None:
        """Begin requests in a reopened engine.

        Args:
            requests: carried requests, in the order in which they should be computed.
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
            self._suspects.appendleft(self._others.popleft())  # shows whether the machine works
        if len(self._accused) > 1:
            for request in self._accused:
                request.lone_fault_count = 0
            self._accused.clear()
        self._is_alone = True
        self.look()

    def admit(self, request: ScopeT) -> None:
        """Begin a new request, or keep it until the request on trial is not alone any more.

        Args:
            request: the request.
        """
        if self._is_alone:
            self._others.append(request)
            self.look()
        else:
            self._begin(request)

    def stop(self) -> list[ScopeT]:
        """Forget all state, because the engine broke again.

        Returns:
            The requests that have not begun.
        """
        waiting = [*self._suspects, *self._others]
        self._suspects.clear()
        self._others.clear()
        self._accused.clear()
        self._is_alone = False
        self._on_trial = None
        self._tried.clear()
        return waiting

    def look(self) -> None:
        """Begin the next suspect if the one on trial has passed.

        Call this after a step was delivered, and when a request has left the core.
        """
        if self._on_trial is None and not self._is_alone and not self._suspects:
            return  # nearly always
        while self._has_passed():
            if self._on_trial is not None:
                passed, self._on_trial = self._on_trial, None
                passed.clear_faults()
            if self._is_alone and (self._has_brought() or not self._suspects):
                self._let_others_begin()
                continue  # ending a request may have begun others
            if not self._suspects:
                return
            request = self._suspects.popleft()
            if request.upcoming:  # otherwise it has left meanwhile
                self._on_trial = request
                self._tried = [(choice, choice.progress) for choice, _ in request.upcoming]
                self._begin(request)

    def _let_others_begin(self) -> None:
        """Let the other requests begin, and end accused requests if the machine works."""
        self._is_alone = False
        accused, others = [*self._accused], [*self._others]
        self._accused.clear()
        self._others.clear()
        for request in accused:
            if request in self._suspects and self._has_brought():  # otherwise it has passed, or left
                self._suspects.remove(request)
                self._end(request)
        for request in others:
            if request.upcoming:
                self._begin(request)

    def _has_passed(self) -> bool:
        """Return True if the request on trial left the core, or each of its sequences made progress or ended."""
        request = self._on_trial
        if request is None or not request.has_begun:
            return True
        return all(choice.is_ended or choice.progress > count for choice, count in self._tried)


def _is_accused(request: AnyScope) -> bool:
    return request.lone_fault_count > 0 and request.fault_count >= FAULTS_OF_ONE_MAX
