"""Tests that a response writes each key of a JSON object only once, and without escapes.

The tests generate responses token by token.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.byte_tokenizer import END_TOKEN, byte_backend
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.json_keys import JsonKeys, KeyTokens, has_free_keys
from trioserve.text.mask_bits import set_all_bits
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.restraints import forced_calls
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

from .test_sequence_guide import masks_of

# These tokens begin, end or contain one or several keys, like tokens in vocabularies for code.
PIECES = (
    *('"a"', '"a": ', '"ab', 'a"', 'b": ', ', "', '", "', '{"', '{"a": ', '": 1', '": 1, "', '": 1, "a"', '1, "b": '),
    *(
        '"}, "',
        '}, "a": ',
        '": {"a": ',
        "\\u",
        '"\\u',
        "\\u0061",
        '": 1, "\\u',
        "u0061",
        "bb",
        '""',
        '"": ',
        "\\n",
        "{}",
    ),
)
VOCAB_SIZE = 256 + len(PIECES) + 1
END = VOCAB_SIZE - 1


def tokenizer_with_pieces() -> Tokenizer:
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {text: token_id for text, token_id in byte_backend(257).get_vocab().items() if token_id < 256}
    vocab |= {written.pre_tokenize_str(piece)[0][0]: 256 + place for place, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = written
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END_TOKEN, special=True)])
    return Tokenizer(
        TokenizerParts(
            backend=backend, bos_token=None, eos_token=END_TOKEN, chat_template=None, tool_chat_template=None
        )
    )


TOKENIZER = tokenizer_with_pieces()
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, end_token_ids=(END,))
ONE = {"enum": [1, 2]}
INNER = {"type": "object", "additionalProperties": ONE, "maxProperties": 3}
SCHEMAS: dict[str, dict[str, Any]] = {
    "additionalProperties": {"type": "object", "additionalProperties": ONE, "minProperties": 2},
    "beside a listed one": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"const": 2},
        "minProperties": 2,
        "maxProperties": 4,
    },
    "optional listed ones": {"type": "object", "properties": {"a": ONE, "b": ONE}, "additionalProperties": ONE},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^[ab]+$": ONE},
        "additionalProperties": False,
        "minProperties": 3,
    },
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": ONE},
    "nested": {"type": "object", "additionalProperties": INNER, "minProperties": 2, "maxProperties": 4},
    "in an array": {"type": "array", "items": INNER, "minItems": 2, "maxItems": 3},
    "references": {
        "$defs": {"tree": {"type": "object", "additionalProperties": {"anyOf": [{"$ref": "#/$defs/tree"}, ONE]}}},
        "$ref": "#/$defs/tree",
    },
    "anything": {"type": "object"},
}


def guide_for(schema: dict[str, Any]) -> SequenceGuide:
    sampling = SamplingParams(structured=StructuredOutput.json(schema))
    return GuideFactory(COMPILER).prepare(sampling).new_guide(frozenset((END,)), ())


def allowed(guide: SequenceGuide) -> set[int]:
    [row] = masks_of(guide, vocab_size=VOCAB_SIZE)
    return row


def faults(text: bytes) -> tuple[bool, bool]:
    r"""Return two booleans for the beginning of a JSON text: if it repeats a key, and if a key contains a \u escape."""
    stack: list[set[bytes] | None] = []
    is_key_next, repeats, escapes = False, False, False
    for found in re.finditer(rb'"((?:[^"\\]|\\.)*)("?)|[{}\[\],]', text, re.DOTALL):
        sign = found[0][:1]
        if sign == b'"':
            if is_key_next:
                escapes |= b"u" in re.findall(rb"\\(.)", found[1])
                if found[2]:
                    assert stack[-1] is not None
                    repeats |= found[1] in stack[-1]
                    stack[-1].add(found[1])
            is_key_next = False
        elif sign in b"{[":
            stack.append(set() if sign == b"{" else None)
            is_key_next = sign == b"{"
        elif sign in b"}]":
            stack.pop()
            is_key_next = False
        else:
            is_key_next = bool(stack) and stack[-1] is not None
    return repeats, escapes


def pairs_of(text: bytes) -> list[list[str]]:
    """Return the keys of each object in a JSON text."""
    seen: list[list[str]] = []
    json.loads(text, object_pairs_hook=lambda pairs: seen.append([key for key, _ in pairs]) or dict(pairs))
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_only_tokens_that_repeat_or_escape_a_json_key_are_cleared(schema, seed):
    rng = random.Random(seed)
    guide, free = guide_for(schema), guide_for(schema)
    free._keys = None
    text = b""
    for step in range(120):
        tokens, before = allowed(guide), allowed(free)
        assert tokens <= before
        for token in before:
            repeats, escapes = faults(text + (b"" if token == END else TOKENIZER.token_bytes(token)))
            assert (token in tokens) == (not repeats and not escapes), (text, TOKENIZER.token_bytes(token))
        if END in tokens and (step > 60 or len(tokens) == 1):
            break
        likely = [token for token in tokens if token >= 256 and token != END] or sorted(tokens - {END})
        letters = [token for token in tokens if token in set(b'ab"1}')]
        token = rng.choice(letters if letters and (rng.random() < 0.5 or step > 60) else likely)
        text += TOKENIZER.token_bytes(token)
        assert guide.accept(token)
        assert free.accept(token)
        if guide.is_over:
            break
    else:
        return
    keys = pairs_of(text)
    assert all(len(one) == len(set(one)) for one in keys), text
    if isinstance(json.loads(text), dict):
        assert len(json.loads(text)) >= schema.get("minProperties", 0)


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {"\u0001": ONE}, "required": ["\u0001"]}])
def test_a_listed_key_that_needs_an_escape_can_be_written(schema):
    guide = guide_for(schema)
    for token in b'{"\\u0001": 1':
        assert token in allowed(guide)
        assert guide.accept(token)


def test_guide_reports_the_cause_if_no_new_key_is_possible():
    guide = guide_for(
        {
            "type": "object",
            "patternProperties": {"^(?:aa|[bc]{6,9})$": {"const": 1}},
            "additionalProperties": False,
            "minProperties": 2,
        }
    )
    for token in b'{"aa": 1, "a':
        assert token in allowed(guide)
        assert guide.accept(token)
    assert guide.forced_tokens(9) == (ord("a"),)
    assert guide.accept(ord("a"))
    assert guide.forced_tokens(9) == ()
    assert allowed(guide) == set()
    assert "no key here" in guide.fault


def test_draft_tokens_from_a_repeated_key_on_are_rejected():
    guide = guide_for(SCHEMAS["additionalProperties"])
    draft = list(b'{"ab": 1, "b": 2, "ab": 1}')
    assert guide.acceptable_count(draft) == len(b'{"ab": 1, "b": 2, "ab')
    assert guide.acceptable_count(list(b'{"\\u0061')) == len(b'{"\\')


def calls_guide(format: str, parameters: dict[str, Any]) -> SequenceGuide:
    tool = OfferedTool(name="look", parameters=parameters)
    structured = forced_calls(format, [tool], may_repeat=True, special_token_ids={})
    return GuideFactory(COMPILER).prepare(SamplingParams(structured=structured)).new_guide(frozenset((END,)), ())


@pytest.mark.parametrize(
    ("format", "begin", "end"),
    [
        ("hermes", '<tool_call>\n{"name": "look", "arguments": ', "}\n</tool_call>"),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": ', "}, "),
    ],
)
def test_a_key_in_arguments_of_calls_cannot_be_repeated(format, begin, end):
    guide = calls_guide(format, {"type": "object", "properties": {"a": ONE}, "additionalProperties": ONE})
    for token in f'{begin}{{"a": 1, "b": 2, "b'.encode():
        assert token in allowed(guide)
        assert guide.accept(token)
    assert ord('"') not in allowed(guide)
    for token in f'b": 1}}{end}'.encode():
        assert token in allowed(guide)
        assert guide.accept(token)


@pytest.mark.parametrize(("format", "begin"), [("olmo3", "<function_calls>\n"), ("llama4_pythonic", "[")])
def test_braces_in_the_text_around_arguments_do_not_open_objects(format, begin):
    guide = calls_guide(
        format,
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "object"}}, "required": ["a", "b"]},
    )
    for token in f'{begin}look(a="x{{", b={{"x": {{"x": 1, "y'.encode():
        assert token in allowed(guide)
        assert guide.accept(token)
    assert ord('"') in allowed(guide)
    for token in b'": 1}, "x':
        assert token in allowed(guide)
        assert guide.accept(token)
    assert ord('"') not in allowed(guide)


def test_keys_are_not_tracked_in_formats_with_free_text():
    assert calls_guide("kimi_k3", {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}})._keys is None


def test_keys_are_tracked_only_for_schemas_with_free_keys():
    closed = {"type": "object", "properties": {"a": ONE, "b": {"type": "array", "items": ONE}}}
    assert has_free_keys(closed)
    assert not has_free_keys({**closed, "additionalProperties": False})
    assert not has_free_keys({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"})
    assert not has_free_keys({"anyOf": [{"type": "null"}, {**closed, "additionalProperties": False}]})
    assert has_free_keys({"anyOf": [{"type": "null"}, closed]})
    assert has_free_keys({"type": "array"})
    assert has_free_keys({"type": "array", "items": {}})
    assert has_free_keys({"type": "array", "items": True})
    assert has_free_keys({"$ref": "#/elsewhere"})


def test_cost_of_a_mask_row_does_not_grow_with_the_number_of_json_keys():
    """Possible ends of a key are looked up by token, so it does not matter how many keys begin like the current key."""
    asked: list[bytes] = []

    class Counted(KeyTokens):
        def beginning_with(self, text):
            asked.append(text)
            return super().beginning_with(text)

    keys = JsonKeys(Counted(VOCAB_SIZE, TOKENIZER.token_bytes))
    for number in range(500):
        keys = keys.after(b'%b"k%d": 1' % (b"," if number else b"{", number))
    keys = keys.after(b', "k1')
    [row] = masks_of(KeysOnly(keys), vocab_size=VOCAB_SIZE)
    assert ord('"') not in row
    assert asked == [b'"']


class KeysOnly:
    """A minimal guide that fills a mask row and clears the tokens of repeated keys."""

    def __init__(self, keys: JsonKeys) -> None:
        self._keys = keys

    def fill_masks(self, address: int, words: int, draft: tuple[int, ...]) -> None:
        set_all_bits(address, words, VOCAB_SIZE)
        self._keys.prune(address, words)
