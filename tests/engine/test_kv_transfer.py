"""Tests of an engine with a connector. The connector gets the callers' options, callers get its reports, and it runs as
long as the engine.
"""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import EngineFault, InvalidRequest, StartupError
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine_metrics import show_connector
from trioserve.metrics.registry import Metrics
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.scripted_connector import ScriptedConnector

ONE = SamplingParams(max_tokens=1, temperature=0.0)
FEW = SamplingParams(max_tokens=4, temperature=0.0)
HOLD = KVTransferParams(do_remote_decode=True)
LOAD = KVTransferParams(do_remote_prefill=True, remote_request_id="there")
PROMPT = "a prompt of some blocks"


def engine_with_connector(**options):
    return open_fake_engine(connector=ScriptedConnector, **options)


async def deltas_of(fake: FakeEngine, sampling: SamplingParams = FEW, **options) -> list[Delta]:
    async with fake.generate(PROMPT, sampling, **options) as stream:
        return [delta async for delta in stream]


async def test_last_delta_says_how_to_read_the_held_blocks(autojump_clock):
    async with engine_with_connector() as fake:
        async with fake.generate(PROMPT, FEW, kv_transfer=HOLD) as stream:
            *earlier, last = [delta async for delta in stream]
            assert all(delta.kv_transfer is None for delta in earlier)
            assert last.kv_transfer.do_remote_prefill
            assert last.kv_transfer.remote_request_id in fake.connector.sends
            assert stream.is_held
        # The stream was left, so no other engine will read the blocks.
        assert fake.connector.calls["request_aborted_after_finish"] == 1
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()
        fake.connector.check()


@pytest.mark.parametrize(
    ("sampling", "response"),
    [
        (SamplingParams(max_tokens=0), None),
        (ONE, None),
        (SamplingParams(max_tokens=8, stop=("ll",)), "Hello"),
        (SamplingParams(max_tokens=8), "Hi"),
    ],
    ids=["nothing is shown", "length", "stop string", "end token"],
)
@pytest.mark.parametrize("paused", [False, True])
async def test_blocks_of_every_complete_response_are_held(sampling, response, paused, autojump_clock):
    async with engine_with_connector(response=response, paused=paused) as fake:
        async with fake.generate(PROMPT, sampling, kv_transfer=HOLD) as stream:
            if paused:
                await fake.step(10)
            last = [delta async for delta in stream][-1]
            assert last.kv_transfer is not None
            assert stream.is_held
            fake.connector.release_all()
            await wait_all_tasks_blocked()
            assert not stream.is_held
        fake.assert_all_free()


async def test_overlapping_steps_leave_no_unreported_hold(autojump_clock):
    """A stop string ends the response before the blocks can be held, because the next step still uses the blocks. The
    hold that begins after this step ends at once.
    """
    async with engine_with_connector(overlap_steps=True, response="Hello", step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, SamplingParams(max_tokens=8, stop=("ll",)), kv_transfer=HOLD) as stream:
            last = [delta async for delta in stream][-1]
            assert last.finish_reason is FinishReason.STOP
        await trio.sleep(1)
        assert last.kv_transfer is not None or set(fake.connector.sends) == {
            request_id for request_id, send in fake.connector.sends.items() if send.is_aborted
        }
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def test_blocks_of_an_aborted_response_are_not_held(autojump_clock):
    async with engine_with_connector(step_seconds=0.1) as fake:
        async with fake.generate(PROMPT, SamplingParams(max_tokens=50), kv_transfer=HOLD) as stream:
            await anext(stream)
            fake.abort([stream.id])
            assert [delta.kv_transfer async for delta in stream] == [None]
        await trio.sleep(1)
        fake.assert_all_free()
        assert not fake.connector.sends


async def test_request_scope_can_wait_until_its_held_blocks_are_released(autojump_clock):
    async with engine_with_connector() as fake, trio.open_nursery() as nursery:
        async with fake.generate(PROMPT, ONE, kv_transfer=HOLD) as stream:
            assert [delta async for delta in stream]

            async def release() -> None:
                await trio.sleep(3)
                fake.connector.release_all()

            nursery.start_soon(release)
            await stream.wait_until_released()
            assert trio.current_time() == pytest.approx(3)
            await stream.wait_until_released()  # From now on, the call returns at once.
        assert fake.connector.calls["request_aborted_after_finish"] == 0


async def test_unread_hold_of_a_response_ends_at_its_deadline(autojump_clock):
    async with engine_with_connector(kv_hold_timeout=5.0) as fake:
        async with fake.generate(PROMPT, ONE, kv_transfer=HOLD) as stream:
            assert [delta async for delta in stream]
            await stream.wait_until_released()
            assert trio.current_time() == pytest.approx(5)
        fake.assert_all_free()
        assert len(fake.connector.expired) == 1


async def test_kept_hold_outlives_the_scope_and_can_be_aborted_by_id(autojump_clock):
    async with engine_with_connector() as fake:
        async with fake.generate(PROMPT, ONE, kv_transfer=HOLD, request_id="mine", owner="me") as stream:
            assert [delta async for delta in stream]
            stream.keep_hold()
        (view,) = fake.live_requests(owner="me")
        assert (view.id, view.state, view.block_count) == ("mine", "held", fake.stats().blocks_held)
        assert fake.live_requests(owner="somebody else") == []
        assert fake.abort(["mine"], owner="somebody else") == {"mine": AbortOutcome.UNKNOWN}
        assert fake.connector.calls["request_aborted_after_finish"] == 0
        assert fake.abort(["mine"], owner="me") == {"mine": AbortOutcome.ALREADY_FINISHED}
        assert fake.abort(["mine"], owner="me") == {"mine": AbortOutcome.ALREADY_FINISHED}
        assert fake.connector.calls["request_aborted_after_finish"] == 1
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def test_ended_request_with_held_blocks_uses_no_slot_and_no_lease(autojump_clock):
    async with (
        engine_with_connector(max_num_seqs=1, max_queued_requests=0) as fake,
        fake.generate(PROMPT, ONE, kv_transfer=HOLD) as held,
    ):
        assert [delta async for delta in held]
        assert held.is_held
        assert (await deltas_of(fake))[-1].finish_reason is FinishReason.LENGTH
        fake.connector.release_all()
        await held.wait_until_released()


async def test_response_above_the_held_share_has_no_kv_transfer(autojump_clock):
    async with engine_with_connector(block_count=64, kv_held_share=0.2) as fake:  # A prompt has 6 blocks.
        async with trio.open_nursery() as nursery:
            lasts = []
            for _ in range(3):
                nursery.start_soon(_hold_until_cancelled, fake, lasts)
                await trio.sleep(1)
            assert [last.kv_transfer is not None for last in lasts] == [True, True, False]
            assert fake.stats().holds_refused_total == 1
            nursery.cancel_scope.cancel()
        assert b'trioserve:kv_transfer_holds_refused_total{engine="0",model_name="fake"} 1.0' in fake.metrics.expose()
        fake.connector.release_all()
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def _hold_until_cancelled(fake: FakeEngine, lasts: list[Delta]) -> None:
    # Each request has its own prompt, so that the requests share no block.
    async with fake.generate(f"{len(lasts)}{PROMPT}", ONE, kv_transfer=HOLD) as stream:
        lasts.extend([delta async for delta in stream][-1:])
        await trio.sleep_forever()


async def test_loaded_kv_gives_an_equal_response(autojump_clock):
    async with engine_with_connector() as fake:
        computed = await deltas_of(fake, kv_transfer=None)
    async with engine_with_connector() as fake:
        async with fake.generate(PROMPT, FEW, kv_transfer=LOAD) as stream:
            await wait_all_tasks_blocked()
            assert fake.stats().remote_kv_count == 1
            fake.connector.load_all()
            assert "".join([delta.text async for delta in stream]) == "".join(delta.text for delta in computed)
        assert fake.stats().loaded_tokens_total == len(PROMPT) - 1  # The last token is always computed in this engine.
        fake.assert_all_free()
        fake.connector.check()


async def test_only_the_first_choice_loads_kv(autojump_clock):
    async with engine_with_connector() as fake:
        async with fake.generate(PROMPT, SamplingParams(max_tokens=4, n=3), kv_transfer=LOAD) as stream:
            await wait_all_tasks_blocked()
            assert len(fake.connector.loads) == 1
            fake.connector.load_all()
            assert sum(delta.finish_reason is not None for delta in [delta async for delta in stream]) == 3
        fake.assert_all_free()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_failure_policy_decides_what_happens_if_kv_is_missing(policy, autojump_clock):
    async with engine_with_connector(kv_load_failure_policy=policy) as fake:
        async with fake.generate(PROMPT, FEW, kv_transfer=LOAD) as stream:
            await wait_all_tasks_blocked()
            fake.connector.fail_loads()
            last = [delta async for delta in stream][-1]
        if policy == "recompute":
            assert last.finish_reason is FinishReason.LENGTH
        else:
            assert last.finish_reason is FinishReason.ERROR
            assert "the other side is gone" in last.message
        fake.assert_all_free()


async def test_kv_transfer_without_a_connector_is_refused(autojump_clock):
    async with open_fake_engine() as fake:
        for asked in (HOLD, LOAD):
            with pytest.raises(InvalidRequest, match="--kv-transfer-config") as raised:
                async with fake.generate(PROMPT, ONE, kv_transfer=asked):
                    pass
            assert raised.value.param == "kv_transfer_params"
        assert (await deltas_of(fake, kv_transfer=KVTransferParams()))[-1].finish_reason is FinishReason.LENGTH
        fake.assert_all_free()


async def test_request_to_hold_the_blocks_of_several_choices_is_refused(autojump_clock):
    async with engine_with_connector() as fake:
        with pytest.raises(InvalidRequest, match="must be 1"):
            async with fake.generate(PROMPT, SamplingParams(n=2), kv_transfer=HOLD):
                pass


async def test_connector_report_during_start_load_wakes_the_loop(autojump_clock):
    """The connector finishes a load and reports it before start_load has returned."""

    class Eager(ScriptedConnector):
        def start_load(self, request, block_table, computed_count, token_count):
            super().start_load(request, block_table, computed_count, token_count)
            self.load_all()

    async with open_fake_engine(connector=Eager) as fake:
        with trio.fail_after(1):
            assert (await deltas_of(fake, kv_transfer=LOAD))[-1].finish_reason is FinishReason.LENGTH
        assert fake.stats().loaded_tokens_total > 0


async def test_broken_connector_breaks_the_engine(autojump_clock):
    with pytest.raises(EngineFault, match="the connector failed: OSError: the network is gone"):
        async with engine_with_connector(step_seconds=0.1) as fake, fake.generate(PROMPT) as stream:
            await anext(stream)
            fake.connector.break_down(OSError("the network is gone"))
            with pytest.raises(EngineFault, match="the connector failed"):
                async for _ in stream:
                    pass
            assert not fake.ready
            await trio.sleep_forever()


async def test_task_that_waits_for_a_release_gets_the_fault(autojump_clock):
    has_heard = False
    with pytest.raises(EngineFault):
        async with engine_with_connector() as fake, fake.generate(PROMPT, ONE, kv_transfer=HOLD) as stream:
            assert [delta async for delta in stream]
            fake.connector.break_down(OSError("the network is gone"))
            with pytest.raises(EngineFault):
                await stream.wait_until_released()
            has_heard = True
            await trio.sleep_forever()
    assert has_heard


async def test_connector_that_cannot_start_raises_startup_error(autojump_clock):
    class Unstartable(ScriptedConnector):
        async def run(self, *, task_status):
            raise StartupError("port 5600 is in use")

    with pytest.raises(StartupError, match="port 5600 is in use"):
        async with open_fake_engine(connector=Unstartable):
            raise AssertionError("it was opened")


async def test_connector_that_ends_early_stops_no_request(autojump_clock, caplog):
    class Short(ScriptedConnector):
        async def run(self, *, task_status):
            task_status.started()
            await trio.sleep(1)

    async with open_fake_engine(connector=Short, kv_hold_timeout=5.0) as fake:
        await trio.sleep(2)
        async with fake.generate(PROMPT, ONE, kv_transfer=HOLD) as stream:
            assert [delta async for delta in stream]
            await stream.wait_until_released()
        fake.assert_all_free()
    assert [record.getMessage() for record in caplog.records if "without a request to stop" in record.getMessage()] == [
        "connector ended without a request to stop connector=Short"
    ]


async def test_connector_runs_from_before_the_first_step_until_after_the_last_step(autojump_clock):
    class Watched(ScriptedConnector):
        has_run = is_running = False

        async def run(self, *, task_status):
            self.has_run = self.is_running = True
            try:
                await super().run(task_status=task_status)
            finally:
                self.is_running = False

        def request_finished(self, *arguments):
            assert self.is_running
            return super().request_finished(*arguments)

    async with open_fake_engine(connector=Watched, step_seconds=1.0) as fake:
        assert fake.connector.is_running

        async def ask() -> None:
            async with fake.generate(PROMPT, SamplingParams(max_tokens=50)) as stream:
                async for _ in stream:
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1.5)  # A step is in flight now.
            fake.abort_all("the end")
    assert fake.connector.has_run
    assert not fake.connector.is_running
    assert not any(fake.stats().transfer_faults_total.values())


async def test_drain_waits_for_held_blocks(autojump_clock):
    async with engine_with_connector(kv_hold_timeout=7.0) as fake:
        async with fake.generate(PROMPT, ONE, kv_transfer=HOLD) as stream:
            assert [delta async for delta in stream]
            stream.keep_hold()
        fake.drain()
        await fake.wait_until_idle()
        assert trio.current_time() == pytest.approx(7)
        fake.assert_all_free()


async def test_each_kind_of_transfer_fault_is_logged_once(autojump_clock, caplog):
    async with engine_with_connector(kv_hold_timeout=1.0) as fake:
        for _ in range(3):
            async with fake.generate(PROMPT, ONE, kv_transfer=HOLD) as stream:
                assert [delta async for delta in stream]
                await stream.wait_until_released()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert lines[0].startswith("transfer fault kind=hold_expired first=")


async def test_connector_counts_become_metrics_by_name(autojump_clock):
    async with engine_with_connector() as fake:
        fake.connector.totals = {"blocks_sent_total": 3.0, "carrier_pigeons_total": 1.0}
        assert b'trioserve:kv_transfer_blocks_sent_total{engine="0",model_name="fake"} 3.0' in fake.metrics.expose()
        fake.connector.totals["blocks_sent_total"] = 5.0
        page = fake.metrics.expose()
        assert b'trioserve:kv_transfer_blocks_sent_total{engine="0",model_name="fake"} 5.0' in page
        assert b"pigeons" not in page


async def test_failing_connector_counts_do_not_affect_other_metrics(autojump_clock, caplog):
    class Dumb(ScriptedConnector):
        def counts(self):
            raise ZeroDivisionError

    async with open_fake_engine(connector=Dumb) as fake:
        for _ in range(3):
            assert b"trioserve:num_requests_running" in fake.metrics.expose()
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1


async def test_load_report_has_a_role_only_with_a_connector(autojump_clock):
    async with open_fake_engine() as fake:
        assert not fake.load().role
    async with engine_with_connector(role="decode") as fake:
        assert fake.load().role == "decode"


@pytest.mark.parametrize("odd", [None, "many", object()])
def test_non_numeric_connector_count_does_not_affect_other_metrics(odd):
    metrics = Metrics("m")
    show_connector(metrics, lambda: {"blocks_sent_total": odd, "bytes_sent_total": 7})
    text = metrics.expose().decode()
    assert 'kv_transfer_bytes_sent_total{engine="0",model_name="m"} 7.0' in text
    assert "num_requests_running" in text
