"""Decodes clients' images and audio files in separate processes (ProcessPool), which can be killed.

Decoders are C code that reads untrusted bytes. A running decoder cannot be interrupted, and the header of a file does
not predict how much time and memory the decoding needs. So each file has a time limit and a memory limit. A file that
exceeds a limit fails only its own request.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import trio

from trioserve.admission.decoding_process import (
    AudioJob,
    DecodedKind,
    DecodeJob,
    DecodeReply,
    Job,
    audio_memory_bytes,
    memory_bytes_max,
)
from trioserve.audio.audio_file import audio_format
from trioserve.audio.recording import Recording, spectrogram_bytes
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.image_generation import RGBImage
from trioserve.contracts.media import AudioLimits, ImageLimits, ImagePlan, Spectrogram, Tiles
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.process_pool import JobTooLong, ProcessLost, ProcessPool
from trioserve.vision.families.registry import ImageProcessing, tiles_from
from trioserve.vision.image_header import read_header

__all__ = ["AudioDecoder", "FileDecoder", "ImageDecoder"]

# One tenant uses at most two processes, so that the third is free for other tenants. An idle process needs about 50 MB.
PROCESSES_MAX = 3
RETRY_SECONDS = 5.0


class FileDecoder:
    """A pool of decoder processes. They are started for the first file. `close` ends them.

    Args:
        kind: What the processes decode.
        memory_bytes: Memory limit of a process.
        seconds_max: Time limit of a file.
        option: Command line option of the time limit.
        count_killed: Counts a process that ended, by reason.
    """

    def __init__(
        self,
        kind: DecodedKind,
        memory_bytes: int,
        *,
        seconds_max: float,
        option: str,
        count_killed: Callable[[str], None],
    ) -> None:
        self._kind = kind
        self._seconds_max = seconds_max
        self._option = option
        self._count_killed = count_killed
        module = "trioserve.admission.decoding_process"
        self._pool = ProcessPool(
            lambda file: [sys.executable, "-m", module, kind, str(file), str(memory_bytes)],
            processes_max=PROCESSES_MAX,
        )

    def turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Return a scope that reserves one process of the pool. Tenants take turns, and no tenant can reserve all
        processes.

        Args:
            tenant: Owner of the file.
        """
        return self._pool.turn(tenant)

    def close(self) -> None:
        """End all processes at once, without waiting."""
        self._pool.close()

    async def _decoded(self, job: Job, content: bytes, size: int) -> tuple[DecodeReply, bytes | bytearray | memoryview]:
        """Run one job.

        Args:
            job: Describes the result.
            content: The file.
            size: Limit of the result, in bytes.

        Raises:
            InvalidRequest: the file is damaged, or takes too much time or memory.
            Overloaded: no process can be started.
        """
        place = job.place
        try:
            head, decoded = await self._pool.ask(
                msgspec.msgpack.encode(job), content, seconds_max=self._seconds_max, reply_bytes_max=size
            )
        except JobTooLong:
            self._count_killed("timeout")
            raise InvalidRequest(
                f"{place} was not decoded within {self._seconds_max:g} s ({self._option}): send a smaller file, or "
                f"save it again with a common {self._kind} program",
                param=place,
            ) from None
        except ProcessLost as error:
            self._count_killed("lost")
            raise InvalidRequest(
                f"{place} cannot be decoded: the process that decoded it ended ({error}): save it again with a "
                f"common {self._kind} program",
                param=place,
            ) from error
        except OSError as error:
            raise Overloaded(
                f"{place} cannot be decoded now: no process could be started ({error.strerror}): try again in "
                f"{RETRY_SECONDS:.0f} s",
                reason="no_decoding_process",
                retry_after_seconds=RETRY_SECONDS,
            ) from error
        reply = msgspec.msgpack.decode(head, type=DecodeReply)
        if reply.error is not None:
            raise InvalidRequest(reply.error, param=place)
        return reply, decoded


class ImageDecoder(FileDecoder):
    """Decodes images: `async with decoder.turn(tenant): await decoder.tiles(...)`.

    Args:
        limits: Limits of images. The largest allowed image sets the memory limit.
        metrics: Counts killed processes.
    """

    def __init__(self, limits: ImageLimits, metrics: Metrics) -> None:
        self.limits = limits
        super().__init__(
            "image",
            memory_bytes_max(limits),
            seconds_max=limits.decode_seconds_max,
            option="--image-decode-timeout",
            count_killed=lambda reason: metrics.image_decoders_killed_total.labels(reason).inc(),
        )

    async def tiles(self, content: bytes, processing: ImageProcessing, plan: ImagePlan, place: str) -> Tiles:
        """Decode an image and cut it into the model's tiles.

        Args:
            content: The encoded image.
            processing: Preprocessing of the model.
            plan: Plan of the image.
            place: Name of the image in error messages.

        Raises:
            InvalidRequest: the image is damaged, or takes too much time or memory.
            Overloaded: no process can be started.
        """
        _, pixels = await self._decoded(
            DecodeJob(kind="tiles", place=place, limits=self.limits, processing=processing, plan=plan),
            content,
            plan.pixel_bytes,
        )
        return tiles_from(pixels, plan)

    async def image(self, content: bytes, place: str, *, is_mask: bool = False) -> RGBImage:
        """Decode an image to upright RGB, with transparent parts on white, or a mask, see image_file.decoded_mask.

        Args:
            content: The encoded image or mask.
            place: Name of the image in error messages.
            is_mask: True to decode a mask.

        Raises:
            InvalidRequest: see `tiles`.
            Overloaded: see `tiles`.
        """
        header = read_header(content, self.limits, place)
        job = DecodeJob(kind="mask" if is_mask else "image", place=place, limits=self.limits)
        reply, pixels = await self._decoded(job, content, 3 * header.width * header.height)
        return RGBImage(reply.width, reply.height, bytes(pixels))


class AudioDecoder(FileDecoder):
    """Decodes audio files: `async with decoder.recording(...) as recording: ...`.

    Args:
        limits: Limits of recordings. The longest allowed recording sets the memory limit.
        metrics: Counts killed processes, and measures time.

    Attributes:
        bytes_held: Bytes of the recordings whose scopes are open.
    """

    def __init__(self, limits: AudioLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.bytes_held = 0
        self._metrics = metrics
        super().__init__(
            "audio",
            audio_memory_bytes(limits),
            seconds_max=limits.decode_seconds_max,
            option="--audio-decode-timeout",
            count_killed=lambda reason: metrics.audio_decoders_killed_total.labels(reason).inc(),
        )

    @asynccontextmanager
    async def recording(
        self, content: bytes, processing: Spectrogram, place: str, *, tenant: str
    ) -> AsyncIterator[Recording]:
        """Decode an audio file to the spectrogram of its first audio stream, and keep it while the scope is open.

        Args:
            content: The file.
            processing: Spectrogram that the model expects.
            place: Name of the file in error messages.
            tenant: Owner of the file, see `turn`.

        Raises:
            InvalidRequest: the file is damaged, too long, or takes too much time or memory.
            Overloaded: no process can be started, or the recordings of all requests take too much memory.
        """
        async with self.turn(tenant):
            recording = await self._recording(content, processing, place)
            self._hold(recording.byte_count)
        try:
            yield recording
        finally:
            self._hold(-recording.byte_count)

    async def seconds(self, content: bytes, processing: Spectrogram, place: str, *, tenant: str) -> float:
        """Return the length of a recording, which only decoding can measure.

        Args:
            content: The file.
            processing: Sample rate that the model expects.
            place: Name of the file in error messages.
            tenant: Owner of the file, see `turn`.

        Raises:
            InvalidRequest: see `recording`.
            Overloaded: no process can be started.
        """
        audio_format(content, self.limits, place)
        job = AudioJob(place=place, limits=self.limits, processing=processing, is_only_measured=True)
        async with self.turn(tenant):
            reply, _ = await self._decoded(job, content, 0)
        return reply.seconds

    def _hold(self, byte_count: int) -> None:
        if byte_count > 0 and self.bytes_held + byte_count > self.limits.features_bytes_max:
            raise Overloaded(
                f"recordings of all requests hold {self.bytes_held:,} bytes, and this one needs {byte_count:,} more: "
                f"allowed are {self.limits.features_bytes_max:,}. Try again shortly, or send a shorter recording",
                reason="recordings",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.bytes_held += byte_count
        self._metrics.audio_bytes_held.set(self.bytes_held)

    async def _recording(self, content: bytes, processing: Spectrogram, place: str) -> Recording:
        audio_format(content, self.limits, place)
        began_at = trio.current_time()
        size = spectrogram_bytes(self.limits.seconds_max + processing.window_seconds, processing)
        job = AudioJob(place=place, limits=self.limits, processing=processing)
        reply, spectrogram = await self._decoded(job, content, size)
        self._metrics.audio_decoding_seconds.observe(trio.current_time() - began_at)
        self._metrics.audio_seconds_total.inc(reply.seconds)
        return Recording(spectrogram, reply.seconds, processing, lowest=reply.lowest)
