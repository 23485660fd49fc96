"""Tests of steps with accepted draft tokens. Several tokens form one delta, each is counted, and the response ends at
the right token.
"""

from __future__ import annotations

import pytest
import trio

from trioserve.contracts.events import FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

TEXT = "one two three four. " * 4
SOURCES = [{"speculative_ngram": 8}, {"draft_model_tokens": 4}]


def value(fake: FakeEngine, name: str) -> float:
    lines = fake.metrics.expose().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


async def read(fake: FakeEngine, **sampling: object) -> tuple[list, object]:
    async with fake.generate("say it", SamplingParams(temperature=0.0, **sampling)) as stream:
        return [delta async for delta in stream], stream


async def test_accepted_draft_tokens_form_one_delta_and_are_counted_one_by_one(autojump_clock):
    async with open_fake_engine(response=TEXT, speculative_ngram=8, step_seconds=0.1) as fake:
        deltas, stream = await read(fake)
        assert "".join(delta.text for delta in deltas) == TEXT
        assert deltas[-1].finish_reason is FinishReason.STOP
        count = len(TEXT) + 1  # The end token is counted, too.
        steps = fake.stats().steps_total
        assert steps < 0.7 * count
        assert max(len(delta.token_ids) for delta in deltas) > 4
        assert sum(len(delta.token_ids) for delta in deltas) == stream.completion_token_count == count
        assert value(fake, "trioserve:generation_tokens_total") == count
        assert value(fake, "trioserve:inter_token_latency_seconds_count") == count - 1
        assert value(fake, "trioserve:inter_token_latency_seconds_sum") == pytest.approx(0.1 * (steps - 1))
        # A step gives one token, plus one for each accepted draft token.
        assert value(fake, "trioserve:spec_decode_num_accepted_tokens_total") == count - steps
        assert value(fake, "vllm:spec_decode_num_drafts_total") == fake.stats().drafts_total > 0
        assert value(fake, "vllm:spec_decode_num_draft_tokens_total") == fake.stats().draft_tokens_total
        fake.assert_all_free()


@pytest.mark.parametrize("drafts", SOURCES, ids=str)
@pytest.mark.parametrize("stop", ["two th", "four. one", "e fou", " ", "three four. one two three four. one two"])
async def test_stop_string_ends_the_response_within_accepted_draft_tokens(stop, drafts, autojump_clock):
    async with open_fake_engine(response=TEXT) as plain, open_fake_engine(response=TEXT, **drafts) as fake:
        expected, expected_stream = await read(plain, stop=(stop,))
        deltas, stream = await read(fake, stop=(stop,))
        assert "".join(delta.text for delta in deltas) == TEXT.partition(stop)[0]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
        token_ids = [token for delta in deltas for token in delta.token_ids]
        assert token_ids == [token for delta in expected for token in delta.token_ids]
        assert stream.completion_token_count == expected_stream.completion_token_count == len(token_ids)
        assert value(fake, "trioserve:generation_tokens_total") == len(token_ids)
        assert value(fake, "trioserve:inter_token_latency_seconds_count") == len(token_ids) - 1
        fake.assert_all_free()


@pytest.mark.parametrize("drafts", SOURCES, ids=str)
async def test_each_accepted_draft_token_has_logprobs(drafts, autojump_clock):
    async with open_fake_engine(response=TEXT) as plain, open_fake_engine(response=TEXT, **drafts) as fake:
        expected, _ = await read(plain, logprobs=2)
        deltas, _ = await read(fake, logprobs=2)
        assert len(deltas) < len(expected)
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        assert logprobs == [entry for delta in expected for entry in delta.logprobs]


@pytest.mark.parametrize("drafts", SOURCES, ids=str)
async def test_client_that_leaves_during_a_step_with_drafts_frees_everything(drafts):
    async with open_fake_engine(response=TEXT, block_count=128, block_size=1, paused=True, **drafts) as fake:
        leaving = trio.CancelScope()

        async def read_until_leaving() -> None:
            with leaving:
                await read(fake)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_until_leaving)
            while not (await fake.step()).chunks[0].draft:
                pass
            async with fake.held_step() as plan:
                assert plan.chunks[0].draft
                used = fake.stats().blocks_used
                leaving.cancel()
                await trio.testing.wait_all_tasks_blocked()
                assert fake.stats().blocks_used == used  # The forward pass still reads the blocks.
        fake.assert_all_free()
