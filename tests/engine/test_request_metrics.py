"""Tests of the metrics of request sizes and stage times. Each value is observed once, and sums agree with the
counters.
"""

from __future__ import annotations

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.metrics.registry import CATALOGUE
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.scripted_connector import ScriptedConnector

SIZES = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n")
TIMES = (
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
)


def shown(fake: FakeEngine, name: str, **labels: str) -> float:
    """Return the value of a series. If a metric also has vLLM's name, check that both series have the same value."""
    values = [
        sample.value
        for family in text_string_to_metric_families(fake.metrics.expose().decode())
        for sample in family.samples
        if sample.name.partition(":")[2] == name
        and {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine", "le")} == labels
    ]
    assert len(set(values)) == 1, (name, labels, values)
    return values[0]


def counts(fake: FakeEngine, names: tuple[str, ...]) -> list[float]:
    return [shown(fake, name + "_count") for name in names]


def sources(fake: FakeEngine) -> tuple[float, float, float]:
    """Return the numbers of prompt tokens that were computed, found in the cache and loaded. Check their sum first."""
    computed, found, loaded = (
        shown(fake, "prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    )
    assert computed + found + loaded == shown(fake, "prompt_tokens_total")
    assert found + loaded == shown(fake, "prompt_tokens_cached_total")
    return computed, found, loaded


# Random tokens are single bytes, so some choices reach one of these stop strings.
STOPS = ("a", "e", "i", "o", "u", "1", "2", "3")


async def ask(fake: FakeEngine, prompt: str, **sampling: object) -> None:
    async with fake.generate(prompt, SamplingParams(ignore_eos=True, **sampling)) as stream:
        async for _ in stream:
            pass


async def test_metrics_observe_the_time_of_each_request_stage(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_batched_tokens=8) as fake:
        # There are three prefill steps, and the last one gives the first token.
        await ask(fake, "p" * 20, max_tokens=6)
        assert shown(fake, "request_queue_time_seconds_sum") == pytest.approx(0.0)
        assert shown(fake, "request_prefill_time_seconds_sum") == pytest.approx(0.03)
        assert shown(fake, "request_decode_time_seconds_sum") == pytest.approx(0.05)
        assert shown(fake, "request_inference_time_seconds_sum") == pytest.approx(0.08)
        assert shown(fake, "request_time_per_output_token_seconds_sum") == pytest.approx(0.01)
        assert shown(fake, "e2e_request_latency_seconds_sum") == pytest.approx(0.08)
        assert counts(fake, TIMES) == [1] * 5
        assert shown(fake, "step_tokens_count") == 8
        assert shown(fake, "step_tokens_sum") == shown(fake, "iteration_tokens_total_sum") == 20 + 5


async def test_metrics_observe_each_request_size_once(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_model_len=128) as fake:
        await ask(fake, "seven..", max_tokens=3)
        async with fake.generate("four", SamplingParams(ignore_eos=True)) as stream:
            async for _ in stream:
                pass
        assert counts(fake, SIZES) == [2, 2, 2, 2]
        assert shown(fake, "request_prompt_tokens_sum") == shown(fake, "prompt_tokens_total") == 11
        assert shown(fake, "request_generation_tokens_sum") == shown(fake, "generation_tokens_total") == 3 + 124
        assert (shown(fake, "request_params_max_tokens_count"), shown(fake, "request_params_max_tokens_sum")) == (1, 3)


async def test_metrics_count_choices_as_sequences_of_one_request(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate(
            "prompt", SamplingParams(n=3, max_tokens=9, temperature=1.0, seed=9, stop=STOPS)
        ) as stream:
            tokens = [0, 0, 0]
            async for delta in stream:
                tokens[delta.index] += len(delta.token_ids)
        assert len(set(tokens)) > 1, tokens
        assert counts(fake, SIZES) == [3, 3, 1, 1]
        assert shown(fake, "request_generation_tokens_sum") == sum(tokens)
        assert shown(fake, "request_max_num_generation_tokens_sum") == max(tokens)
        assert shown(fake, "request_params_n_sum") == 3
        assert shown(fake, "request_params_max_tokens_sum") == 9


async def test_aborted_request_is_counted_by_size_but_not_by_time(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate("prompt", SamplingParams(max_tokens=50, ignore_eos=True)):
            await trio.sleep(0.055)
        await trio.sleep(0.02)
        assert counts(fake, SIZES) == [1, 1, 1, 1]
        assert shown(fake, "request_generation_tokens_sum") == shown(fake, "generation_tokens_total") > 0
        assert counts(fake, TIMES) == [0] * 5


async def test_request_that_never_ran_is_not_counted(autojump_clock):
    async with open_fake_engine(max_num_seqs=1) as fake:
        fake.steps.hold()
        async with fake.generate("runs", SamplingParams(max_tokens=1)):
            await fake.steps.entered()
            async with fake.generate("waits"):
                await trio.testing.wait_all_tasks_blocked()
            assert shown(fake, "request_success_total", finished_reason="abort") == 1
            assert counts(fake, SIZES) == [0, 0, 0, 0]
            assert sources(fake) == (4, 0, 0)
            fake.steps.release()


async def test_response_of_one_token_has_no_time_per_token(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        await ask(fake, "prompt", max_tokens=1)
        await ask(fake, "another", max_tokens=0)  # One token is sampled, but not delivered.
        assert shown(fake, "request_time_per_output_token_seconds_count") == 0
        assert shown(fake, "request_decode_time_seconds_count") == 2
        assert shown(fake, "request_decode_time_seconds_sum") == 0
        assert shown(fake, "request_generation_tokens_sum") == shown(fake, "generation_tokens_total") == 2


async def test_pooled_request_is_counted_by_its_prompt_only(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        await fake.embed(["one", "four"])
        assert counts(fake, SIZES) == [2, 0, 0, 0]
        assert shown(fake, "request_prompt_tokens_sum") == 7
        assert shown(fake, "request_prefill_time_seconds_count") == shown(fake, "request_inference_time_seconds_count")
        assert shown(fake, "request_decode_time_seconds_count") == 0


async def test_resumed_response_is_counted_by_its_new_tokens_only(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        resume = Resume(token_ids=(tuple(b"known"),), finished=(False,))
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        async with fake.generate("prompt", sampling, resume=resume) as stream:
            async for _ in stream:
                pass
        assert shown(fake, "request_generation_tokens_sum") == shown(fake, "generation_tokens_total") == 3
        assert shown(fake, "request_prompt_tokens_sum") == 6
        assert shown(fake, "request_time_per_output_token_seconds_sum") == pytest.approx(0.01)


async def test_prompt_tokens_are_counted_by_the_source_of_their_kv(autojump_clock):
    async with open_fake_engine(step_seconds=0.01, block_size=4) as fake:
        await ask(fake, "a prompt of some 25 bytes", max_tokens=2)
        assert sources(fake) == (25, 0, 0)
        await ask(fake, "a prompt of some other 30 bytes"[:30], max_tokens=2)
        assert sources(fake) == (25 + 14, 16, 0)
        assert shown(fake, "request_prefill_kv_computed_tokens_sum") == 25 + 14


async def test_loaded_prompt_tokens_are_counted_separately(autojump_clock):
    load = KVTransferParams(do_remote_prefill=True, remote_request_id="there")
    async with open_fake_engine(connector=ScriptedConnector, role="decode", block_size=4) as fake:
        async with fake.generate("a prompt of some 25 bytes", SamplingParams(max_tokens=2), kv_transfer=load) as stream:
            await trio.testing.wait_all_tasks_blocked()
            assert shown(fake, "num_requests_waiting_by_reason", reason="deferred") == 1
            assert shown(fake, "num_requests_waiting_by_reason", reason="capacity") == 0
            fake.connector.load_all()
            async for _ in stream:
                pass
        computed, found, loaded = sources(fake)
        assert found == 0
        assert loaded == shown(fake, "kv_transfer_loaded_tokens_total") > 0
        assert computed == 25 - loaded


async def test_waiting_gauges_by_reason_add_up(autojump_clock):
    async with open_fake_engine(max_num_seqs=1) as fake:
        fake.steps.hold()
        async with fake.generate("runs"), fake.generate("waits"), fake.generate("waits, too"):
            await fake.steps.entered()
            await trio.testing.wait_all_tasks_blocked()
            assert shown(fake, "num_requests_waiting_by_reason", reason="capacity") == 2
            assert shown(fake, "num_requests_waiting_by_reason", reason="deferred") == 0
            assert shown(fake, "num_requests_waiting") == 2
            fake.steps.release()


async def test_preempted_or_resumed_request_is_counted_once(autojump_clock):
    async with open_fake_engine(
        step_seconds=0.01, block_count=16, block_size=4, max_model_len=64, max_num_batched_tokens=8, engine_restarts=1
    ) as fake:
        async with trio.open_nursery() as nursery:
            for letter in "abc":
                nursery.start_soon(lambda letter=letter: ask(fake, letter * 7, max_tokens=25))
            await trio.sleep(0.1)
            fake.break_next_step()
        assert shown(fake, "engine_restarts_total") == 1
        assert shown(fake, "num_preemptions_total") >= 1
        assert counts(fake, SIZES) == [3, 3, 3, 3]
        assert counts(fake, TIMES) == [3] * 5
        assert shown(fake, "request_generation_tokens_sum") == shown(fake, "generation_tokens_total") == 75
        assert sum(sources(fake)) == 21


async def test_every_request_metric_has_a_test():
    looked_at = {*SIZES, *TIMES, "request_queue_time_seconds", "request_params_max_tokens"}
    looked_at.add("request_prefill_kv_computed_tokens")
    of_requests = {metric.name for metric in CATALOGUE if metric.kind == "histogram" and "request_" in metric.name}
    assert {name for name in of_requests if not name.startswith("http_")} == looked_at
