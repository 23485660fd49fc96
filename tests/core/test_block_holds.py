"""Tests of holds on blocks of finished requests. Each hold ends once, by a report or at its deadline."""

from __future__ import annotations

import pytest

from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed, Released
from trioserve.contracts.request import KVTransferParams
from trioserve.core.block_holds import BlockHolds
from trioserve.core.connector_guard import TransferFaults
from trioserve.core.kv_blocks import BlockPool

SEND, LOAD = HoldKind.SEND, HoldKind.LOAD


class Books:
    """A pool, together with the holds on its blocks. A hold lasts 10 seconds."""

    def __init__(self, block_count: int = 4) -> None:
        self.pool = BlockPool(block_count)
        self.faults = TransferFaults()
        self.holds = BlockHolds(self.pool, 10.0, self.faults)

    def hold(self, name: str, count: int, *, kind: HoldKind = SEND, now: float = 0.0) -> list[int]:
        """Allocate blocks for a request, hold them, and end the request."""
        blocks = self.pool.allocate(count)
        self.holds.add(RequestId(name), kind, blocks, now)
        self.pool.release(blocks)
        return blocks

    def check(self, *, free: int, held: int, cached: int = 0, used: int = 0, **faults: int) -> None:
        pool = self.pool
        pool.check()
        assert (pool.free_count, pool.cached_count, pool.used_count, pool.held_count) == (free, cached, used, held)
        assert {fault.value: total for fault, total in self.faults.totals.items() if total} == faults


# --- the pool -------------------------------------------------------------------------------------------------------


def test_held_block_counts_as_used_while_it_has_a_user():
    books = Books()
    blocks = books.pool.allocate(2)
    books.holds.add(RequestId("a"), SEND, blocks, 0.0)
    books.check(free=2, used=2, held=0)
    books.pool.release(blocks)
    books.check(free=2, used=0, held=2)
    assert books.pool.available_count == 2
    assert [books.pool.user_count(block) for block in blocks] == [0, 0]


def test_a_held_block_is_not_allocated():
    books = Books(block_count=3)
    held = books.hold("a", 2)
    assert not set(books.pool.allocate(1)) & set(held)
    with pytest.raises(AssertionError):
        books.pool.allocate(1)


def test_held_block_in_the_prefix_cache_can_be_shared_and_is_cached_after_release():
    books = Books()
    blocks = books.pool.allocate(1)
    books.pool.publish(blocks[0])
    books.holds.add(RequestId("a"), SEND, blocks, 0.0)
    books.pool.release(blocks)
    assert not books.pool.is_idle(blocks[0])
    books.pool.share(blocks)
    books.check(free=3, used=1, held=0)
    books.holds.report_end(RequestId("a"), SEND)
    books.check(free=3, used=1, held=0)
    books.pool.release(blocks)
    books.check(free=3, cached=1, held=0)


def test_second_release_of_a_user_does_not_remove_the_hold():
    books = Books()
    blocks = books.hold("a", 1)
    with pytest.raises(AssertionError, match="without a user"):
        books.pool.release(blocks)
    books.check(free=3, held=1)


def test_only_a_used_block_can_be_held():
    books = Books()
    with pytest.raises(AssertionError, match="gets a hold, but has no user"):
        books.holds.add(RequestId("a"), SEND, [0], 0.0)
    books.hold("a", 1)
    with pytest.raises(AssertionError, match="gets a hold, but has no user"):
        books.pool.hold(next(iter(books.holds)).blocks)


def test_a_block_with_several_holds_is_free_after_the_last():
    books = Books()
    blocks = books.pool.allocate(1)
    books.holds.add(RequestId("a"), SEND, blocks, 0.0)
    books.holds.add(RequestId("b"), SEND, blocks, 0.0)
    books.pool.release(blocks)
    books.holds.report_end(RequestId("b"), SEND)
    books.check(free=3, held=1)
    books.holds.report_end(RequestId("a"), SEND)
    books.check(free=4, held=0)


# --- reports --------------------------------------------------------------------------------------------------------


def test_send_and_load_holds_of_a_request_end_independently():
    books = Books()
    books.hold("a", 1, kind=SEND)
    books.hold("a", 2, kind=LOAD)
    books.holds.report_end(RequestId("a"), LOAD)
    books.check(free=3, held=1)
    books.holds.report_end(RequestId("a"), LOAD)
    books.check(free=3, held=1, double=1)
    books.holds.report_end(RequestId("a"), SEND)
    books.check(free=4, held=0, double=1)


def test_second_report_is_counted_as_duplicate_and_changes_nothing():
    books = Books()
    books.hold("a", 2)
    books.hold("b", 1)
    for double in range(3):
        books.holds.report_end(RequestId("a"), SEND)
        books.check(free=3, held=1, **({"double": double} if double else {}))


def test_report_without_a_hold_is_counted_as_unknown():
    books = Books()
    books.hold("a", 2)
    for name, kind in [("A", SEND), ("a ", SEND), ("", SEND), ("a", LOAD)]:
        books.holds.report_end(RequestId(name), kind)
    books.check(free=2, held=2, unknown=4)


def test_report_after_the_deadline_is_counted_as_late_and_a_second_one_as_duplicate():
    books = Books()
    books.hold("a", 2)
    assert [hold.request_id for hold in books.holds.expire(10.0)] == ["a"]
    books.check(free=4, held=0, hold_expired=1)
    books.hold("b", 4, now=10.0)
    books.holds.report_end(RequestId("a"), SEND)
    books.check(free=0, held=4, hold_expired=1, late=1)
    books.holds.report_end(RequestId("a"), SEND)
    books.check(free=0, held=4, hold_expired=1, late=1, double=1)


def test_ended_holds_are_forgotten_after_many_others():
    books = Books()
    for number in range(10_001):
        books.holds.note_ended(RequestId(f"r{number}"), LOAD)
    books.holds.report_end(RequestId("r0"), LOAD)
    books.holds.report_end(RequestId("r1"), LOAD)
    books.check(free=4, held=0, unknown=1, double=1)


def test_a_request_has_one_hold_of_each_kind():
    books = Books()
    books.hold("a", 1)
    with pytest.raises(AssertionError, match="held twice"):
        books.hold("a", 1)


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_holds_expire_in_order_and_not_before_their_time():
    books = Books()
    assert books.holds.next_deadline() is None
    books.hold("a", 1, now=1.0)
    books.hold("b", 1, now=2.0)
    books.hold("c", 1, now=3.0)
    assert books.holds.next_deadline() == 11.0
    assert books.holds.expire(10.999) == []
    books.check(free=1, held=3)
    assert [hold.request_id for hold in books.holds.expire(12.0)] == ["a", "b"]
    books.check(free=3, held=1, hold_expired=2)
    assert books.holds.next_deadline() == 13.0
    books.holds.report_end(RequestId("c"), SEND)
    assert books.holds.next_deadline() is None
    assert books.holds.expire(99.0) == []


def test_still_read_report_restarts_the_deadline_and_holds_still_expire_in_order():
    books = Books()
    books.hold("a", 1, now=1.0)
    books.hold("b", 1, now=2.0)
    books.holds.extend(RequestId("a"), SEND, 5.0)
    assert books.holds.next_deadline() == 12.0
    assert [hold.request_id for hold in books.holds.expire(12.0)] == ["b"]
    assert books.holds.next_deadline() == 15.0
    books.check(free=3, held=1, hold_expired=1)
    assert [hold.request_id for hold in books.holds.expire(15.0)] == ["a"]


def test_still_read_report_is_counted_for_an_unknown_hold_and_ignored_for_an_ended_hold():
    books = Books()
    books.hold("a", 1)
    books.hold("b", 1)
    books.holds.report_end(RequestId("a"), SEND)
    books.holds.expire(10.0)
    for name in ("a", "b", "nobody"):
        books.holds.extend(RequestId(name), SEND, 11.0)
    books.check(free=4, held=0, hold_expired=1, unknown=1)
    books.holds.report_end(RequestId("b"), SEND)
    books.check(free=4, held=0, hold_expired=1, unknown=1, late=1)


# --- a complete request ---------------------------------------------------------------------------------------------


def finished_and_held(drive, **more):
    driver = drive(connected=True, **more)
    driver.holds = {"a"}
    driver.add("a", range(6))
    driver.step()
    assert driver.finished["a"].reason is FinishReason.LENGTH
    assert driver.core.stats().blocks_held == 2
    return driver


def test_held_blocks_are_free_when_the_connector_releases_them(drive):
    driver = finished_and_held(drive)
    send = driver.connector.sends["a"]
    assert send.tokens == tuple(range(6)), "the last token was sampled but not computed, so it has no KV"
    assert len(send.block_table) == 2
    driver.report(driver.connector.released(RequestId("a")))
    stats = driver.core.stats()
    assert (stats.blocks_held, stats.blocks_cached, stats.blocks_free) == (0, 1, 63)
    driver.run()
    assert driver.faults == {}


def test_an_abort_after_the_end_notifies_the_connector_once(drive):
    """Scenario S02 of tests/README.md."""
    driver = finished_and_held(drive)
    for _ in range(3):
        assert driver.abort("a")["a"].outcome is AbortOutcome.ALREADY_FINISHED
        assert driver.core.stats().blocks_held == 2
    assert driver.connector.calls["request_aborted_after_finish"] == 1
    driver.report(driver.connector.released(RequestId("a")))
    assert driver.core.stats().blocks_held == 0
    driver.abort("a")
    assert driver.connector.calls["request_aborted_after_finish"] == 1
    driver.run()
    assert driver.faults == {}


def test_progress_handles_pending_connector_reports(drive):
    driver = finished_and_held(drive, hold_seconds_max=3.0)
    connector, name = driver.connector, RequestId("a")
    driver.wait(2.0)
    connector.outbox = [lambda: connector.still_read(name)]
    assert driver.core.progress(driver.now) == []
    assert driver.core.next_deadline() == 5.0
    connector.outbox = [lambda: connector.still_read(name), lambda: connector.released(name)]
    connector.raises = {"progress"}
    assert driver.core.progress(driver.now) == []
    assert (driver.core.stats().blocks_held, driver.faults) == (2, {"raised": 1})
    connector.raises = set()
    driver.core.progress(driver.now)
    assert driver.core.stats().blocks_held == 0
    driver.run()


def test_connector_is_not_asked_to_hold_blocks_beyond_the_held_share(drive):
    driver = drive(connected=True, block_count=8, held_share_max=0.25)
    seen: dict[str, KVTransferParams] = {}

    def holds(request, reason):
        seen[request.id] = request.kv_transfer
        return request.kv_transfer.do_remote_decode

    driver.connector.holds = holds
    asked = KVTransferParams(do_remote_decode=True, do_remote_prefill=True, remote_engine_id="e")
    for name in ("a", "b"):
        driver.add(name, range(6), kv_transfer=asked)
    while driver.step() is not None:
        pass
    flags = [seen[name].do_remote_decode for name in ("a", "b")]
    assert (sorted(flags), driver.core.stats().holds_refused_total) == ([False, True], 1)
    assert all(params.do_remote_prefill and params.remote_engine_id == "e" for params in seen.values())
    driver.run()


def test_last_event_of_a_request_with_held_blocks_contains_transfer_params(drive):
    driver = finished_and_held(drive)
    assert driver.finished["a"].kv_transfer == KVTransferParams(do_remote_prefill=True, remote_request_id="a")
    assert driver.connector.calls["transfer_params"] == 1
    driver.add("b", range(6))
    driver.step()
    assert driver.finished["b"].kv_transfer is None
    assert driver.connector.calls["transfer_params"] == 1


def test_connector_is_not_notified_of_an_abort_without_a_hold(drive):
    driver = drive(connected=True)
    driver.add("a", range(6))
    driver.run()
    driver.abort("a", "nobody")
    assert driver.connector.calls["request_aborted_after_finish"] == 0


def test_hold_without_a_release_report_ends_at_its_deadline(drive):
    """Scenario S07 of tests/README.md: the engine that reads the blocks may have crashed."""
    driver = finished_and_held(drive, hold_seconds_max=3.0)
    assert driver.core.next_deadline() == 3.0
    driver.wait(2.9)
    assert driver.core.stats().blocks_held == 2
    driver.wait(0.1)
    assert driver.core.stats().blocks_held == 0
    assert driver.connector.expired == [("a", SEND)]
    assert driver.faults == {"hold_expired": 1}
    driver.report(driver.connector.released(RequestId("a")))
    driver.report(driver.connector.released(RequestId("a")))
    assert driver.faults == {"hold_expired": 1, "late": 1, "double": 1}
    driver.run()


@pytest.mark.parametrize("event", [Released("z"), Loaded("z", 4), LoadFailed("z")], ids=lambda event: type(event))
def test_report_about_an_unknown_request_is_counted_and_ignored(drive, event):
    """Scenario S05 of tests/README.md."""
    driver = finished_and_held(drive)
    driver.report(event)
    assert driver.faults == {"unknown": 1}
    assert driver.core.stats().blocks_held == 2


def test_a_report_to_a_core_without_a_connector_is_ignored(drive):
    driver = drive()
    driver.report(Released(RequestId("a")))
    assert driver.core.expire(1e9) == []
    assert driver.core.next_deadline() is None


@pytest.mark.parametrize("when", ["waiting", "running", "in a step", "preempted", "failed", "finished"])
def test_the_connector_is_notified_of_every_end_exactly_once(drive, when):
    """Scenario S06 of tests/README.md. The requests include some that were aborted before they ran."""
    driver = drive(connected=True, block_count=3)
    driver.add("z", range(4), 8, priority=-1)
    driver.add("a", range(10, 14), 1 if when == "finished" else 8)
    if when != "waiting":
        driver.step(fail=["a"] if when == "failed" else [])
    if when == "preempted":
        assert driver.step().preempted == ("a",)
    if when == "in a step":
        driver.abort("z")
        driver.step(abort=["a"])
    if when in ("waiting", "running", "preempted"):
        driver.abort("a")
    driver.run()
    expected = {"failed": FinishReason.ERROR, "finished": FinishReason.LENGTH}.get(when, FinishReason.ABORT)
    assert driver.connector.finished["a"] is expected
    assert driver.connector.calls["request_finished"] == 2


def test_a_request_shares_a_held_prefix(drive):
    driver = finished_and_held(drive)
    driver.add("b", [*range(6), 9, 9], 3)
    driver.step()
    stats = driver.core.stats()
    assert (stats.prefix_hit_tokens_total, stats.blocks_used, stats.blocks_held) == (4, 2, 1)
    driver.report(driver.connector.released(RequestId("a")))
    assert driver.core.stats().blocks_held == 0
    driver.run()
    assert driver.finished["b"].cached_token_count == 4


def test_a_waiting_request_starts_when_held_blocks_are_released(drive):
    driver = finished_and_held(drive, block_count=3)
    driver.add("b", range(20, 28), 2)
    assert driver.step() is None, "it does not fit until the hold is released"
    driver.report(driver.connector.released(RequestId("a")))
    assert driver.step().admitted == ("b",)
    driver.run()


def test_a_request_preempted_because_of_holds_resumes_first(drive):
    driver = drive(connected=True, block_count=4)
    driver.holds = {"a"}
    driver.add("a", range(8))
    driver.add("b", range(20, 24), 8)
    driver.step()
    driver.step()
    assert driver.core.stats().blocks_held == 2
    while driver.step() is not None:
        pass
    assert driver.core.stats().preemptions_total == 1
    assert driver.core.next_deadline() == 10.0
    driver.run()
    assert driver.finished["b"].reason is FinishReason.LENGTH


def test_a_waiting_request_starts_if_holds_preempt_all_running_ones(drive):
    driver = drive(connected=True, block_count=4)
    driver.holds = {"a"}
    driver.add("a", range(8))
    driver.add("b", range(20, 24), 8)
    while len(driver.tokens["b"]) < 5:
        driver.step()
    driver.add("c", range(30, 34), priority=-1)
    plan = driver.step()
    assert (plan.preempted, plan.admitted) == (("b",), ("c",))
    driver.run()


def test_an_id_with_held_blocks_is_refused(drive):
    driver = finished_and_held(drive)
    with pytest.raises(AssertionError, match="a is held"):
        driver.add("a", range(3))


def test_blocks_are_not_held_if_the_connector_raises_at_the_end(drive):
    driver = drive(connected=True)
    driver.connector.raises = {"request_finished"}
    driver.holds = {"a"}
    driver.add("a", range(6))
    driver.run()
    assert driver.faults == {"raised": 1}
    assert "request_finished is broken" in next(iter(driver.core.transfers.faults.latest.values()))


def test_held_blocks_count_in_kv_usage(drive):
    driver = finished_and_held(drive, block_count=4)
    assert driver.core.stats().kv_usage == 0.5
