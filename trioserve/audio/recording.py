"""A decoded recording: its spectrogram, and the windows of it that a model reads one after another."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from trioserve.audio.log_mel import log_mel
from trioserve.contracts.media import Spectrogram

__all__ = ["Recording", "spectrogram_bytes", "spectrogram_of"]

DIGEST_BYTES = 16


def spectrogram_of(samples: npt.NDArray[np.int16], processing: Spectrogram) -> npt.NDArray[np.float32]:
    """Compute the spectrogram of a recording. A recording shorter than a window is continued with silence.
    `Spectrogram.windows` says what follows for longer ones.

    Args:
        samples: int16 [samples], one channel.
        processing: sample rate and spectrogram that the model expects.

    Returns:
        float32 [frames, mel_bins].
    """
    window = processing.window_seconds * processing.sample_rate
    missing = -len(samples) % window if processing.windows != "cut" else window - len(samples)
    filled = np.pad(samples, (0, missing)) if missing > 0 else samples
    return np.concatenate(
        [
            log_mel(
                part,
                sample_rate=processing.sample_rate,
                mel_bins=processing.mel_bins,
                fft_size=processing.fft_size,
                hop_length=processing.hop_length,
            )
            for part in (filled.reshape(-1, window) if processing.windows == "apart" else (filled,))
        ]
    )


def spectrogram_bytes(seconds: float, processing: Spectrogram) -> int:
    """Return the bytes of the spectrogram of a recording, which is at least a window long.

    Args:
        seconds: length of the recording.
        processing: sample rate and size of the spectrogram.
    """
    return 4 * processing.mel_bins * int(seconds * processing.sample_rate / processing.hop_length)


class Recording:
    """The spectrogram of a recording.

    Args:
        spectrogram: buffer with the result of spectrogram_of. It is not copied.
        seconds: length of the recording, without silence that was added.
        lowest: lowest value of the spectrogram.
        processing: sample rate and spectrogram that the model expects.

    Attributes:
        byte_count: bytes of the spectrogram.
    """

    def __init__(
        self,
        spectrogram: bytes | bytearray | memoryview,
        seconds: float,
        processing: Spectrogram,
        *,
        lowest: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self.byte_count = len(spectrogram)
        self._frames = np.frombuffer(spectrogram, dtype=np.float32).reshape(-1, processing.mel_bins)
        self._processing = processing
        self._lowest = lowest

    def window(self, start: float) -> tuple[npt.NDArray[np.float32], bytes]:
        """Copy one window. Behind the end of the recording, it is filled with the recording's lowest value.

        Args:
            start: first second of the window.

        Returns:
            float32 [mel_bins, frames], and a digest that only equal windows share.
        """
        processing = self._processing
        rate = processing.sample_rate / processing.hop_length
        first, count = round(start * rate), processing.frame_count
        frames = self._frames[first : first + count]
        window = np.full((processing.mel_bins, count), self._lowest, np.float32)
        window[:, : len(frames)] = frames.T
        return window, blake2b(window.data.cast("B"), digest_size=DIGEST_BYTES).digest()
