"""Tests of slots, their order, and the length of the queue over time."""

from __future__ import annotations

import math

import pytest

from trioserve.bench.router.fake_endpoint import Depth, Slots


def slots(*, slots_max: int = 2, service_seconds: float = 1.0) -> Slots:
    return Slots(slots_max, service_seconds, 0.0)


def test_requests_without_a_free_slot_wait_and_are_served_in_order():
    queue = slots()
    for key in (1, 2, 3, 4):
        queue.enter(key, 0.0)
    assert (queue.running, queue.waiting, queue.next_end) == (2, 2, 1.0)
    assert queue.ended(0.9) == []
    assert queue.ended(1.0) == [1, 2]
    assert (queue.running, queue.waiting) == (2, 0)
    assert queue.ended(2.0) == [3, 4]
    assert (queue.running, queue.next_end) == (0, math.inf)


def test_slot_is_free_from_the_end_of_its_service_even_if_processed_later():
    queue = slots(slots_max=1)
    for key in (1, 2, 3):
        queue.enter(key, 0.0)
    assert queue.ended(2.5) == [1, 2]
    assert queue.next_end == 3.0


def test_request_that_leaves_the_queue_never_gets_a_slot():
    queue = slots(slots_max=1)
    for key in (1, 2, 3):
        queue.enter(key, 0.0)
    queue.leave(2, 0.5)
    assert queue.waiting == 1
    assert queue.ended(2.0) == [1, 3]


def test_slot_of_a_request_that_leaves_goes_to_the_next_one():
    queue = slots(slots_max=1)
    queue.enter(1, 0.0)
    queue.enter(2, 0.0)
    queue.leave(1, 0.25)
    assert (queue.running, queue.waiting, queue.next_end) == (1, 0, 1.25)
    queue.leave(1, 0.5)  # A repeated call has no effect.
    assert queue.ended(1.25) == [2]


def test_queue_depth_has_its_maximum_and_its_mean_over_time():
    depth = Depth(10.0)
    depth.note(4, 11.0)
    depth.note(1, 12.0)
    assert depth.most == 4
    assert depth.mean(14.0) == pytest.approx((0 + 4 + 1 + 1) / 4)


def test_queue_depth_after_a_reset_begins_with_the_waiting_requests():
    queue = slots(slots_max=1)
    for key in (1, 2, 3):
        queue.enter(key, 0.0)
    queue.ended(1.0)
    queue.measure_depth_again(1.5)
    assert queue.depth.most == 1
    assert queue.depth.mean(2.0) == pytest.approx(1.0)
