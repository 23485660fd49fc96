from __future__ import annotations

import pytest

from trioserve.text.bad_words import BadWords


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("history", "barred"),
    [
        ("", "x"),
        ("a", "xb"),  # "ab"
        (" ", "xx"),  # " x"
        ("ab", "xc"),  # "abc"
        ("zab", "xc"),
        (" a", "xb"),
    ],
)
def test_the_last_token_of_a_word_is_barred_behind_the_others(history, barred):
    words = BadWords(["ab", "abc", "x"], encode)
    assert words.barred(encode(history)) == set(encode(barred))
    assert words.history_max == 3


def test_a_word_alone_is_barred_everywhere():
    assert BadWords(["x"], lambda text: [7]).barred([1, 2, 3]) == {7}
