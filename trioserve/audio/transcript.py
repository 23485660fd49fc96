"""The transcript of a recording: its segments, and where the next window begins (Whisper, arXiv 2212.04356, 4.5).

A window's output has segments between two timestamps. The next window begins at the last timestamp, so text that the
window cut off is transcribed again. The text of earlier windows is the prompt of the next one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trioserve.contracts.media import TIMESTAMP_SECONDS, AudioProcessing

__all__ = [
    "FALLBACK_TEMPERATURES",
    "LANGUAGE_NAMES",
    "NO_SPEECH_MIN",
    "REST_SECONDS_MIN",
    "Segment",
    "Transcript",
    "WindowOutput",
    "srt",
    "vtt",
]

# The thresholds are those of Whisper.
NO_SPEECH_MIN = 0.6
SURE_LOGPROB_MIN = -1.0  # A window whose mean log probability is higher has speech in any case.
COMPRESSION_RATIO_MAX = 2.4  # A text that zlib compresses better repeats itself.
TEMPERATURE_MAX = 0.5  # A text that was sampled at a higher temperature is no prompt for the next window.
FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

ADVANCE_SECONDS_MIN = 1.0  # Without this minimum, timestamps near 0 could give a recording thousands of windows.
REST_SECONDS_MIN = 0.1  # A shorter rest of a recording has no word. The model would invent one.

_LANGUAGES = """
af:afrikaans am:amharic ar:arabic as:assamese az:azerbaijani ba:bashkir be:belarusian bg:bulgarian bn:bengali
bo:tibetan br:breton bs:bosnian ca:catalan cs:czech cy:welsh da:danish de:german el:greek en:english es:spanish
et:estonian eu:basque fa:persian fi:finnish fo:faroese fr:french gl:galician gu:gujarati ha:hausa haw:hawaiian
he:hebrew hi:hindi hr:croatian ht:haitian_creole hu:hungarian hy:armenian id:indonesian is:icelandic it:italian
ja:japanese jw:javanese ka:georgian kk:kazakh km:khmer kn:kannada ko:korean la:latin lb:luxembourgish ln:lingala
lo:lao lt:lithuanian lv:latvian mg:malagasy mi:maori mk:macedonian ml:malayalam mn:mongolian mr:marathi ms:malay
mt:maltese my:myanmar ne:nepali nl:dutch nn:nynorsk no:norwegian oc:occitan pa:punjabi pl:polish ps:pashto
pt:portuguese ro:romanian ru:russian sa:sanskrit sd:sindhi si:sinhala sk:slovak sl:slovenian sn:shona so:somali
sq:albanian sr:serbian su:sundanese sv:swedish sw:swahili ta:tamil te:telugu tg:tajik th:thai tk:turkmen
tl:tagalog tr:turkish tt:tatar uk:ukrainian ur:urdu uz:uzbek vi:vietnamese yi:yiddish yo:yoruba yue:cantonese
zh:chinese
"""
LANGUAGE_NAMES: dict[str, str] = dict(pair.replace("_", " ").split(":", 1) for pair in _LANGUAGES.split())
"""Whisper's languages by their codes."""


class WindowOutput(NamedTuple):
    """Output of the model for one window.

    Attributes:
        token_ids: sampled tokens, with timestamps and the end token.
        logprob: mean log probability of a token.
        no_speech: probability that the window has no speech. None if it was not computed.
        temperature: temperature with which the tokens were sampled.
    """

    token_ids: Sequence[int]
    logprob: float
    no_speech: float | None = None
    temperature: float = 0.0

    @property
    def may_be_silence(self) -> bool:
        """True if the probability of no speech decides whether the window has text."""
        return self.logprob <= SURE_LOGPROB_MIN

    @property
    def is_silence(self) -> bool:
        """True if the window has no text."""
        return self.may_be_silence and self.no_speech is not None and self.no_speech > NO_SPEECH_MIN


class Segment(NamedTuple):
    """A part of the transcript.

    Attributes:
        start, end: seconds of the recording.
        window_start: first second of the window.
        text: text, usually with a space before it.
        token_ids: tokens of the segment, with timestamps.
        output: output of the segment's window.
    """

    start: float
    end: float
    window_start: float
    text: str
    token_ids: tuple[int, ...]
    output: WindowOutput

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text divided by its bytes as zlib compresses them."""
        return compression_ratio(self.text)


class Transcript:
    """The transcript of one recording, window by window.

    Args:
        processing: tokens and window of the model.
        text_of: decodes tokens without special tokens.
        seconds: length of the recording.
        task_ids: tokens after the start token: language and task. Empty for a model of English only.
        prompt_ids: text tokens that precede the transcript. The last ones are used.
        has_timestamps: True if the windows' output has timestamps. A recording that is longer than a window needs them.

    Attributes:
        position: first second of the next window.
        segments: all segments so far.
    """

    def __init__(
        self,
        processing: AudioProcessing,
        text_of: Callable[[Sequence[int]], str],
        *,
        seconds: float,
        task_ids: Sequence[int] = (),
        prompt_ids: Sequence[int] = (),
        has_timestamps: bool = True,
    ) -> None:
        assert has_timestamps or seconds <= processing.window_seconds, "long recordings need timestamps"
        self._processing = processing
        self._text_of = text_of
        self._seconds = seconds
        self._task_ids = tuple(task_ids)
        self._previous_ids = self._texts(prompt_ids)
        self._has_timestamps = has_timestamps
        self.position = 0.0
        self.segments: list[Segment] = []

    @property
    def is_complete(self) -> bool:
        return self._seconds - self.position < REST_SECONDS_MIN

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(segment.text for segment in self.segments).strip()

    def window_prompt(self) -> tuple[int, ...]:
        """Return the decoder's prompt for the next window. Earlier text takes up to half of the decoder's tokens."""
        processing = self._processing
        previous = self._previous_ids[-(processing.tokens_max // 2 - 1) :]
        end = () if self._has_timestamps else (processing.no_timestamps_id,)
        return (
            *((processing.previous_id, *previous) if previous else ()),
            processing.start_id,
            *self._task_ids,
            *end,
        )

    def is_doubtful(self, output: WindowOutput) -> bool:
        """Return True if the window should be sampled again at a higher temperature: its text repeats itself or is
        improbable.

        Args:
            output: output of the model for a window.
        """
        if output.is_silence:
            return False
        text = self._text_of(self._texts(output.token_ids))
        return output.logprob < SURE_LOGPROB_MIN or compression_ratio(text) > COMPRESSION_RATIO_MAX

    def add_window(self, output: WindowOutput) -> list[Segment]:
        """Accept the output of the window at `position`, and advance to the next one.

        Args:
            output: output of the model.

        Returns:
            The new segments.
        """
        start = self.position
        rest = min(self._processing.window_seconds, self._seconds - start)
        if output.is_silence:
            self.position = start + rest
            return []
        pieces, advance = self._cut([one for one in output.token_ids if one != self._processing.end_id], rest)
        segments = [
            Segment(start + first, start + end, start, text, tuple(ids), output)
            for first, end, ids in pieces
            if (text := self._text_of(self._texts(ids))).strip() and (end > first or not self._has_timestamps)
        ]
        self.segments += segments
        self.position = start + max(advance, min(ADVANCE_SECONDS_MIN, rest))
        text = "".join(segment.text for segment in segments)
        if output.temperature > TEMPERATURE_MAX or compression_ratio(text) > COMPRESSION_RATIO_MAX:
            self._previous_ids = ()
        else:
            new_ids = [one for segment in segments for one in self._texts(segment.token_ids)]
            self._previous_ids = (*self._previous_ids, *new_ids)[-self._processing.tokens_max :]
        return segments

    def _texts(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Leave out timestamps and control tokens, all of which follow the end token."""
        return tuple(one for one in token_ids if one < self._processing.end_id)

    def _cut(self, token_ids: list[int], rest: float) -> tuple[list[tuple[float, float, list[int]]], float]:
        """Cut a window's tokens between two adjacent timestamps.

        Returns:
            Start, end and tokens of each segment, in seconds of the window, and the seconds to the next window.
        """
        first_id = self._processing.timestamp_first_id
        is_time = [one >= first_id for one in token_ids]
        times = [(one - first_id) * TIMESTAMP_SECONDS for one in token_ids]
        cuts = [place for place in range(1, len(token_ids)) if is_time[place - 1] and is_time[place]]
        if not cuts:
            last = max((time for time, is_one in zip(times, is_time, strict=True) if is_one), default=0.0)
            return [(0.0, min(last, rest) or rest, token_ids)], rest
        ends_with_one = is_time[-2:] == [False, True]  # Then no speech follows in this window.
        if ends_with_one:
            cuts.append(len(token_ids))
        pieces = [
            (min(times[first], rest), min(times[end - 1], rest), token_ids[first:end])
            for first, end in zip([0, *cuts], cuts, strict=False)
        ]
        return pieces, rest if ends_with_one else min(times[cuts[-1] - 1], rest)


def compression_ratio(text: str) -> float:
    """Return the bytes of a text divided by its bytes as zlib compresses them. 0 for an empty text."""
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data))


def srt(segments: Sequence[Segment]) -> str:
    """Write segments as SubRip subtitles.

    Args:
        segments: all segments.
    """
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one.text)}\n\n"
        for number, one in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Write segments as WebVTT subtitles.

    Args:
        segments: all segments.
    """
    return "WEBVTT\n\n" + "".join(
        f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_line(one.text)}\n\n" for one in segments
    )


def _line(text: str) -> str:
    return " ".join(text.split()).replace("-->", "->")  # An arrow or an empty line would end the subtitle.


def _time(seconds: float, point: str) -> str:
    milliseconds = math.floor(seconds * 1000 + 0.5)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
