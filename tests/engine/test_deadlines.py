"""Tests that each deadline ends its request on time and with its own reason, even if nothing reads the stream."""

from __future__ import annotations

import pytest
import trio

from trioserve.contracts.deadlines import DEADLINE_SECONDS_MAX, Deadlines
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle

LONG = SamplingParams(max_tokens=100)


async def end_of(stream) -> tuple[object, object, float]:
    async for delta in stream:
        last = delta
    return last.finish_reason, last.stop_reason, trio.current_time()


@pytest.mark.parametrize(
    ("deadlines", "reason"),
    [
        (Deadlines(queue_timeout=2), "queue_timeout"),
        (Deadlines(ttft_timeout=2), "ttft_timeout"),
        (Deadlines(timeout=2), "timeout"),
        (Deadlines(queue_timeout=2, ttft_timeout=3, timeout=4), "queue_timeout"),
    ],
)
async def test_queued_request_ends_at_any_deadline_without_running(deadlines, reason, autojump_clock):
    """Scenarios S35 and S37 of tests/README.md: the time in the queue is bounded."""
    async with open_fake_engine(step_seconds=0.1, max_num_seqs=1) as fake:
        async with (
            fake.generate("runs", LONG),
            fake.generate("waits", LONG, deadlines=deadlines) as waiting,
        ):
            assert await end_of(waiting) == (FinishReason.DEADLINE, reason, pytest.approx(2.0))
            assert fake.core.stats().waiting_count == 0
            assert fake.core.stats().prefix_query_tokens_total == len("runs")
            assert fake.metrics.deadlines_passed_total.labels(reason)._value.get() == 1
        await trio.sleep(0.2)
        check_idle(fake.core)


async def test_queue_timeout_ends_at_the_start_and_ttft_timeout_at_the_first_token(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        deadlines = Deadlines(queue_timeout=0.05, ttft_timeout=0.15)
        async with fake.generate("prompt", LONG, deadlines=deadlines) as stream:
            assert (await end_of(stream))[0] is FinishReason.LENGTH
        assert len(fake._deadline_keeper) == 0


async def test_long_prefill_passes_its_ttft_timeout(autojump_clock):
    async with open_fake_engine(step_seconds=0.1, max_num_batched_tokens=8) as fake:
        async with fake.generate("p" * 100, deadlines=Deadlines(ttft_timeout=0.55)) as stream:
            assert await end_of(stream) == (FinishReason.DEADLINE, "ttft_timeout", pytest.approx(0.55))
        await trio.sleep(0.2)
        check_idle(fake.core)


async def test_total_timeout_ends_a_response_that_is_not_read(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        async with fake.generate("prompt", LONG, deadlines=Deadlines(timeout=1.05)) as stream:
            await trio.sleep(5)
            check_idle(fake.core)
            deltas = [delta async for delta in stream]
        assert len(deltas) == 1
        assert len(deltas[0].token_ids) == 10
        assert deltas[0].finish_reason is FinishReason.DEADLINE
        assert deltas[0].message == "the request's timeout of 1.05 s has passed"


async def test_deadline_during_a_forward_pass_frees_blocks_after_it(autojump_clock):
    async with open_fake_engine() as fake:
        fake.steps.hold()
        async with fake.generate("prompt", LONG, deadlines=Deadlines(timeout=1)) as stream:
            assert await end_of(stream) == (FinishReason.DEADLINE, "timeout", pytest.approx(1.0))
            assert fake.core.stats().blocks_used > 0
            fake.steps.release()
            await trio.testing.wait_all_tasks_blocked()
            check_idle(fake.core)


async def test_queue_timeout_applies_until_the_last_choice_runs(autojump_clock):
    async with open_fake_engine(step_seconds=0.1, max_num_seqs=2) as fake:
        sampling = SamplingParams(n=3, max_tokens=100)
        async with fake.generate("prompt", sampling, deadlines=Deadlines(queue_timeout=1)) as stream:
            reasons = [delta.finish_reason async for delta in stream if delta.finish_reason]
        assert reasons == [FinishReason.DEADLINE] * 3


async def test_server_defaults_and_limits_of_deadlines_apply(autojump_clock):
    defaults, limits = Deadlines(queue_timeout=5, timeout=50), Deadlines(timeout=60, ttft_timeout=20)
    assert Deadlines().within(defaults, limits) == Deadlines(queue_timeout=5, timeout=50, ttft_timeout=20)
    asked = Deadlines(queue_timeout=9, ttft_timeout=1, timeout=1000)
    assert asked.within(defaults, limits) == Deadlines(queue_timeout=9, ttft_timeout=1, timeout=60)


@pytest.mark.parametrize("field", ["queue_timeout", "ttft_timeout", "timeout"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), DEADLINE_SECONDS_MAX + 1])
def test_error_of_a_deadline_out_of_range_names_the_field(field, value):
    with pytest.raises(InvalidRequest, match=field) as caught:
        Deadlines(**{field: value})
    assert caught.value.param == field


async def test_live_requests_are_visible_to_their_owner_and_to_operators(autojump_clock):
    async with open_fake_engine(step_seconds=0.1, max_num_seqs=1) as fake:
        async with (
            fake.generate("mine", LONG, request_id="a", owner="me", priority=-3),
            fake.generate("yours", SamplingParams(n=2, max_tokens=5), request_id="b", owner="you"),
        ):
            await trio.sleep(0.35)
            views = fake.live_requests()
            assert [(view.id, view.state, view.phase.value) for view in views] == [
                ("a", "running", "decode"),
                ("b", "waiting", "queued"),
            ]
            mine = views[0]
            assert (mine.priority, mine.prompt_token_count, mine.completion_token_count) == (-3, 4, 3)
            assert mine.age_seconds == pytest.approx(0.35)
            assert mine.block_count == fake.core.stats().blocks_used == 2
            assert [view.id for view in fake.live_requests(owner="you")] == ["b"]
            assert fake.live_requests(owner="nobody") == []

            response = fake.abort(["a", "b"], owner="you")
            assert {name: outcome.value for name, outcome in response.items()} == {"a": "unknown", "b": "aborted"}
            assert [view.state for view in fake.live_requests()] == ["running", "finished"]
        await trio.sleep(0.2)
        assert fake.live_requests() == []
        outcomes = [fake.abort(["a"], owner=owner)["a"].value for owner in ("me", "you", None)]
        assert outcomes == ["already_finished", "unknown", "already_finished"]


async def test_step_without_waiting_requests_is_abandoned_and_caches_no_block(autojump_clock):
    async with open_fake_engine() as fake:
        fake.steps.hold()
        async with fake.generate("a prompt of some length", LONG):
            plan = await fake.steps.entered()
            assert not fake.core.flights.is_abandoned(plan)
        assert fake.core.flights.is_abandoned(plan)
        fake.steps.release()
        await trio.testing.wait_all_tasks_blocked()
        check_idle(fake.core)
        assert fake.core.stats().blocks_cached == 0


async def test_step_with_a_waiting_request_is_finished(autojump_clock):
    async with open_fake_engine() as fake:
        fake.steps.hold()
        async with fake.generate("the one who stays", SamplingParams(max_tokens=2)) as stays:
            async with fake.generate("the one who leaves", LONG):
                fake.steps.release()
                fake.steps.hold()
                plan = await fake.steps.entered()
            assert not fake.core.flights.is_abandoned(plan)
            fake.steps.release()
            assert [delta.finish_reason async for delta in stays][-1] is FinishReason.LENGTH
        check_idle(fake.core)
