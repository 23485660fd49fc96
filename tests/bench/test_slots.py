"""Slots are taken in order and for so long, and the queue's depth is what it was over time."""

from __future__ import annotations

import math

import pytest

from trioserve.bench.router.slots import Depth, Slots


def slots(*, slots_max: int = 2, service_seconds: float = 1.0) -> Slots:
    return Slots(slots_max, service_seconds, 0.0)


def test_who_finds_no_seat_waits_and_is_served_in_order():
    queue = slots()
    for key in (1, 2, 3, 4):
        queue.enter(key, 0.0)
    assert (queue.running, queue.waiting, queue.next_end) == (2, 2, 1.0)
    assert queue.ended(0.9) == []
    assert queue.ended(1.0) == [1, 2]
    assert (queue.running, queue.waiting) == (2, 0)
    assert queue.ended(2.0) == [3, 4]
    assert (queue.running, queue.next_end) == (0, math.inf)


def test_a_seat_that_is_noticed_late_was_free_from_its_moment():
    queue = slots(slots_max=1)
    for key in (1, 2, 3):
        queue.enter(key, 0.0)
    assert queue.ended(2.5) == [1, 2]
    assert queue.next_end == 3.0


def test_who_leaves_the_line_never_gets_a_seat():
    queue = slots(slots_max=1)
    for key in (1, 2, 3):
        queue.enter(key, 0.0)
    queue.leave(2, 0.5)
    assert queue.waiting == 1
    assert queue.ended(2.0) == [1, 3]


def test_who_leaves_a_seat_leaves_it_to_the_next():
    queue = slots(slots_max=1)
    queue.enter(1, 0.0)
    queue.enter(2, 0.0)
    queue.leave(1, 0.25)
    assert (queue.running, queue.waiting, queue.next_end) == (1, 0, 1.25)
    queue.leave(1, 0.5)  # once more: nothing
    assert queue.ended(1.25) == [2]


def test_the_depth_is_the_most_and_the_mean_over_time():
    depth = Depth(10.0)
    depth.note(4, 11.0)
    depth.note(1, 12.0)
    assert depth.most == 4
    assert depth.mean(14.0) == pytest.approx((0 + 4 + 1 + 1) / 4)


def test_measured_anew_the_depth_begins_with_those_who_wait():
    queue = slots(slots_max=1)
    for key in (1, 2, 3):
        queue.enter(key, 0.0)
    queue.ended(1.0)
    queue.measure_depth_anew(1.5)
    assert queue.depth.most == 1
    assert queue.depth.mean(2.0) == pytest.approx(1.0)
