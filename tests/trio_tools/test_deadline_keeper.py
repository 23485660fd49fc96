"""Tests that the callback of an alarm is called once, at its time, unless the alarm is cancelled. Cancelled alarms do
not accumulate.
"""

from __future__ import annotations

import trio

from trioserve.trio_tools.deadline_keeper import DeadlineKeeper


async def test_alarms_call_their_callbacks_in_order_at_their_times(nursery, autojump_clock):
    keeper = DeadlineKeeper()
    nursery.start_soon(keeper.run)
    start, rung = trio.current_time(), []
    for seconds in (5, 1, 3):
        keeper.set(start + seconds, lambda seconds=seconds: rung.append((seconds, trio.current_time() - start)))
    await trio.sleep(4)
    assert rung == [(1, 1), (3, 3)]
    keeper.set(start + 4.5, lambda: rung.append((4.5, trio.current_time() - start)))
    await trio.sleep(10)
    assert rung == [(1, 1), (3, 3), (4.5, 4.5), (5, 5)]
    assert len(keeper) == 0


async def test_cancelled_alarm_does_not_call_its_callback(nursery, autojump_clock):
    keeper = DeadlineKeeper()
    nursery.start_soon(keeper.run)
    rung = []
    first = keeper.set(trio.current_time() + 1, lambda: rung.append("first"))
    keeper.set(trio.current_time() + 2, lambda: rung.append("second"))
    first.cancel()
    first.cancel()
    assert len(keeper) == 1
    await trio.sleep(5)
    assert rung == ["second"]
    first.cancel()
    assert len(keeper) == 0


async def test_alarm_in_the_past_calls_its_callback_soon_and_may_cancel_another_alarm(nursery, autojump_clock):
    keeper = DeadlineKeeper()
    nursery.start_soon(keeper.run)
    rung = []
    other = keeper.set(trio.current_time() + 1, lambda: rung.append("other"))

    def ring() -> None:
        rung.append("now")
        other.cancel()
        keeper.set(trio.current_time(), lambda: rung.append("again"))

    keeper.set(trio.current_time() - 1, ring)
    await trio.sleep(3)
    assert rung == ["now", "again"]


async def test_cancelled_alarms_do_not_accumulate(autojump_clock):
    keeper = DeadlineKeeper()
    last = keeper.set(trio.current_time() + 10_000, lambda: None)
    for _ in range(50_000):
        keeper.set(trio.current_time() + 600, lambda: None).cancel()
    assert len(keeper._heap) < 2_100
    assert len(keeper) == 1
    last.cancel()
    assert len(keeper) == 0
