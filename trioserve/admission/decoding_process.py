"""Decodes files in a separate process: `python -m trioserve.admission.decoding_process KIND FD MEMORY_BYTES`.

KIND is "image" or "audio", and FD is the file descriptor of the connection to the server. The process runs one job
after another. It ends when the connection ends, when the thread that started it ends, or when a job needs more memory
or CPU time than allowed. It imports only a few modules besides numpy, and Pillow or PyAV.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import AudioLimits, ImageLimits, ImagePlan, Spectrogram
from trioserve.vision.families.registry import ImageProcessing, tiles_of

__all__ = [
    "AudioJob",
    "DecodeJob",
    "DecodeReply",
    "DecodedKind",
    "Job",
    "audio_memory_bytes",
    "decode",
    "memory_bytes_max",
]

DecodedKind = Literal["image", "audio"]

FRAME = struct.Struct("<II")  # This format must equal the format in trio_tools.process_pool.
PR_SET_PDEATHSIG = 1
OWN_BYTES = 256 * 2**20  # Memory in addition to the image, for free memory of the allocator and tables of decoders.
# Memory per pixel. Pillow needs up to six copies of 4 bytes, and numpy three copies of 8 bytes for 16-bit samples.
PIXEL_BYTES = 40
# Memory per second of sound: three copies of samples of 16 bits at 16 kHz, and two of a spectrogram with 128 bands.
SECOND_BYTES = 200_000


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job to decode one image.

    Attributes:
        kind: "tiles" for a model with image input, "image" for an image to edit, "mask" for the mask of an edit.
        place: name of the image in error messages.
        limits: limits on the size of the image and on the time.
        processing: how to split the image into tiles. None if `kind` is not "tiles".
        plan: plan of the tiles. None if `kind` is not "tiles".
    """

    kind: Literal["tiles", "image", "mask"]
    place: str
    limits: ImageLimits
    processing: ImageProcessing | None = None
    plan: ImagePlan | None = None


class AudioJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job to decode one recording to its log-mel spectrogram.

    Attributes:
        place: name of the file in error messages.
        limits: limits on the length of the recording and on the time.
        processing: sample rate and spectrogram that the model expects.
        is_only_measured: only the length of the recording is needed.
    """

    place: str
    limits: AudioLimits
    processing: Spectrogram
    is_only_measured: bool = False


Job = DecodeJob | AudioJob


class DecodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job, which precedes the pixels or the spectrogram.

    Attributes:
        width, height: size of an image or a mask in pixels. 0 for tiles and audio.
        seconds: length of a recording. 0 for images.
        lowest: lowest value of a spectrogram. 0 for images.
        error: the reason to refuse the file, or None if the file was decoded.
    """

    width: int = 0
    height: int = 0
    seconds: float = 0.0
    lowest: float = 0.0
    error: str | None = None


def memory_bytes_max(limits: ImageLimits) -> int:
    """Return the number of bytes of memory that a decoding process may use. It is enough for the largest allowed image.

    Args:
        limits: limits on the size of images.
    """
    return OWN_BYTES + PIXEL_BYTES * limits.pixels_max + 2 * limits.image_bytes_max


def audio_memory_bytes(limits: AudioLimits) -> int:
    """Return the number of bytes of memory that is enough to decode the longest allowed recording.

    Args:
        limits: limits on recordings.
    """
    return OWN_BYTES + int(SECOND_BYTES * limits.seconds_max) + 2 * limits.audio_bytes_max


def decode(job: Job, content: bytes) -> tuple[DecodeReply, bytes | memoryview]:
    """Decode one file.

    Args:
        job: describes the result that is needed.
        content: bytes of the file.

    Returns:
        The reply, and the pixels or the spectrogram. Pixels are uint8 [count, tile_height, tile_width, 3] for tiles,
        and [height, width, 3] for images. A spectrogram is described in audio/recording.py. If the reply has an error,
        nothing follows.
    """
    try:
        return _heard(job, content) if isinstance(job, AudioJob) else _seen(job, content)
    except InvalidRequest as error:
        return DecodeReply(error=str(error)), b""


def _heard(job: AudioJob, content: bytes) -> tuple[DecodeReply, bytes | memoryview]:
    from trioserve.audio.audio_file import decoded_audio
    from trioserve.audio.recording import spectrogram_of

    samples = decoded_audio(content, job.processing.sample_rate, job.limits, job.place)
    seconds = len(samples) / job.processing.sample_rate
    if job.is_only_measured:
        return DecodeReply(seconds=seconds), b""
    spectrogram = spectrogram_of(samples, job.processing)
    return DecodeReply(seconds=seconds, lowest=float(spectrogram.min())), spectrogram.data.cast("B")


def _seen(job: DecodeJob, content: bytes) -> tuple[DecodeReply, bytes | memoryview]:
    from trioserve.vision.image_file import decoded_image, decoded_mask

    if job.kind == "tiles":
        assert job.processing is not None, "a job for tiles needs `processing`"
        assert job.plan is not None, "a job for tiles needs `plan`"
        return DecodeReply(), tiles_of(content, job.processing, job.plan, job.place).data.cast("B")
    read = decoded_image if job.kind == "image" else decoded_mask
    image = read(content, job.limits, job.place)
    return DecodeReply(width=image.width, height=image.height), image.rgb


def main() -> None:
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        _limit_itself(sys.argv[1], int(sys.argv[3]))
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    while (frame := _received(connection, FRAME.size)) is not None:
        head_bytes, content_bytes = FRAME.unpack(frame)
        head, content = _received(connection, head_bytes), _received(connection, content_bytes)
        if head is None or content is None or _is_closed(connection):
            break
        job = msgspec.msgpack.decode(head, type=Job)
        _limit_cpu(job.limits.decode_seconds_max)
        reply, decoded = decode(job, bytes(content))
        encoded = msgspec.msgpack.encode(reply)
        connection.sendall(FRAME.pack(len(encoded), len(decoded)) + encoded)
        connection.sendall(decoded)


def _is_closed(connection: socket.socket) -> bool:
    """Return True if the server has ended.

    The server may end while this process starts, before PR_SET_PDEATHSIG is set.
    """
    poll = select.poll()
    poll.register(connection, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _limit_itself(kind: str, memory_bytes: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # PR_SET_PDEATHSIG exists only on Linux.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ignore the signal, because the server ends this process.
    _load_decoders(kind)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # This limit is not available on macOS.
        memory_bytes += _address_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _address_bytes() -> int:
    """Return the bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _load_decoders(kind: str) -> None:
    """Import the decoders before the first file, because decoding time is limited."""
    if kind == "audio":
        from trioserve.audio.audio_file import load_decoder

        load_decoder()
        return
    from trioserve.vision.image_file import load_decoders

    load_decoders()


def _limit_cpu(seconds: float) -> None:
    """Limit the CPU time of one job.

    Normally the server kills a slow process. The limit also works if the server has ended.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _received(connection: socket.socket, byte_count: int) -> bytearray | None:
    """Receive exactly `byte_count` bytes. Return None if the server has closed the connection."""
    received = bytearray(byte_count)
    view, first = memoryview(received), 0
    while first < byte_count:
        count = connection.recv_into(view[first:])
        if not count:
            return None
        first += count
    return received


if __name__ == "__main__":
    try:
        main()
    except OSError:  # The server has closed the connection.
        os._exit(0)
