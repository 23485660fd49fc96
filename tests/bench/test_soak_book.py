"""Tests that only responses that are whole in the counted part of a slice count."""

from __future__ import annotations

import array

from trioserve.bench.soak import SliceBook, rounds_from
from trioserve.bench.soak_plan import Slice


def book(begins_at: float, *responses: tuple[int, float, float], is_control: bool = False) -> SliceBook:
    """Return a record with responses. Each response is given by its client's number, its end time and its only gap."""
    made = SliceBook(Slice(is_control=is_control, request_indices=range(10)))
    made.start(begins_at)
    for number, responded_at, gap in responses:
        made.note_response(number, responded_at, array.array("d", [gap]))
    return made


def test_clients_are_numbered_and_the_first_client_begins_the_slice():
    made = SliceBook(Slice(is_control=False, request_indices=range(10)))
    assert [made.start(7.0), made.start(8.0)] == [0, 1]
    assert made.began_at == 7.0


def test_only_responses_of_settled_clients_that_end_within_their_slice_count():
    rounds = rounds_from(
        [
            book(0.0, (1, 3.0, 0.1), (2, 4.0, 0.2), (3, 10.0, 0.3), (4, 10.5, 0.4)),
            book(10.0, (1, 12.0, 0.5), (2, 15.0, 0.6), (3, 20.5, 0.7), is_control=True),
            book(20.0, (2, 25.0, 0.8)),
            book(30.0, (2, 35.0, 0.9), (3, 36.5, 1.0), is_control=True),
        ],
        settled_number=2,
        all_sent_at=36.0,
    )
    assert [(list(one.soak_gaps), list(one.control_gaps)) for one in rounds] == [([0.2, 0.3], [0.6]), ([0.8], [0.9])]
