"""Metrics of recordings that clients send."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import Counter, Gauge

from trioserve.metrics.metric import WAIT_SECONDS, Label, Metric, PlainHistogram, Question

__all__ = ["AudioMetrics"]


class AudioMetrics:
    """Metrics of recordings in requests."""

    audio_seconds_total: Annotated[
        Counter, Metric(Question.AUDIO, "seconds", "Length of the recordings that were decoded.")
    ]
    audio_decoding_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.AUDIO,
            "seconds",
            "Time to decode a recording and to compute its spectrogram, including the start of a process.",
            buckets=WAIT_SECONDS,
        ),
    ]
    audio_decoders_killed_total: Annotated[
        Counter,
        Metric(
            Question.AUDIO,
            "processes",
            "Processes that ended while they decoded a client's recording: killed after --audio-decode-timeout "
            "(timeout), or ended by the kernel, a memory limit or a crash (lost).",
            labels=(Label("reason", ("timeout", "lost")),),
        ),
    ]
    audio_bytes_held: Annotated[
        Gauge, Metric(Question.AUDIO, "bytes", "Spectrograms of recordings whose transcripts are not complete.")
    ]
