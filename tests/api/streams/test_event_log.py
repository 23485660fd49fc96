"""Event logs: numbers, dropped events, and the size limit."""

from __future__ import annotations

import pytest

from trioserve.api.streams.event_log import EventLog, EventLogFull, split_events


def log_of(*events, bytes_max=10, drops_taken=True, first=1):
    log = EventLog(first=first, bytes_max=bytes_max, drops_taken=drops_taken)
    for event in events:
        log.append(event)
    return log


def test_events_are_numbered_and_read_from_any_number():
    log = log_of(b"aa", b"bb", b"cc", first=0)
    assert (log.first_kept, log.last) == (0, 2)
    assert log.take(-1, 100) == (b"aabbcc", 2)
    assert log.take(0, 2) == (b"bb", 1)
    assert log.take(0, 1) == (b"bb", 1)  # at least one event
    assert log.take(2, 100) == (b"", 2)


def test_events_without_a_reader_are_never_dropped():
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


def test_log_without_dropping_keeps_all_events():
    log = log_of(b"aaaa", b"bbbb", drops_taken=False)
    log.take(0, 100)
    with pytest.raises(EventLogFull):
        log.append(b"cccc")


def test_event_larger_than_the_limit_is_refused():
    log = log_of(b"aaaa")
    log.take(0, 100)
    with pytest.raises(EventLogFull):
        log.append(b"x" * 11)


def test_rewound_reader_protects_the_events_that_it_will_read():
    log = log_of(b"aaaa", b"bbbb")
    log.take(0, 100)
    log.rewind(1)
    assert log.unread_byte_count == 4
    log.append(b"cccc")  # the first event may be dropped
    with pytest.raises(EventLogFull):
        log.append(b"dddd")
    assert log.take(1, 100) == (b"bbbbcccc", 3)
    assert log.unread_byte_count == 0


def test_last_events_ignore_the_size_limit():
    log = log_of(b"aaaa", b"bbbb")
    log.append_last([b"cccc", b"dddd"])
    assert log.is_ended
    assert log.take(0, 100) == (b"aaaabbbbccccdddd", 4)
    with pytest.raises(AssertionError):
        log.append(b"e")


def test_joined_events_are_split():
    assert split_events(b"data: 1\n\nevent: x\ndata: 2\n\n") == [b"data: 1\n\n", b"event: x\ndata: 2\n\n"]
    with pytest.raises(AssertionError):
        split_events(b"data: 1\n\ndata")
