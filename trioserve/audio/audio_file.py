"""Decodes a client's audio file with PyAV, inside of a process that can be killed (decoding_process)."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.extras import install_command
from trioserve.contracts.media import AudioLimits

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["AUDIO_FORMATS", "audio_format", "decoded_audio", "decoder_missing", "load_decoder"]

AUDIO_FORMATS = "WAV, FLAC, MP3, AAC, M4A or MP4, Ogg and WebM"
SECONDS_MIN = 0.1  # A shorter recording has no word.
# FFmpeg knows hundreds of decoders. A client's file reaches only these.
CODECS = (
    *("aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis"),
    *("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw"),
)
SYNC_LAYER_BITS = 0x06  # in the second byte of an MPEG audio frame: 0 for AAC
DAMAGED_PACKETS_MAX = 8  # Files cut from a stream begin or end with part of a packet.
MISSING_SECONDS_MAX = 1.0  # Durations in containers include padding of codecs, which is not decoded.
MISSING_SHARE_MAX = 0.1
EXACT_DURATIONS = ("flac", "mp4", "matroska")  # Other formats state no duration, or an estimate.
WAV_SIZE_MAX = 0xFFFFFF00  # Programs that write to a pipe do not know the size, and write a number above this one.


def decoder_missing() -> str | None:
    """Return why audio cannot be decoded, or None if PyAV is installed."""
    if importlib.util.find_spec("av") is None:
        return f"PyAV, which decodes audio, is not installed: {install_command('audio')}"
    return None


def load_decoder() -> None:
    """Import PyAV, and keep FFmpeg from writing to the server's log."""
    import av

    av.logging.set_level(None)


def audio_format(content: bytes, limits: AudioLimits, place: str) -> str:
    """Check the size and the first bytes of a file, and return FFmpeg's name of its format.

    FFmpeg must not guess the format: it also knows playlists, which make it read other files and URLs.

    Args:
        content: bytes of the file.
        limits: limits of recordings.
        place: name of the file in error messages.

    Raises:
        InvalidRequest: the file is empty, too large, or has another format.
    """
    if len(content) > limits.audio_bytes_max:
        raise InvalidRequest(
            f"{place} has {len(content)} bytes, audio may have {limits.audio_bytes_max}: send it in parts, or in a "
            "compressed format such as Opus",
            param=place,
        )
    found = _format(content)
    if found is None:
        what = f"begins with the bytes {content[:8].hex(' ')}" if content else "is empty"
        raise InvalidRequest(
            f"{place} {what}, which is no audio of a supported format: send {AUDIO_FORMATS}", param=place
        )
    if found == "wav":
        size = int.from_bytes(content[4:8], "little") + 8
        if len(content) < size < WAV_SIZE_MAX:
            raise _damaged(place, f"it states {size} bytes and has {len(content)}")
    return found


def _format(content: bytes) -> str | None:
    if content[:4] in (b"RIFF", b"RF64") and content[8:12] == b"WAVE":
        return "wav"
    if content.startswith(b"fLaC"):
        return "flac"
    if content.startswith(b"OggS"):
        return "ogg"
    if content.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if content[4:8] == b"ftyp":
        return "mp4"
    if content.startswith(b"ID3"):
        return "mp3"
    if len(content) > 1 and content[0] == 0xFF and content[1] & 0xE0 == 0xE0:
        return "mp3" if content[1] & SYNC_LAYER_BITS else "aac"
    return None


def decoded_audio(content: bytes, sample_rate: int, limits: AudioLimits, place: str) -> npt.NDArray[np.int16]:
    """Decode the first audio stream of a file to one channel.

    Args:
        content: bytes of the file.
        sample_rate: samples per second of the result.
        limits: limits of recordings.
        place: name of the file in error messages.

    Returns:
        int16 [samples].

    Raises:
        InvalidRequest: the file is damaged, incomplete, too long, too short, or has no audio.

    Cost:
        About 0.1 s for a minute of compressed audio.
    """
    import av

    file_format = audio_format(content, limits, place)
    samples = bytearray()
    bytes_max = 2 * int(limits.seconds_max * sample_rate)
    options = {"protocol_whitelist": "none", "codec_whitelist": ",".join(CODECS), "format_whitelist": file_format}
    try:
        with av.open(io.BytesIO(content), "r", format=file_format, options=options) as container:
            if not container.streams.audio:
                raise InvalidRequest(f"{place} has no audio stream: send a file with audio", param=place)
            stream = container.streams.audio[0]
            if stream.codec_context.name not in CODECS:
                raise InvalidRequest(
                    f"{place} has audio in the codec {stream.codec_context.name}, allowed are {AUDIO_FORMATS} with "
                    "their usual codecs",
                    param=place,
                )
            stated = 0.0 if container.duration is None else container.duration / av.time_base
            resampler = av.AudioResampler(format="s16", layout="mono", rate=sample_rate)
            damaged_count = 0
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except av.error.InvalidDataError:
                    damaged_count += 1
                    if damaged_count > DAMAGED_PACKETS_MAX:
                        raise
                    continue
                for frame in frames:
                    _add(samples, resampler.resample(frame))
                if len(samples) > bytes_max:
                    raise InvalidRequest(
                        f"{place} has more than {limits.seconds_max:g} s of audio, which is the limit: send it in "
                        "parts",
                        param=place,
                    )
            if samples:
                _add(samples, resampler.resample(None))
    except (av.error.FFmpegError, EOFError, ValueError) as error:
        raise _damaged(place, getattr(error, "strerror", None) or str(error)) from None
    except MemoryError:
        raise InvalidRequest(
            f"{place} needs more memory to decode than a decoding process may use: convert it with a common program",
            param=place,
        ) from None
    seconds = len(samples) / 2 / sample_rate
    if file_format in EXACT_DURATIONS and stated - seconds > max(MISSING_SECONDS_MAX, MISSING_SHARE_MAX * stated):
        raise _damaged(place, f"it states {stated:.1f} s of audio, of which {seconds:.1f} s are there")
    if seconds < SECONDS_MIN:
        raise InvalidRequest(
            f"{place} has {seconds:g} s of audio, the minimum is {SECONDS_MIN} s: send a longer recording", param=place
        )
    import numpy as np  # Routers import this module for its names, and have no use for numpy.

    return np.frombuffer(samples, dtype=np.int16)


def _add(samples: bytearray, frames: object) -> None:
    for frame in frames:  # type: ignore[attr-defined]  # a list of frames of PyAV
        samples += frame.to_ndarray().tobytes()


def _damaged(place: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{place} cannot be decoded ({reason}): it is damaged or incomplete", param=place)
