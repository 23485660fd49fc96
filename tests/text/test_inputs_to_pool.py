"""Tests of inputs for pooling models: pairs of texts, truncation, and the token that each label adds."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import Cut
from trioserve.text.tokenizer import EncodedInput, Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e", "yes", "no", "y", "##es")
CLS, SEP, A, B, C, D, E = 2, 3, 4, 5, 6, 7, 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Make a tokenizer like that of BERT: [CLS] and [SEP] around a text, and [SEP] after the second text of a pair."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(WORDS[:4]))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    parts: dict[str, Any] = {"bos_token": None, "eos_token": None, "chat_template": None, "tool_chat_template": None}
    return Tokenizer(TokenizerParts(backend=backend, **parts))


@pytest.mark.parametrize(
    "cut, expected",
    [
        (None, [CLS, A, B, C, D, SEP]),
        (Cut(6), [CLS, A, B, C, D, SEP]),
        (Cut(5), [CLS, A, B, C, SEP]),
        (Cut(5, "left"), [CLS, B, C, D, SEP]),
        (Cut(3), [CLS, A, SEP]),
        (Cut(2), [CLS, SEP]),
        (Cut(1), [CLS]),
    ],
)
def test_special_tokens_around_a_text_are_never_truncated(
    cut: Cut | None, expected: list[int], tokenizer: Tokenizer
) -> None:
    assert tokenizer.encode_input("a b c d", cut=cut) == EncodedInput(expected)


def test_only_the_text_is_encoded_if_special_tokens_are_not_requested(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_input("a b c", add_special_tokens=False, cut=Cut(2)).token_ids == [A, B]


@pytest.mark.parametrize(
    "first, second, tokens_max, expected, first_segment_tokens",
    [
        ("a b", "c d", 99, [CLS, A, B, SEP, C, D, SEP], 4),
        ("a b", "c d", 7, [CLS, A, B, SEP, C, D, SEP], 4),
        ("a", "b c d e", 6, [CLS, A, SEP, B, C, SEP], 3),  # The longer text is truncated.
        ("a b c d", "e", 6, [CLS, A, B, SEP, E, SEP], 4),
        ("a b c d", "b c d e", 7, [CLS, A, B, SEP, B, C, SEP], 4),
        ("a b c d", "b c d e", 8, [CLS, A, B, SEP, B, C, D, SEP], 4),
    ],
)
def test_the_longer_text_of_a_pair_is_truncated_first(
    first: str,
    second: str,
    tokens_max: int,
    expected: list[int],
    first_segment_tokens: int,
    tokenizer: Tokenizer,
) -> None:
    encoded = tokenizer.encode_input(first, second, cut=Cut(tokens_max))
    assert encoded == EncodedInput(expected, first_segment_tokens)


@pytest.mark.parametrize("text", ["a b ", "a[SEP]b ", "a[SEP]"])
def test_each_label_has_the_id_of_the_token_that_it_adds(text: str, tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_labelled(text, ["c", "no"], add_special_tokens=False)
    assert encoded.token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert encoded.label_token_ids == (C, WORDS.index("no"))


@pytest.mark.parametrize(
    "text, labels, wrong",
    [
        ("a ", ["b c"], "b c"),  # This label has two tokens.
        ("a ", ["b", " b"], " b"),  # Both labels have the same token.
        ("a y", ["es"], "es"),  # This label changes the preceding tokens.
        ("a", [""], ""),
        ("a[SEP]", [""], ""),
    ],
)
def test_label_that_does_not_add_exactly_one_token_is_refused(
    text: str, labels: list[str], wrong: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_labelled(text, labels, add_special_tokens=False)
    assert f"the label {wrong!r} is not one token" in str(caught.value)
