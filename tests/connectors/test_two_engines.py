"""Tests two engines with a real model in one program: one engine computes the prompt, the other continues from
its KV.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import trio

import trioserve
from trioserve import SamplingParams
from trioserve.connectors.loopback import LoopbackConnector
from trioserve.contracts.errors import StartupError
from trioserve.contracts.request import KVTransferParams

pytestmark = pytest.mark.slow

PROMPT = "the thing in it and on and on and the other in the ring " * 3
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
FIRST = SamplingParams(max_tokens=1, temperature=0.0)
HELD = KVTransferParams(do_remote_decode=True)


WINDOW = 8  # sliding window of every layer of the Mistral model


@pytest.fixture(scope="module", params=("llama", "deepseek-v3", "mistral"))
def checkpoint(request, tmp_path_factory) -> str:
    """Write a tiny model: "deepseek-v3" has latents as KV, "mistral" has a sliding window in all layers."""
    return written(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> str:
    return written("mistral", tmp_path_factory)


def written(kind: str, tmp_path_factory) -> str:
    place = Path(__file__).parents[1] / "model" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp(f"checkpoint-{kind}")
    module.write_checkpoint(directory, kind)
    return str(directory)


def opened(checkpoint: str, **options):
    config = {"kv_connector": "loopback"}
    return trioserve.open_engine(checkpoint, dtype="float32", kv_transfer_config=config, **options)


async def text_of(engine, sampling=GREEDY, **more) -> str:
    async with engine.generate(PROMPT, sampling, **more) as stream:
        return "".join([delta.text async for delta in stream])


@pytest.mark.parametrize("block_size", [16, 8, 48])
async def test_response_continues_from_the_kv_of_another_engine(checkpoint, block_size):
    async with opened(checkpoint) as prefill, opened(checkpoint, block_size=block_size) as decode:
        async with prefill.generate(PROMPT, FIRST, kv_transfer=HELD) as stream:
            params = [delta async for delta in stream][-1].kv_transfer
            assert params is not None
            if "mistral" in checkpoint:
                assert 1 <= prefill.stats().blocks_held <= 2 < len(params.remote_block_ids)
            response = await text_of(decode, kv_transfer=params)
            token_count = params.remote_num_tokens
            expected = token_count - 1
            if "mistral" in checkpoint:
                held_from = (token_count - WINDOW) // 16 * 16
                if (token_count - WINDOW) // block_size * block_size < held_from:
                    expected = 0  # The reader's longer block begins in a released block.
            assert decode.stats().loaded_tokens_total == expected
            await stream.wait_until_released()
            assert prefill.stats().blocks_held == 0
        assert response == await text_of(prefill)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 2)])
async def test_engines_with_different_rank_counts_exchange_kv(checkpoint, prefill_ranks, decode_ranks):
    def opened_in(ranks):
        return opened(checkpoint, tensor_parallel_size=ranks, threads=2, kv_cache_memory=0.05)

    async with opened_in(prefill_ranks) as prefill, opened_in(decode_ranks) as decode:
        async with prefill.generate(PROMPT, FIRST, kv_transfer=HELD) as stream:
            params = [delta async for delta in stream][-1].kv_transfer
            response = await text_of(decode, kv_transfer=params)
            assert decode.stats().loaded_tokens_total == params.remote_num_tokens - 1
            await stream.wait_until_released()
            assert prefill.stats().blocks_held == 0
        assert response == await text_of(prefill)


async def test_blocks_that_the_other_engine_released_are_computed_again(checkpoint):
    async with opened(checkpoint) as prefill, opened(checkpoint) as decode:
        async with prefill.generate(PROMPT, FIRST, kv_transfer=HELD) as stream:
            params = [delta async for delta in stream][-1].kv_transfer
            assert prefill.stats().blocks_held > 0
        with trio.fail_after(30):
            response = await text_of(decode, kv_transfer=params)
        assert decode.stats().loaded_tokens_total == 0
        assert prefill.stats().blocks_held == 0
        assert response == await text_of(prefill)


async def test_context_with_a_window_can_exceed_the_cache(windowed):
    small = {
        "kv_cache_memory": 8 * 16 * 1024 / 2**30,
        "max_num_batched_tokens": 64,
    }  # The KV cache has 8 blocks of 16 tokens.
    long = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
    async with (
        trioserve.open_engine(windowed, dtype="float32", **small) as engine,
        trioserve.open_engine(windowed, dtype="float32") as roomy,
    ):
        assert engine.stats().blocks_total == 8
        response = await text_of(engine, long)
        assert engine.stats().blocks_given_back_total > 8
        assert engine.stats().blocks_used == 0
        assert response == await text_of(roomy, long)


async def test_connector_without_window_support_is_refused(windowed, monkeypatch):
    monkeypatch.setattr(LoopbackConnector, "knows_windows", False)
    with pytest.raises(StartupError, match="knows_windows"):
        async with opened(windowed):
            pass
