"""What has to hold in an IterativeCore after every event, whatever happened. Reads the core and changes nothing."""

from __future__ import annotations

from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.iterative.live_iteration import LiveIteration
from trioserve.core.request_state import RequestStatus

__all__ = ["check_iterative_core", "check_iterative_idle"]


def check_iterative_core(core: IterativeCore) -> None:
    """Assert every invariant of slots, states, order and counts. O(live requests + slots). Legal at any moment."""
    slots = core.scheduler.slots
    slots.own.check()
    slots.kept.check()
    lives = list(core.live_requests())
    for live in lives:
        _check_life(core, live)
    running = [live for live in lives if live.status is RequestStatus.RUNNING]
    preempted = [live for live in lives if live.status is RequestStatus.PREEMPTED]
    waiting = [live for live in lives if live.status is not RequestStatus.RUNNING]
    assert {live.request.id: live for live in running} == core.scheduler.running
    assert list(core.scheduler.waiting) == sorted(waiting, key=lambda live: live.order), "the line is out of order"
    own, kept = {live.slot for live in running}, {live.kept_slot for live in preempted}
    assert len(own) == len(running), "two requests have one slot"
    assert len(kept) == len(preempted), "two latents are kept in one slot"
    assert slots.own.used_count == len(running), f"{slots.own.used_count} slots are used, and {len(running)} run"
    assert slots.kept.used_count == len(preempted), f"{slots.kept.used_count} are kept, of {len(preempted)}"
    assert len(core.scheduler.waiting) == len(waiting)


def check_iterative_idle(core: IterativeCore) -> None:
    """Assert that nothing is left: no request, no slot in use."""
    check_iterative_core(core)
    stats = core.stats()
    assert not list(core.live_requests())
    assert stats.running_count == stats.waiting_count == stats.slots_used == stats.kept_used == 0, stats
    assert core.schedule(0.0) is None, "nothing lives, but there is something to compute"


def _check_life(core: IterativeCore, live: LiveIteration) -> None:
    name = live.request.id
    has = (live.slot is not None, live.kept_slot is not None)
    expected = (live.status is RequestStatus.RUNNING, live.status is RequestStatus.PREEMPTED)
    assert has == expected, f"{name} is {live.status.value}, and has (a slot, a kept latent): {has}"
    assert live.status in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED), name
    assert 0 <= live.steps_done <= (live.request.step_count if live.is_encoded else 0), name
    assert 0 <= live.steps_in_flight <= len(core.flights), f"{name} is in {live.steps_in_flight} steps"
    assert live.abort_reason is None or live.steps_in_flight, f"{name} is marked, and no step will end it"
    assert live.is_encoded or live.status is not RequestStatus.PREEMPTED, f"{name} has nothing that could be kept"
    is_new = live.status is RequestStatus.RUNNING and not live.is_encoded
    assert not is_new or live.steps_in_flight, f"{name} has a slot, and was never encoded"
