"""Tests of a guide: masks, draft tokens and forced tokens agree with its results for single tokens."""

from __future__ import annotations

import ctypes
import json
from array import array

import hypothesis
import msgspec
import pytest
from hypothesis import strategies

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.guide import mask_words
from trioserve.contracts.sampling import SamplingParams, Thinking
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.sequence_guide import SequenceGuide

WORDS = mask_words(BYTE_VOCAB_SIZE)
COMPILER = GrammarCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,))
STOPS = frozenset((END_TOKEN_ID,))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "xy"]}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = StructuredOutput.json(SCHEMA)
REPEATED = '{"ab": "x", "a": "x", "ab": "x", "\\u0061": "x"}'
TEXTS = ('{"a": "x", "b": [1, 22]}', '{"a": "xy", "b": []}', '{"a": "xy", "b": [-7]}')


def guide_for(*, prompt: str = "say", stop_token_ids: frozenset[int] = STOPS, **sampling: object) -> SequenceGuide:
    prepared = GuideFactory(COMPILER).prepare(SamplingParams(**sampling))
    return prepared.new_guide(stop_token_ids, tuple(prompt.encode()))


def masks_of(guide: SequenceGuide, draft: tuple[int, ...] = (), *, vocab_size: int = BYTE_VOCAB_SIZE) -> list[set[int]]:
    row_words = mask_words(vocab_size)
    words = array("I", (0xA5A5A5A5,)) * (row_words * (1 + len(draft)))  # The rows contain values from an earlier step.
    guide.fill_masks(words.buffer_info()[0], row_words, draft)
    rows = [words[row * row_words : (row + 1) * row_words] for row in range(1 + len(draft))]
    found = [{token for token in range(32 * row_words) if row[token // 32] >> token % 32 & 1} for row in rows]
    assert all(token < vocab_size for row in found for token in row), "a bit beyond the vocabulary"
    return found


def walked(guide: SequenceGuide, text: str) -> SequenceGuide:
    for token in text.encode():
        assert token in masks_of(guide)[0]
        assert guide.accept(token)
    return guide


FREE_KEYS = StructuredOutput.json(
    {"type": "object", "additionalProperties": {"enum": ["x", "xy", [], [1, 22], [-7]]}, "minProperties": 2}
)
GUIDES = {
    "json with free keys": {"structured": FREE_KEYS},
    "json with free keys after reasoning": {
        "structured": msgspec.structs.replace(FREE_KEYS, free_until="</t>"),
        "thinking": Thinking(begin="<t>", end="</t>", tokens_max=4),
    },
    "json": {"structured": JSON},
    "json after free text": {"structured": StructuredOutput.json(SCHEMA, free_until="</t>")},
    "json after reasoning": {
        "structured": StructuredOutput.json(SCHEMA, free_until="</t>"),
        "thinking": Thinking(begin="<t>", end="</t>", tokens_max=4),
    },
    "reasoning": {"thinking": Thinking(end="</t>", tokens_max=4)},
    "json without x": {"structured": JSON, "bad_words": ("xy", "[]")},
    "few tokens": {"allowed_token_ids": tuple(b'{"abxy:, []0123456789-}<t>/')},
    "json of few tokens": {"structured": JSON, "allowed_token_ids": tuple(b'{"abxy:, []0123456789-}')},
}


@pytest.mark.parametrize("sampling", GUIDES.values(), ids=GUIDES.keys())
@hypothesis.settings(deadline=None, database=None, max_examples=60)
@hypothesis.given(
    text=strategies.sampled_from(
        (*TEXTS, *(f"<t>ab</t>{text}" for text in TEXTS), "<t>abcdefg", "ab</t>" + TEXTS[0], REPEATED)
    ),
    place=strategies.integers(0, 30),
    length=strategies.integers(0, 6),
    change=strategies.none() | strategies.integers(0, 5),
)
def test_token_masks_after_a_draft_equal_the_masks_after_accepting_its_tokens(sampling, text, place, length, change):
    tokens = text.encode()
    guide, twin = guide_for(**sampling), guide_for(**sampling)
    for token in tokens[:place]:
        if token not in masks_of(guide)[0]:
            break
        assert guide.accept(token)
        assert twin.accept(token)
    draft = list(tokens[place : place + length])
    if change is not None and change < len(draft):
        draft[change] = ord("#")
    draft = draft[: guide.acceptable_count(draft)]
    rows = masks_of(guide, tuple(draft))
    assert not draft or guide.wants_mask(draft) or all(len(row) == BYTE_VOCAB_SIZE for row in rows)
    for index, row in enumerate(rows):
        assert row == masks_of(twin)[0], f"after {bytes(draft[:index])!r}"
        if index < len(draft):
            assert draft[index] in row, "an accepted draft token is allowed"
            assert twin.accept(draft[index])
    assert masks_of(guide)[0] == rows[0], "fill_masks does not change the guide"


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_that_a_guide_forces_are_the_only_allowed_tokens(text):
    guide = guide_for(structured=JSON)
    tokens, place, forced_total = text.encode(), 0, 0
    while place < len(tokens):
        assert guide.accept(tokens[place])
        place += 1
        forced = guide.forced_tokens(100)
        assert forced == guide.forced_tokens(100), "forced_tokens does not change the guide"
        assert guide.forced_tokens(2) == forced[:2]
        for token in forced:
            assert masks_of(guide)[0] == {token}
            assert guide.accept(token)
        place, forced_total = place + len(forced), forced_total + len(forced)
    assert guide.is_over
    assert forced_total >= len('"a": "x, "b": [}') - 2
    assert json.loads(text)


EXCLUDED = {
    "the first token": ({"structured": JSON, "allowed_token_ids": tuple(b"0123")}, "at the beginning of the response"),
    "the second token": ({"structured": JSON, "allowed_token_ids": tuple(b"{}")}, "after '{'"),
    "a word": ({"structured": StructuredOutput.regex("abc"), "bad_words": ("b",)}, "after 'a'"),
    "a word in each branch": ({"structured": StructuredOutput.regex("(a|x)bc"), "bad_words": ("ab", "xb")}, "after"),
    "both fields together": (
        {"structured": StructuredOutput.choice(["ab", "ba"]), "allowed_token_ids": (97, 98), "bad_words": ("b",)},
        "allowed_token_ids and bad_words leave",
    ),
    "the grammar after reasoning": (
        {
            "structured": StructuredOutput.json(SCHEMA, free_until="</t>"),
            "thinking": Thinking(begin="<t>", end="</t>", tokens_max=4),
            "allowed_token_ids": tuple(b"abc"),
        },
        "at the beginning of the response",
    ),
    "all tokens, without a grammar": ({"allowed_token_ids": (97,), "bad_words": ("a",)}, "allow no token"),
}


@pytest.mark.parametrize(("sampling", "words"), EXCLUDED.values(), ids=EXCLUDED.keys())
def test_restrictions_that_make_the_grammar_unsatisfiable_are_refused(sampling, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        guide_for(**sampling)
    assert caught.value.param == next(name for name in ("allowed_token_ids", "bad_words") if name in sampling)


POSSIBLE = {
    "a way around a dead end": {"structured": StructuredOutput.regex("(a|x)bc"), "bad_words": ("ab",)},
    "a grammar that may end at once": {"structured": StructuredOutput.regex("b*"), "allowed_token_ids": (97,)},
    "a dead end after max_tokens": {"structured": StructuredOutput.regex("abc"), "bad_words": ("c",), "max_tokens": 2},
    "a dead end after a stop string": {
        "structured": StructuredOutput.regex("abc"),
        "bad_words": ("c",),
        "stop": ("b",),
    },
    "a dead end far away": {"structured": StructuredOutput.regex("a{40}b"), "bad_words": ("b",)},
    "more branches than are tried": {"structured": StructuredOutput.regex("[a-z]{4}0"), "bad_words": ("0",)},
}


@pytest.mark.parametrize("sampling", POSSIBLE.values(), ids=POSSIBLE.keys())
def test_restrictions_under_which_the_grammar_may_be_satisfiable_are_accepted(sampling):
    assert guide_for(**sampling).fault is None


def test_a_dead_end_that_is_found_later_sets_a_fault_that_names_the_field():
    guide = guide_for(structured=StructuredOutput.regex("a{40}b"), bad_words=("b",))
    walked(guide, "a" * 40)
    assert guide.fault is None
    assert masks_of(guide) == [set()]
    assert "bad_words" in guide.fault


def test_a_dead_end_after_a_draft_sets_no_fault_yet():
    guide = guide_for(structured=StructuredOutput.regex("(a{40}|c)b?"), bad_words=("ab",), max_tokens=60)
    walked(guide, "a" * 39)
    assert masks_of(guide, (97,)) == [{97}, {END_TOKEN_ID}]
    guide = guide_for(structured=StructuredOutput.regex("a{40}b"), bad_words=("b",))
    walked(guide, "a" * 39)
    assert masks_of(guide, (97,)) == [{97}, set()]
    assert guide.fault is None


@pytest.mark.parametrize("stop_token_ids", [STOPS, frozenset()])
def test_a_complete_grammar_ends_if_restrictions_exclude_its_further_tokens(stop_token_ids):
    sampling = {"structured": StructuredOutput.regex("a(c)?"), "allowed_token_ids": (97,)}
    guide = guide_for(**sampling, stop_token_ids=stop_token_ids)
    assert masks_of(walked(guide, "a")) == [{END_TOKEN_ID}]
    assert guide.accept(END_TOKEN_ID)
    assert guide.is_over


def test_a_token_that_the_grammar_excludes_sets_a_fault():
    guide = walked(guide_for(structured=JSON), '{"a": "x')
    assert not guide.accept(ord("z"))
    assert "cannot continue" in guide.fault
    assert masks_of(guide, (1, 2)) == [set(), set(), set()]


def test_stop_tokens_are_allowed_where_the_grammar_may_end_but_ignored_end_tokens_are_not():
    structured = StructuredOutput.regex("a+")
    assert masks_of(walked(guide_for(structured=structured), "a")) == [{ord("a"), END_TOKEN_ID}]
    assert masks_of(guide_for(structured=structured)) == [{ord("a")}]
    both = guide_for(structured=structured, stop_token_ids=frozenset((7, END_TOKEN_ID)))
    assert masks_of(walked(both, "a")) == [{ord("a"), 7, END_TOKEN_ID}]
    ignored = guide_for(structured=structured, stop_token_ids=frozenset((7,)))
    assert masks_of(walked(ignored, "a")) == [{ord("a"), 7}]


def test_a_response_cannot_end_before_its_grammar_begins():
    guide = guide_for(structured=StructuredOutput.regex("a+", free_until="</t>"))
    assert guide.wants_mask(())
    for token in b"b</t>":
        assert masks_of(guide) == [set(range(BYTE_VOCAB_SIZE)) - {END_TOKEN_ID}]
        assert guide.accept(token)
    assert masks_of(walked(guide, "a")) == [{ord("a"), END_TOKEN_ID}]


LIKE_REASONING = {
    "structured": StructuredOutput.regex("<t[a-c]+", free_until="</think>"),
    "thinking": Thinking(begin="<think>", end="</think>"),
}


@pytest.mark.parametrize(
    ("text", "next_tokens"),
    [
        ("", b"<"),
        ("<", b"t"),
        ("<t", b"habc"),  # After this token, only reasoning or only the grammar can continue.
        ("<ta", b"abc"),
        ("<th", b"i"),
        ("<think>x</think>", b"<"),
        ("<think>x</think><ta", b"abc"),
    ],
)
def test_a_grammar_may_begin_like_reasoning(text, next_tokens):
    guide = walked(guide_for(**LIKE_REASONING), text)
    assert masks_of(guide)[0] - {END_TOKEN_ID} == set(next_tokens)
    for token in guide.forced_tokens(10):
        assert masks_of(guide)[0] == {token}
        assert guide.accept(token)


@pytest.mark.parametrize(
    ("sampling", "is_free"),
    [
        ({"thinking": Thinking(end="</t>")}, True),
        ({"thinking": Thinking(end="</t>", tokens_max=2)}, True),
        ({"thinking": Thinking(end="</t>", tokens_max=1)}, False),
        ({"structured": JSON}, False),
        ({"structured": StructuredOutput.json(SCHEMA, free_until="</t>")}, False),
        ({"allowed_token_ids": (1,)}, False),
        ({"bad_words": ("ab",)}, False),
    ],
)
def test_is_free_ahead_is_true_only_if_no_token_changes_later_masks(sampling, is_free):
    assert guide_for(**sampling).is_free_ahead is is_free


def test_a_row_without_restraints_has_exactly_the_bits_of_the_vocabulary():
    assert masks_of(guide_for(thinking=Thinking(end="</t>")), (1, 2)) == [set(range(BYTE_VOCAB_SIZE))] * 3
    assert ctypes.sizeof(ctypes.c_uint32) == 4
