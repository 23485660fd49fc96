"""Seats are taken in order and for so long, and the line's depth is what it was over time."""

from __future__ import annotations

import math

import pytest

from trioserve.bench.router.slots import Depth, Seats


def seats(*, seats_max: int = 2, service_seconds: float = 1.0) -> Seats:
    return Seats(seats_max, service_seconds, 0.0)


def test_who_finds_no_seat_waits_and_is_served_in_order():
    line = seats()
    for key in (1, 2, 3, 4):
        line.enter(key, 0.0)
    assert (line.running, line.waiting, line.next_end) == (2, 2, 1.0)
    assert line.ended(0.9) == []
    assert line.ended(1.0) == [1, 2]
    assert (line.running, line.waiting) == (2, 0)
    assert line.ended(2.0) == [3, 4]
    assert (line.running, line.next_end) == (0, math.inf)


def test_a_seat_that_is_noticed_late_was_free_from_its_moment():
    line = seats(seats_max=1)
    for key in (1, 2, 3):
        line.enter(key, 0.0)
    assert line.ended(2.5) == [1, 2]
    assert line.next_end == 3.0


def test_who_leaves_the_line_never_gets_a_seat():
    line = seats(seats_max=1)
    for key in (1, 2, 3):
        line.enter(key, 0.0)
    line.leave(2, 0.5)
    assert line.waiting == 1
    assert line.ended(2.0) == [1, 3]


def test_who_leaves_a_seat_leaves_it_to_the_next():
    line = seats(seats_max=1)
    line.enter(1, 0.0)
    line.enter(2, 0.0)
    line.leave(1, 0.25)
    assert (line.running, line.waiting, line.next_end) == (1, 0, 1.25)
    line.leave(1, 0.5)  # once more: nothing
    assert line.ended(1.25) == [2]


def test_the_depth_is_the_most_and_the_mean_over_time():
    depth = Depth(10.0)
    depth.note(4, 11.0)
    depth.note(1, 12.0)
    assert depth.most == 4
    assert depth.mean(14.0) == pytest.approx((0 + 4 + 1 + 1) / 4)


def test_measured_anew_the_depth_begins_with_those_who_wait():
    line = seats(seats_max=1)
    for key in (1, 2, 3):
        line.enter(key, 0.0)
    line.ended(1.0)
    line.measure_depth_anew(1.5)
    assert line.depth.most == 1
    assert line.depth.mean(2.0) == pytest.approx(1.0)
