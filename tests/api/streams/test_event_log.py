"""Tests event logs: numbers, dropped events, and the size limit."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.error_responses import Refusal
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.detached_stream import DetachedStream, EventLog, EventLogFull, split_events


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
    assert log.take(0, 1) == (b"bb", 1)  # The log returns at least one event, even if the event exceeds the size limit.
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
    log.append(b"cccc")  # The log may drop the first event.
    with pytest.raises(EventLogFull):
        log.append(b"dddd")
    assert log.take(1, 100) == (b"bbbbcccc", 3)
    assert log.unread_byte_count == 0


def test_last_events_ignore_the_size_limit():
    log = log_of(b"aaaa", b"bbbb")
    log.end([b"cccc", b"dddd"])
    assert log.is_ended
    assert log.take(0, 100) == (b"aaaabbbbccccdddd", 4)
    with pytest.raises(AssertionError):
        log.append(b"e")


def test_joined_events_in_the_log_are_split():
    assert split_events(b"data: 1\n\nevent: x\ndata: 2\n\n") == [b"data: 1\n\n", b"event: x\ndata: 2\n\n"]
    with pytest.raises(AssertionError):
        split_events(b"data: 1\n\ndata")


async def nowhere(_piece):
    await trio.lowlevel.checkpoint()


def unread_stream(*, silent_seconds_max=15.0):
    def never(*_):
        raise AssertionError

    return DetachedStream(
        "s",
        None,
        seconds=1,
        bytes_max=60,
        call_at=never,
        on_unread=lambda _: None,
        on_expired=never,
        silent_seconds_max=silent_seconds_max,
    )


async def test_reader_of_a_detached_stream_gets_a_comment_for_each_allowed_silence(autojump_clock):
    sent = []

    async def note(piece):
        sent.append((trio.current_time() - began_at, piece))

    stream = unread_stream(silent_seconds_max=3)
    stream.begin(200, ())
    began_at = trio.current_time()
    with trio.move_on_after(7):
        await stream.read(0, note)
    assert sent == [(pytest.approx(3), KEEP_ALIVE), (pytest.approx(6), KEEP_ALIVE)]


async def test_reader_that_is_woken_and_cancelled_takes_no_events():
    log = EventLog(first=1, bytes_max=100, drops_taken=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(log.follow, 0, nowhere, silent_seconds_max=15))
        await wait_all_tasks_blocked()
        log.append(b"event")
        nursery.cancel_scope.cancel()
    assert log.unread_byte_count == 5


async def test_reader_is_refused_if_its_events_are_dropped_while_it_begins():
    async def goes_on():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.read, 0, nowhere)
            for _ in range(5):
                await stream.add(b"data: 12345\n\n")
                await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    stream = unread_stream()
    stream.begin(200, ())
    await goes_on()
    assert stream.log.first_kept > 1
    with pytest.raises(Refusal) as refused:
        await stream.read(0, nowhere)
    assert refused.value.response.code == "events_gone"
