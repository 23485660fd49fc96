"""Tests of Tokenizer.encode, decode and the methods for single tokens, for both kinds of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

ROUND_TRIP_TEXTS = ["", "plain", " leading", "trailing ", "  two", "\n", "é🎉日本\u0000", "a\u200d\ufe0f", "x" * 5000]


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(
        TokenizerParts(backend=backend, bos_token=None, eos_token=None, chat_template=None, tool_chat_template=None)
    )


def words_backend(decoder: object) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoder
    return backend


@pytest.mark.parametrize("text", ROUND_TRIP_TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_decoding_an_encoded_text_returns_the_text(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud83d", "ab\udc00c", "\ud83d\ude00"])
def test_a_text_with_lone_surrogates_is_refused(text: str, byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D[8-F].. at character [02], which is half of a surrogate pair"):
        byte_level.encode(text)


def test_special_tokens_in_a_plain_text_become_special_tokens(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a<|end|>b")
    assert token_ids[1] == byte_level.eos_token_id == 0
    assert byte_level.decode(token_ids) == "ab"
    assert byte_level.decode(token_ids, skip_special_tokens=False) == "a<|end|>b"


def test_user_defined_tokens_are_one_token_and_not_hidden(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<think>x")[0] == 3
    assert 3 not in byte_level.special_token_ids
    assert 0 in byte_level.special_token_ids
    assert byte_level.decode([3, 0]) == "<think>"


def test_a_token_of_part_of_a_character_has_exact_bytes(byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentence_piece):
        token_ids = tokenizer.encode("🦆", add_special_tokens=False)
        assert len(token_ids) >= 4
        assert b"".join(map(tokenizer.token_bytes, token_ids)).lstrip(b" ") == "🦆".encode()
        assert tokenizer.token_text(token_ids[-1]) == "�"


@pytest.mark.slow
def test_bytes_of_every_token_equal_its_decoded_text(smollm2: Tokenizer) -> None:
    for token_id in range(smollm2.vocab_size):
        expected = smollm2.decode([token_id], skip_special_tokens=False)
        assert smollm2.token_text(token_id) == expected
        assert smollm2.token_bytes(token_id).decode("utf-8", "replace") == expected


def test_ids_without_a_text_decode_to_empty_text(byte_level: Tokenizer) -> None:
    for token_id in (-1, byte_level.vocab_size, 2**31, 2**32, 2**70):
        assert byte_level.token_text(token_id) == ""
        assert byte_level.token_bytes(token_id) == b""
        assert byte_level.decode([token_id]) == ""
        assert token_id not in byte_level.special_token_ids


def test_all_ids_with_a_text_are_below_vocab_size(byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentence_piece):
        assert tokenizer.token_text(tokenizer.vocab_size - 1) != ""
        assert tokenizer.token_text(tokenizer.vocab_size) == ""


@pytest.mark.parametrize("decoder", [decoders.WordPiece(cleanup=False), decoders.Metaspace()], ids=["bert", "xlm-r"])
def test_decoders_of_encoder_models_decode_like_the_library(decoder: decoders.Decoder) -> None:
    tokens = ["▁a", "b", "##c", "##", "▁", "é"]
    backend = tokenizers.Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, "b"))
    backend.decoder = decoder
    tokenizer = tokenizer_of(backend)
    for token_ids in ([0, 1, 2, 5], [1, 2, 2], [1, 0, 4, 5], [5], []):
        assert tokenizer.decode(token_ids) == backend.decode(token_ids)


def test_vocab_size_includes_added_tokens() -> None:
    backend = words_backend(None)
    backend.add_special_tokens(["<s>"])
    assert tokenizer_of(backend).vocab_size == 4


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    backend = words_backend(None)
    backend.enable_truncation(2)
    backend.enable_padding(length=8, pad_id=2, pad_token="?")
    assert tokenizer_of(backend).encode("hello world hello") == [0, 1, 0]


def test_words_of_a_tokenizer_without_decoder_are_joined_with_spaces() -> None:
    tokenizer = tokenizer_of(words_backend(None))
    assert tokenizer.decode([0, 1, 0]) == "hello world hello"
    assert tokenizer.token_text(1) == " world"


TO_SPACE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


@pytest.mark.parametrize("decoder", [
    decoders.CTC(),
    decoders.Sequence([BYTES, FUSE, TO_SPACE]),
    decoders.Sequence([TO_SPACE, BYTES, decoders.Strip(" ", 1, 0)]),
    decoders.Sequence([TO_SPACE, BYTES, FUSE, decoders.Strip(" ", 1, 1)]),
    decoders.Sequence([TO_SPACE, BYTES, FUSE, decoders.Strip("_", 1, 0)]),
])  # fmt: skip
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: object) -> None:
    with pytest.raises(ModelLoadError, match="supported are ByteLevel"):
        tokenizer_of(words_backend(decoder))


@pytest.mark.parametrize("decoder", [
    decoders.ByteLevel(),
    decoders.Sequence([decoders.ByteLevel()]),
    decoders.Sequence([TO_SPACE, BYTES, FUSE]),
    decoders.Sequence([TO_SPACE, BYTES, FUSE, decoders.Strip(" ", 2, 0)]),
])  # fmt: skip
def test_decoders_of_generative_models_decode_like_the_library(decoder: decoders.Decoder) -> None:
    tokens = ["▁a", "b▁", "▁", "<0x41>", "<0xC3>", "<0xA9>", "Ġx", "Ã", "©", "plain", "▁▁"]
    backend = tokenizers.Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, "plain"))
    backend.decoder = decoder
    tokenizer = tokenizer_of(backend)
    for token_ids in ([0, 1, 2, 3, 4, 5, 9], [2, 2, 2, 0], [10, 2, 0], [6, 7, 8, 9], [3], [], [2]):
        assert tokenizer.decode(token_ids) == backend.decode(token_ids)


def test_name_of_a_tokenizer_depends_on_vocabulary_and_template(byte_level: Tokenizer) -> None:
    decoder = decoders.WordPiece()
    names = {tokenizer_of(words_backend(decoder)).name() for _ in range(2)}
    parts = TokenizerParts(
        backend=words_backend(decoder), bos_token=None, eos_token=None, chat_template="{{ x }}", tool_chat_template=None
    )
    assert len(names) == 1
    assert len(names | {Tokenizer(parts).name(), byte_level.name()}) == 3


@pytest.mark.parametrize(("template", "ends"), [
    (None, [0]),
    ("{% for m in messages %}<|user|>{{ m['content'] }}<|begin|>\n{% endfor %}", [0, 1]),
    ("{% for m in messages %}<|user|>{{ m['content'] }} {{ eos_token }}{% endfor %}", [0]),
    ("{% for m in messages %}<|user|>{{ m['content'] }}\n{% endfor %}", [0]),
    ("{{ raise_exception('no') }}", [0]),
])  # fmt: skip
def test_end_tokens_are_eos_and_the_token_that_ends_a_turn_in_the_template(
    template: str | None, ends: list[int], byte_level_metadata: dict[str, Any]
) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.eos_token_id": 0}
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    assert list(Tokenizer.from_gguf(metadata).end_token_ids()) == ends
