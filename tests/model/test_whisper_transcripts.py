"""Tests of transcriptions with a tiny Whisper: a recording is decoded in a process, and a client that leaves frees
blocks, encoder outputs and decoders.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

from tests.api.conftest import MemoryExchange
from tests.api.images.forms import multipart
from tests.audio.audio_files import wav
from trioserve.api.routes import App
from trioserve.assemble import open_engine
from trioserve.engine.engine import Engine
from trioserve.testing.accounting import assert_all_free

pytestmark = pytest.mark.slow

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def whisper(tiny_whisper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whisper")
    tiny_whisper.write_checkpoint(path)
    return path


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Engine, App]]:
    async with open_engine(
        str(path), dtype="float32", max_num_batched_tokens=48, max_num_seqs=4, enable_prefix_caching=False
    ) as engine:
        free = engine.stats().blocks_free
        yield engine, App(engine)
        assert engine.stats().blocks_free == free
        assert engine.image_outputs is not None
        engine.image_outputs.check()
        assert engine.image_outputs.claimed_bytes == 0
        assert engine.audio_decoder is not None
        assert engine.audio_decoder.bytes_held == 0
        assert_all_free(engine)


def exchange(seconds: float, **fields: str) -> MemoryExchange:
    body, kind = multipart(("file", wav(seconds), "a.wav"), *fields.items())
    return MemoryExchange("POST", PATH, body, [("content-type", kind)])


async def test_recording_of_several_windows_is_transcribed(whisper: Path) -> None:
    async with served(whisper) as (engine, app):
        asked = exchange(3.5, response_format="verbose_json")
        await app(asked)
        assert asked.status == 200, asked.data
        body = asked.json()
        assert body["duration"] == 3.5
        codes = {"english": "en", "german": "de", "french": "fr"}
        assert body["language"] in codes
        assert body["text"] == "".join(segment["text"] for segment in body["segments"]).strip()
        assert all(0 <= one["start"] <= one["end"] <= 3.5 for one in body["segments"])
        assert all(0 <= one["no_speech_prob"] <= 1 for one in body["segments"])
        again = exchange(3.5, response_format="verbose_json", language=codes[body["language"]])
        await app(again)
        assert again.json() == body
        assert engine.metrics.total("audio_seconds_total") == 7.0


async def test_stream_and_whole_response_have_the_same_text(whisper: Path) -> None:
    async with served(whisper) as (_, app):
        chosen = {"language": "en", "temperature": "0.5", "seed": "1"}  # A stream has no fallback.
        whole, streamed = exchange(0.9, **chosen), exchange(0.9, **chosen, stream="true")
        await app(whole)
        await app(streamed)
        assert whole.status == 200
        assert whole.json()["text"].encode() in streamed.data or not whole.json()["text"].isascii()
        assert b"event: transcript.text.done" in streamed.data


@pytest.mark.parametrize("phase", ["decoding", "encoding", "decode"])
async def test_client_that_leaves_frees_blocks_outputs_and_decoders(
    whisper: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(whisper) as (engine, app):
        decoder = engine.audio_decoder
        assert decoder is not None
        with trio.CancelScope() as client:
            # Each hook cancels the client at the beginning of a phase.
            if phase == "decoding":
                decoded = decoder._decoded

                async def leave(*arguments: Any) -> Any:
                    client.cancel()
                    return await decoded(*arguments)

                monkeypatch.setattr(decoder, "_decoded", leave)
            elif phase == "encoding":
                encoding = engine._texts.encoding
                assert encoding is not None
                prepare = encoding.prepare

                async def prepare_and_leave(request: Any) -> None:
                    client.cancel()
                    await prepare(request)

                monkeypatch.setattr(encoding, "prepare", prepare_and_leave)
            else:
                generate = engine.generate

                def generate_and_leave(*arguments: Any, **options: Any) -> Any:
                    client.cancel()
                    return generate(*arguments, **options)

                monkeypatch.setattr(engine, "generate", generate_and_leave)
            await app(exchange(3.5))
        assert client.cancelled_caught
        assert decoder._pool._running.total() == 0
        monkeypatch.undo()
        after = exchange(0.9, language="en")  # It ends after the step in flight.
        await app(after)
        assert after.status == 200


async def test_damaged_recording_is_refused(whisper: Path) -> None:
    async with served(whisper) as (_, app):
        body, kind = multipart(("file", wav(1.0)[:500], "a.wav"))
        asked = MemoryExchange("POST", PATH, body, [("content-type", kind)])
        await app(asked)
        assert asked.status == 400
        assert "damaged or incomplete" in asked.json()["error"]["message"]
