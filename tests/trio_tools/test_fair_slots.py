"""Tests that keys take turns at running their jobs, and that a cancelled job costs its key no turn."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trioserve.contracts.errors import Overloaded
from trioserve.trio_tools.fair_slots import KEYS_KEPT_MAX, STAGE_FULL, FairSlots


class Stage:
    """Runs jobs that take a second each, and records the order in which they began."""

    def __init__(self, places: FairSlots) -> None:
        self.places = places
        self.begun: list[str] = []

    async def job(self, key: str | None, name: str) -> None:
        async with self.places.place(key):
            self.begun.append(name)
            await trio.sleep(1)


async def test_key_waits_for_at_most_one_job_of_a_busy_key(autojump_clock, nursery):
    stage = Stage(FairSlots(1, what="texts"))
    for index in range(200):
        nursery.start_soon(stage.job, "flood", f"flood {index}")
    await trio.testing.wait_all_tasks_blocked()
    began_at = trio.current_time()
    await stage.job("other", "other")
    assert trio.current_time() - began_at < 2.5
    assert stage.begun.index("other") == 1
    await stage.job("other", "again")
    assert stage.begun.index("again") == 3
    nursery.cancel_scope.cancel()


async def test_jobs_of_one_key_begin_in_the_order_of_their_calls(autojump_clock):
    stage = Stage(FairSlots(1, what="texts"))
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for index in range(10):
            nursery.start_soon(stage.job, None, str(index))
            await trio.testing.wait_all_tasks_blocked()
    assert stage.begun == [str(index) for index in range(10)]
    assert trio.current_time() - began_at == pytest.approx(10, abs=0.01)


async def test_at_most_the_configured_number_of_jobs_runs_at_the_same_time(autojump_clock):
    stage = Stage(FairSlots(2, what="texts"))
    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        for index in range(10):
            nursery.start_soon(stage.job, str(index % 3), str(index))
    assert trio.current_time() - began_at == pytest.approx(5, abs=0.01)


async def test_key_with_many_waiting_jobs_gets_a_fair_share_beside_keys_with_one_job_at_a_time(autojump_clock):
    """Each of three keys starts a new job as soon as its last job ends. A fourth key has many waiting jobs, and gets a
    quarter of the turns.
    """
    stage = Stage(FairSlots(1, what="texts"))

    async def come_back(key: str) -> None:
        while True:
            await stage.job(key, key)

    with trio.move_on_after(100.5):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(stage.job, "flood", "flood")
            for key in "abc":
                nursery.start_soon(come_back, key)
    assert all(stage.begun.count(key) >= 20 for key in ("flood", "a", "b", "c"))


async def test_turns_of_idle_keys_are_forgotten(autojump_clock):
    places = FairSlots(2, what="texts")
    async with places.place("stays"):
        for index in range(5000):
            async with places.place(str(index)):
                pass
    assert len(places._turns) <= KEYS_KEPT_MAX + 1
    async with places.place("new"):
        assert list(places._turns) == ["new"]


async def test_turn_of_a_job_cancelled_while_waiting_goes_to_the_next_job(autojump_clock):
    stage = Stage(FairSlots(1, what="texts"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.job, "a", "first")
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as leaving:
            for index in range(5):
                leaving.start_soon(stage.job, "a", f"left {index}")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(stage.job, "a", "last")
            await trio.testing.wait_all_tasks_blocked()
            assert stage.places.waiting_count == 6
            leaving.cancel_scope.cancel()
        assert stage.places.waiting_count == 1
    assert stage.begun == ["first", "last"]


async def test_slot_granted_to_a_cancelled_job_goes_to_another_job(autojump_clock):
    stage = Stage(FairSlots(1, what="texts"))
    for order in (0, 1):
        scope = trio.CancelScope()

        async def leaving(scope: trio.CancelScope = scope) -> None:
            with scope:
                await stage.job("b", "leaving")

        async with trio.open_nursery() as nursery:
            release = trio.Event()

            async def holding(release: trio.Event = release) -> None:
                async with stage.places.place("a"):
                    await release.wait()

            nursery.start_soon(holding)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(leaving)
            await trio.testing.wait_all_tasks_blocked()
            for act in (scope.cancel, release.set) if order else (release.set, scope.cancel):
                act()
        await stage.job("c", "after")
        assert stage.places.waiting_count == 0


async def test_only_the_key_with_too_many_waiting_jobs_is_refused(autojump_clock, nursery):
    stage = Stage(FairSlots(1, what="schemas", waiting_of_one_max=3))
    for index in range(4):
        nursery.start_soon(stage.job, "a", str(index))
        await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(Overloaded, match="3 schemas of this key wait already, at most 3 may") as caught:
        await stage.job("a", "more")
    assert caught.value.reason == STAGE_FULL
    assert caught.value.retry_after_seconds >= 1
    await stage.job("b", "other")
    assert stage.begun[:2] == ["0", "other"]
    nursery.cancel_scope.cancel()


async def test_keys_take_turns_in_calls_that_run_in_threads():
    places = FairSlots(1, what="forms")
    done: list[str] = []

    async def one(key: str, name: str) -> None:
        await places.call(lambda: done.append(name), key=key)

    async with trio.open_nursery() as nursery, places.place("a"):
        for index in range(3):
            nursery.start_soon(one, "a", f"a{index}")
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one, "b", "b")
        await trio.testing.wait_all_tasks_blocked()
    assert done == ["b", "a0", "a1", "a2"]
    assert places.waiting_count == 0
