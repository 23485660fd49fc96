"""Tests of KV from other engines. The KV arrives completely or partly, late, twice or never, and some requests do not
wait for it.
"""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import AbortOutcome, FinishReason, Phase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded
from trioserve.core.settings import CoreSettings

# Defaults of the cases: block_size 4, step_tokens_max 8, max_num_seqs 4, block_count 64.
# Loads and holds may take 10 seconds each.


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:12<8 | +a", ". | a8-11*", id="loaded tokens are not computed"),
        pytest.param("a:12<100 | +a", ". | a11*", id="the last token is always computed"),
        pytest.param("a:12<7>2 | +a", ". | a7-11* | a12*", id="a load may end inside a block"),
        pytest.param("a:20<6 | +a", ". | a6-13 | a14-19*", id="a long rest is computed in chunks"),
        pytest.param("a:12<8 | +a5", ". | a5-11*", id="missing tokens are computed"),
        pytest.param("a:12<8 | +a0", ". | a0-7 | a8-11*", id="an empty load"),
        pytest.param("a:12<8 | -a", ". | a0-7 | a8-11*", id="a failed load"),
        pytest.param("a:12<8 | _9 | _1", ". | . | a0-7 | a8-11*", id="a load that expires"),
        pytest.param("a:12<8 | +a99", ". | a0-7 | a8-11*", id="a load with too many tokens"),
        pytest.param("a:12<8=p", "a0-7 | a8-11*", id="no load with prompt logprobs"),
        pytest.param("a:8 | b:a8+4<4", "a0-7* | b8-11*", id="no load if more is cached here"),
        pytest.param("a:8 | b:a8+8<12 | +b", "a0-7* | . | b12-15*", id="cached tokens are not loaded"),
        pytest.param("a:12<8 b:4>3 | | +a", "b0-3* | b4* | b5* a8-11*", id="others run during the load"),
        pytest.param("a:12<8 b:12<8 | +b | +a", ". | b8-11* | a8-11*", id="the first load to arrive runs first"),
        pytest.param("a:12<8>2 | +a b:8@-9", ". | a8-11* b0-3 | a12* b4-7*", id="before requests without KV"),
        pytest.param("a:12<8 b:12<8@-1 | +a +b", ". | b8-11* a8-11*", id="loaded requests by priority"),
        pytest.param("a:12<8 b:12<8 | +b +a", ". | a8-11* b8-11*", id="loaded requests by arrival"),
        pytest.param(
            "a:12<8 b:4@-1 | -a c:4", "b0-3* | a0-7 | a8-11* c0-3*", id="a failed load keeps the place in the queue"
        ),
    ],
)
def test_a_request_runs_when_its_kv_has_arrived_and_computes_the_rest(check, script, expect):
    check(script, expect, connected=True)


@pytest.mark.parametrize(
    ("script", "expect", "faults"),
    [
        pytest.param("a:12<8 | +a5", ". | a5-11*", {}, id="a partial load"),
        pytest.param("a:12<8 | -a", ". | a0-7 | a8-11*", {"load_failed": 1}, id="a failed load"),
        pytest.param("a:12<8 | _10", ". | a0-7 | a8-11*", {"load_expired": 1, "hold_expired": 1}, id="no report"),
        pytest.param("a:12<8 | _10 +a", ". | a0-7 | a8-11*", {"load_expired": 1}, id="a report during the hold"),
        pytest.param(
            "a:12<8 | _10 _9.5 -a", ". | a0-7 | a8-11*", {"load_expired": 1}, id="a failure report during the hold"
        ),
        pytest.param("a:12<8 | +a +a", ". | a8-11*", {"double": 1}, id="a second report"),
        pytest.param(
            "a:12<8 | -a +a", ". | a0-7 | a8-11*", {"load_failed": 1, "double": 1}, id="success after failure"
        ),
        pytest.param(
            "a:12<8 | _10 _10 +a +a",
            ". | a0-7 | a8-11*",
            {"load_expired": 1, "hold_expired": 1, "late": 1, "double": 1},
            id="reports after the hold",
        ),
        pytest.param("a:12<8 | +a99", ". | a0-7 | a8-11*", {"bad_count": 1}, id="too many tokens"),
        pytest.param("a:12 | +a", "a0-7 | a8-11*", {"unknown": 1}, id="an unknown load"),
    ],
)
def test_wrong_connector_reports_are_counted(check, script, expect, faults):
    """Scenario S08 of tests/README.md: this engine computes tokens whose KV did not arrive. It never samples output
    from missing KV.
    """
    assert check(script, expect, connected=True).faults == faults


def test_request_owns_blocks_for_the_prompt_tokens_that_were_not_loaded(check):
    driver = check("a:19<6 | +a", ". | a6-13 | a14-18*", connected=True, block_count=5)
    assert driver.core.stats().preemptions_total == 0


def test_loading_request_owns_blocks_but_no_batch_slot(drive):
    driver = drive(connected=True, max_num_seqs=1)
    driver.remote = {"a": 8}
    driver.add("a", range(12))
    driver.add("b", range(20, 24), 2)
    assert driver.step().admitted == ("b",)
    stats = driver.core.stats()
    assert (stats.remote_kv_count, stats.waiting_count, stats.running_count, stats.blocks_used) == (1, 1, 1, 4)
    load = driver.connector.loads["a"]
    assert (load.start, load.token_count, len(load.block_table)) == (0, 8, 3)
    driver.report(driver.connector.loaded(RequestId("a")))
    driver.run()
    assert driver.finished["a"].cached_token_count == 0, "the prefix cache was empty"
    assert driver.core.stats().loaded_tokens_total == 8


def test_a_request_waits_while_the_maximum_of_loads_is_pending(drive):
    driver = drive(connected=True, max_num_seqs=1)
    driver.add("p", range(100, 105))  # This is a part of b's prompt, which b finds in the cache.
    driver.run()
    driver.connector.calls.clear()
    driver.remote = {"a": 8, "b": 8}
    for index, name in enumerate("abcd"):
        driver.add(name, range(100 * index, 100 * index + 12))
    steps = [driver.step().chunks[0].request.id for _ in range(4)]
    assert steps == ["c", "c", "d", "d"]
    assert set(driver.connector.loads) == {"a"}
    assert driver.step() is None
    assert driver.connector.calls["num_matched_tokens"] == 4, "it is not looked up at every step"
    driver.report(driver.connector.load_failed(RequestId("a")))
    assert driver.step().admitted == ("a",)
    driver.step()
    assert driver.step() is None
    assert set(driver.connector.loads) == {"b"}
    assert driver.connector.loads["b"].start == 4
    driver.run()


def test_request_whose_load_failed_is_matched_again_against_the_prefix_cache(drive):
    driver = drive(connected=True, block_count=12, step_tokens_max=64)
    driver.remote, driver.holds = {"a": 8}, {"q"}
    driver.add("a", range(31))
    driver.add("q", range(16))  # This is the start of a's prompt. From now on, its blocks are held.
    driver.step()
    assert driver.core.stats().blocks_held == 4
    driver.report(driver.connector.load_failed(RequestId("a")))
    driver.add("p", range(50, 54), 2, priority=-1)
    assert driver.step().admitted == ("p", "a"), "half of its prompt is cached here by now"
    driver.run()


def test_no_more_requests_load_at_a_time_than_can_run(drive):
    driver = drive(connected=True, max_num_seqs=2)
    for index, name in enumerate("abcd"):
        driver.remote[name] = 8
        driver.add(name, range(100 * index, 100 * index + 12))
    assert driver.step() is None
    assert driver.step() is None
    assert set(driver.connector.loads) == {"a", "b"}
    driver.report(driver.connector.loaded(RequestId("a")))
    assert driver.step().admitted == ("a",)
    assert set(driver.connector.loads) == {"b", "c"}
    driver.run()


def test_load_begins_only_when_all_known_tokens_fit_the_pool(drive):
    driver = drive(connected=True, block_count=4)
    driver.remote = {"b": 4}
    driver.add("a", range(8), 4)
    driver.add("b", range(20, 32))
    driver.step()
    assert not driver.connector.loads
    driver.abort("a")
    assert driver.step() is None
    assert driver.connector.loads["b"].token_count == 4
    driver.run()


def test_loaded_blocks_are_found_by_the_next_request_with_the_prefix(drive):
    driver = drive(connected=True)
    driver.remote = {"a": 8}
    driver.add("a", range(12))
    driver.step()
    driver.report(driver.connector.loaded(RequestId("a")))
    driver.run()
    driver.add("b", range(12))
    driver.run()
    assert driver.finished["b"].cached_token_count == 8


# --- aborts and timeouts --------------------------------------------------------------------------------------------


def loading(drive, *, prefix: bool = False, **more):
    """Let request `a` wait for the KV of 8 tokens. With `prefix`, its first 4 tokens are cached, and it waits for the
    tokens after them.
    """
    driver = drive(connected=True, **more)
    if prefix:
        driver.add("p", range(5))
        driver.run()
    driver.remote = {"a": 12 if prefix else 8}
    driver.add("a", range(14), 2)
    assert driver.step() is None
    assert driver.connector.loads["a"].token_count == 8
    return driver


@pytest.mark.parametrize("prefix", [False, True], ids=["nothing cached", "a cached prefix"])
@pytest.mark.parametrize("report", ["loaded", "load_failed"])
def test_an_abort_during_a_load_holds_its_blocks_until_the_report(drive, prefix, report):
    """Scenario S03 of tests/README.md."""
    driver = loading(drive, prefix=prefix)
    result = driver.abort("a")["a"]
    assert (result.outcome, result.finished.phase) == (AbortOutcome.ABORTED, Phase.QUEUED)
    assert driver.connector.loads["a"].is_abandoned
    stats = driver.core.stats()
    assert (stats.blocks_used, stats.blocks_held, stats.blocks_cached) == (0, 3 if prefix else 4, 1 if prefix else 0)
    assert driver.abort("a")["a"].outcome is AbortOutcome.ALREADY_FINISHED
    driver.report(getattr(driver.connector, report)(RequestId("a")))
    assert driver.core.stats().blocks_held == 0
    driver.run()
    assert driver.faults == {}


def test_an_abort_during_a_load_frees_its_blocks_at_the_deadline(drive):
    """Scenario S03 of tests/README.md."""
    driver = loading(drive, hold_seconds_max=3.0)
    driver.wait(2.0)
    driver.abort("a")
    assert driver.core.next_deadline() == 5.0
    driver.wait(3.0)
    assert driver.connector.expired == [("a", HoldKind.LOAD)]
    assert driver.core.stats().blocks_free == 64
    driver.report(driver.connector.loaded(RequestId("a")))
    assert driver.faults == {"hold_expired": 1, "late": 1}
    driver.run()


def test_an_abort_with_load_and_send_pending_waits_for_both(drive):
    """Scenario S04 of tests/README.md."""
    driver = loading(drive, prefix=True)
    driver.holds = {"a"}
    driver.abort("a")
    assert driver.connector.sends["a"].tokens == tuple(range(4)), "only computed blocks are sent"
    assert driver.core.stats().blocks_held == 4
    driver.report(driver.connector.loaded(RequestId("a")))
    assert driver.core.stats().blocks_held == 1
    driver.report(driver.connector.loaded(RequestId("a")))
    driver.report(driver.connector.released(RequestId("a")))
    driver.report(driver.connector.released(RequestId("a")))
    stats = driver.core.stats()
    assert (stats.blocks_held, stats.blocks_used) == (0, 0)
    assert driver.faults == {"double": 2}
    driver.run()


def test_after_a_load_timeout_the_request_computes_in_other_blocks(drive):
    """Scenario S08 of tests/README.md: the load may still write to the first blocks."""
    driver = loading(drive)
    written = set(driver.connector.loads["a"].block_table)
    driver.wait(10.0)
    plan = driver.step()
    assert (plan.admitted, plan.chunks[0].start) == (("a",), 0)
    assert not written & set(plan.chunks[0].block_table)
    assert driver.core.stats().blocks_held == 4
    driver.report(driver.connector.loaded(RequestId("a")))
    driver.run()
    assert driver.faults == {"load_expired": 1}


def test_an_abort_before_the_load_began_notifies_the_connector(drive):
    """Scenario S07 of tests/README.md."""
    driver = drive(connected=True)
    driver.remote = {"a": 8}
    driver.add("a", range(12))
    driver.abort("a")
    assert driver.connector.finished == {"a": FinishReason.ABORT}
    assert driver.connector.calls["start_load"] == 0
    driver.run()


@pytest.mark.parametrize("moment", ["in the queue", "while it loads", "after it has come"])
def test_an_abort_in_the_decode_core_frees_the_blocks_of_the_prefill_core(drive, moment):
    """Scenarios S07 and S10 of tests/README.md, with two cores. The test passes messages between their connectors.

    The prefill core holds the blocks. When the request ends in the decode core, both connectors are notified at once.
    """
    prefills, decodes = drive(connected=True), drive(connected=True, max_num_seqs=1)
    prefills.holds = {"a"}
    prefills.add("a", range(12))
    for _ in range(2):
        prefills.step()
    assert prefills.core.stats().blocks_held == 3
    decodes.remote = {"a": 8}
    decodes.add("a", range(12), 5)
    decodes.add("z", range(50, 54), 9)  # This request uses the only batch slot.
    if moment != "in the queue":
        decodes.step()
    if moment == "after it has come":
        decodes.report(decodes.connector.loaded(RequestId("a")))

    decodes.abort("a")
    assert decodes.connector.finished == {"a": FinishReason.ABORT}
    if moment == "while it loads":
        assert decodes.connector.loads["a"].is_abandoned
        assert decodes.core.stats().blocks_held == 3, "the connector may still write to them"
        decodes.report(decodes.connector.load_failed(RequestId("a")))
    assert decodes.core.stats().blocks_held == 0
    assert [live.request.id for live in decodes.core.live_requests()] == ["z"]

    prefills.abort("a")
    assert prefills.connector.sends["a"].is_aborted
    prefills.report(prefills.connector.released(RequestId("a")))
    assert (prefills.core.stats().blocks_held, prefills.core.stats().blocks_used) == (0, 0)
    prefills.run()
    decodes.run()
    assert prefills.faults == decodes.faults == {}


def test_an_abort_between_load_and_start_releases_everything(drive):
    driver = loading(drive, max_num_seqs=1)
    driver.add("b", range(50, 54), 9)
    driver.step()
    driver.report(driver.connector.loaded(RequestId("a")))
    driver.step()
    assert driver.core.stats().waiting_count == 1
    assert driver.abort("a")["a"].finished is not None
    stats = driver.core.stats()
    assert (stats.waiting_count, stats.blocks_held, stats.blocks_used) == (0, 0, 2)
    driver.run()


def test_a_preempted_request_computes_its_loaded_tokens(drive):
    driver = drive(connected=True, block_count=5)
    driver.remote = {"a": 8}
    driver.add("a", range(11), 6)
    driver.step()
    driver.add("b", range(50, 54), 9, priority=-1)
    driver.step()
    driver.report(driver.connector.loaded(RequestId("a")))
    while not driver.core.stats().preemptions_total:
        assert driver.step() is not None
    driver.run()
    assert driver.connector.calls["start_load"] == 1
    assert driver.finished["a"].reason is FinishReason.LENGTH


def test_a_preempted_request_is_not_loaded(drive):
    driver = drive(connected=True, block_count=3)
    driver.add("b", range(4), 6, priority=-1)
    driver.add("a", range(50, 54), 6)
    driver.step()
    driver.remote = {"a": 4}
    assert driver.step().preempted == ("a",)
    driver.run()
    assert driver.connector.calls["start_load"] == 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fails", "the other side is gone"),
        ("is empty", "no tokens arrived"),
        ("is too much", "the connector reported 9 tokens, but 8 were requested"),
        ("is less than nothing", "the connector reported -1 tokens, but 8 were requested"),
        ("takes too long", "it did not arrive within 10.0 seconds"),
    ],
)
def test_a_failed_load_ends_the_request_under_the_policy_fail(drive, what, message):
    driver = loading(drive, load_failure_policy="fail")
    name = RequestId("a")
    if what == "takes too long":
        driver.wait(10.0)
        assert driver.core.stats().blocks_held == 4
        driver.report(driver.connector.loaded(name))
    elif what == "fails":
        driver.report(driver.connector.load_failed(name))
    else:
        counts = {"is empty": 0, "is too much": 9, "is less than nothing": -1}
        driver.report(driver.connector.loaded(name, counts[what]))
    finished = driver.finished["a"]
    assert finished.reason is FinishReason.ERROR
    assert finished.message == f"the KV of this prompt could not be loaded: {message}"
    stats = driver.core.stats()
    assert (stats.blocks_held, stats.blocks_used) == (0, 0)
    driver.run()


# --- a faulty connector ---------------------------------------------------------------------------


def test_a_load_whose_start_raises_expires_at_once_and_its_blocks_are_held(drive):
    driver = drive(connected=True)
    driver.connector.raises = {"start_load"}
    driver.remote = {"a": 8, "b": 8}
    driver.add("b", range(50, 62))
    driver.add("a", range(12))
    assert driver.step() is None
    assert driver.core.next_deadline() == 0.0
    driver.wait(0.0)
    assert driver.core.stats().blocks_held == 6
    assert driver.step().admitted == ("b",)
    driver.run()
    assert driver.faults == {"raised": 2, "load_expired": 2, "hold_expired": 2}


def test_a_load_whose_start_raises_expires_before_earlier_loads(drive):
    driver = drive(connected=True)
    driver.remote = {"a": 8, "b": 8}
    driver.add("a", range(12))
    driver.step()
    driver.wait(1.0)
    driver.connector.raises = {"start_load"}
    driver.add("b", range(50, 62))
    driver.step()
    assert driver.core.next_deadline() == 1.0
    driver.wait(0.0)
    assert driver.step().admitted == ("b",)
    assert driver.core.next_deadline() == 10.0
    driver.run()


@pytest.mark.parametrize("response", [-1, None, "8", 2.5], ids=repr)
def test_impossible_match_count_of_a_connector_means_no_match(drive, response):
    driver = drive(connected=True)
    driver.connector.matched_count = lambda request, computed_count: response
    driver.add("a", range(8))
    driver.run()
    assert driver.connector.calls["start_load"] == 0
    assert driver.faults == {"bad_count": 1}


@pytest.mark.parametrize("call", ["load_abandoned", "hold_expired", "num_matched_tokens"])
def test_connector_call_that_raises_is_counted_and_everything_is_released(drive, call):
    driver = drive(connected=True)
    driver.connector.raises = {call}
    driver.remote = {"a": 8}
    driver.add("a", range(12))
    driver.step()
    driver.abort("a")
    driver.run()
    assert driver.faults["raised"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hold_seconds_max": 0.0}, "hold_seconds_max is 0.0, it must be above 0"),
        ({"hold_seconds_max": float("inf")}, "hold_seconds_max is inf"),
        ({"remote_kv_seconds_max": -1.0}, "remote_kv_seconds_max is -1.0"),
        ({"remote_kv_seconds_max": float("nan")}, "remote_kv_seconds_max is nan"),
        ({"load_failure_policy": "retry"}, 'it may be "recompute" or "fail"'),
    ],
)
def test_connector_settings_with_endless_waits_are_refused(change, message):
    with pytest.raises(StartupError, match=message):
        CoreSettings(block_count=4, context_tokens_max=64, max_num_seqs=2, **change)


@pytest.mark.parametrize("report", [None, "x", Loaded(RequestId("a"), None), Loaded(RequestId("a"), 3.5)])
def test_invalid_connector_report_is_counted_and_ignored(drive, report):
    driver = drive(connected=True)
    driver.remote = {"a": 8}
    driver.add("a", range(12))
    assert driver.core.schedule(driver.now) is None
    driver.connector.progress = lambda: (report,)
    driver.core.progress(driver.now)
    driver.connector.progress = tuple
    assert sum(driver.core.stats().transfer_faults_total.values()) == 1
    assert driver.core.stats().running_count == 0


def test_prompt_starts_if_prefix_cache_hits_in_held_blocks_make_it_fit(drive):
    """Prompt b does not fit at first, because the cache is empty. It fits after c has computed the same prefix."""
    driver = drive(connected=True, block_count=8, block_size=1)
    driver.holds = {"c"}
    driver.add("a", (9, 8, 7))
    driver.add("b", (1, 2, 3, 4, 5, 6))
    driver.step()
    driver.add("c", (1, 2, 3), priority=-1)
    assert [chunk.request.id for chunk in driver.step().chunks] == ["c"]
    assert driver.core.stats().blocks_held == 3
    assert [(chunk.request.id, chunk.start, chunk.count) for chunk in driver.step().chunks] == [("b", 3, 3)]
