"""Events by number: which are kept, which may go, and when there are too many."""

from __future__ import annotations

import pytest

from trioserve.api.streams.event_log import EventLog, EventLogFull, split_events


def log_of(*events, bytes_max=10, drops_taken=True, first=1):
    log = EventLog(first=first, bytes_max=bytes_max, drops_taken=drops_taken)
    for event in events:
        log.append(event)
    return log


def test_events_are_numbered_and_taken_from_any_place():
    log = log_of(b"aa", b"bb", b"cc", first=0)
    assert (log.first_kept, log.last) == (0, 2)
    assert log.take(-1, 100) == (b"aabbcc", 2)
    assert log.take(0, 2) == (b"bb", 1)
    assert log.take(0, 1) == (b"bb", 1)  # one at least
    assert log.take(2, 100) == (b"", 2)


def test_what_nobody_has_taken_is_never_dropped():
    log = log_of(b"aaaa", b"bbbb")
    with pytest.raises(EventLogFull):
        log.append(b"cccc")
    assert (log.last, log.byte_count, log.unread_byte_count) == (2, 8, 8)
    log.take(0, 4)
    assert log.unread_byte_count == 4
    assert log.append(b"cccc") == 3
    assert (log.first_kept, log.byte_count, log.unread_byte_count) == (2, 8, 8)
    with pytest.raises(EventLogFull):
        log.append(b"dddd")


def test_what_has_to_be_kept_from_the_first_on_is():
    log = log_of(b"aaaa", b"bbbb", drops_taken=False)
    log.take(0, 100)
    with pytest.raises(EventLogFull):
        log.append(b"cccc")


def test_one_event_that_is_too_large_for_all_is_refused():
    log = log_of(b"aaaa")
    log.take(0, 100)
    with pytest.raises(EventLogFull):
        log.append(b"x" * 11)


def test_a_reader_that_begins_earlier_protects_what_it_will_read():
    log = log_of(b"aaaa", b"bbbb")
    log.take(0, 100)
    log.rewind(1)
    assert log.unread_byte_count == 4
    log.append(b"cccc")  # the first one may go
    with pytest.raises(EventLogFull):
        log.append(b"dddd")
    assert log.take(1, 100) == (b"bbbbcccc", 3)
    assert log.unread_byte_count == 0


def test_there_is_always_room_for_the_end():
    log = log_of(b"aaaa", b"bbbb")
    log.append_last([b"cccc", b"dddd"])
    assert log.is_ended
    assert log.take(0, 100) == (b"aaaabbbbccccdddd", 4)
    with pytest.raises(AssertionError):
        log.append(b"e")


def test_several_events_in_one_piece_are_told_apart():
    assert split_events(b"data: 1\n\nevent: x\ndata: 2\n\n") == [b"data: 1\n\n", b"event: x\ndata: 2\n\n"]
    with pytest.raises(AssertionError):
        split_events(b"data: 1\n\ndata")
