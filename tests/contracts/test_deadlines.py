"""Tests of error messages about deadlines that have passed."""

from __future__ import annotations

from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message


def test_message_of_a_passed_deadline_names_the_limit_that_shortened_it() -> None:
    limits = Deadlines(timeout=5)
    asked = Deadlines(timeout=60, ttft_timeout=3).within(NO_DEADLINES, limits)
    total = passed_message(Deadline.TOTAL, asked.seconds(Deadline.TOTAL) or 0, limits)
    assert "timeout of 5 s has passed" in total
    assert "--max-request-timeout" in total
    assert "--max" not in passed_message(Deadline.FIRST_TOKEN, 3, limits)
    assert "--max" not in passed_message(Deadline.TOTAL, 4, limits)
