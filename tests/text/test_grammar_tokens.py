"""Tests of added tokens that a grammar must name as tokens, since llguidance never matches them by their text."""

from __future__ import annotations

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from trioserve.testing.byte_tokenizer import byte_backend
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.restraints import forced_calls
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

PLAIN = ["<tool_call>", "</tool_call>", "<think>", "[TOOL]", "marker", "<|open", "<\uff5ctool\u2581begin\uff5c>"]


def tokenizer_with(names: list[str], *, special: bool = False) -> Tokenizer:
    backend = byte_backend(300)
    backend.add_tokens([tokenizers.AddedToken(name, special=special, normalized=False) for name in names])
    return Tokenizer(
        TokenizerParts(
            backend=backend, bos_token=None, eos_token="<|end|>", chat_template=None, tool_chat_template=None
        )
    )


def library_of(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.serialized(), n_vocab=tokenizer.vocab_size, eos_token=[299])


def test_special_ids_are_the_tokens_that_the_library_treats_as_special() -> None:
    tokenizer = tokenizer_with(PLAIN)
    library = library_of(tokenizer)
    named = tokenizer.special_ids()
    for token_id in range(300, tokenizer.vocab_size):
        text = tokenizer.token_text(token_id)
        assert (text in named) == library.is_special_token(token_id), text
    assert "<tool_call>" in named
    assert "marker" not in named


def test_a_forced_call_uses_markers_that_are_added_but_not_special() -> None:
    """In Qwen's vocabulary, the markers are added tokens that are not special.

    Only the token itself counts as the marker.
    """
    tokenizer = tokenizer_with(PLAIN)
    structured = forced_calls(
        "hermes",
        [OfferedTool(name="look", parameters={"type": "object", "properties": {}, "additionalProperties": False})],
        may_repeat=False,
        special_token_ids=tokenizer.special_ids(),
    )
    matcher = LLMatcher(library_of(tokenizer), LLMatcher.grammar_from_lark(structured.source))
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids[0] == tokenizer.special_ids()["<tool_call>"]
    assert matcher.validate_tokens(token_ids) == len(token_ids)
    assert matcher.compute_ff_tokens()[0] == token_ids[0]
