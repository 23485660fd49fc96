"""Forms and responses of the audio API, with OpenAI's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.form import parsed_form
from trioserve.api.openai.request_types import Int32, wrong_field
from trioserve.api.response import Response
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = [
    "FORMATS",
    "RANGES",
    "AudioForm",
    "DurationUsage",
    "InputTokenDetails",
    "TranscriptDelta",
    "TranscriptDone",
    "TokensUsage",
    "Transcription",
    "TranscriptionForm",
    "TranscriptionSegment",
    "parsed_audio",
]

FILE = "file"
PROMPT_BYTES_MAX = 16_384  # The model reads a few hundred tokens of the prompt, the last ones.
GRANULARITIES = "timestamp_granularities"
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
RANGES = {
    "temperature": Range(0.0, 1.0),
    "seed": SAMPLING_RANGES["seed"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}


class TranscriptionForm(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the form. The part with a filename is the recording.

    Attributes:
        language: language of the recording, such as "en". None: the model detects it.
        prompt: text that precedes the recording, or words that it may contain.
        response_format: format of the response.
        temperature: sampling temperature. 0 chooses the most probable tokens.
        timestamp_granularities: "segment", with verbose_json. Timestamps of words are not supported.
        stream: True: text is sent as it is recognized. Not with srt, vtt and verbose_json.
    """

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})] | UnsetType = UNSET
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = 0.0
    timestamp_granularities: list[str] = []
    stream: bool = False
    seed: int | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None

    def check(self) -> None:
        """Check rules that the types of the fields cannot express.

        Raises:
            InvalidRequest: a rule is broken.
        """
        if not 0 <= self.temperature <= 1:
            raise InvalidRequest(f"temperature is {self.temperature}, allowed is 0 to 1", param="temperature")
        for granularity in self.timestamp_granularities:
            if granularity == "word":
                raise InvalidRequest(
                    "timestamp_granularities has word, but this server has no timestamps of words: send segment",
                    param=GRANULARITIES,
                )
            if granularity != "segment":
                raise InvalidRequest(
                    f"timestamp_granularities has {granularity[:40]!r}, allowed is segment", param=GRANULARITIES
                )
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(
                f"timestamp_granularities is set, but response_format is {self.response_format}: send verbose_json",
                param=GRANULARITIES,
            )
        if self.stream and self.response_format not in ("json", "text"):
            raise InvalidRequest(
                f"response_format is {self.response_format}, but a stream has json or text: leave stream out",
                param="response_format",
            )

    # A transcription has no session, and its blocks are not moved to another engine.
    @property
    def kv_transfer_params(self) -> None:
        return None

    @property
    def session_key(self) -> None:
        return None

    @property
    def retention_seconds(self) -> None:
        return None


class AudioForm(msgspec.Struct, frozen=True):
    """A parsed form.

    Attributes:
        fields: the text fields.
        content: bytes of the recording.
    """

    fields: TranscriptionForm
    content: bytes


def parsed_audio(raw: bytes, content_type: str | None) -> AudioForm:
    """Parse a form.

    Args:
        raw: body of the request.
        content_type: value of the header Content-Type. None: not sent.

    Raises:
        InvalidRequest: the form is not valid. The error names the part.
    """
    lists = (GRANULARITIES, f"{GRANULARITIES}[]", "include[]")
    form = parsed_form(raw, content_type, files=(FILE,), lists=lists, field_bytes_max=PROMPT_BYTES_MAX)
    sent = form.files.get(FILE)
    if sent is None:
        raise InvalidRequest('the form has no recording: send an audio file as the part "file"', param=FILE)
    values: dict[str, Any] = {name: text for name, text in form.texts.items() if text}
    granularities = [one for name in lists[:2] for one in form.lists.get(name, ()) if one]
    if granularities:
        values[GRANULARITIES] = granularities
    try:
        fields = msgspec.convert(values, TranscriptionForm, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
    fields.check()
    return AudioForm(fields, sent.content)


class DurationUsage(Response, tag_field="type", tag="duration"):
    seconds: float


class InputTokenDetails(Response):
    audio_tokens: int
    text_tokens: int


class TokensUsage(Response, tag_field="type", tag="tokens"):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class TranscriptionSegment(Response):
    """One segment. `seek` is the start of its window in hundredths of a second."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcription(Response):
    """The text of a recording. Fields after `usage` are present with verbose_json."""

    text: str
    usage: DurationUsage
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptionSegment] | UnsetType = UNSET


class TranscriptDelta(Response, tag_field="type", tag="transcript.text.delta"):
    """Event with new text."""

    delta: str


class TranscriptDone(Response, tag_field="type", tag="transcript.text.done"):
    """Last event, with the whole text."""

    text: str
    usage: TokensUsage
