"""Tests of spectrograms: they equal those of transformers, also across block boundaries, and windows cut them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from transformers import WhisperFeatureExtractor

from tests.audio.audio_files import WHISPER
from trioserve.audio.recording import Recording, spectrogram_bytes, spectrogram_of


def noise(seconds: float) -> npt.NDArray[np.int16]:
    rng = np.random.default_rng(7)
    time = np.arange(int(seconds * 16_000)) / 16_000
    samples = 9000 * np.sin(2 * np.pi * 300 * time * (1 + time / 20)) + rng.normal(0, 400, len(time))
    samples[len(samples) // 3 : len(samples) // 2] = 0
    return samples.astype(np.int16)


@pytest.mark.parametrize("mel_bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.4, 29.99, 30.0, 41.237])
def test_spectrogram_equals_that_of_transformers(seconds: float, mel_bins: int) -> None:
    samples = noise(seconds)
    padded = np.pad(samples, (0, max(0, 480_000 - len(samples)))).astype(np.float32) / 32_768
    extractor = WhisperFeatureExtractor(feature_size=mel_bins)
    expected = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    computed = spectrogram_of(samples, msgspec.structs.replace(WHISPER, mel_bins=mel_bins))
    assert computed.dtype == np.float32
    assert np.abs(computed.T - expected).max() < 1e-5


def test_window_of_a_short_recording_equals_the_features_of_transformers() -> None:
    samples = noise(5)
    recording = Recording(spectrogram_of(samples, WHISPER).data.cast("B"), 5.0, WHISPER)
    window, digest = recording.window(0)
    extracted = WhisperFeatureExtractor()(samples.astype(np.float32) / 32_768, sampling_rate=16_000)["input_features"]
    assert np.abs(window - extracted[0]).max() < 1e-4  # torch computes the extractor's spectrum in float32
    assert window.flags["C_CONTIGUOUS"]
    assert len(digest) == 16
    assert digest == recording.window(0)[1] != recording.window(1.0)[1]


def test_window_beyond_the_end_is_filled_with_the_lowest_value() -> None:
    spectrogram = spectrogram_of(noise(40), WHISPER)
    assert spectrogram.nbytes == spectrogram_bytes(40, WHISPER)
    window, _ = Recording(spectrogram.data.cast("B"), 40.0, WHISPER, lowest=float(spectrogram.min())).window(12.34)
    assert window.shape == (80, 3000)
    assert np.array_equal(window[:, :2766], spectrogram[1234:].T)
    assert (window[:, 2766:] == spectrogram.min()).all()
