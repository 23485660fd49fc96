"""Times and work of the last 1,000 steps, their totals and trace, and a watch of the step in flight.

The step loop records one entry per step. Readers copy the entries when they need them. The trace is JSON in the Trace
Event Format, for ui.perfetto.dev and chrome://tracing. It has a row for the event loop, a row for the computation, and
counters of the tokens and sequences of each step.

An engine can hang while its event loop still runs, if the GPU hangs or the compute thread waits forever. A running
step cannot be ended from outside. So the watch only reports the hang: the engine becomes unready, and routers send
requests to other endpoints until the step ends.
"""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import msgspec
import trio

from trioserve.contracts.extras import VERSION
from trioserve.contracts.step import StepPlan
from trioserve.engine.lifecycle.engine_loop import AnyPlan

__all__ = ["PlanTimes", "STEPS_MAX", "StepCounts", "StepTime", "StepTimes", "StepWatch", "step_trace"]

logger = logging.getLogger(__name__)

STEP_SECONDS_MAX = 60.0  # Far more than a small model needs on a slow machine, and far less than clients wait.
LONGEST_STEPS_MAX = 10.0  # Multiple of the longest step so far. The times of healthy steps differ by a smaller factor.
HANGS_AFTER = 5.0  # Multiple of the allowed age. An older step will not end, and only a new process helps.


class StepWatch:
    """Compares the time that the step in flight has run with a limit.

    A step that exceeded the limit is recorded as a step of exactly the limit. So a slow machine gets a higher limit
    after one long step, but one hang of an hour does not raise the limit to ten hours.

    Args:
        seconds_max: longest time in seconds that a step may run. None: 60 s or ten times the longest step so far,
            whichever is larger. 0: no limit.
    """

    def __init__(self, seconds_max: float | None = None) -> None:
        self._fixed_seconds_max = seconds_max
        self._longest_seconds = 0.0
        self._handed_over_at: deque[float] = deque()  # Submission times of the plans in flight, the oldest first.
        self._ended_at = -math.inf
        self._is_logged = False

    def begin(self, now: float) -> None:
        """Note that a plan is submitted. Another plan may still be in flight.

        Args:
            now: current time.
        """
        self._handed_over_at.append(now)

    def end(self, now: float) -> None:
        """Note that the step of the oldest plan in flight has ended.

        Args:
            now: current time.
        """
        seconds = now - max(self._handed_over_at.popleft(), self._ended_at)
        self._ended_at = now
        self._is_logged = False
        if seconds <= self._longest_seconds:
            # Nearly every step ends here. The limit is larger than the longest step, so the step was in time.
            return
        seconds_max = self.seconds_max
        self._longest_seconds = max(self._longest_seconds, min(seconds, seconds_max))
        if seconds > seconds_max:
            logger.warning("a step ended late seconds=%.1f allowed=%g", seconds, seconds_max)

    def forget(self, now: float) -> None:
        """Forget the plans in flight, because their results will never arrive.

        Args:
            now: current time.
        """
        self._handed_over_at.clear()
        self._ended_at = now
        self._is_logged = False

    def note_unblocked(self, now: float) -> None:
        """Note that steps were blocked on purpose until now. The blocked time does not count as lack of progress.

        Args:
            now: current time.
        """
        if not self._handed_over_at:
            self._ended_at = now

    @property
    def seconds_max(self) -> float:
        """Highest allowed age of the step in flight, in seconds. math.inf: no limit."""
        if self._fixed_seconds_max is None:
            return max(STEP_SECONDS_MAX, LONGEST_STEPS_MAX * self._longest_seconds)
        return self._fixed_seconds_max or math.inf

    def age_seconds(self, now: float) -> float:
        """Return how long the step in flight has run. A step that was planned ahead begins when the previous step ends.

        Args:
            now: current time.

        Returns:
            Seconds. 0 if no step is in flight.
        """
        return now - max(self._handed_over_at[0], self._ended_at) if self._handed_over_at else 0.0

    def idle_seconds(self, now: float, waiting_since: float | None) -> float:
        """Return how long requests have waited since the last step ended.

        Args:
            now: current time.
            waiting_since: time at which the oldest unfinished request entered. None: there is no such request.

        Returns:
            Seconds. 0 if no request waits or runs.
        """
        return 0.0 if waiting_since is None else now - max(waiting_since, self._ended_at)

    def overdue(self) -> str | None:
        """Return a sentence that describes the step in flight if it has run too long. Otherwise return None."""
        if not self._handed_over_at:
            return None
        seconds, seconds_max = self.age_seconds(trio.current_time()), self.seconds_max
        if seconds <= seconds_max:
            return None
        if not self._is_logged:
            self._is_logged = True
            logger.warning("the step in flight is overdue seconds=%.1f allowed=%g", seconds, seconds_max)
        return f"the step in flight is {seconds:.1f} s old, and {seconds_max:g} s are allowed"

    def hangs(self) -> bool:
        """Return True if the step in flight is so old that it will probably never end."""
        return self.age_seconds(trio.current_time()) > HANGS_AFTER * self.seconds_max


# 1,000 steps are half a minute of decoding on a CPU, or some seconds on a GPU. This is enough to find lost time.
STEPS_MAX = 1000


class StepTime(NamedTuple):
    """Times and work of one step. Times are seconds of Trio's clock.

    An overlapping step was planned while the previous step was computed. Its forward pass begins when the forward pass
    of the previous step ends.

    Attributes:
        step_index: number of the step, from 0.
        schedule_at: time at which planning began.
        schedule_seconds: duration of planning.
        forward_at: time at which the forward pass began.
        forward_seconds: duration of the forward pass.
        update_seconds: duration of updating the core with the result.
        deliver_seconds: duration of the delivery.
        sequence_count: sequences in the step.
        prefill_tokens: prompt tokens, including tokens that are computed again after a preemption.
        decode_tokens: tokens of decoding sequences, including draft tokens.
        admitted_count: sequences that the plan admitted.
        preempted_count: sequences that the plan preempted.
        is_ahead: True if the plan was made while another step was in flight.
        is_dropped: True if the result was dropped, because no request waited for it any more.
        phase: phase of an image step. Empty for text.
        work_count: amount of work of an image step. 0 for text.
    """

    step_index: int
    schedule_at: float
    schedule_seconds: float
    forward_at: float
    forward_seconds: float
    update_seconds: float
    deliver_seconds: float
    sequence_count: int
    prefill_tokens: int
    decode_tokens: int
    admitted_count: int
    preempted_count: int
    is_ahead: bool
    is_dropped: bool
    phase: str = ""
    work_count: int = 0


class StepCounts(NamedTuple):
    """The amount of work in a plan. `StepTime` documents the fields."""

    sequence_count: int
    prefill_tokens: int = 0
    decode_tokens: int = 0
    is_ahead: bool = False
    phase: str = ""
    work_count: int = 0


Plan = TypeVar("Plan", bound=AnyPlan)


class PlanTimes(ABC, Generic[Plan]):
    """Records the times of steps.

    Attributes:
        count: number of all steps so far.
        schedule_seconds: sum over all steps. The other fields are sums, too, and `StepTime` documents their names.
    """

    def __init__(self) -> None:
        self._steps: deque[StepTime] = deque(maxlen=STEPS_MAX)
        self.count = 0
        self.schedule_seconds = 0.0
        self.forward_seconds = 0.0
        self.update_seconds = 0.0
        self.deliver_seconds = 0.0

    def latest(self) -> Iterable[StepTime]:
        """Return a copy of the recorded steps, the oldest first."""
        return tuple(self._steps)

    @abstractmethod
    def _counts(self, plan: Plan) -> StepCounts:
        """Return the amount of work in a plan."""

    def note(
        self,
        plan: Plan,
        *,
        schedule_at: float,
        planned_at: float,
        forward_at: float,
        computed_at: float,
        updated_at: float,
        delivered_at: float,
        is_dropped: bool,
    ) -> None:
        """Record a step that was delivered.

        Args:
            plan: the plan of the step.
            schedule_at: time at which planning began.
            planned_at: time at which planning ended.
            forward_at: time at which the forward pass began.
            computed_at: time at which the result arrived.
            updated_at: time at which the core had processed the result.
            delivered_at: time at which the result was delivered.
            is_dropped: True if there was no result.
        """
        counts = self._counts(plan)
        step = StepTime(
            step_index=plan.step_index,
            schedule_at=schedule_at,
            schedule_seconds=planned_at - schedule_at,
            forward_at=forward_at,
            forward_seconds=computed_at - forward_at,
            update_seconds=updated_at - computed_at,
            deliver_seconds=delivered_at - updated_at,
            sequence_count=counts.sequence_count,
            prefill_tokens=counts.prefill_tokens,
            decode_tokens=counts.decode_tokens,
            admitted_count=len(plan.admitted),
            preempted_count=len(plan.preempted),
            is_ahead=counts.is_ahead,
            is_dropped=is_dropped,
            phase=counts.phase,
            work_count=counts.work_count,
        )
        self._steps.append(step)
        self.count += 1
        self.schedule_seconds += step.schedule_seconds
        self.forward_seconds += step.forward_seconds
        self.update_seconds += step.update_seconds
        self.deliver_seconds += step.deliver_seconds


class StepTimes(PlanTimes[StepPlan]):
    """Records the step times of an engine for text."""

    def _counts(self, plan: StepPlan) -> StepCounts:
        decode_tokens = 0
        for chunk in plan.chunks:
            if chunk.count == 1 and chunk.samples:
                decode_tokens += 1 + len(chunk.draft)
        return StepCounts(len(plan.chunks), plan.token_count - decode_tokens, decode_tokens, plan.is_ahead)


EVENT_LOOP, COMPUTE = 1, 2  # rows
MICROSECONDS = 1_000_000


def step_trace(steps: Iterable[StepTime]) -> bytes:
    """Encode steps as a trace. Times are microseconds since the first step.

    Cost:
        Some milliseconds per thousand steps. Call it in a worker thread.
    """
    steps = list(steps)
    events = [*_names(), *_events(steps, origin=min((step.schedule_at for step in steps), default=0.0))]
    return msgspec.json.encode(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"version": f"trioserve {VERSION}"}}
    )


def _names() -> Iterator[dict[str, object]]:
    pid = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": EVENT_LOOP, "args": {"name": "trioserve"}}
    for tid, name in ((EVENT_LOOP, "event loop"), (COMPUTE, "compute")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _events(steps: list[StepTime], *, origin: float) -> Iterator[dict[str, object]]:
    pid = os.getpid()
    for step in steps:
        computed_at = step.forward_at + step.forward_seconds
        args = {
            "step": step.step_index,
            "sequences": step.sequence_count,
            "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.decode_tokens,
            "admitted": step.admitted_count,
            "preempted": step.preempted_count,
            "planned_ahead": step.is_ahead,
            "dropped": step.is_dropped,
            **({"phase": step.phase, "work": step.work_count} if step.phase else {}),
        }
        for name, tid, at, seconds in (
            ("schedule", EVENT_LOOP, step.schedule_at, step.schedule_seconds),
            ("forward", COMPUTE, step.forward_at, step.forward_seconds),
            ("update", EVENT_LOOP, computed_at, step.update_seconds),
            ("deliver", EVENT_LOOP, computed_at + step.update_seconds, step.deliver_seconds),
        ):
            yield {
                "ph": "X",
                "name": name,
                "cat": "step",
                "pid": pid,
                "tid": tid,
                "ts": round((at - origin) * MICROSECONDS, 3),
                "dur": round(seconds * MICROSECONDS, 3),
                "args": args,
            }
        for name, values in (
            ("tokens", {"prefill": step.prefill_tokens, "decode": step.decode_tokens}),
            ("sequences", {"sequences": step.sequence_count}),
        ):
            ts = round((step.forward_at - origin) * MICROSECONDS, 3)
            yield {"ph": "C", "name": name, "pid": pid, "tid": COMPUTE, "ts": ts, "args": values}
