"""Tests of an engine with BART or T5: prompts of several lengths in one batch, and what each request frees."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trio

from tests.api.conftest import MemoryExchange
from trioserve.api.routes import App
from trioserve.assemble import open_engine
from trioserve.commands.models import check_model
from trioserve.contracts.errors import ContextTooLong, InvalidRequest, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.testing.accounting import assert_all_free

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
TEXTS = ("a", "Translate this.", "x" * 15, "Three blocks of text are here to read!")


@pytest.fixture(scope="module", params=["mbart", "t5-1.1"])
def model_name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(model_name: str, tiny_encoder_decoders: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_encoder_decoders.write_checkpoint(path, model_name)
    return path


@asynccontextmanager
async def reading(path: Path, **options: Any) -> AsyncIterator[Engine]:
    async with open_engine(
        str(path), **{"dtype": "float32", "max_num_batched_tokens": 24, "max_num_seqs": 4, **options}
    ) as engine:
        yield engine
        assert engine.image_outputs is not None
        engine.image_outputs.check()
        assert engine.image_outputs.claimed_bytes == 0
        assert_all_free(engine)


async def written(engine: Engine, text: str, sampling: SamplingParams = GREEDY) -> list[int]:
    tokens: list[int] = []
    async with engine.generate(text, sampling) as stream:
        async for delta in stream:
            tokens += delta.token_ids
    return tokens


async def all_written(engine: Engine, sampling: SamplingParams = GREEDY) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}

    async def write(text: str) -> None:
        found[text] = await written(engine, text, sampling)

    async with trio.open_nursery() as nursery:
        for text in TEXTS:
            nursery.start_soon(write, text)
    return found


async def test_texts_in_one_batch_get_the_tokens_of_transformers(
    path: Path, model_name: str, tiny_encoder_decoders: ModuleType
) -> None:
    model: Any = tiny_encoder_decoders.model_of(path, model_name)
    async with reading(path) as engine:
        found = await all_written(engine)
        for text in TEXTS:
            read = torch.tensor([await engine.encode(text)])
            with torch.no_grad():
                wanted = model.generate(read, do_sample=False, num_beams=1, min_new_tokens=10, max_new_tokens=10)
            assert found[text] == wanted[0, 1:].tolist() or tiny_encoder_decoders.END in found[text]
        sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
        batch = await all_written(engine, sampling)
        assert batch == {text: await written(engine, text, sampling) for text in TEXTS}


async def test_blocks_are_shared_by_equal_texts_only(path: Path) -> None:
    async with reading(path) as engine:
        one, other = "x" * 40, "x" * 39 + "y"
        first, second = await written(engine, one), await written(engine, other)
        async with engine.generate(other, GREEDY) as stream:
            again = [token async for delta in stream for token in delta.token_ids]
        assert again == second
        assert stream.cached_token_count == len(await engine.encode(other)) == 41
        assert stream.prompt_token_count == 42
        assert first == await written(engine, one)
        async with engine.generate(one[:-1] + "z", GREEDY) as stream:
            assert [token async for delta in stream for token in delta.token_ids] not in (first, second)
        assert stream.cached_token_count == 0


@pytest.mark.parametrize("stage", ["encoding", "prefill", "decode"])
async def test_a_request_that_leaves_frees_all_blocks(stage: str, path: Path) -> None:
    async with reading(path, enable_prefix_caching=False) as engine:
        free = engine.stats().blocks_free
        for text in TEXTS:
            with trio.CancelScope() as scope:
                async with engine.generate(text, SamplingParams(temperature=0.0, ignore_eos=True)) as stream:
                    if stage == "encoding":
                        scope.cancel()
                    await stream.wait_until_begun()
                    if stage == "prefill":
                        scope.cancel()
                    async for _ in stream:
                        scope.cancel()
            assert scope.cancelled_caught
        assert await written(engine, "b")
        assert engine.stats().blocks_free == free


async def test_preempted_requests_resume_with_the_same_tokens(path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    async with reading(path, enable_prefix_caching=False) as engine:
        alone = {text: await written(engine, text, sampling) for text in TEXTS}
        found: dict[str, list[int]] = {}

        async def write(text: str) -> None:
            found[text] = await written(engine, text, sampling)

        async with trio.open_nursery() as nursery:
            for text in TEXTS:
                nursery.start_soon(write, text)
            await engine.pause_generation("retract")
            engine.resume_generation()
    assert found == alone


async def test_tokens_drafted_from_the_text_change_nothing(path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    async with reading(path) as engine:
        plain = await all_written(engine, sampling)
    async with reading(path, speculative_ngram=3) as engine:
        assert await all_written(engine, sampling) == plain


async def test_output_ends_at_the_last_position_of_the_decoder(path: Path, model_name: str) -> None:
    async with reading(path) as engine:
        assert engine.model.encoder is not None
        tokens_max = engine.model.encoder.tokens_max
        assert tokens_max == (60 if model_name == "mbart" else 512)
        if model_name == "mbart":
            for max_tokens in (None, 100):
                sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
                assert len(await written(engine, "a", sampling)) == tokens_max - 1
        with pytest.raises(ContextTooLong, match=f"reads {tokens_max} tokens, and the prompt has"):
            await written(engine, "x" * tokens_max)


async def test_what_an_encoder_cannot_do_is_refused(path: Path) -> None:
    async with reading(path) as engine:
        with pytest.raises(InvalidRequest, match="encoder that reads the prompt predicts no tokens"):
            await written(engine, "a", SamplingParams(prompt_logprobs=1))
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            async with engine.generate([], GREEDY):
                pass
        with pytest.raises(InvalidRequest, match="computes no embeddings"):
            await engine.embed("Hello")
    with pytest.raises(StartupError, match="with an encoder runs in one process"):
        async with open_engine(str(path), dtype="float32", tensor_parallel_size=2):
            pass


async def test_completions_count_the_tokens_that_the_encoder_reads(path: Path) -> None:
    async with reading(path) as engine:
        app = App(engine)
        body = b'{"model": "%b", "prompt": ["abc", "abcdef"], "max_tokens": 4, "temperature": 0, "ignore_eos": true}'
        exchange = MemoryExchange("POST", "/v1/completions", body % engine.model.name.encode(), [])
        await app(exchange)
        assert exchange.status == 200, exchange.data
        assert exchange.json()["usage"]["prompt_tokens"] == (3 + 2) + (6 + 2)
        assert exchange.json()["usage"]["completion_tokens"] == 8


def test_check_describes_the_encoder_and_no_chat_template(path: Path, model_name: str) -> None:
    found = {finding.name: finding.what for finding in check_model(str(path)).findings}
    count = 60 if model_name == "mbart" else 512
    assert found["encoder"] == f"reads {count} tokens, and the decoder writes {count - 1}"
    assert "chat template" not in found
