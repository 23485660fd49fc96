"""Tests stop strings against a search in the whole text: where they end the text, and how much text is held back."""

from __future__ import annotations

import sys
from types import FrameType

import hypothesis
import pytest
from hypothesis import strategies

from trioserve.text.stop_strings import StopStringFinder

SETTINGS = hypothesis.settings(deadline=None, database=None, max_examples=500)

few_letters = strategies.text("ab ", max_size=8)
stop_lists = strategies.lists(strategies.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4)
deltas = strategies.lists(few_letters, max_size=12)


def fibonacci_word(length: int) -> str:
    """Return a Fibonacci word, the text with the most suffixes that are also prefixes."""
    shorter, longer = "b", "a"
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


def first_stop(text: str, stops: list[str], *, completes_after: int = 0) -> tuple[int, str] | None:
    """Return the first stop string and where it begins, by testing all stop strings at every end position."""
    for end in range(completes_after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def longest_open_end(text: str, stops: list[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of a stop string."""
    return max(
        (count for stop in stops for count in range(len(stop)) if count <= len(text) and text.endswith(stop[:count])),
        default=0,
    )


def check(stops: list[str], pieces: list[str], *, expect: list[str], found: str | None) -> None:
    finder = StopStringFinder(stops)
    shown = []
    for piece in pieces:
        shown.append(finder.feed(piece))
        if finder.found is not None:
            break
    else:
        shown.append(finder.flush())
    assert (shown, finder.found) == (expect, found)


@pytest.mark.slow
@SETTINGS
@hypothesis.given(stops=stop_lists, pieces=deltas)
def test_finder_with_any_pieces_agrees_with_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    finder = StopStringFinder(stops)
    shown = seen = ""
    for piece in pieces:
        shown += finder.feed(piece)
        seen += piece
        expected = first_stop(seen, stops)
        if expected is not None:
            assert (shown, finder.found) == (seen[: expected[0]], expected[1])
            return
        assert finder.found is None
        assert len(seen) - len(shown) == longest_open_end(seen, stops)
        assert seen.startswith(shown)
    assert shown + finder.flush() == seen


@pytest.mark.slow
@SETTINGS
@hypothesis.given(stops=stop_lists, before=deltas, after=deltas)
def test_text_that_must_not_complete_a_stop_string_may_begin_a_stop_string(
    stops: list[str], before: list[str], after: list[str]
) -> None:
    finder = StopStringFinder(stops)
    shown = "".join(finder.feed(piece, may_complete=False) for piece in before)
    seen = "".join(before)
    count_before = len(seen)
    assert finder.found is None
    assert seen.startswith(shown)
    for piece in after:
        shown += finder.feed(piece)
        seen += piece
        expected = first_stop(seen, stops, completes_after=count_before)
        if expected is not None:
            assert finder.found == expected[1]
            assert shown == seen[: expected[0]]
            return
        assert finder.found is None
    assert shown + finder.flush() == seen


def test_a_stop_string_is_found_across_pieces() -> None:
    check(["</s>"], ["a<", "/", "s", ">b"], expect=["a", "", "", ""], found="</s>")


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    check(["\n\nUser:"], ["one\n", "two\n\n", "Us", "ual"], expect=["one", "\ntwo", "", "\n\nUsual", ""], found=None)


def test_finder_returns_text_that_was_held_back_at_the_end() -> None:
    check(["stop"], ["a st", "o"], expect=["a ", "", "sto"], found=None)


def test_the_stop_string_that_is_complete_first_is_found() -> None:
    check(["abcd", "c"], ["xabcd"], expect=["xab"], found="c")


def test_the_longer_of_two_stop_strings_that_end_together_is_found() -> None:
    check(["c", "abc"], ["xabc"], expect=["x"], found="abc")


def test_a_complete_stop_string_does_not_wait_for_a_longer_stop_string() -> None:
    check(["ab", "abc"], ["ab", "c"], expect=[""], found="ab")


def test_stop_strings_with_characters_beyond_the_basic_plane_are_found() -> None:
    check(["🦆🦆"], ["x🦆", "y🦆", "🦆z"], expect=["x", "🦆y", ""], found="🦆🦆")


HOSTILE_STOPS = {
    "a long run and its end": ["a" * 255 + "b"],
    "ends of one another": [*("a" * 10 + "b" * (230 + index) for index in range(15)), "a" * 255 + "b"],
    "one run, many ends": ["a" * (240 + index) + chr(0x400 + index) for index in range(16)],
    "two letters by turns": [("ab" * 128)[: 200 + index] + "c" for index in range(16)],
    "runs of Fibonacci": [fibonacci_word(200 + index) + "c" for index in range(16)],
    "nothing in common": [chr(0x61 + index) * 256 for index in range(16)],
}


@pytest.mark.parametrize("stops", HOSTILE_STOPS.values(), ids=HOSTILE_STOPS)
@pytest.mark.parametrize("period", ["a", "ab", "aaab", fibonacci_word(377), "x"], ids=["a", "ab", "aaab", "fib", "x"])
def test_number_of_steps_per_character_is_bounded_for_all_stop_strings(stops: list[str], period: str) -> None:
    text = (period * 2000)[:2000]
    finder = StopStringFinder(stops)
    line_count = 0

    def count(_frame: FrameType, _event: str, _argument: object) -> object:
        nonlocal line_count
        line_count += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for character in text:
            if finder.found is not None:
                break
            finder.feed(character)
    finally:
        sys.settrace(before)
    assert line_count <= 40 * len(text)


def test_the_null_character_in_a_text_matches_no_state() -> None:
    finder = StopStringFinder(["a", "x", "ab"])
    assert finder.feed("a", may_complete=False) == ""
    assert finder.feed("\0") == "a\0"
    assert finder.found is None


def test_stop_string_finders_that_share_an_automaton_are_independent() -> None:
    one, other = StopStringFinder(["stop"]), StopStringFinder(["stop"])
    assert (one.feed("st"), other.feed("op")) == ("", "op")
    assert one.feed("op") == ""
    assert (one.found, other.found) == ("stop", None)


def test_feeding_a_stop_string_finder_after_a_match_is_an_error() -> None:
    finder = StopStringFinder(["x"])
    finder.feed("x")
    with pytest.raises(AssertionError):
        finder.feed("y")
