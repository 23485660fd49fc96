"""Images, sounds and speech as model input.

Images and sounds of a chat have plans, limits, an encoder interface, and embeddings in the prompt. Speech has the
window of sound that a model hears, the prompt with that window, and the rules of a transcript.
"""

from __future__ import annotations

import struct
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = [
    "AudioLimits",
    "AudioProcessing",
    "AudioPrompt",
    "GivenRows",
    "ImageEncoder",
    "ImageLimits",
    "ImagePlan",
    "SoundPlan",
    "SoundProcessing",
    "Spectrogram",
    "SpeechRules",
    "TIMESTAMP_SECONDS",
    "Tiles",
    "rows_material",
]


class GivenRows(msgspec.Struct, frozen=True):
    """Embeddings of the prompt positions start .. start + count - 1, regardless of the tokens at these positions.

    Attributes:
        start: First position.
        count: Number of positions.
        content: 16 bytes that identify the embeddings. Two contents are equal only if all numbers are equal, also
            across machines.
        values: Buffer of float32 [count, hidden_size]. Its numbers must not change. The buffer is kept as long as a
            request uses it.
        grid: Rows and columns of the image's tokens, for a model with positions in a grid (see RotaryConfig.axes).
            Their product is count. None: the tokens have positions like tokens of a text.
        is_bidirectional: True if these positions also attend to each other's later positions. A step that computes one
            of them then computes all later ones, too.
    """

    start: int
    count: int
    content: bytes
    values: object
    grid: tuple[int, int] | None = None
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rotary_count(self) -> int:
        """Return how far the rotary position advances from the first token to the token after the last."""
        return self.count if self.grid is None else max(self.grid)


def rows_material(given: Sequence[GivenRows], start: int, end: int) -> bytes:
    """Return the bytes that a block's hash depends on in addition to its tokens (contracts/ids.py).

    Args:
        given: Given rows, ordered by position.
        start: First position of the block.
        end: Position after the block.

    Returns:
        Bytes for with_material, or b"" if all embeddings of the block are looked up by token.
    """
    return b"".join(_overlaps(given, start, end))


def _overlaps(given: Iterable[GivenRows], start: int, end: int) -> Iterable[bytes]:
    for rows in given:
        if rows.start < end and rows.end > start:
            yield rows.content + struct.pack("<q", rows.start - start)
            if rows.grid is not None:
                yield struct.pack("<qq", *rows.grid)


class ImagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tiles of one image, and its rows in the prompt. Follows from the size of the image.

    Attributes:
        width: Pixels of the upright image's width.
        height: Pixels of the upright image's height.
        tile_width: Pixels of each tile's width. All tiles of an image have the same size.
        tile_height: Pixels of each tile's height.
        rows: Rows of tiles into which the image is cut. 0 if the whole image is the only tile.
        columns: Tiles of one such row.
        tile_count: Number of tiles, including a tile of the whole image.
        runs: Number of embedding rows in each run of image tokens, in the order of the prompt.
        grid: Rows and columns of the image's only run, for a model with positions in a grid. See GivenRows.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    rows: int = 0
    columns: int = 0
    tile_count: int = 1
    runs: tuple[int, ...]
    grid: tuple[int, int] | None = None

    @property
    def row_count(self) -> int:
        """Return the number of embedding rows."""
        return sum(self.runs)

    @property
    def pixel_bytes(self) -> int:
        """Return the bytes of the tiles' pixels."""
        return self.tile_count * self.tile_width * self.tile_height * 3


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for images that clients send.

    Attributes:
        images_max: Images of one prompt, 0 to 1000.
        image_bytes_max: Bytes of an encoded image.
        pixels_max: Largest width times height. This limit determines the memory limit of the decoder processes.
        side_max: Pixels of each side.
        decode_seconds_max: Time for one image. The largest images take about three seconds on a slow core.
        outputs_bytes_max: Bytes of encoder output kept for all requests together. Output that no request uses is kept
            until its memory is needed.

    Raises:
        StartupError: a limit is out of range.
    """

    images_max: int = 8
    image_bytes_max: int = 16 * 2**20
    pixels_max: int = 40_000_000
    side_max: int = 16_384
    decode_seconds_max: float = 15.0
    outputs_bytes_max: int = 256 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.images_max <= 1000:
            raise StartupError(f"--limit-mm-per-prompt has image {self.images_max}, it may be 0 to 1000")
        for name in ("image_bytes_max", "pixels_max", "side_max", "outputs_bytes_max"):
            if getattr(self, name) < 1:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not self.decode_seconds_max > 0:
            raise StartupError(f"decode_seconds_max is {self.decode_seconds_max}, it must be above 0")


class Tiles(Protocol):
    """The tiles of an image, in the order of its family. uint8 [count, tile_height, tile_width, 3]."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class ImageEncoder(Protocol):
    """Turns the tiles of an image, or the windows of a sound, into embedding rows. Its methods are called from the
    event loop.
    """

    def encode(self, tiles: Tiles, plan: ImagePlan) -> Coroutine[Any, Any, object]:
        """Compute the embeddings of an image's tiles, or of a sound's windows.

        The work is split into pieces that take about as long as a step. The engine runs steps between two pieces. A
        cancelled caller returns at once.

        Args:
            tiles: Tiles of one image. Of a sound, its windows: a list of float32 [mel_bins, frame_count].
            plan: Plan of the tiles. Of a sound, its SoundPlan.

        Returns:
            Buffer of float32 [plan.row_count, embedding_size].

        Raises:
            AlreadyEnded: the engine was closed or restarted.
        """
        ...


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


class Spectrogram(msgspec.Struct, frozen=True, kw_only=True):
    """The spectra that a model hears, as read from the model's configuration files.

    Attributes:
        sample_rate: Samples per second.
        mel_bins: Mel bands of a spectrum.
        fft_size: Samples of the window of one spectrum.
        hop_length: Samples between two spectra.
        window_seconds: Seconds of sound that the encoder reads at once. Shorter sound is padded with silence.
        frame_count: Spectra of one window.
        windows: How a longer recording becomes windows. "cut": its spectrogram is cut, and the last window is filled
            with the lowest value. "filled": the same, but silence first fills the last window. "apart": each window
            has a spectrogram of its own.
    """

    sample_rate: int
    mel_bins: int
    fft_size: int
    hop_length: int
    window_seconds: int
    frame_count: int
    windows: Literal["cut", "filled", "apart"] = "cut"


class SoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The windows of one sound, and its rows in the prompt. Follows from the length of the sound.

    Attributes:
        frame_counts: Spectra of the sound in each window. The rest of a window is silence.
        runs: Number of embedding rows, in one run.
    """

    frame_counts: tuple[int, ...]
    runs: tuple[int, ...]

    grid: ClassVar[None] = None

    @property
    def row_count(self) -> int:
        """Return the number of embedding rows."""
        return sum(self.runs)


class SoundProcessing(Spectrogram, frozen=True, kw_only=True):
    """How a language model hears the sounds of a chat, as read from the model's configuration files.

    Attributes:
        embedding_size: Numbers in one embedding row.
        audio_token_id: Placeholder token that stands in the prompt once for each row.
        row_token: Text of this token. Chat templates write it once for each sound.
        window_rows: Rows of each window, with those of the silence that fills it. None: only the sound has rows, one
            for each four spectra.
        windows_max: Most windows of one sound.
    """

    embedding_size: int
    audio_token_id: int
    row_token: str
    window_rows: int | None
    windows_max: int

    is_bidirectional: ClassVar[bool] = False

    @property
    def sign(self) -> str:
        """Return the text that chat templates write in the place of one sound."""
        return self.row_token

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row in float32."""
        return 4 * self.embedding_size

    @property
    def description(self) -> str:
        """Return how many tokens a sound has, for operators."""
        return f"{self.window_rows or self.frame_count // 4} tokens per {self.window_seconds} s of sound"

    def plan(self, seconds: float, place: str) -> SoundPlan:
        """Plan the windows and the rows of a sound.

        Args:
            seconds: Length of the sound.
            place: Name of the sound in error messages.

        Raises:
            InvalidRequest: the sound is longer than the model can hear.
        """
        samples, window = max(1, round(seconds * self.sample_rate)), self.window_seconds * self.sample_rate
        if samples > self.windows_max * window:
            raise InvalidRequest(
                f"{place} has {seconds:.1f} s of sound, and this model hears {self.windows_max * self.window_seconds} "
                "s: send it in parts",
                param=place,
            )
        frame_counts = tuple(-(-min(samples - first, window) // self.hop_length) for first in range(0, samples, window))
        # A convolution halves the number of spectra, and the projection halves the number of rows.
        rows = sum((count + 1) // 2 // 2 for count in frame_counts)
        if self.window_rows is not None:
            rows = self.window_rows * len(frame_counts)
        return SoundPlan(frame_counts=frame_counts, runs=(rows,))

    def text(self, plan: SoundPlan) -> str:
        """Return the text that replaces `sign`.

        Args:
            plan: Plan of the sound.
        """
        return self.row_token * plan.row_count


class AudioProcessing(Spectrogram, frozen=True, kw_only=True):
    """How a speech model hears and writes, as read from the model's configuration files.

    Attributes:
        row_count: Rows that the encoder computes for one window.
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

    row_count: int
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


class AudioLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for audio files that clients send.

    Attributes:
        sounds_max: Sounds of one prompt, 0 to 1000.
        audio_bytes_max: Bytes of a file. The default is OpenAI's limit.
        seconds_max: Length of a recording. It determines the memory limit of the decoding processes.
        decode_seconds_max: Time to decode one file. A file of an hour takes about ten seconds on a slow core.
        features_bytes_max: Bytes of the decoded recordings of all requests together.

    Raises:
        StartupError: a limit is out of range.
    """

    sounds_max: int = 8
    audio_bytes_max: int = 25 * 2**20
    seconds_max: float = 3600.0
    decode_seconds_max: float = 60.0
    features_bytes_max: int = 2**30

    def __post_init__(self) -> None:
        if not 0 <= self.sounds_max <= 1000:
            raise StartupError(f"--limit-mm-per-prompt has audio {self.sounds_max}, it may be 0 to 1000")
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
