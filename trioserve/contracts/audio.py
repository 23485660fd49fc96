"""Speech as model input: how a model hears, the prompt with one window of sound, and the rules of its transcripts."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = ["TIMESTAMP_SECONDS", "AudioEncoder", "AudioLimits", "AudioProcessing", "AudioPrompt", "SpeechRules"]

TIMESTAMP_SECONDS = 0.02  # One timestamp token is later than the previous one by this time.


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a transcript may contain at each position (Whisper, arXiv 2212.04356).

    With timestamps, the text of each segment stands between two timestamps, which never decrease. If all timestamps
    together are more probable than each other token, the next token is a timestamp.

    Attributes:
        end_id: Token that ends the transcript. It is below all timestamps.
        no_timestamps_id: Token that turns timestamps off. The timestamp of 0 seconds is the token after it.
        has_timestamps: True if the transcript has timestamps.
        first_timestamp_max: Index of the largest timestamp with which a transcript may begin. None for no limit.
        suppressed_ids: Tokens that are never sampled.
        begin_suppressed_ids: Tokens that are not sampled as the first token.
    """

    end_id: int
    no_timestamps_id: int
    has_timestamps: bool
    first_timestamp_max: int | None = 50
    suppressed_ids: tuple[int, ...] = ()
    begin_suppressed_ids: tuple[int, ...] = ()

    @property
    def timestamp_first_id(self) -> int:
        """Return the token of the timestamp of 0 seconds."""
        return self.no_timestamps_id + 1


class AudioProcessing(msgspec.Struct, frozen=True, kw_only=True):
    """How a speech model hears and writes, as read from the model's configuration files.

    Attributes:
        sample_rate: Samples per second.
        mel_bins: Mel bands of a spectrum.
        fft_size: Samples of the window of one spectrum.
        hop_length: Samples between two spectra.
        window_seconds: Seconds of sound in one prompt. Shorter sound is padded with silence.
        frame_count: Spectra of one window.
        row_count: Rows that the encoder computes for one window.
        prompt_positions: Positions of a sequence that one window takes. The decoder's tokens follow.
        embedding_size: Numbers in one row.
        tokens_max: Highest number of the decoder's tokens, of prompt and output together.
        start_id: Token that begins the decoder's prompt.
        end_id: Token that ends a transcript.
        transcribe_id: Token after the language's token, for a transcript. None for a model of English only.
        translate_id: Token after the language's token, for a translation into English. None for a model of English
            only.
        no_timestamps_id: Token that ends the decoder's prompt if the transcript gets no timestamps.
        previous_id: Token before the text of the previous window.
        no_speech_id: Token whose probability after start_id is the probability of no speech.
        languages: Token of each language by its code, such as "en". Empty for a model of English only.
        suppressed_ids: See SpeechRules.
        begin_suppressed_ids: See SpeechRules.
        first_timestamp_max: See SpeechRules.
    """

    sample_rate: int
    mel_bins: int
    fft_size: int
    hop_length: int
    window_seconds: int
    frame_count: int
    row_count: int
    prompt_positions: int
    embedding_size: int
    tokens_max: int
    start_id: int
    end_id: int
    transcribe_id: int | None
    translate_id: int | None
    no_timestamps_id: int
    previous_id: int
    no_speech_id: int
    languages: Mapping[str, int]
    suppressed_ids: tuple[int, ...] = ()
    begin_suppressed_ids: tuple[int, ...] = ()
    first_timestamp_max: int | None = 50

    @property
    def window_bytes(self) -> int:
        """Return the bytes of one window's rows in float32."""
        return 4 * self.row_count * self.embedding_size

    @property
    def timestamp_first_id(self) -> int:
        """Return the token of the timestamp of 0 seconds. Each further token is TIMESTAMP_SECONDS later."""
        return self.no_timestamps_id + 1

    def rules(self, *, has_timestamps: bool) -> SpeechRules:
        """Return the rules for the tokens of a transcript (SamplingParams.speech).

        Args:
            has_timestamps: True if the transcript has timestamps.
        """
        return SpeechRules(
            end_id=self.end_id,
            no_timestamps_id=self.no_timestamps_id,
            has_timestamps=has_timestamps,
            first_timestamp_max=self.first_timestamp_max,
            suppressed_ids=self.suppressed_ids,
            begin_suppressed_ids=self.begin_suppressed_ids,
        )


class AudioEncoder(Protocol):
    """Turns spectra into the rows that a decoder attends to. Its methods are called from the event loop."""

    def encode(self, features: object) -> Coroutine[Any, Any, object]:
        """Compute the rows of one window, in pieces between which the engine runs steps.

        A cancelled caller returns at once.

        Args:
            features: See AudioPrompt.

        Returns:
            Buffer of float32 [row_count, embedding_size].

        Raises:
            AlreadyEnded: the engine was closed or restarted.
        """
        ...


class AudioLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for audio files that clients send.

    Attributes:
        audio_bytes_max: Bytes of a file. The default is OpenAI's limit.
        seconds_max: Length of a recording. It determines the memory limit of the decoding processes.
        decode_seconds_max: Time to decode one file. A file of an hour takes about ten seconds on a slow core.
        features_bytes_max: Bytes of the decoded recordings of all requests together.

    Raises:
        StartupError: a limit is out of range.
    """

    audio_bytes_max: int = 25 * 2**20
    seconds_max: float = 3600.0
    decode_seconds_max: float = 60.0
    features_bytes_max: int = 2**30

    def __post_init__(self) -> None:
        for name in ("audio_bytes_max", "seconds_max", "decode_seconds_max", "features_bytes_max"):
            if not getattr(self, name) > 0:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be above 0")


class AudioPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One window of sound, and the tokens with which the decoder begins.

    Attributes:
        features: Buffer of float32 [mel_bins, frame_count], the logarithmic mel spectra of one window. Its numbers must
            not change.
        digest: 16 bytes that identify the features. Equal digests mean equal features, also across requests.
        token_ids: The decoder's tokens, such as start, language, task and no_timestamps. At least one.

    Raises:
        InvalidRequest: the digest or the tokens are missing.
    """

    features: object
    digest: bytes
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidRequest("the decoder's prompt is empty: it needs at least the start token", param="prompt")
        if len(self.digest) != 16:
            raise InvalidRequest(f"the sound's digest has {len(self.digest)} bytes, it must have 16", param="prompt")
