"""Tests of decoding images in processes. The pixels equal those of decoding in the server's process, and a fault fails
only one image.
"""

from __future__ import annotations

import contextlib
import io
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.audio.audio_files import WHISPER, audio_file, wav
from trioserve.admission import decoding_process
from trioserve.admission.decoding_process import DecodeJob, DecodeReply
from trioserve.admission.file_decoders import AudioDecoder, ImageDecoder
from trioserve.audio.audio_file import decoded_audio
from trioserve.audio.recording import spectrogram_of
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.image_generation import RGBImage
from trioserve.contracts.media import AudioLimits, ImageLimits
from trioserve.metrics.registry import Metrics
from trioserve.testing.fake_image_encoder import FAKE_IMAGES
from trioserve.trio_tools.process_pool import FRAME, ProcessPool
from trioserve.vision.families.registry import tiles_of
from trioserve.vision.image_file import decoded_image, decoded_mask

LIMITS = ImageLimits(decode_seconds_max=60.0)


def png(width: int = 40, height: int = 30, *, mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(width).integers(0, 255, (height, width, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, "PNG")
    return file.getvalue()


@contextmanager
def decoding(limits: ImageLimits = LIMITS) -> Iterator[ImageDecoder]:
    with closing(ImageDecoder(limits, Metrics("x"))) as decoder:
        yield decoder


async def image(decoder: ImageDecoder, content: bytes) -> RGBImage:
    async with decoder.turn("key"):
        return await decoder.image(content, "here")


async def test_process_decodes_the_same_pixels() -> None:
    content = png(mode="RGBA")
    with decoding() as decoder:
        async with decoder.turn("key"):
            plan = FAKE_IMAGES.plan(40, 30)
            tiles = await decoder.tiles(content, FAKE_IMAGES, plan, "here")
            assert np.array_equal(np.asarray(tiles), tiles_of(content, FAKE_IMAGES, plan, "here"))
            assert await decoder.image(content, "here") == decoded_image(content, LIMITS, "here")
            assert await decoder.image(content, "here", is_mask=True) == decoded_mask(content, LIMITS, "here")


async def test_damaged_file_is_refused_and_the_process_decodes_the_next_file() -> None:
    content = png()
    with decoding() as decoder:
        with pytest.raises(InvalidRequest, match=r"here cannot be decoded .* damaged or incomplete") as refusal:
            await image(decoder, content[: len(content) // 2])
        assert refusal.value.param == "here"
        assert (await image(decoder, content)).width == 40


async def test_largest_allowed_image_fits_the_memory_limit_in_every_mode() -> None:
    side = 1500
    with decoding(msgspec.structs.replace(LIMITS, pixels_max=side * side)) as decoder:
        for mode in ("RGB", "RGBA", "P", "I;16"):
            file = io.BytesIO()
            if mode == "I;16":
                Image.fromarray(np.zeros((side, side), np.uint16)).save(file, "PNG")
            else:
                Image.new(mode, (side, side)).save(file, "PNG", **({"transparency": 0} if mode == "P" else {}))
            assert (await image(decoder, file.getvalue())).width == side


async def test_decoder_process_has_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.admission.file_decoders.memory_bytes_max", lambda limits: 2**26)
    file = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(file, "PNG")
    with decoding() as decoder:
        with pytest.raises(InvalidRequest, match="more memory"):
            await image(decoder, file.getvalue())
        assert (await image(decoder, png())).width == 40


async def test_error_of_a_slow_image_names_the_timeout_option() -> None:
    slow = [sys.executable, "-c", "import signal; signal.pause()"]
    with decoding(msgspec.structs.replace(LIMITS, decode_seconds_max=0.01)) as decoder:
        decoder._pool = ProcessPool(lambda file: slow, processes_max=2)
        with pytest.raises(InvalidRequest, match=r"within 0\.01 s \(--image-decode-timeout\)"):
            await image(decoder, png())


async def test_client_may_retry_if_no_process_can_start() -> None:
    with decoding() as decoder:
        decoder._pool = ProcessPool(lambda file: ["/no/such/program"], processes_max=2)
        with pytest.raises(Overloaded, match="no process could be started"):
            await image(decoder, png())


async def test_error_says_how_the_process_ended() -> None:
    with decoding() as decoder:
        decoder._pool = ProcessPool(lambda file: [sys.executable, "-c", "raise SystemExit(7)"], processes_max=2)
        with pytest.raises(InvalidRequest, match="ended with code 7"):
            await image(decoder, png())


async def test_image_refused_by_its_header_starts_no_process() -> None:
    with decoding() as decoder:
        with pytest.raises(InvalidRequest, match="not an image"):
            await image(decoder, b"<svg/>")
        assert decoder._pool.started_total == 0


def test_process_skips_jobs_after_the_server_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[DecodeJob] = []

    def decode(job: DecodeJob, content: bytes) -> tuple[DecodeReply, bytes]:
        jobs.append(job)
        server.close()
        return DecodeReply(), b""

    monkeypatch.setattr(decoding_process, "_limit_itself", lambda kind, memory: None)
    monkeypatch.setattr(decoding_process, "_limit_cpu", lambda seconds: None)
    monkeypatch.setattr(decoding_process, "decode", decode)
    head = msgspec.msgpack.encode(DecodeJob(kind="image", place="image", limits=ImageLimits()))
    for is_gone in (False, True):
        server, own = socket.socketpair()
        server.sendall(FRAME.pack(len(head), 3) + head + b"GIF")
        if is_gone:
            server.close()
        monkeypatch.setattr("sys.argv", ["", "image", str(own.detach()), "0"])
        with contextlib.nullcontext() if is_gone else pytest.raises(BrokenPipeError):
            decoding_process.main()
    assert len(jobs) == 1


async def decoded(decoder: AudioDecoder, content: bytes) -> float:
    async with decoder.recording(content, WHISPER, "file", tenant="key") as recording:
        return recording.seconds


async def test_process_decodes_audio_to_the_same_spectrogram() -> None:
    content = wav(2.0)
    metrics = Metrics("x")
    with closing(AudioDecoder(AudioLimits(), metrics)) as decoder:
        async with decoder.recording(content, WHISPER, "file", tenant="key") as recording:
            expected = spectrogram_of(decoded_audio(content, 16_000, AudioLimits(), "file"), WHISPER)
            assert recording.seconds == 2.0
            assert np.array_equal(recording.window(0.0)[0], expected[:3000].T)
            assert decoder.bytes_held == expected.nbytes
        assert decoder.bytes_held == 0
        with pytest.raises(InvalidRequest, match=r"file cannot be decoded .* damaged or incomplete"):
            await decoded(decoder, content[:-1000])
        assert decoder._pool.started_total == 1
    assert metrics.total("audio_seconds_total") == 2.0


async def test_longest_allowed_recording_fits_the_memory_limit() -> None:
    limits = AudioLimits(seconds_max=120.0)
    with closing(AudioDecoder(limits, Metrics("x"))) as decoder:
        assert abs(await decoded(decoder, audio_file("mp3", "libmp3lame", 119.0, rate=16_000)) - 119.0) < 0.2
        with pytest.raises(InvalidRequest, match="more than 120 s"):
            await decoded(decoder, audio_file("mp3", "libmp3lame", 121.0, rate=16_000))


async def test_recordings_of_all_requests_have_a_memory_limit() -> None:
    limits = AudioLimits(features_bytes_max=2_000_000)
    with closing(AudioDecoder(limits, Metrics("x"))) as decoder:
        async with (
            decoder.recording(wav(), WHISPER, "file", tenant="a"),
            decoder.recording(wav(), WHISPER, "file", tenant="b"),
        ):
            with pytest.raises(Overloaded, match="hold 1,920,000 bytes, and this one needs 960,000 more"):
                await decoded(decoder, wav())
        assert await decoded(decoder, wav()) == 1.0


async def test_error_of_slow_audio_names_the_timeout_option() -> None:
    slow = [sys.executable, "-c", "import signal; signal.pause()"]
    metrics = Metrics("x")
    with closing(AudioDecoder(AudioLimits(decode_seconds_max=0.01), metrics)) as decoder:
        decoder._pool = ProcessPool(lambda file: slow, processes_max=2)
        with pytest.raises(InvalidRequest, match=r"within 0\.01 s \(--audio-decode-timeout\)"):
            await decoded(decoder, wav())
        decoder._pool.close()
    assert metrics.total("audio_decoders_killed_total") == 1
