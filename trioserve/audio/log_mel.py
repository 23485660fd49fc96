"""Log-mel spectrograms, as Whisper's feature extractor computes them."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

__all__ = ["log_mel", "mel_filters"]

MEL_HERTZ_MAX = 8000.0  # Whisper's filters end here at every sample rate.
LINEAR_HERTZ_MAX = 1000.0  # Slaney's mel scale is linear up to here and logarithmic above.
LINEAR_HERTZ_PER_MEL = 200.0 / 3
LOG_STEP = math.log(6.4) / 27  # natural logarithm of the frequency ratio of one mel
POWER_MIN = 1e-10
RANGE = 8.0  # Powers that are this many powers of ten below the highest power are raised to that level.
BLOCK_FRAMES = 1000  # frames that are transformed together; one block needs about 10 MB


def log_mel(
    samples: npt.NDArray[np.int16], *, sample_rate: int, mel_bins: int, fft_size: int, hop_length: int
) -> npt.NDArray[np.float32]:
    """Compute the log-mel spectrogram of a whole recording.

    The highest power of the recording sets the lowest value of its spectrogram. Each end of the recording is continued
    by its mirror image.

    Args:
        samples: int16 [samples], at least fft_size / 2 + 1 samples.
        sample_rate: samples per second.
        mel_bins: number of filters.
        fft_size: samples of one frame.
        hop_length: samples from the start of a frame to the start of the next.

    Returns:
        float32 [samples / hop_length, mel_bins].

    Cost:
        About 20 ms for 30 s of audio on one core.
    """
    half = fft_size // 2
    padded = np.pad(samples, half, mode="reflect")
    frame_count = len(samples) // hop_length
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft_size) / fft_size)  # a periodic Hann window
    window /= 2**15  # the scale of int16
    filters = mel_filters(sample_rate, mel_bins, fft_size)
    spectrogram = np.empty((frame_count, mel_bins), dtype=np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft_size)[::hop_length]
    for first in range(0, frame_count, BLOCK_FRAMES):
        block = frames[first : min(first + BLOCK_FRAMES, frame_count)]
        spectrum = np.fft.rfft(block * window)
        power = spectrum.real**2 + spectrum.imag**2
        spectrogram[first : first + len(block)] = np.log10(np.maximum(power @ filters, POWER_MIN))
    if frame_count:
        np.maximum(spectrogram, spectrogram.max() - RANGE, out=spectrogram)
    spectrogram += 4.0
    spectrogram /= 4.0
    return spectrogram


@functools.cache
def mel_filters(sample_rate: int, mel_bins: int, fft_size: int) -> npt.NDArray[np.float64]:
    """Compute triangular filters on Slaney's mel scale, each with an area of 1 (Auditory Toolbox, 1998).

    Args:
        sample_rate: samples per second.
        mel_bins: number of filters.
        fft_size: samples of one frame.

    Returns:
        float64 [fft_size / 2 + 1, mel_bins].
    """
    bins = np.linspace(0, sample_rate // 2, fft_size // 2 + 1)[:, None]
    linear_mels = LINEAR_HERTZ_MAX / LINEAR_HERTZ_PER_MEL
    mels = np.linspace(0, linear_mels + math.log(MEL_HERTZ_MAX / LINEAR_HERTZ_MAX) / LOG_STEP, mel_bins + 2)
    logarithmic = LINEAR_HERTZ_MAX * np.exp(LOG_STEP * (mels - linear_mels))
    edges = np.where(mels < linear_mels, LINEAR_HERTZ_PER_MEL * mels, logarithmic)
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
    filters: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * (2 / (high - low))
    return filters
