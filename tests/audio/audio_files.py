"""Audio files for tests."""

from __future__ import annotations

import io

import av
import numpy as np
import numpy.typing as npt

from trioserve.contracts.media import AudioProcessing

__all__ = ["WHISPER", "audio_file", "tone", "wav"]

WHISPER = AudioProcessing(
    sample_rate=16_000,
    mel_bins=80,
    fft_size=400,
    hop_length=160,
    window_seconds=30,
    frame_count=3000,
    row_count=1500,
    embedding_size=8,
    tokens_max=448,
    start_id=50_258,
    end_id=50_257,
    transcribe_id=50_359,
    translate_id=50_358,
    no_timestamps_id=50_363,
    previous_id=50_361,
    no_speech_id=50_362,
    languages={"en": 50_259, "de": 50_261},
)


def tone(seconds: float, *, rate: int = 48_000, hertz: float = 440.0) -> npt.NDArray[np.int16]:
    """Return int16 [samples] of a tone."""
    time = np.arange(int(seconds * rate)) / rate
    return (8000 * np.sin(2 * np.pi * hertz * time)).astype(np.int16)


def audio_file(
    file_format: str, codec: str, seconds: float = 3.0, *, rate: int = 48_000, hertz: float = 440.0
) -> bytes:
    """Encode a tone in two channels.

    Args:
        file_format: FFmpeg's name of the container.
        codec: FFmpeg's name of the encoder.
        seconds: length of the tone.
        rate: samples per second.
        hertz: frequency of the tone. 0: silence.
    """
    file = io.BytesIO()
    with av.open(file, "w", format=file_format) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        samples = np.repeat(tone(seconds, rate=rate, hertz=hertz), 2)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="stereo")
        frame.sample_rate = rate
        for one in (frame, None):
            for packet in stream.encode(one):
                container.mux(packet)
    return file.getvalue()


def wav(seconds: float = 1.0, *, rate: int = 16_000) -> bytes:
    """Encode a tone as WAV."""
    return audio_file("wav", "pcm_s16le", seconds, rate=rate)
