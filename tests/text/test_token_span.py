"""Tests that the lower bound of a text's token count never exceeds the real count, for every kind of tokenizer."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.text.detokenizer import NFC_SHRINKS_AT_MOST, TokenSpan, byte_alphabet
from trioserve.text.request_texts import SLICE_CHARACTERS
from trioserve.text.tokenizer import Tokenizer

LONG_WORD = "=" * 40


def bytes_backend(*words: str, **model_options: Any) -> tokenizers.Tokenizer:
    """Make a byte-level vocabulary with additional words, each of which is one token."""
    vocabulary = {token: token_id for token_id, token in enumerate([*byte_alphabet(), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True, **model_options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def composing_backend() -> tokenizers.Tokenizer:
    backend = bytes_backend("".join(character for character in byte_alphabet() if character.isalpha()))
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    return backend


def space_taking_backend() -> tokenizers.Tokenizer:
    backend = bytes_backend()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<end>", rstrip=True)])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """Make a SentencePiece vocabulary in the form of newer tokenizer.json files."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁▁▁▁": 256, "▁": 257, "▁▁": 258}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("▁▁", "▁▁")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def incomplete_backend(**model_options: Any) -> tokenizers.Tokenizer:
    """Make a byte-level vocabulary that lacks tokens for the letter x and for bytes that UTF-8 never has."""
    vocabulary = {character: byte for character, byte in byte_alphabet().items() if byte != ord("x") and byte < 0xF5}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary | {"?": 256}, [], **model_options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


BOUNDED = {
    "bytes": bytes_backend,
    "long word": lambda: bytes_backend(LONG_WORD),
    "composing": composing_backend,
    "space taking": space_taking_backend,
    "metaspace": metaspace_backend,
    "incomplete": incomplete_backend,
    "unknown": lambda: incomplete_backend(unk_token="?", fuse_unk=True),
}

texts = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from(
            [" ", "\n", "a", "=", LONG_WORD, "▁", "<mask>", "<end>", "<|end|>", "<think>", "\u3000", "\x1c"]
        ),
        # NFC shortens these texts most: singletons, and letters with separate accents.
        st.sampled_from(["\u212a", "\u1fbe\u0308\u0301", "\u1100\u1161\u11a8", "\u212b\u0301", "\u1fef"]),
    ).map(lambda piece: piece * 3)
).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    backend = BOUNDED[name]()
    span = TokenSpan(backend)
    assert span.bytes_max is not None

    @given(texts)
    def check(text: str) -> None:
        assert span.token_count_min(text) <= len(backend.encode(text).ids)

    check()


@pytest.mark.slow
@given(texts)
def test_no_text_of_a_trained_vocabulary_has_fewer_tokens_than_the_bound(
    byte_level: Tokenizer, sentence_piece: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_level, sentence_piece):
        assert tokenizer.token_count_min("x" * 10_000) > 0
        assert tokenizer.token_count_min(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_of_several_slices_is_counted_completely(name: str) -> None:
    span = TokenSpan(BOUNDED[name]())
    assert span.bytes_max is not None
    for character in ("a", "é", "🦆"):
        byte_count = 3 * SLICE_CHARACTERS * len(character.encode())
        assert span.token_count_min(character * 3 * SLICE_CHARACTERS) == -(-byte_count // span.bytes_max)


def test_bytes_max_of_the_packaged_model_is_the_length_of_its_longest_token(smollm2: Tokenizer) -> None:
    longest = max(map(smollm2.token_bytes, range(smollm2.vocab_size)), key=len)
    text = longest.decode() * 1000
    assert smollm2.token_count_min(text) == 1000 <= len(smollm2.encode(text))


def test_characters_without_a_token_are_not_counted(smollm2: Tokenizer) -> None:
    """The packaged model's vocabulary has no token for some control characters, so the tokenizer drops them."""
    assert smollm2.encode("a" + "\x04" * 1000) == smollm2.encode("a")
    assert smollm2.token_count_min("a" + "\x04" * 1000) == 1


def test_bytes_max_of_single_byte_tokens_is_the_length_of_the_longest_special_token() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_count_min("<|end|>" * 50) == 50 == len(tokenizer.encode("<|end|>" * 50))


def test_spaces_are_not_counted_if_a_token_absorbs_them() -> None:
    backend = space_taking_backend()
    text = "<end>" + " \n\u3000" * 100_000
    assert len(backend.encode(text).ids) == 1
    assert TokenSpan(backend).token_count_min(text) == 1


def unknown_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="isolated")
    return backend


def compatibility_backend() -> tokenizers.Tokenizer:
    backend = bytes_backend()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])
    return backend


def deleting_backend() -> tokenizers.Tokenizer:
    backend = bytes_backend()
    backend.normalizer = normalizers.Replace("xx", "x")
    return backend


def pattern_backend() -> tokenizers.Tokenizer:
    backend = bytes_backend()
    backend.normalizer = normalizers.Replace(tokenizers.Regex("x+"), "x")
    return backend


def removing_backend() -> tokenizers.Tokenizer:
    backend = bytes_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", behavior="removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def words_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def incomplete_composing_backend() -> tokenizers.Tokenizer:
    backend = incomplete_backend()
    backend.normalizer = normalizers.NFC()
    return backend


def incomplete_fallback_backend() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(255)}, [], byte_fallback=True))


@pytest.mark.parametrize(
    "backend",
    [
        unknown_backend,
        compatibility_backend,
        deleting_backend,
        pattern_backend,
        removing_backend,
        words_backend,
        incomplete_composing_backend,
        incomplete_fallback_backend,
    ],
)
def test_no_minimum_token_count_if_tokenizer_may_drop_text(backend: Any) -> None:
    span = TokenSpan(backend())
    assert span.bytes_max is None
    assert span.token_count_min("x" * 100_000) == 0


@pytest.mark.slow
def test_nfc_shortens_no_text_by_more_than_the_factor() -> None:
    """The test compares the length of every character with the longest spellings of its decomposed parts."""
    characters = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point <= 0xDFFF]
    decomposed = {character: unicodedata.normalize("NFD", character) for character in characters}
    weight: dict[str, int] = {}  # Size of the longest character that NFD replaces by this one, in bytes.
    for character, parts in decomposed.items():
        if len(parts) == 1:
            weight[parts] = max(weight.get(parts, 0), len(character.encode()))
    for character, parts in decomposed.items():
        spelled = sum(weight[part] for part in parts)
        assert len(character.encode()) <= spelled  # So no other composed character is longer than its parts.
        if unicodedata.normalize("NFC", character) == character:
            assert spelled <= NFC_SHRINKS_AT_MOST * len(character.encode())
