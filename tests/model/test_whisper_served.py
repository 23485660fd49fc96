"""Tests of a tiny Whisper that an engine serves: batches, prefix cache, cancellation, and refused requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import trio

from trioserve.assemble import open_engine
from trioserve.commands.models import check_model
from trioserve.contracts.errors import ContextTooLong, InvalidRequest, StartupError
from trioserve.contracts.media import AudioPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.testing.accounting import assert_all_free

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def whisper(tiny_whisper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    tiny_whisper.write_checkpoint(path)
    return path


@asynccontextmanager
async def hearing(path: Path, **options: Any) -> AsyncIterator[Engine]:
    async with open_engine(
        str(path), **{"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 4, **options}
    ) as engine:
        yield engine
        assert engine.image_outputs is not None
        engine.image_outputs.check()
        assert_all_free(engine)


def prompt(engine: Engine, seed: int, sound: Any, *token_ids: int) -> AudioPrompt:
    audio = engine.model.audio
    assert audio is not None
    usual = (audio.start_id, audio.languages["en"], audio.transcribe_id or 0, audio.no_timestamps_id)
    return AudioPrompt(features=sound, digest=seed.to_bytes(16, "big"), token_ids=token_ids or usual)


async def said(engine: Engine, asked: AudioPrompt, sampling: SamplingParams = GREEDY) -> list[int]:
    tokens: list[int] = []
    async with engine.generate(asked, sampling) as stream:
        async for delta in stream:
            tokens += delta.token_ids
    return tokens


def expected_tokens(path: Path, features: Any, asked: tuple[int, ...], count: int) -> list[int]:
    from transformers import WhisperForConditionalGeneration

    model: Any = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    tokens = list(asked)
    with torch.no_grad():
        for _ in range(count):
            out = model(torch.from_numpy(features)[None], decoder_input_ids=torch.tensor([tokens]))
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens[len(asked) :]


async def test_requests_in_one_batch_get_the_tokens_of_transformers(whisper: Path, tiny_whisper: ModuleType) -> None:
    found: dict[int, list[int]] = {}
    async with hearing(whisper) as engine:
        asked = {seed: prompt(engine, seed, tiny_whisper.features(seed)) for seed in range(4)}

        async def ask(seed: int) -> None:
            found[seed] = await said(engine, asked[seed])

        async with trio.open_nursery() as nursery:
            for seed in asked:
                nursery.start_soon(ask, seed)
    for seed, one in asked.items():
        assert found[seed] == expected_tokens(whisper, np.asarray(one.features), one.token_ids, 10)


async def test_equal_sound_is_encoded_once_and_its_blocks_are_shared(whisper: Path, tiny_whisper: ModuleType) -> None:
    async with hearing(whisper) as engine:
        audio = engine.model.audio
        assert audio is not None
        first = prompt(engine, 1, tiny_whisper.features(1))
        tokens = await said(engine, first)
        other = prompt(engine, 1, tiny_whisper.features(1), audio.start_id, audio.languages["de"])
        async with engine.generate(other, GREEDY) as stream:
            async for _ in stream:
                pass
        assert stream.cached_token_count == audio.row_count
        assert engine.image_outputs is not None
        assert (engine.image_outputs.query_count, engine.image_outputs.hit_count) == (2, 1)
        assert await said(engine, first) == tokens
        assert await said(engine, prompt(engine, 2, tiny_whisper.features(2))) != tokens


async def test_one_generated_token_gives_the_probabilities_of_languages_and_silence(
    whisper: Path, tiny_whisper: ModuleType
) -> None:
    from transformers import WhisperForConditionalGeneration

    features = tiny_whisper.features(3)
    model: Any = WhisperForConditionalGeneration.from_pretrained(whisper, dtype=torch.float32).eval()
    async with hearing(whisper) as engine:
        audio = engine.model.audio
        assert audio is not None
        with torch.no_grad():
            out = model(torch.from_numpy(features)[None], decoder_input_ids=torch.tensor([[audio.start_id]]))
        wanted = out.logits[0, -1].log_softmax(-1)
        asked = prompt(engine, 3, features, audio.start_id)
        for allowed in ((audio.no_speech_id,), tuple(audio.languages.values())):
            sampling = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=allowed, logprobs=0)
            async with engine.generate(asked, sampling) as stream:
                deltas = [delta async for delta in stream]
            [token_id] = [token_id for delta in deltas for token_id in delta.token_ids]
            [entry] = [entry for delta in deltas for entry in delta.logprobs or ()]
            assert token_id == max(allowed, key=lambda token: float(wanted[token]))
            assert entry.logprob == pytest.approx(float(wanted[token_id]), abs=1e-3)


@pytest.mark.parametrize("stage", ["encoding", "prefill", "decode"])
async def test_a_request_that_leaves_frees_all_blocks(stage: str, whisper: Path, tiny_whisper: ModuleType) -> None:
    async with hearing(whisper, enable_prefix_caching=False) as engine:
        free = engine.stats().blocks_free
        for seed in range(3):
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            with trio.CancelScope() as scope:
                async with engine.generate(prompt(engine, seed, tiny_whisper.features(seed)), sampling) as stream:
                    if stage == "encoding":
                        scope.cancel()
                    await stream.wait_until_begun()
                    if stage == "prefill":
                        scope.cancel()
                    async for _ in stream:
                        scope.cancel()
            assert scope.cancelled_caught
        assert await said(engine, prompt(engine, 9, tiny_whisper.features(9)))
        assert engine.stats().blocks_free == free


async def test_preempted_requests_resume_with_the_same_tokens(whisper: Path, tiny_whisper: ModuleType) -> None:
    found: dict[int, list[int]] = {}
    alone: dict[int, list[int]] = {}
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    async with hearing(whisper, enable_prefix_caching=False) as engine:
        for seed in range(3):
            alone[seed] = await said(engine, prompt(engine, seed, tiny_whisper.features(seed)), sampling)
        async with trio.open_nursery() as nursery:

            async def ask(seed: int) -> None:
                found[seed] = await said(engine, prompt(engine, seed, tiny_whisper.features(seed)), sampling)

            for seed in range(3):
                nursery.start_soon(ask, seed)
            await engine.pause_generation("retract")
            engine.resume_generation()
    assert found == alone


async def test_text_and_too_long_prompts_are_refused(whisper: Path, tiny_whisper: ModuleType) -> None:
    async with hearing(whisper) as engine:
        with pytest.raises(InvalidRequest, match="transcribes speech"):
            async with engine.generate("Hello", GREEDY):
                pass
        with pytest.raises(InvalidRequest, match="computes no embeddings"):
            await engine.embed("Hello")
        with pytest.raises(ContextTooLong, match="is 40 tokens besides the sound"):
            await said(engine, prompt(engine, 1, tiny_whisper.features(1), *[1] * 40))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "runs in one process"),
        ({"cpu_kernels": "native"}, "they do not compute cross attention"),
        ({"max_model_len": 60}, "raise --kv-cache-memory or --max-model-len"),
    ],
)
async def test_options_that_the_model_does_not_support_are_refused(
    options: dict[str, Any], words: str, whisper: Path
) -> None:
    with pytest.raises(StartupError, match=words):
        async with open_engine(str(whisper), dtype="float32", **options):
            pass


async def test_transcripts_follow_the_rules_of_speech(whisper: Path, tiny_whisper: ModuleType) -> None:
    async with hearing(whisper) as engine:
        audio = engine.model.audio
        assert audio is not None
        with_times = prompt(engine, 5, tiny_whisper.features(5), audio.start_id, audio.languages["en"])
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(
                temperature=temperature, seed=1, max_tokens=20, speech=audio.rules(has_timestamps=True)
            )
            tokens = await said(engine, with_times, sampling)
            times = [token for token in tokens if token >= audio.timestamp_first_id]
            assert times[0] == tokens[0] <= audio.timestamp_first_id + 10
            assert times == sorted(times)
            assert not set(tokens) & {*audio.suppressed_ids, audio.no_timestamps_id}
        rules = audio.rules(has_timestamps=False)
        tokens = await said(engine, prompt(engine, 5, tiny_whisper.features(5)), SamplingParams(speech=rules, seed=2))
        assert not set(tokens) & set(audio.suppressed_ids)
        assert tokens[0] not in audio.begin_suppressed_ids


def test_check_describes_the_speech_input_and_no_chat_template(whisper: Path) -> None:
    found = {finding.name: finding.what for finding in check_model(str(whisper)).findings}
    assert found["speech"] == "50 rows per 1 s, 3 languages"
    assert "plain torch on a GPU" in found["computed by"]
    assert "chat template" not in found
