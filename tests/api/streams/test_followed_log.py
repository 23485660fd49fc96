"""Readers of an event log that are cancelled or refused in the moment in which they begin or are woken."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.error_responses import Refusal
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.api.streams.followed_log import FollowedLog


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
    log = FollowedLog(first=1, bytes_max=100, drops_taken=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(log.follow, 0, nowhere, silent_seconds_max=15))
        await wait_all_tasks_blocked()
        log.append(b"event")
        log.wake()
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
