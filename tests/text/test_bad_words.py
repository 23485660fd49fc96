"""Tests of bad words: the tokens that bad words bar, and the cost of finding these tokens."""

from __future__ import annotations

import random
from array import array

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.text.mask_bits import has_bit
from trioserve.text.stop_strings import ROWS_KEPT_MAX, BadWords


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def state_after(words: BadWords, history: list[int]) -> int:
    state = 0
    for token_id in history:
        state = words.after(state, token_id)
    return state


@pytest.mark.parametrize(
    ("history", "barred"),
    [
        ("", "x"),
        ("a", "xb"),  # The bad word "ab" still lacks one token.
        (" ", "xx"),  # The bad word "x" is barred after a space and without a space.
        ("ab", "xc"),  # The bad word "abc" still lacks one token.
        ("zab", "xc"),
        (" a", "xb"),
        ("abca", "xb"),
        ("aba", "xb"),
    ],
)
def test_last_token_of_a_bad_word_is_barred_after_all_preceding_tokens(history, barred):
    words = BadWords(["ab", "abc", "x"], encode)
    state = state_after(words, encode(history))
    assert words.barred(state) == set(encode(barred))
    assert words.bars_any(state)


def test_a_bad_word_of_one_token_is_always_barred():
    words = BadWords(["x"], lambda text: [7])
    assert words.barred(state_after(words, [1, 2, 3])) == {7}


def test_a_bad_word_without_tokens_bars_nothing():
    words = BadWords(["x"], lambda text: [])
    assert words.barred(0) == set()
    assert not words.bars_any(0)


def test_barred_tokens_equal_those_of_a_search_of_all_bad_words():
    random_words = random.Random(7)
    for _ in range(50):
        texts = ["".join(random_words.choices("abc", k=random_words.randint(1, 5))) for _ in range(12)]
        words = BadWords(texts, encode)
        spelled = {*texts, *(f" {text}" for text in texts)}
        history, state = "", 0
        for token in random_words.choices("abc ", k=60):
            expected = {ord(text[-1]) for text in spelled if history.endswith(text[:-1])}
            assert words.barred(state) == expected
            assert words.bars_any(state) == bool(expected)
            assert {token_id for token_id in range(128) if words.is_barred(state, token_id)} == expected
            assert cleared(words, state) == expected
            history += token
            state = words.after(state, ord(token))


def cleared(words: BadWords, state: int) -> set[int]:
    row = array("I", [0xFFFFFFFF] * 8)
    words.clear(row.buffer_info()[0], len(row), state)
    return {token_id for token_id in range(256) if not has_bit(row.tobytes(), token_id)}


def test_mask_bits_of_many_barred_tokens_are_cleared():
    words = BadWords(["a", *(f"a{chr(100 + index)}" for index in range(100))], encode)
    assert cleared(words, words.after(0, ord("a"))) == {ord("a"), *range(100, 200)}
    assert cleared(words, 0) == {ord("a")}


def test_a_barred_token_beyond_the_mask_row_is_ignored():
    words = BadWords(["a"], lambda text: [255 if text == "a" else 256])
    assert cleared(words, 0) == {255}


def test_number_of_cached_mask_rows_of_bad_words_is_bounded():
    texts = [chr(97 + first) + chr(200 + last) for first in range(20) for last in range(30)]
    words = BadWords(texts, encode)
    for first in range(20):
        assert len(cleared(words, words.after(0, 97 + first))) == 30
    assert len(words._rows) == ROWS_KEPT_MAX


class CountedSteps(str):
    """Counts the lookups of characters."""

    __slots__ = ()
    count = 0

    def __getitem__(self, index):
        CountedSteps.count += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("word_count", [10, 1000])
def test_cost_of_a_step_does_not_grow_with_bad_words_that_share_a_prefix(word_count):
    words = BadWords([f"{'a' * 120}{chr(1000 + index)}" for index in range(word_count)], encode)
    automaton = words._automaton
    assert automaton is not None
    automaton.next_characters = CountedSteps(automaton.next_characters)
    CountedSteps.count = 0
    state = 0
    for _ in range(500):
        state = words.after(state, ord("a"))
    assert CountedSteps.count <= 1000
    assert len(words.barred(state)) == word_count


def test_total_length_of_bad_words_is_bounded():
    SamplingParams(bad_words=("a" * 256,) * 128)
    with pytest.raises(InvalidRequest, match="32769 characters, allowed are 32768"):
        SamplingParams(bad_words=(*("a" * 256,) * 128, "b"))
