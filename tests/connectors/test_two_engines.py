"""Two engines with a real model in one program: one computes the prompt, the other goes on from its KV."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import trio

import trioserve
from trioserve import SamplingParams
from trioserve.contracts.kv_transfer_params import KVTransferParams

pytestmark = pytest.mark.slow

PROMPT = "the thing in it and on and on and the other in the ring " * 3
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
FIRST = SamplingParams(max_tokens=1, temperature=0.0)
HELD = KVTransferParams(do_remote_decode=True)


@pytest.fixture(scope="module", params=("llama", "deepseek-v3"))
def checkpoint(request, tmp_path_factory) -> str:
    """The second one's KV are latents."""
    place = Path(__file__).parents[1] / "model" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("checkpoint")
    module.write_checkpoint(directory, request.param)
    return str(directory)


def opened(checkpoint: str, **options):
    config = {"kv_connector": "loopback"}
    return trioserve.open_engine(checkpoint, dtype="float32", kv_transfer_config=config, **options)


async def text_of(engine, sampling=GREEDY, **more) -> str:
    async with engine.generate(PROMPT, sampling, **more) as stream:
        return "".join([delta.text async for delta in stream])


@pytest.mark.parametrize("block_size", [16, 8, 48])
async def test_a_response_goes_on_from_what_another_engine_has_computed(checkpoint, block_size):
    async with opened(checkpoint) as prefill, opened(checkpoint, block_size=block_size) as decode:
        async with prefill.generate(PROMPT, FIRST, kv_transfer=HELD) as stream:
            params = [delta async for delta in stream][-1].kv_transfer
            assert params is not None
            response = await text_of(decode, kv_transfer=params)
            assert decode.stats().loaded_tokens_total == params.remote_num_tokens - 1
            await stream.wait_until_released()
            assert prefill.stats().blocks_held == 0
        assert response == await text_of(prefill)


async def test_what_was_let_go_is_computed_again(checkpoint):
    async with opened(checkpoint) as prefill, opened(checkpoint) as decode:
        async with prefill.generate(PROMPT, FIRST, kv_transfer=HELD) as stream:
            params = [delta async for delta in stream][-1].kv_transfer
            assert prefill.stats().blocks_held > 0
        with trio.fail_after(30):
            response = await text_of(decode, kv_transfer=params)
        assert decode.stats().loaded_tokens_total == 0
        assert prefill.stats().blocks_held == 0
        assert response == await text_of(prefill)
