"""Invariants of an IterativeCore. They must hold after every event. The checks read the core and change nothing."""

from __future__ import annotations

from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.iterative.latent_slots import LiveIteration
from trioserve.core.request_state import RequestStatus

__all__ = ["check_iterative_core", "check_iterative_idle"]


def check_iterative_core(core: IterativeCore) -> None:
    """Assert every invariant of slots, states, order and counts. A caller may call this function at any time.

    Args:
        core: the core to check.

    Cost:
        O(live requests + slots).
    """
    slots = core.scheduler.slots
    slots.own.check()
    slots.kept.check()
    lives = list(core.live_requests())
    for live in lives:
        _check_request(core, live)
    running = [live for live in lives if live.status is RequestStatus.RUNNING]
    preempted = [live for live in lives if live.status is RequestStatus.PREEMPTED]
    waiting = [live for live in lives if live.status is not RequestStatus.RUNNING]
    assert {live.request.id: live for live in running} == core.scheduler.running
    assert list(core.scheduler.waiting) == sorted(waiting, key=lambda live: live.order), (
        "the waiting queue is out of order"
    )
    own, kept = {live.slot for live in running}, {live.kept_slot for live in preempted}
    assert len(own) == len(running), "two requests have one slot"
    assert len(kept) == len(preempted), "two latents are kept in one slot"
    assert slots.own.used_count == len(running), (
        f"{slots.own.used_count} slots are in use, but {len(running)} requests run"
    )
    assert slots.kept.used_count == len(preempted), (
        f"{slots.kept.used_count} latents are kept, but {len(preempted)} requests are preempted"
    )
    assert len(core.scheduler.waiting) == len(waiting)


def check_iterative_idle(core: IterativeCore) -> None:
    """Assert that the core has no request, and that no slot is in use.

    Args:
        core: the core to check.
    """
    check_iterative_core(core)
    stats = core.stats()
    assert not list(core.live_requests())
    assert stats.running_count == stats.waiting_count == stats.slots_used == stats.kept_used == 0, stats
    assert core.schedule(0.0) is None, "the core has no request, but it schedules a step"


def _check_request(core: IterativeCore, live: LiveIteration) -> None:
    name = live.request.id
    has = (live.slot is not None, live.kept_slot is not None)
    expected = (live.status is RequestStatus.RUNNING, live.status is RequestStatus.PREEMPTED)
    assert has == expected, f"{name} is {live.status.value}, and (has a slot, has a kept latent) is {has}"
    assert live.status in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED), name
    assert 0 <= live.steps_done <= (live.request.step_count if live.is_encoded else 0), name
    assert 0 <= live.steps_in_flight <= len(core.flights), f"{name} is in {live.steps_in_flight} steps"
    assert live.abort_reason is None or live.steps_in_flight, (
        f"{name} is marked for abort, but no step in flight will end it"
    )
    assert live.is_encoded or live.status is not RequestStatus.PREEMPTED, (
        f"{name} was preempted before it had a latent to keep"
    )
    is_new = live.status is RequestStatus.RUNNING and not live.is_encoded
    assert not is_new or live.steps_in_flight, f"{name} has a slot, but no step encodes it"
