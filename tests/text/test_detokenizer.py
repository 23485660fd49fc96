"""Tests that streamed text equals the decoded text for any tokens, and never contains part of a character."""

from __future__ import annotations

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies

from trioserve.text.tokenizer import Tokenizer

SETTINGS = hypothesis.settings(deadline=None, database=None, max_examples=300)
FEW = hypothesis.settings(deadline=None, database=None, max_examples=100)

# Small token ids are special tokens and single bytes, so random small ids often form incomplete characters.
byte_level_ids = strategies.lists(strategies.integers(0, 280) | strategies.integers(0, 650), max_size=40)
sentence_piece_ids = strategies.lists(strategies.integers(0, 262) | strategies.integers(0, 520), max_size=40)


def streamed(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool, continues_text: bool = False) -> list[str]:
    decoder = tokenizer.new_decoder(skip, continues_text=continues_text)
    return [*map(decoder.push, token_ids), decoder.flush()]


@pytest.mark.slow
@SETTINGS
@hypothesis.given(token_ids=byte_level_ids, skip=strategies.booleans())
def test_joined_byte_level_deltas_equal_the_text_of_the_library(
    token_ids: list[int], skip: bool, byte_level: Tokenizer, byte_level_library: tokenizers.Tokenizer
) -> None:
    pieces = streamed(byte_level, token_ids, skip=skip)
    assert "".join(pieces) == byte_level.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == byte_level_library.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.slow
@FEW
@hypothesis.given(token_ids=strategies.lists(strategies.integers(0, 49_160), max_size=20), skip=strategies.booleans())
def test_joined_deltas_of_the_packaged_model_equal_the_text_of_the_library(
    token_ids: list[int], skip: bool, smollm2: Tokenizer, smollm2_library: tokenizers.Tokenizer
) -> None:
    joined = "".join(streamed(smollm2, token_ids, skip=skip))
    assert joined == smollm2_library.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.slow
@SETTINGS
@hypothesis.given(token_ids=sentence_piece_ids, skip=strategies.booleans())
def test_joined_sentence_piece_deltas_equal_the_decoded_text(
    token_ids: list[int], skip: bool, sentence_piece: Tokenizer, sentence_piece_library: tokenizers.Tokenizer
) -> None:
    joined = "".join(streamed(sentence_piece, token_ids, skip=skip))
    assert joined == sentence_piece.decode(token_ids, skip_special_tokens=skip)
    from_library = sentence_piece_library.decode(token_ids, skip_special_tokens=skip)
    if "�" not in from_library:  # Our result differs from the library's result only for an invalid run of byte tokens.
        assert joined == from_library
    else:
        assert "�" in joined


@SETTINGS
@hypothesis.given(text=strategies.text(max_size=30))
def test_detokenizer_returns_only_whole_characters(text: str, byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentence_piece):
        pieces = streamed(tokenizer, tokenizer.encode(text), skip=False)
        shown = "".join(pieces)
        assert shown.count("�") == text.count("�")
        assert pieces[-1] == ""


def test_detokenizer_returns_a_character_after_its_last_byte(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("🦆!")
    assert [piece for piece in streamed(byte_level, token_ids, skip=True) if piece] == ["🦆", "!"]


def test_an_incomplete_character_at_the_end_is_replaced_once(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a🦆")[:-1]
    assert streamed(byte_level, token_ids, skip=True)[-1] == "�"


def test_a_shown_special_token_within_a_character_splits_the_character(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("🦆")
    assert "".join(streamed(byte_level, [first, 0, *rest], skip=True)) == "🦆"
    assert "".join(streamed(byte_level, [first, 0, *rest], skip=False)).startswith("�<|end|>�")


def test_only_the_invalid_part_of_a_run_of_byte_tokens_is_replaced(
    sentence_piece: Tokenizer, sentence_piece_library: tokenizers.Tokenizer
) -> None:
    token_ids = [3 + byte for byte in "é".encode() + b"\xf0\x9f" + b"a"]
    assert "".join(streamed(sentence_piece, token_ids, skip=True)) == "é�a"
    assert sentence_piece_library.decode(token_ids) == "�����"


@pytest.mark.parametrize(("continues_text", "shown"), [(False, "the the"), (True, " the the")])
def test_detokenizer_keeps_a_leading_space_only_after_other_text(
    continues_text: bool, shown: str, sentence_piece: Tokenizer
) -> None:
    token_ids = sentence_piece.encode("the the")
    assert "".join(streamed(sentence_piece, token_ids, skip=True, continues_text=continues_text)) == shown


def test_joined_prompt_and_continuation_equal_the_decoded_whole(sentence_piece: Tokenizer) -> None:
    text = "the quick brown fox"
    token_ids = sentence_piece.encode(text)
    for cut in range(2, len(token_ids)):
        response = "".join(streamed(sentence_piece, token_ids[cut:], skip=True, continues_text=True))
        assert sentence_piece.decode(token_ids[:cut]) + response == text


def test_a_replacement_character_in_the_text_is_shown_at_once(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("�")
    assert streamed(byte_level, token_ids, skip=True)[-2:] == ["�", ""]
