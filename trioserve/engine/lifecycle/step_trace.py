"""A trace of the last steps for ui.perfetto.dev and chrome://tracing: JSON in the Trace Event Format.

The trace has one row for the event loop, one row for the computation, and counters of each step's tokens and sequences.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import msgspec

from trioserve.contracts.version import VERSION
from trioserve.engine.lifecycle.step_times import StepTime

__all__ = ["step_trace"]

EVENT_LOOP, COMPUTE = 1, 2  # rows
MICROSECONDS = 1_000_000


def step_trace(steps: Iterable[StepTime]) -> bytes:
    """Encode steps as a trace. Times are microseconds since the first step.

    Args:
        steps: the steps.

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
