"""POST /v1/audio/transcriptions and /v1/audio/translations: the text of a recording, whole or as a stream.

The recording is decoded in a process. Then its windows are engine requests, one after another, because each window
begins where the text of the previous one ended. Leaving the request ends whichever of these runs: the process is
killed, or the engine request is aborted.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import deadline_refusal
from trioserve.api.form import INLINE_BYTES_MAX, parsed_form
from trioserve.api.generation import Choice, read_streams, usage_of, wait_until_begun
from trioserve.api.openai.request_types import Int32, deadlines_of, wrong_field
from trioserve.api.response import Response
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.api.surface import event
from trioserve.audio.audio_file import AUDIO_FORMATS, decoder_missing
from trioserve.audio.transcript import (
    FALLBACK_TEMPERATURES,
    LANGUAGE_NAMES,
    Segment,
    Transcript,
    WindowOutput,
    srt,
    vtt,
)
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import AudioProcessing, AudioPrompt
from trioserve.contracts.output import Delta
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range, SamplingParams

if TYPE_CHECKING:
    from trioserve.audio.recording import Recording

__all__ = [
    "AudioForm",
    "DurationUsage",
    "FORMATS",
    "InputTokenDetails",
    "OPERATIONS",
    "RANGES",
    "TokensUsage",
    "TranscriptDelta",
    "TranscriptDone",
    "Transcription",
    "TranscriptionForm",
    "TranscriptionSegment",
    "create_transcription",
    "create_translation",
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


Task = Literal["transcribe", "translate"]


async def create_transcription(context: ServerContext) -> None:
    await _answer(context, "transcribe")


async def create_translation(context: ServerContext) -> None:
    await _answer(context, "translate")


async def _answer(context: ServerContext, task: Task) -> None:
    clock = _Clock(trio.current_time())
    processing = _processing(context)
    form = await _form(context)
    fields = form.fields
    context.model_name(fields.model)
    if context.adapter is not None:
        raise InvalidRequest("model names an adapter, but adapters transcribe nothing: name the model", param="model")
    _check_language(processing, fields.language, task)
    clock.deadlines = deadlines_of(fields, context.exchange.headers)
    is_json = fields.response_format in ("json", "verbose_json")
    if is_json and not fields.stream:
        context.exchange.fill_silence()
    async with _decoded(context, processing, form.content, clock) as recording:
        del form  # The file is not needed any more.
        run = _Transcription(context, fields, task, recording, processing, clock)
        await run.complete()
    # The recording and the engine requests are released. So a slow client delays only its own bytes.
    if fields.stream:
        await context.finish(event("transcript.text.done", run.done()))
    elif is_json:
        await context.respond_json(run.whole())
    else:
        await context.respond_bytes(run.written().encode(), "text/plain; charset=utf-8")


def _processing(context: ServerContext) -> AudioProcessing:
    processing = context.engine.model.audio
    if processing is None:
        raise InvalidRequest(
            f"the model {context.engine.model.name} reads text and hears nothing: ask a server with a speech model, "
            "such as Whisper",
            param="model",
        )
    if missing := decoder_missing():
        raise InvalidRequest(f"this server cannot decode audio: {missing}", param="file")
    return processing


async def _form(context: ServerContext) -> AudioForm:
    raw = await context.exchange.body()
    parse = partial(parsed_audio, raw, context.exchange.headers.get("content-type"))
    return parse() if len(raw) <= INLINE_BYTES_MAX else await context.server.uploads.call(parse, key=context.owner)


def _check_language(processing: AudioProcessing, language: str | None, task: Task) -> None:
    if not processing.languages or processing.transcribe_id is None or processing.translate_id is None:
        if task == "translate":
            raise InvalidRequest("this model knows only English and translates nothing", param="model")
        if language not in (None, "en"):
            raise InvalidRequest(f"language is {language[:40]!r}, this model knows only en", param="language")
    elif language is not None and language not in processing.languages:
        raise InvalidRequest(
            f"language is {language[:40]!r}, allowed are {', '.join(sorted(processing.languages))}: leave it out if "
            "the model should detect it",
            param="language",
        )


class _Clock:
    """Deadlines of a request that has several parts.

    Args:
        began_at: time at which the request began, of Trio's clock.

    Attributes:
        deadlines: deadlines from the beginning.
    """

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self.deadlines = NO_DEADLINES

    @property
    def first(self) -> tuple[float, Deadline | None]:
        """Time of the next deadline before the first engine request."""
        return min(
            (
                (self._began_at + seconds, deadline)
                for deadline in Deadline
                if (seconds := self.deadlines.seconds(deadline)) is not None
            ),
            key=lambda pair: pair[0],
            default=(math.inf, None),
        )

    def rest(self, *, is_first: bool) -> Deadlines:
        """Return the deadlines of the next engine request.

        Args:
            is_first: True: the request has computed nothing so far.

        Raises:
            Refusal: a deadline has passed.
        """
        rest = {}
        for deadline in Deadline:
            seconds = self.deadlines.seconds(deadline)
            if seconds is None or not (is_first or deadline is Deadline.TOTAL):
                continue
            rest[deadline.value] = self._began_at + seconds - trio.current_time()
            if rest[deadline.value] <= 0:
                raise self.passed(deadline)
        return Deadlines(**rest)

    def passed(self, deadline: Deadline) -> Exception:
        """Return the error for a deadline that has passed."""
        return deadline_refusal(
            deadline, passed_message(deadline, self.deadlines.seconds(deadline) or 0.0, NO_DEADLINES)
        )


@asynccontextmanager
async def _decoded(
    context: ServerContext, processing: AudioProcessing, content: bytes, clock: _Clock
) -> AsyncIterator[Recording]:
    decoder, (at, deadline) = context.engine.audio_decoder, clock.first
    assert decoder is not None, "an engine that hears has a decoder"
    tenant = context.caller.tenant(context.named_tenant)
    async with AsyncExitStack() as scopes:
        recording = None
        with trio.move_on_at(at):
            recording = await scopes.enter_async_context(decoder.recording(content, processing, "file", tenant=tenant))
        if recording is None:
            assert deadline is not None, "only a deadline ends the scope"
            raise clock.passed(deadline)
        yield recording


class _Transcription:
    """Asks the engine for one window after another, and writes the response.

    Args:
        context: the request.
        fields: fields of the form.
        task: what the model writes.
        recording: the decoded recording.
        processing: tokens and window of the model.
        clock: deadlines of the request.
    """

    def __init__(
        self,
        context: ServerContext,
        fields: TranscriptionForm,
        task: Task,
        recording: Recording,
        processing: AudioProcessing,
        clock: _Clock,
    ) -> None:
        self._context = context
        self._fields = fields
        self._task = task
        self._recording = recording
        self._processing = processing
        self._clock = clock
        self._seconds = recording.seconds
        self._language = fields.language or "en"
        self._text_tokens = 0
        self._is_spoken = False  # True after the first text of a stream.
        needs_times = fields.response_format in ("verbose_json", "srt", "vtt")
        self._has_timestamps = needs_times or recording.seconds > processing.window_seconds
        self._sends_tokens = fields.stream and not self._has_timestamps
        self._transcript: Transcript | None = None

    async def complete(self) -> None:
        """Transcribe the whole recording. In a stream, send the text."""
        transcript = self._transcript = Transcript(
            self._processing,
            self._context.engine.tokenizer.decode,
            seconds=self._seconds,
            task_ids=await self._task_ids(),
            prompt_ids=await self._prompt_ids(),
            has_timestamps=self._has_timestamps,
        )
        while not transcript.is_complete:
            segments = transcript.add_window(await self._window_output(transcript))
            if self._fields.stream and not self._sends_tokens:
                await self._send("".join(segment.text for segment in segments))

    async def _window_output(self, transcript: Transcript) -> WindowOutput:
        """Return the model's output for the next window, sampled at the lowest temperature that gives a good text.

        A stream sends tokens at once, so its text cannot be replaced by another one.
        """
        features, digest = self._recording.window(transcript.position)
        token_ids = transcript.window_prompt()
        is_fixed = self._fields.temperature > 0 or self._sends_tokens
        temperatures = (self._fields.temperature,) if is_fixed else FALLBACK_TEMPERATURES
        no_speech: float | None = None
        for temperature in temperatures:
            choice = await self._asked(
                AudioPrompt(features=features, digest=digest, token_ids=token_ids),
                SamplingParams(
                    temperature=temperature,
                    # A request without a temperature gets the same text each time.
                    seed=self._fields.seed if is_fixed else self._fields.seed or 0,
                    max_tokens=min(self._processing.tokens_max // 2, self._processing.tokens_max - len(token_ids)),
                    clamp_max_tokens=True,
                    logprobs=0,
                    speech=self._processing.rules(has_timestamps=self._has_timestamps),
                ),
                sends=self._sends_tokens,
            )
            logprobs = [token.logprob for token in choice.logprobs]
            logprob = sum(logprobs) / max(1, len(logprobs))
            output = WindowOutput(choice.token_ids, logprob, no_speech, temperature)
            needs_no_speech = output.may_be_silence and not self._sends_tokens
            if no_speech is None and (needs_no_speech or self._fields.response_format == "verbose_json"):
                no_speech = await self._no_speech(features, digest)
                output = output._replace(no_speech=no_speech)
            if not transcript.is_doubtful(output):
                break
        return output

    async def _task_ids(self) -> tuple[int, ...]:
        processing = self._processing
        task_id = processing.transcribe_id if self._task == "transcribe" else processing.translate_id
        if not processing.languages or task_id is None:
            return ()
        if self._fields.language is None:
            features, digest = self._recording.window(0.0)
            ids = processing.languages
            choice = await self._asked(
                AudioPrompt(features=features, digest=digest, token_ids=(processing.start_id,)),
                SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=tuple(ids.values())),
            )
            self._language = next((code for code, one in ids.items() if one in choice.token_ids), "en")
        return processing.languages[self._language], task_id

    async def _prompt_ids(self) -> Sequence[int]:
        prompt = (self._fields.prompt or "").strip()
        if not prompt:
            return ()
        end = " " + prompt[-4 * self._processing.tokens_max :]  # The model reads only the end of a long prompt.
        return await self._context.engine.encode(end, add_special_tokens=False)

    async def _no_speech(self, features: object, digest: bytes) -> float:
        """Return the probability that a window has no speech. The encoder output of the window is cached."""
        processing = self._processing
        choice = await self._asked(
            AudioPrompt(features=features, digest=digest, token_ids=(processing.start_id,)),
            SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=(processing.no_speech_id,), logprobs=0),
        )
        return math.exp(choice.logprobs[0].logprob)

    async def _asked(self, prompt: AudioPrompt, sampling: SamplingParams, *, sends: bool = False) -> Choice:
        context, choice = self._context, Choice()

        async def take(_: int, delta: Delta) -> None:
            context.response_bound.take(delta)
            choice.take(delta)
            if sends:
                await self._send(delta.text)

        deadlines = self._clock.rest(is_first=not context.streams)
        self._text_tokens += len(prompt.token_ids)
        async with context.generate(prompt, sampling, self._fields, deadlines) as stream:
            if self._fields.stream and not context.exchange.started:
                await context.begin_events(lambda: wait_until_begun(stream), context.start_events)
            await read_streams([stream], take, keep_alive=context.keep_alive if self._fields.stream else None)
        return choice

    async def _send(self, text: str) -> None:
        if not self._is_spoken:
            text = text.lstrip()
        if text:
            self._is_spoken = True
            await self._context.exchange.send(event("transcript.text.delta", TranscriptDelta(delta=text)))

    @property
    def _result(self) -> Transcript:
        assert self._transcript is not None, "the transcript is not complete"
        return self._transcript

    def whole(self) -> Transcription:
        """Return the body of a response in JSON."""
        response = Transcription(text=self._result.text, usage=DurationUsage(seconds=self._seconds))
        if self._fields.response_format == "verbose_json":
            response.task, response.duration = self._task, self._seconds
            response.language = LANGUAGE_NAMES.get(self._language, self._language)
            response.segments = [self._shown(number, one) for number, one in enumerate(self._result.segments)]
        return response

    def _shown(self, number: int, segment: Segment) -> TranscriptionSegment:
        return TranscriptionSegment(
            id=number,
            seek=round(100 * segment.window_start),
            start=round(segment.start, 2),
            end=round(segment.end, 2),
            text=segment.text,
            tokens=list(segment.token_ids),
            temperature=segment.output.temperature,
            avg_logprob=segment.output.logprob,
            compression_ratio=segment.compression_ratio,
            no_speech_prob=segment.output.no_speech or 0.0,
        )

    def written(self) -> str:
        """Return the body of a response in another format."""
        segments = self._result.segments
        match self._fields.response_format:
            case "srt":
                return srt(segments)
            case "vtt":
                return vtt(segments)
            case _:
                return self._result.text + "\n"

    def done(self) -> TranscriptDone:
        """Return the last event of a stream."""
        usage = usage_of(self._context.streams)
        return TranscriptDone(
            text=self._result.text,
            usage=TokensUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
                input_token_details=InputTokenDetails(
                    audio_tokens=usage.prompt_tokens - self._text_tokens, text_tokens=self._text_tokens
                ),
            ),
        )


_FORM = (
    f'The part "file" is {AUDIO_FORMATS}. Longer recordings than a window are read window by window. Fields that are '
    "not listed here are ignored. With response_format text, srt or vtt, the response is plain text."
)

OPERATIONS: tuple[Operation[ServerContext], ...] = tuple(
    Operation(
        method="POST",
        path=path,
        handler=handler,
        summary=summary,
        forwarding=Forwarding.BY_MODEL,
        description=_FORM,
        body=TranscriptionForm,
        body_media="multipart/form-data",
        ranges=RANGES,
        response=Transcription,
        named_events=(TranscriptDelta, TranscriptDone),
        errors=GENERATES,
        takes_deadlines=True,
    )
    for path, handler, summary in (
        ("/v1/audio/transcriptions", create_transcription, "Transcribe a recording"),
        ("/v1/audio/translations", create_translation, "Translate a recording into English"),
    )
)
