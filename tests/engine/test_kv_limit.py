"""Tests of an engine whose KV cache becomes smaller and larger while it serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

import trioserve
from tests.engine.test_pausing import Reader, undisturbed
from trioserve.contracts.errors import Draining, InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.kv_storage import KVStorage
from trioserve.model.loading.default_model import find_default_model
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import open_memory_server

SIZES: dict[str, Any] = {"block_count": 40, "block_size": 4, "max_model_len": 80, "step_seconds": 0.01}
FILLER = SamplingParams(max_tokens=60, ignore_eos=True)
KINDS: list[dict[str, Any]] = [{}, {"overlap_steps": True}, {"speculative_ngram": 4}, {"draft_model_tokens": 4}]


async def until_last_blocks_are_used(fake: FakeEngine) -> None:
    while fake.core.pool.available_count > 19:  # noqa: ASYNC110
        await trio.sleep(0.01)


@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_smaller_cache_waits_for_the_requests_that_use_its_last_blocks(autojump_clock, options):
    expected = await undisturbed("one", **options)
    filler, one, late = Reader(), Reader(), Reader()
    async with open_fake_engine(**(SIZES | options)) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(filler.read, fake, "fill", FILLER)
        nursery.start_soon(one.read, fake, "one")
        await until_last_blocks_are_used(fake)
        used = fake.stats().blocks_used
        with trio.fail_after(100):
            await fake.limit_kv_cache(80)
        assert not fake.core.pool.retiring_count
        assert fake.stats().blocks_total == 20 < used
        await late.read(fake, "late")
        assert late.end[0] is FinishReason.LENGTH
        await fake.limit_kv_cache(160)
        assert fake.stats().blocks_total == 40
    assert one.token_ids == expected
    assert filler.end[0] is FinishReason.LENGTH
    fake.assert_all_free()


async def test_cancelled_limit_is_restored(autojump_clock):
    filler, one = Reader(), Reader()
    async with open_fake_engine(**SIZES) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(filler.read, fake, "fill", FILLER)
        nursery.start_soon(one.read, fake, "one")
        await until_last_blocks_are_used(fake)
        with trio.move_on_after(0.01) as scope:
            await fake.limit_kv_cache(80)
        assert scope.cancelled_caught
        assert fake.stats().blocks_total == 40
    fake.assert_all_free()


async def test_limit_stays_in_force_after_a_sleep(autojump_clock):
    async with open_fake_engine(**SIZES) as fake:
        await fake.limit_kv_cache(99)
        await fake.sleep()
        await fake.wake_up()
        assert fake.stats().blocks_total == 25


@pytest.mark.parametrize("tokens", [76, 161])
async def test_limit_that_is_out_of_range_is_refused(autojump_clock, tokens):
    async with open_fake_engine(**SIZES) as fake:
        with pytest.raises(InvalidRequest, match="allowed are 80, for one full context, to 160, the size"):
            await fake.limit_kv_cache(tokens)
        assert fake.stats().blocks_total == 40


async def test_limit_that_waits_ends_as_soon_as_the_engine_drains(autojump_clock):
    filler, one = Reader(), Reader()
    async with open_fake_engine(**SIZES) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(filler.read, fake, "fill", FILLER)
        nursery.start_soon(one.read, fake, "one")
        await until_last_blocks_are_used(fake)

        async def limit() -> None:
            with pytest.raises(Draining):
                await fake.limit_kv_cache(80)
            assert len(list(fake.core.live_requests())) == 2

        nursery.start_soon(limit)
        await trio.sleep(0.01)
        fake.drain()


async def test_cache_is_limited_over_http(autojump_clock):
    async with open_memory_server(**SIZES) as server:
        client = server.client()

        async def ask(query: str) -> tuple[int, Any]:
            async with client.ask("/kv_cache" + query, method="POST") as response:
                return await response.head(), await response.json()

        assert await ask("") == (200, {"tokens": 160, "tokens_max": 160})
        assert await ask("?tokens=99") == (200, {"tokens": 100, "tokens_max": 160})
        status, refusal = await ask("?tokens=3")
        assert (status, refusal["error"]["message"][:22]) == (400, "a KV cache of 4 tokens")
        assert await ask("?tokens=160") == (200, {"tokens": 160, "tokens_max": 160})


def test_released_memory_reads_as_zeros_and_other_blocks_keep_their_content():
    class Config:
        class Entry:
            head_dim, head_count, part_count = 64, 8, 2

        kv_entries = (Entry, None, Entry)

    def make(shape: tuple[int, ...]) -> np.ndarray:
        return np.ones(shape, np.float32)

    storage = KVStorage(Config, block_count=8, block_size=16, make=make, has_spare=True)  # type: ignore[arg-type]
    storage.release_memory(5)
    for pages in storage.kept:
        assert pages[:5].all()
        assert pages[8].all()
        assert not pages[6:7].any()  # Pages of the system at the ends also belong to other blocks.


@pytest.mark.skipif(find_default_model("smollm2") is None, reason="smollm2 is not on this machine")
async def test_real_model_continues_with_equal_tokens_in_a_smaller_cache():
    sampling = trioserve.SamplingParams(max_tokens=8, temperature=0)

    async def said(engine: trioserve.Engine) -> str:
        async with engine.generate("The capital of France is", sampling) as stream:
            return "".join([delta.text async for delta in stream])

    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": 0.25, "threads": 1, "max_num_seqs": 4}
    async with trioserve.open_engine("smollm2", **options) as engine:
        expected = await said(engine)
        before = engine.stats().blocks_total
        await engine.limit_kv_cache(256)
        assert engine.stats().blocks_total < before
        assert [await said(engine), await said(engine)] == [expected] * 2
        await engine.sleep()
        await engine.wake_up()
        assert await said(engine) == expected
