"""Tests of weights that are replaced while requests run: how requests continue, the version of each token, and cached
blocks of old weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.engine.test_pausing import KINDS, LONG, Reader, undisturbed
from trioserve.contracts.errors import Draining, EngineReopening, InvalidRequest, RankLost, WeightsLost
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import ReplacementState, SharedWeights, WeightSource
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_weights import FakeWeightTarget

MORE_KINDS = [*KINDS, {"draft_model_tokens": 4}, {"state_slots": 4, "snapshot_slots": 4}]
PROMPT = "a prompt of several blocks"


def versions(deltas: list[Delta]) -> list[str]:
    """Return the weight version of each token."""
    told = []
    for delta in deltas:
        for version, count in delta.weight_versions or (("default", len(delta.token_ids)),):
            told += [version] * count
    return told


async def hits(fake: FakeEngine, prompt: str = PROMPT) -> int:
    async with fake.generate(prompt, SamplingParams(max_tokens=1)) as stream:
        async for _ in stream:
            pass
        return stream.cached_token_count


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
@pytest.mark.parametrize("options", MORE_KINDS, ids=str)
async def test_begun_requests_continue_with_the_new_weights(autojump_clock, options, in_flight):
    expected = await undisturbed(PROMPT, **options)
    one = Reader()
    async with open_fake_engine(step_seconds=0.01, **options) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, PROMPT)
            await trio.sleep(0.055)
            assert await fake.update_weights("b", version="step 1", in_flight=in_flight) == "step 1"
        count = versions(one.deltas).count("default")
        assert 0 < count < 40
        assert one.end[0] is FinishReason.LENGTH
        assert one.token_ids[:count] == expected[:count]
        assert one.token_ids != expected, "the same tokens, whatever weights there are"
        assert versions(one.deltas) == ["default"] * count + ["step 1"] * (40 - count)
        fake.assert_all_free()


@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_recomputed_request_equals_a_request_resumed_after_its_tokens(autojump_clock, options):
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    one, other = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, **options) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, PROMPT, greedy)
            await trio.sleep(0.055)
            await fake.update_weights("b", in_flight="recompute")
        count = versions(one.deltas).count("default")
        assert 0 < count < 40
        known = [*PROMPT.encode(), *one.token_ids[:count]]
        async with fake.generate(known, SamplingParams(max_tokens=40 - count, temperature=0.0)) as stream:
            other.deltas = [delta async for delta in stream]
            assert stream.cached_token_count > 0, "what was computed anew is as good as anybody's"
        assert other.token_ids == one.token_ids[count:]
        fake.assert_all_free()


async def test_update_with_abort_ends_requests_with_partial_results(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, PROMPT)
            await trio.sleep(0.055)
            free = fake.stats().blocks_used
            assert free > 0
            await fake.update_weights("b", in_flight="abort")
            assert fake.stats().blocks_used == 0
        assert one.end == (FinishReason.ABORT, "weights_replaced")
        assert one.token_ids
        assert not any(delta.weight_versions for delta in one.deltas)
        fake.assert_all_free()


async def test_cached_blocks_of_old_weights_are_not_found(autojump_clock):
    async with open_fake_engine() as fake:
        await hits(fake)
        found = await hits(fake)
        assert found > 0
        await fake.update_weights("b", version="b")
        assert await hits(fake) == 0
        assert await hits(fake) == found
        await fake.update_weights("a", version="a")
        assert await hits(fake) == 0
        await fake.update_weights("b", version="b")
        assert await hits(fake) == found, "weights of equal versions are the same"
        fake.assert_all_free()


async def test_blocks_of_a_kept_request_are_not_shared_after_an_update(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, PROMPT)
            await trio.sleep(0.055)
            await fake.update_weights("b", version="b")
        for version in ("b", "c", "b"):
            if version != fake.weight_version:
                await fake.update_weights(version, version=version)
            async with fake.generate([*PROMPT.encode(), *one.token_ids], SamplingParams(max_tokens=1)) as stream:
                async for _ in stream:
                    pass
                assert stream.cached_token_count == 0 or version == "b"
        fake.assert_all_free()


async def test_queued_and_new_requests_use_the_new_weights(autojump_clock):
    runs, waits, comes = Reader(), Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, max_num_seqs=1) as fake:
        fake.weights.seconds = 5.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runs.read, fake, "one")
            await wait_all_tasks_blocked()
            nursery.start_soon(waits.read, fake, PROMPT)
            await trio.sleep(0.055)
            nursery.start_soon(lambda: fake.update_weights("b", version="b"))
            await trio.sleep(1.0)
            assert not fake.ready
            count, steps = len(runs.token_ids), fake.stats().steps_total
            nursery.start_soon(comes.read, fake, "comes")
            await trio.sleep(3.0)
            assert (len(runs.token_ids), fake.stats().steps_total) == (count, steps)
        for reader in (waits, comes):
            assert versions(reader.deltas) == ["b"] * 40
        assert await hits(fake) > 0
        fake.assert_all_free()


@pytest.mark.parametrize(
    ("source", "options", "param"),
    [
        ("missing", {}, "model_path"),
        ("", {}, "model_path"),
        (3, {}, "source"),
        ("b", {"version": ""}, "version"),
        ("b", {"version": "default"}, "version"),
        ("b", {"version": "x" * 257}, "version"),
        ("b", {"in_flight": "later"}, "in_flight"),
    ],
)
async def test_refused_weight_update_changes_nothing(autojump_clock, source: Any, options: dict[str, Any], param: str):
    expected = await undisturbed("one")
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            with pytest.raises(InvalidRequest) as refusal:
                await fake.update_weights(source, **{"in_flight": "abort", **options})
            assert refusal.value.param == param
            assert fake.weight_version == "default"
            assert fake.ready
        assert one.token_ids == expected
        fake.assert_all_free()


class LostRanks:
    """A Replacement that loses its ranks while they write."""

    state = ReplacementState.CHECKED

    async def replace(self) -> None:
        await trio.lowlevel.checkpoint()
        self.state = ReplacementState.GONE
        raise RankLost("rank 1 was killed")


async def test_no_step_begins_after_ranks_are_lost_during_writing(autojump_clock, monkeypatch):
    async def look(source: object) -> LostRanks:
        await trio.lowlevel.checkpoint()
        return LostRanks()

    async with open_fake_engine(step_seconds=0.01) as fake:
        monkeypatch.setattr(fake.weights, "check", look)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Reader().read, fake, "one")
            await trio.sleep(0.055)
            with pytest.raises(WeightsLost, match="ended meanwhile"):
                await fake.update_weights("b")
            step_count = fake.stats().steps_total
            await trio.sleep(1.0)  # The engine does not know yet that the ranks are lost.
            assert fake.stats().steps_total == step_count
            nursery.cancel_scope.cancel()
        await fake.wait_until_idle()
        fake.assert_all_free()


async def test_half_written_weights_block_steps_until_a_complete_update(autojump_clock):
    kept, comes = Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.read, fake, "kept")
            await trio.sleep(0.055)
            fake.weights.breaks = True
            with pytest.raises(WeightsLost, match="only a part of the new weights arrived"):
                await fake.update_weights("b", version="b")
            assert fake.has_half_weights
            assert not fake.ready
            assert fake.weight_version == "default"
            count, steps = len(kept.token_ids), fake.stats().steps_total
            nursery.start_soon(comes.read, fake, "comes")
            await fake.pause_generation("keep")
            fake.resume_generation()
            await trio.sleep(100)
            with pytest.raises(InvalidRequest):
                await fake.update_weights("missing")
            assert (len(kept.token_ids), fake.stats().steps_total) == (count, steps)
            assert not fake.ready
            await fake.update_weights(SharedWeights("c"), version="c")
            assert not fake.has_half_weights
            assert fake.ready
        assert versions(kept.deltas) == ["default"] * count + ["c"] * (40 - count)
        assert versions(comes.deltas) == ["c"] * 40
        fake.assert_all_free()


async def test_sleep_with_wait_is_refused_while_weights_are_half_written(autojump_clock):
    """The requests wait for the next update. A sleep that waited for the requests would block this update."""
    kept = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.read, fake, "kept")
            await trio.sleep(0.055)
            fake.weights.breaks = True
            with pytest.raises(WeightsLost):
                await fake.update_weights("b")
            with trio.fail_after(1), pytest.raises(InvalidRequest, match="cannot end"):
                await fake.sleep(2, "wait")
            assert not fake.is_paused
            await fake.update_weights("c", version="c")
        assert kept.end[0] is FinishReason.LENGTH
        await fake.sleep(2, "wait")
        await fake.wake_up()
        fake.assert_all_free()


async def test_reading_the_model_again_repairs_half_written_weights(autojump_clock):
    kept = Reader()
    expected = await undisturbed("kept")
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.read, fake, "kept")
            await trio.sleep(0.055)
            fake.weights.breaks = True
            with pytest.raises(WeightsLost):
                await fake.update_weights("b")
            await fake.sleep(2, "keep")
            await fake.wake_up()
            assert fake.ready
        assert kept.token_ids == expected
        fake.assert_all_free()


async def test_metrics_show_the_weight_version(autojump_clock):
    def told(fake: FakeEngine) -> list[str]:
        lines = fake.metrics.expose().decode().splitlines()
        return [line.split("{")[1] for line in lines if line.startswith("trioserve:weights_info{")]

    async with open_fake_engine() as fake:
        assert ['version="default"' in line for line in told(fake)] == [True]
        await fake.update_weights("b", version="b")
        assert ['version="b"' in line for line in told(fake)] == [True]
        await fake.sleep(2)
        await fake.wake_up()
        assert ['version="default"' in line for line in told(fake)] == [True]


async def test_weight_updates_run_one_after_the_other(autojump_clock):
    ends: list[str] = []

    async def update(name: str) -> None:
        await fake.update_weights(name, version=name)
        assert fake.weight_version == name
        ends.append(name)

    async with open_fake_engine() as fake:
        fake.weights.seconds = 1.0
        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(update, name)
                await wait_all_tasks_blocked()
        assert ends == ["a", "b", "c"]
        fake.assert_all_free()


async def test_paused_engine_stays_paused_after_an_update(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            await fake.pause_generation("keep")
            await wait_all_tasks_blocked()
            count = len(one.token_ids)
            await fake.update_weights("b", version="b")
            assert fake.is_paused
            await trio.sleep(10)
            assert len(one.token_ids) == count
            fake.resume_generation()
        assert versions(one.deltas) == ["default"] * count + ["b"] * (40 - count)
        fake.weights.seconds = 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: fake.update_weights("c", version="c"))
            await trio.sleep(1)
            await fake.pause_generation("wait")
        assert fake.is_paused
        fake.resume_generation()
        assert fake.ready
        fake.assert_all_free()


@pytest.mark.parametrize(("level", "version"), [(1, "b"), (2, "default")])
async def test_updated_weights_survive_sleep_level_one_only(autojump_clock, level: int, version: str):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            fingerprint = fake.model.fingerprint
            await hits(fake)
            await fake.update_weights("b", version="b")
            assert fake.model.fingerprint != fingerprint
            nursery.start_soon(one.read, fake, PROMPT)
            await trio.sleep(0.055)
            await fake.sleep(level, "keep")
            with pytest.raises(InvalidRequest, match="wake it up"):
                await fake.update_weights("c")
            count = len(one.token_ids)
            await fake.wake_up()
            assert fake.weight_version == version
            assert (fake.model.fingerprint == fingerprint) == (level == 2)
        assert versions(one.deltas) == ["b"] * count + [version] * (40 - count)
        assert await hits(fake) > 0, "what was computed anew is called as what the weights are"
        fake.assert_all_free()


async def test_sleep_waits_for_a_running_update(autojump_clock):
    async with open_fake_engine() as fake:
        fake.weights.seconds = 3.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: fake.update_weights("b", version="b"))
            await trio.sleep(1)
            with trio.fail_after(2.5):
                await fake.sleep(2)
            assert fake.weight_version == "b"
            await fake.wake_up()
        assert fake.weight_version == "default"
        fake.assert_all_free()


async def test_step_in_flight_uses_the_old_weights(autojump_clock):
    one = Reader()
    async with open_fake_engine(paused=True) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(one.read, fake, "one", SamplingParams(max_tokens=3))
        await fake.step()
        async with fake.held_step():
            nursery.start_soon(lambda: fake.update_weights("b", version="b"))
            await wait_all_tasks_blocked()
            assert fake.weight_version == "default"
        await wait_all_tasks_blocked()
        assert fake.weight_version == "b"
        await fake.step()
        assert versions(one.deltas) == ["default", "default", "b"]


async def test_request_that_leaves_during_an_update_ends_at_once(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        fake.weights.seconds = 5.0
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(1) as scope:
                nursery.start_soon(sleep_and_update, fake)
                async with fake.generate(PROMPT, LONG) as stream:
                    async for _ in stream:
                        pass
            assert scope.cancelled_caught
            assert fake.stats().blocks_used == 0
            assert fake.weight_version == "default"
        assert fake.weight_version == "b"
        fake.assert_all_free()


async def sleep_and_update(fake: FakeEngine) -> None:
    await trio.sleep(0.055)
    await fake.update_weights("b", version="b")


async def test_cancelled_update_still_writes_all_weights(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        fake.weights.seconds = 5.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            with trio.move_on_after(1) as scope:
                await fake.update_weights("b", version="b")
            assert scope.cancelled_caught
            assert fake.weight_version == "b"
            assert fake.ready
        assert set(versions(one.deltas)) == {"default", "b"}
        fake.assert_all_free()


async def test_update_cancelled_before_writing_changes_nothing(autojump_clock):
    expected = await undisturbed("one")
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            with trio.move_on_after(0.001) as scope:
                await fake.update_weights("b", version="b")
            assert scope.cancelled_caught
            assert fake.weight_version == "default"
        assert one.token_ids == expected
        fake.assert_all_free()


async def test_engine_that_breaks_during_an_update_has_its_first_weights(autojump_clock):
    expected = await undisturbed("one")
    one = Reader()
    async with open_fake_engine(step_seconds=0.01, opening_seconds=1.0, engine_restarts=3) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            await fake.update_weights("a", version="a")
            await trio.sleep(0.05)
            fake.break_next_step()
            await trio.sleep(0.011)
            with pytest.raises(EngineReopening):
                await fake.update_weights("b", version="b")
            await trio.sleep(1)
            assert fake.ready
            assert fake.weight_version == "default"
        count = versions(one.deltas).count("a")
        before = versions(one.deltas).index("a")
        assert versions(one.deltas) == ["default"] * before + ["a"] * count + ["default"] * (40 - before - count)
        assert one.token_ids[:before] == expected[:before]
        fake.assert_all_free()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_update_continues_if_the_engine_is_reopened_during_the_check(autojump_clock, monkeypatch, is_lost: bool):
    """A check may take as long as reading files, and steps continue meanwhile. If `is_lost` is True, the check fails
    because its executor was closed.
    """
    look = FakeWeightTarget.check

    async def slowly(place: FakeWeightTarget, source: WeightSource) -> Any:
        await trio.sleep(3)
        assert place is fake.weights or not is_lost
        return await look(place, source)

    monkeypatch.setattr(FakeWeightTarget, "check", slowly)
    one = Reader()
    async with open_fake_engine(step_seconds=0.01, opening_seconds=1.0, engine_restarts=3) as fake:
        async with trio.open_nursery() as nursery:
            fake.break_next_step()
            nursery.start_soon(one.read, fake, "one")
            assert await fake.update_weights("b", version="b") == "b"
            assert fake.weight_version == "b"
        assert one.end[0] is FinishReason.LENGTH
        assert versions(one.deltas)[-1] == "default", "it had ended by then"
        assert await hits(fake) == 0
        assert await hits(fake) > 0
        fake.assert_all_free()


async def test_update_is_refused_if_the_step_in_flight_fails(autojump_clock):
    async with open_fake_engine(step_seconds=5.0, opening_seconds=1.0, engine_restarts=3) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Reader().read, fake, "one", SamplingParams(max_tokens=2))
            fake.break_next_step()
            await trio.sleep(1)
            with pytest.raises(EngineReopening):
                await fake.update_weights("b", version="b")
            assert trio.current_time() == pytest.approx(5.0, abs=0.1)
            assert not fake.has_half_weights
        fake.assert_all_free()


async def test_drain_during_an_update_lets_requests_finish(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        fake.weights.seconds = 5.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            nursery.start_soon(sleep_and_update, fake)
            await trio.sleep(1)
            fake.drain()
            with pytest.raises(Draining):
                await fake.update_weights("c")
            await fake.wait_until_idle()
        assert one.end[0] is FinishReason.LENGTH
        fake.assert_all_free()


async def test_drain_with_half_written_weights_ends_requests(autojump_clock):
    one = Reader()
    async with open_fake_engine(step_seconds=0.01) as fake:
        fake.weights.seconds, fake.weights.breaks = 5.0, True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.read, fake, "one")
            await trio.sleep(0.055)
            nursery.start_soon(lose, fake)
            await trio.sleep(1)
            fake.drain()
            await fake.wait_until_idle()
        assert one.end == (FinishReason.ABORT, "server_stopping")
        fake.assert_all_free()


async def lose(fake: FakeEngine) -> None:
    with pytest.raises(WeightsLost):
        await fake.update_weights("b")
