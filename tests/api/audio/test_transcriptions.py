"""Tests of /v1/audio/transcriptions and /v1/audio/translations: forms, formats, streams, deadlines and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.api.images.forms import multipart
from tests.audio.audio_files import WHISPER, audio_file, wav
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.media import AudioLimits, AudioPrompt
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.inline_work import InlineAudioDecoder

PATH = "/v1/audio/transcriptions"
# The tokens of the scripted engine are characters, and these tokens follow them.
SOUND = msgspec.structs.replace(
    WHISPER,
    mel_bins=4,
    end_id=1000,
    start_id=1001,
    languages={"en": 1002, "de": 1003},
    translate_id=1004,
    transcribe_id=1005,
    previous_id=1006,
    no_speech_id=1007,
    no_timestamps_id=1008,
)
SILENCE = audio_file("flac", "flac", 45.0, rate=16_000, hertz=0.0)
"""A small file, which is parsed in the event loop."""
START = (SOUND.start_id, SOUND.languages["en"], SOUND.transcribe_id)


class Speech:
    """Scripts the engine. The output of a window is a list of texts and timestamps (numbers).

    Args:
        windows: output of each window, in order.

    Attributes:
        prompts: decoder prompts of all engine requests.
        language: the detected language.
        no_speech: log probability of no speech.
        held_window: number of the window, from 1, whose output stops after its first character. 0: no window.
    """

    def __init__(self, *windows: tuple[float | str, ...], logprob: float = -0.5) -> None:
        self.windows = list(windows)
        self.prompts: list[tuple[int, ...]] = []
        self.language = SOUND.languages["de"]
        self.no_speech = -3.0
        self.logprob = logprob
        self.held_window = 0

    def __call__(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Iterable[Any]:
        self.prompts.append(prompt)
        if sampling.max_tokens == 1:
            is_language = sampling.allowed_token_ids == tuple(SOUND.languages.values())
            token = self.language if is_language else SOUND.no_speech_id
            yield self._delta("", (token,), self.no_speech, FinishReason.LENGTH)
            return
        assert sampling.speech is not None
        assert sampling.speech.has_timestamps is (SOUND.no_timestamps_id not in prompt)
        for part in self.windows.pop(0):
            if isinstance(part, str):
                for letter in part:
                    yield self._delta(letter, (ord(letter),), self.logprob)
                    if len(self.prompts) == self.held_window:
                        yield trio.Event()
            else:
                yield self._delta("", (SOUND.timestamp_first_id + round(part / 0.02),), self.logprob)
        yield self._delta("", (SOUND.end_id,), self.logprob, FinishReason.STOP)

    def _delta(self, text: str, ids: tuple[int, ...], logprob: float, end: FinishReason | None = None) -> Delta:
        logprobs = tuple(TokenLogprob(one, logprob) for one in ids)
        return Delta(index=0, text=text, token_ids=ids, logprobs=logprobs, finish_reason=end)


class Hearing:
    """An app with a speech model.

    Args:
        api: the app's fixture.
        speech: output of the model.
        limits: limits of recordings.
    """

    def __init__(self, api: Any, speech: Speech, limits: AudioLimits | None = None) -> None:
        self.api, self.speech = api, speech
        self.decoder = InlineAudioDecoder(limits or AudioLimits(), api.engine.metrics)
        api.engine.model.audio = SOUND
        api.engine.audio_decoder = self.decoder
        api.engine.script = speech

    def exchange(self, content: bytes, path: str = PATH, headers: dict[str, str] | None = None, **fields: str) -> Any:
        body, kind = multipart(("file", content, "a.wav"), ("model", "letters"), *fields.items())
        return self.api.exchange("POST", path, body, {"content-type": kind, **(headers or {})})

    async def ask(self, content: bytes, path: str = PATH, **fields: str) -> Any:
        exchange = self.exchange(content, path, **fields)
        await self.api.app(exchange)
        self.check_free()
        return exchange

    async def refusal(self, content: bytes, path: str = PATH, *, status: int = 400, **fields: str) -> dict[str, Any]:
        exchange = await self.ask(content, path, **fields)
        assert exchange.status == status, exchange.data
        error: dict[str, Any] = exchange.json()["error"]
        return error

    @property
    def running_count(self) -> int:
        """Number of requests that have a decoding process."""
        return self.decoder._pool._running.total()

    def check_free(self) -> None:
        assert self.decoder.bytes_held == 0
        assert self.running_count == 0
        assert self.api.left()


@pytest.fixture
def hello(api: Any) -> Hearing:
    return Hearing(api, Speech((" Hello", " there.")))


def events(exchange: Any) -> list[dict[str, Any]]:
    found = []
    for block in exchange.data.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_text_of_a_recording(hello: Hearing) -> None:
    exchange = await hello.ask(wav(2.0), language="en")
    assert exchange.status == 200
    assert exchange.json() == {"text": "Hello there.", "usage": {"type": "duration", "seconds": 2.0}}
    assert hello.speech.prompts == [(*START, SOUND.no_timestamps_id)]
    sampling = hello.api.engine.streams[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.0, SOUND.tokens_max // 2)
    prompt = hello.api.engine.streams[0].prompt
    assert isinstance(prompt, AudioPrompt)
    assert prompt.features.shape == (4, 3000)  # type: ignore[attr-defined]  # a numpy array
    assert hello.api.engine.metrics.total("audio_seconds_total") == 2.0


async def test_language_is_detected(hello: Hearing) -> None:
    exchange = await hello.ask(wav(), response_format="text")
    assert exchange.data == b"Hello there.\n"
    assert exchange.response_headers["content-type"] == "text/plain; charset=utf-8"
    assert hello.speech.prompts == [
        (SOUND.start_id,),
        (SOUND.start_id, 1003, SOUND.transcribe_id, SOUND.no_timestamps_id),
    ]
    detection, transcript = (stream.prompt for stream in hello.api.engine.streams)
    assert detection.digest == transcript.digest  # type: ignore[union-attr]  # both are AudioPrompts


async def test_translation(hello: Hearing) -> None:
    exchange = await hello.ask(wav(), "/v1/audio/translations", language="de", response_format="verbose_json")
    assert exchange.status == 200
    assert exchange.json()["task"] == "translate"
    assert hello.speech.prompts[0] == (SOUND.start_id, 1003, SOUND.translate_id)


async def test_verbose_json_has_segments(api: Any) -> None:
    hearing = Hearing(api, Speech((0.0, " One.", 1.0, 1.0, " Two.", 1.5)))
    exchange = await hearing.ask(
        wav(2.0), language="en", response_format="verbose_json", **{"timestamp_granularities[]": "segment"}
    )
    body = exchange.json()
    segments = body.pop("segments")
    assert body == {
        "text": "One. Two.",
        "usage": {"type": "duration", "seconds": 2.0},
        "task": "transcribe",
        "language": "english",
        "duration": 2.0,
    }
    assert [(one["id"], one["start"], one["end"], one["text"]) for one in segments] == [
        (0, 0.0, 1.0, " One."),
        (1, 1.0, 1.5, " Two."),
    ]
    assert segments[0]["tokens"] == [SOUND.timestamp_first_id, *map(ord, " One."), SOUND.timestamp_first_id + 50]
    assert segments[0]["avg_logprob"] == -0.5
    assert segments[0]["no_speech_prob"] == pytest.approx(0.0498, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("srt", "1\n00:00:00,000 --> 00:00:01,000\nOne.\n\n2\n00:00:01,000 --> 00:00:01,500\nTwo.\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nOne.\n\n00:00:01.000 --> 00:00:01.500\nTwo.\n\n"),
    ],
)
async def test_subtitles(api: Any, name: str, text: str) -> None:
    hearing = Hearing(api, Speech((0.0, " One.", 1.0, 1.0, " Two.", 1.5)))
    exchange = await hearing.ask(wav(2.0), language="en", response_format=name)
    assert exchange.data.decode() == text


async def test_long_recording_is_read_window_by_window(api: Any) -> None:
    hearing = Hearing(api, Speech((0.0, " One.", 20.0, 20.0, " cut"), (0.0, " Two.", 25.0)))
    exchange = await hearing.ask(wav(45.0), language="en", prompt="names")
    assert exchange.json()["text"] == "One. Two."
    assert hearing.speech.prompts == [
        (SOUND.previous_id, *map(ord, " names"), *START),
        (SOUND.previous_id, *map(ord, " names One."), *START),
    ]
    first, second = (stream.prompt for stream in api.engine.streams)
    assert first.digest != second.digest  # type: ignore[union-attr]  # both are AudioPrompts


async def test_text_that_repeats_itself_is_sampled_again_at_a_higher_temperature(api: Any) -> None:
    windows = ((0.0, " la" * 60, 1.0), (0.0, " ho" * 60, 1.0), (0.0, " Fine words.", 1.0))
    hearing = Hearing(api, Speech(*windows))
    exchange = await hearing.ask(wav(2.0), language="en", response_format="verbose_json")
    assert exchange.json()["text"] == "Fine words."
    assert [one["temperature"] for one in exchange.json()["segments"]] == [0.4]
    assert [one.sampling.temperature for one in api.engine.streams if one.sampling.speech] == [0.0, 0.2, 0.4]
    assert sum(prompt == START[:1] for prompt in hearing.speech.prompts) == 1  # No speech is computed once.


@pytest.mark.parametrize("fields", [{"temperature": "0.1"}, {"stream": "true"}])
async def test_text_is_sampled_once_at_a_chosen_temperature_and_in_a_stream(api: Any, fields: dict[str, str]) -> None:
    exchange = await Hearing(api, Speech((" la" * 60,))).ask(wav(2.0), language="en", **fields)
    assert exchange.status == 200, exchange.data
    assert len([one for one in api.engine.streams if one.sampling.speech]) == 1


async def test_silent_window_has_no_text(api: Any) -> None:
    speech = Speech((" Thanks for watching.",), logprob=-2.0)
    speech.no_speech = -0.1
    exchange = await Hearing(api, speech).ask(wav(2.0), language="en")
    assert exchange.json()["text"] == ""
    assert len(speech.prompts) == 2


async def test_stream_sends_tokens_of_a_short_recording(hello: Hearing) -> None:
    exchange = await hello.ask(wav(), language="en", stream="true")
    assert exchange.response_headers["content-type"].startswith("text/event-stream")
    sent = events(exchange)
    assert "".join(one["delta"] for one in sent[:-1]) == "Hello there."
    assert len(sent) > 10
    assert sent[-1]["text"] == "Hello there."
    assert sent[-1]["usage"] == {
        "type": "tokens",
        "input_tokens": 4,
        "output_tokens": 14,
        "total_tokens": 18,
        "input_token_details": {"audio_tokens": 0, "text_tokens": 4},
    }


async def test_stream_sends_segments_of_a_long_recording(api: Any) -> None:
    hearing = Hearing(api, Speech((0.0, " One.", 20.0, 20.0, " cut"), (0.0, " Two.", 25.0)))
    exchange = await hearing.ask(wav(45.0), language="en", stream="true")
    assert [one.get("delta") for one in events(exchange)] == ["One.", " Two.", None]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities", "word"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "send verbose_json"),
        ({"response_format": "mp3"}, "response_format", "mp3"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "leave stream out"),
        ({"language": "xx"}, "language", "allowed are de, en"),
        ({"temperature": "2"}, "temperature", "allowed is 0 to 1"),
        ({"temperature": "warm"}, "temperature", "float"),
        ({"timeout": "0"}, "timeout", "above 0"),
    ],
)
async def test_wrong_fields_are_refused_before_decoding(
    hello: Hearing, fields: dict[str, str], param: str, words: str
) -> None:
    error = await hello.refusal(wav(), **fields)
    assert error["param"] == param
    assert words in error["message"]
    assert hello.decoder.gate.run_count == 0


async def test_wrong_files_are_refused(hello: Hearing) -> None:
    assert "is no audio" in (await hello.refusal(b"hello"))["message"]
    assert "damaged or incomplete" in (await hello.refusal(wav()[:-1000]))["message"]
    body, kind = multipart(("model", "letters"), ("file", "text"))
    exchange = await hello.api.context("POST", PATH, body, content_type=kind)
    assert "is no audio" in exchange.json()["error"]["message"]
    body, kind = multipart(("model", "letters"))
    exchange = await hello.api.context("POST", PATH, body, content_type=kind)
    assert exchange.json()["error"]["param"] == "file"
    exchange = await hello.api.context("POST", PATH, {"file": "x"}, content_type="application/json")
    assert exchange.json()["error"]["param"] == "content-type"


async def test_text_model_refuses_recordings(api: Any) -> None:
    body, kind = multipart(("file", wav(), "a.wav"), ("model", "letters"))
    exchange = await api.context("POST", PATH, body, content_type=kind)
    assert exchange.status == 400
    assert "hears nothing" in exchange.json()["error"]["message"]


async def test_unknown_model_is_refused(hello: Hearing) -> None:
    body, kind = multipart(("file", wav(), "a.wav"), ("model", "whisper-1"))
    exchange = await hello.api.context("POST", PATH, body, content_type=kind)
    assert exchange.status == 404


async def test_recordings_above_the_memory_limit_are_refused(api: Any) -> None:
    hearing = Hearing(api, Speech(), AudioLimits(features_bytes_max=1000))
    error = await hearing.refusal(wav(), status=429)
    assert "recordings of all requests hold 0 bytes" in error["message"]


async def test_deadline_ends_the_wait_for_a_decoder(hello: Hearing, autojump_clock: trio.testing.MockClock) -> None:
    with hello.decoder.gate.held():
        error = await hello.refusal(wav(), queue_timeout="3", timeout="9", status=504)
    assert error["code"] == "queue_timeout"
    assert trio.current_time() == pytest.approx(3.0)


async def test_total_deadline_counts_from_the_beginning(hello: Hearing, autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        exchange = hello.exchange(wav(), language="en", timeout="9", queue_timeout="5")
        with hello.decoder.gate.held():
            nursery.start_soon(hello.api.app, exchange)
            await trio.sleep(4)
    deadlines = hello.api.engine.options[0]["deadlines"]
    assert (deadlines.queue_timeout, deadlines.timeout) == pytest.approx((1.0, 5.0))
    assert exchange.status == 200


@pytest.mark.parametrize("phase", ["waiting", "decoding", "generating", "second window"])
@pytest.mark.parametrize("stream", ["", "true"])
async def test_client_that_leaves_frees_everything(
    api: Any, phase: str, stream: str, autojump_clock: trio.testing.MockClock
) -> None:
    speech = Speech((0.0, " One.", 20.0, 20.0, " cut"), (0.0, " Two.", 25.0))
    hearing = Hearing(api, speech)
    blockers = 2 if phase == "waiting" else 0
    speech.held_window = {"generating": 1, "second window": 2}.get(phase, 0)
    exchange = hearing.exchange(SILENCE, language="en", stream=stream)
    async with trio.open_nursery() as nursery:
        if phase in ("waiting", "decoding"):
            nursery.start_soon(_hold_gate, hearing)
            await wait_all_tasks_blocked()
        for _ in range(blockers):
            nursery.start_soon(api.app, hearing.exchange(wav(), language="en"))
        await wait_all_tasks_blocked()
        with trio.CancelScope() as client:
            async with trio.open_nursery() as requests:
                requests.start_soon(api.app, exchange)
                await wait_all_tasks_blocked()
                held = {"waiting": 2, "decoding": 1}.get(phase, 0)
                assert hearing.running_count == held
                assert (hearing.decoder.bytes_held > 0) is (phase in ("generating", "second window"))
                assert len(speech.prompts) == speech.held_window
                client.cancel()
        nursery.cancel_scope.cancel()
    hearing.check_free()


async def _hold_gate(hearing: Hearing) -> None:
    with hearing.decoder.gate.held():
        await trio.sleep_forever()


@asynccontextmanager
async def openai_client(hearing: Hearing) -> AsyncIterator[openai.AsyncOpenAI]:
    async def handle(request: httpx.Request) -> httpx.Response:
        kind = {"content-type": request.headers["content-type"]}
        exchange = hearing.api.exchange("POST", request.url.path, await request.aread(), kind)
        await hearing.api.app(exchange)
        return httpx.Response(exchange.status, headers=exchange.response_headers, content=exchange.data)

    async with (
        httpx.AsyncClient(transport=httpx.MockTransport(handle)) as web,
        openai.AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        yield client
        hearing.check_free()


async def test_openai_client_reads_every_format(api: Any) -> None:
    window = (0.0, " One.", 1.0, 1.0, " Two.", 1.5)
    hearing = Hearing(api, Speech((" One.",), window, window))
    file = ("a.wav", wav(2.0))
    async with openai_client(hearing) as client:
        create = client.audio.transcriptions.create
        plain = await create(model="letters", file=file, language="en")
        assert plain.text == "One."
        verbose = await create(
            model="letters", file=file, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert verbose.segments is not None
        times = [(one.start, one.end, one.text) for one in verbose.segments]
        assert times == [(0.0, 1.0, " One."), (1.0, 1.5, " Two.")]
        assert (verbose.language, verbose.duration) == ("german", 2.0)
        subtitles = await create(model="letters", file=file, response_format="srt")
        assert "00:00:01,000 --> 00:00:01,500" in subtitles


async def test_openai_client_reads_a_stream_and_an_error(hello: Hearing) -> None:
    async with openai_client(hello) as client:
        stream = await client.audio.transcriptions.create(model="letters", file=("a.wav", wav()), stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == "Hello there."
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == "Hello there."
        with pytest.raises(openai.BadRequestError, match="is no audio"):
            await client.audio.transcriptions.create(model="letters", file=("a.wav", b"hello"))
