"""Tests of a transcript: segments between timestamps, the start of the next window, and prompts from earlier text."""

from __future__ import annotations

import pytest

from tests.audio.audio_files import WHISPER
from trioserve.audio.transcript import LANGUAGE_NAMES, Segment, Transcript, WindowOutput, compression_ratio, srt, vtt

SURE = -0.2
END = WHISPER.end_id


def at(seconds: float) -> int:
    """Return the token of a timestamp."""
    return WHISPER.timestamp_first_id + round(seconds / 0.02)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(token_ids: object) -> str:
    return "".join(map(chr, token_ids))  # type: ignore[call-overload]  # a sequence of ids


def transcript(seconds: float, **options: object) -> Transcript:
    options = {"task_ids": (WHISPER.languages["en"], WHISPER.transcribe_id), **options}
    return Transcript(WHISPER, text_of, seconds=seconds, **options)  # type: ignore[arg-type]  # options of a test


def said(*parts: float | str) -> list[int]:
    """Return tokens: a number is a timestamp."""
    tokens: list[int] = []
    for part in parts:
        tokens += letters(part) if isinstance(part, str) else [at(part)]
    return tokens


def add(one: Transcript, *parts: float | str, logprob: float = SURE) -> list[tuple[float, float, str]]:
    segments = one.add_window(WindowOutput([*said(*parts), END], logprob))
    return [(round(segment.start, 2), round(segment.end, 2), segment.text) for segment in segments]


def test_segments_are_split_at_timestamps_and_the_next_window_begins_at_the_last_timestamp() -> None:
    one = transcript(60.0)
    assert add(one, 0.0, " one", 4.0, 4.5, " two", 9.0, 9.0, " cut") == [(0.0, 4.0, " one"), (4.5, 9.0, " two")]
    assert one.position == pytest.approx(9.0)
    assert add(one, 0.0, " three", 2.0, 2.0, " four", 30.0) == [(9.0, 11.0, " three"), (11.0, 39.0, " four")]
    assert one.position == pytest.approx(39.0)
    assert not one.is_complete
    assert add(one, 1.0, " end", 5.0) == [(39.0, 44.0, " end")]
    assert one.position == 60.0
    assert one.is_complete
    assert one.text == "one two three four end"


def test_last_window_ends_with_the_recording() -> None:
    one = transcript(10.0)
    assert add(one, 0.0, " a", 5.0, 5.0, " b", 29.0) == [(0.0, 5.0, " a"), (5.0, 10.0, " b")]
    assert one.is_complete


def test_window_without_a_pair_of_timestamps_is_one_segment() -> None:
    one = transcript(40.0)
    assert add(one, 0.0, " all") == [(0.0, 30.0, " all")]
    assert one.position == 30.0


def test_transcript_without_timestamps_is_one_segment() -> None:
    one = transcript(3.0, has_timestamps=False)
    assert one.window_prompt()[-1] == WHISPER.no_timestamps_id
    assert add(one, " hello") == [(0.0, 3.0, " hello")]
    assert one.is_complete


@pytest.mark.parametrize("parts", [(0.0, " a", 0.0, 0.0, " b"), (0.0, 0.0), (0.0, " a", 0.3, 0.3, " b"), ()])
def test_every_window_advances_at_least_a_second(parts: tuple[float | str, ...]) -> None:
    one = transcript(31.0)
    add(one, *parts)
    assert one.position >= 1.0
    assert one.position in (1.0, 30.0)


def test_window_count_has_a_limit_for_any_output() -> None:
    one, count = transcript(35.0), 0
    while not one.is_complete:
        add(one, 0.0, "x", 0.02, 0.02, "y")
        count += 1
    assert count == 35


def test_segments_without_length_or_text_are_left_out() -> None:
    one = transcript(30.0)
    assert add(one, 1.0, " a", 1.0, 1.0, " ", 2.0, 2.0, " b", 3.0) == [(2.0, 3.0, " b")]


def test_next_window_continues_the_text() -> None:
    one = transcript(60.0, prompt_ids=letters("names: Kim"))
    start = (WHISPER.start_id, WHISPER.languages["en"], WHISPER.transcribe_id)
    assert one.window_prompt() == (WHISPER.previous_id, *letters("names: Kim"), *start)
    add(one, 0.0, " one", 4.0, 4.0, " cut")
    assert one.window_prompt() == (WHISPER.previous_id, *letters("names: Kim one"), *start)
    assert transcript(60.0).window_prompt() == start


def test_prompt_keeps_the_last_tokens_and_drops_control_tokens() -> None:
    prompt_ids = [*letters("x" * 500), WHISPER.start_id, at(1.0), ord("y")]
    asked = transcript(60.0, prompt_ids=prompt_ids).window_prompt()
    assert len(asked) == WHISPER.tokens_max // 2 + 3
    assert asked[1:-3] == tuple(letters("x" * 222 + "y"))


@pytest.mark.parametrize(("text", "temperature"), [(" la" * 60, 0.0), (" fine words", 0.8)])
def test_text_that_may_be_wrong_is_no_prompt(text: str, temperature: float) -> None:
    one = transcript(60.0)
    output = WindowOutput([*said(0.0, text, 20.0, 20.0, " rest"), END], SURE, temperature=temperature)
    one.add_window(output)
    assert one.window_prompt()[0] == WHISPER.start_id


@pytest.mark.parametrize(
    ("logprob", "no_speech", "is_kept"),
    [(-1.5, 0.9, False), (-1.5, 0.5, True), (-0.5, 0.9, True), (-1.5, None, True)],
)
def test_silent_window_has_no_text(logprob: float, no_speech: float | None, is_kept: bool) -> None:
    one = transcript(60.0)
    output = WindowOutput([*said(0.0, " thanks for watching", 9.0), END], logprob, no_speech)
    assert bool(one.add_window(output)) is is_kept
    assert output.may_be_silence is (logprob <= -1.0)
    assert one.position == 30.0


def test_english_models_have_no_language_and_task() -> None:
    assert transcript(60.0, task_ids=()).window_prompt() == (WHISPER.start_id,)


def test_subtitles() -> None:
    output = WindowOutput([], SURE)
    segments = [
        Segment(0.0, 2.5, 0.0, " Hello\n\nthere --> you", (), output),
        Segment(3661.0049, 3723.9996, 3660.0, " Bye", (), output),
    ]
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello there -> you\n\n2\n01:01:01,005 --> 01:02:04,000\nBye\n\n"
    )
    assert vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there -> you\n\n01:01:01.005 --> 01:02:04.000\nBye\n\n"
    )


def test_compression_ratio_finds_repetition() -> None:
    assert compression_ratio("") == 0.0
    assert compression_ratio("The quick brown fox jumps over the lazy dog.") < 1.1
    assert compression_ratio("so what " * 50) > 10


@pytest.mark.parametrize(
    ("text", "logprob", "no_speech", "is_doubtful"),
    [
        (" fine words", -0.5, None, False),
        (" la" * 60, -0.5, None, True),
        (" fine words", -1.5, 0.5, True),
        (" fine words", -1.5, 0.9, False),
    ],
)
def test_text_that_repeats_itself_or_is_improbable_is_sampled_again(
    text: str, logprob: float, no_speech: float | None, is_doubtful: bool
) -> None:
    output = WindowOutput([*said(0.0, text, 9.0), END], logprob, no_speech)
    assert transcript(60.0).is_doubtful(output) is is_doubtful


def test_language_names_are_those_of_whisper() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    assert LANGUAGE_NAMES == LANGUAGES
