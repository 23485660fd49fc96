"""Metrics of images and recordings in requests, and of generated images."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import Counter, Gauge

from trioserve.contracts.events import IterativePhase
from trioserve.metrics.metric import STEP_TOKENS, WAIT_SECONDS, Label, Metric, PlainHistogram, Question

__all__ = ["AudioMetrics", "ImageMetrics"]


_STEP_PHASE = Label("phase", tuple(phase.value for phase in IterativePhase if phase is not IterativePhase.QUEUED))


class ImageMetrics:
    """Metrics of images in prompts, and of image generation."""

    image_encoding_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.IMAGES,
            "seconds",
            "Time to encode an image or a window of sound that was not cached, including the steps that were computed "
            "in between.",
            buckets=WAIT_SECONDS,
        ),
    ]
    image_decoders_killed_total: Annotated[
        Counter,
        Metric(
            Question.IMAGES,
            "processes",
            "Processes that ended while they decoded a client's image: killed after --image-decode-timeout "
            "(timeout), or ended by the kernel, a memory limit or a crash (lost).",
            labels=(Label("reason", ("timeout", "lost")),),
        ),
    ]
    image_queries_total: Annotated[
        Counter,
        Metric(Question.IMAGES, "images", "Images and windows of sound in prompts. A repeated image counts once."),
    ]
    image_hits_total: Annotated[
        Counter,
        Metric(Question.IMAGES, "images", "Images and windows of sound in prompts that had been encoded before."),
    ]
    image_output_bytes: Annotated[
        Gauge,
        Metric(
            Question.IMAGES,
            "bytes",
            "Memory of encoded images and sound: used by requests, including reservations, or cached.",
            labels=(Label("state", ("used", "cached")),),
        ),
    ]
    images_total: Annotated[
        Counter, Metric(Question.IMAGE_GENERATION, "images", "Images that were generated.", part="images")
    ]
    denoising_steps_total: Annotated[
        Counter,
        Metric(
            Question.IMAGE_GENERATION,
            "steps",
            "Denoising steps of all images, including images whose client left early.",
            part="images",
        ),
    ]
    latent_slots: Annotated[
        Gauge,
        Metric(
            Question.IMAGE_GENERATION,
            "slots",
            "Slots for the latents of images between two steps: of images in progress (free, used), and of "
            "preempted images (kept_free, kept_used).",
            labels=(Label("state", ("free", "used", "kept_free", "kept_used")),),
            part="images",
        ),
    ]
    time_to_first_picture_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.IMAGE_GENERATION,
            "seconds",
            "Time from the arrival of a request to its first visible image: a partial or a finished one. The time "
            "to the finished image is e2e_request_latency_seconds.",
            buckets=WAIT_SECONDS,
            part="images",
        ),
    ]
    step_work: Annotated[
        PlainHistogram,
        Metric(
            Question.IMAGE_GENERATION,
            "units of work",
            "Work of one step, in the units that limit a step, by phase.",
            labels=(_STEP_PHASE,),
            buckets=STEP_TOKENS,
            part="images",
        ),
    ]


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
