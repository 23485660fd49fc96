"""Tests of decoding audio files: formats, limits, and damaged files."""

from __future__ import annotations

import numpy as np
import pytest

from tests.audio.audio_files import audio_file, tone, wav
from trioserve.audio.audio_file import audio_format, decoded_audio
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import AudioLimits

LIMITS = AudioLimits()
FORMATS = {
    "wav": ("wav", "pcm_s16le"),
    "wav of 24 bits": ("wav", "pcm_s24le"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "ogg opus": ("ogg", "libopus"),
    "m4a": ("ipod", "aac"),
    "mp4": ("mp4", "aac"),
    "alac": ("ipod", "alac"),
    "webm": ("webm", "libopus"),
    "aac": ("adts", "aac"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_decode_to_one_channel_at_the_models_rate(name: str) -> None:
    samples = decoded_audio(audio_file(*FORMATS[name]), 16_000, LIMITS, "file")
    assert samples.dtype == np.int16
    assert abs(len(samples) / 16_000 - 3.0) < 0.1
    spectrum = np.abs(np.fft.rfft(samples[16_000:32_000]))
    assert spectrum.argmax() == 440
    assert 7000 < np.abs(samples[16_000:32_000]).max() < 9000


def test_pcm_at_the_models_rate_is_unchanged() -> None:
    samples = decoded_audio(wav(1.0), 16_000, LIMITS, "file")
    assert np.array_equal(samples, tone(1.0, rate=16_000))


@pytest.mark.parametrize("name", ["wav", "flac", "m4a", "mp4", "alac", "webm"])
def test_truncated_file_is_refused(name: str) -> None:
    content = audio_file(*FORMATS[name], seconds=6.0)
    with pytest.raises(InvalidRequest, match=r"file cannot be decoded \(.*\): it is damaged or incomplete") as refused:
        decoded_audio(content[: len(content) // 2], 16_000, LIMITS, "file")
    assert refused.value.param == "file"


@pytest.mark.parametrize("name", FORMATS)
def test_header_without_audio_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"file (cannot be decoded|has 0 s of audio)"):
        decoded_audio(audio_file(*FORMATS[name])[:100], 16_000, LIMITS, "file")


def test_wav_written_to_a_pipe_is_decoded_although_its_size_is_unknown() -> None:
    content = bytearray(wav(1.0))
    content[4:8] = b"\xff\xff\xff\xff"
    at = content.index(b"data") + 4
    content[at : at + 4] = b"\xff\xff\xff\xff"
    assert len(decoded_audio(bytes(content), 16_000, LIMITS, "file")) == 16_000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "file is empty, which is no audio of a supported format: send WAV"),
        (b"#EXTM3U\nfile:///etc/passwd", "file begins with the bytes 23 45 58"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "is no audio"),
        (b"ID3" + b"#EXTM3U\n" * 400, "file cannot be decoded"),
        (b"OggS" + bytes(5000), "file cannot be decoded"),
        (b"\x1a\x45\xdf\xa3" + bytes(5000), "file cannot be decoded"),
        (b"\xff\xfb" + b"\x12" * 3000, "file cannot be decoded"),
        (b"fLaC" + b"\xff" * 3000, "file cannot be decoded"),
    ],
)
def test_other_files_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decoded_audio(content, 16_000, LIMITS, "file")


def test_refusals_name_what_was_received_and_what_is_allowed() -> None:
    limits = AudioLimits(audio_bytes_max=1000)
    with pytest.raises(InvalidRequest, match="file has 64078 bytes, audio may have 1000"):
        audio_format(wav(1.0), limits, "file")
    with pytest.raises(InvalidRequest, match="file has more than 2 s of audio"):
        decoded_audio(audio_file("mp3", "libmp3lame"), 16_000, AudioLimits(seconds_max=2.0), "file")
    with pytest.raises(InvalidRequest, match=r"file has 0\.05 s of audio, the minimum is 0\.1 s"):
        decoded_audio(wav(0.05), 16_000, LIMITS, "file")


def test_file_with_another_codec_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="file has audio in the codec adpcm_ima_wav"):
        decoded_audio(audio_file("wav", "adpcm_ima_wav"), 16_000, LIMITS, "file")
