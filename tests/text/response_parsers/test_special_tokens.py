"""Tests of call grammars for vocabularies in which the markers of the family are special tokens, as in real models."""

from __future__ import annotations

import llguidance
import msgspec
import pytest
import tokenizers

from trioserve.testing.byte_tokenizer import byte_backend
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.response_parts import WholeCall
from trioserve.text.restraints import forced_calls, strict_calls
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

PARIS = WholeCall("get_weather", '{"city": "Paris", "days": 3}')
WRONG = WholeCall("get_weather", '{"days": 3}')
FAMILIES = sorted(name for name, family in TOOL_FAMILIES.items() if family.special_tokens)
REASONING = sorted(name for name, family in REASONING_FAMILIES.items() if family.special_tokens)
VOCABULARY_TOKENS = 300


class Vocabulary:
    """A vocabulary of bytes and a family's special tokens."""

    def __init__(self, names: tuple[str, ...]) -> None:
        backend = byte_backend(VOCABULARY_TOKENS)
        backend.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
        self.tokenizer = Tokenizer(
            TokenizerParts(backend=backend, bos_token=None, eos_token=None, chat_template=None, tool_chat_template=None)
        )
        self._library = llguidance.LLTokenizer(
            self.tokenizer.serialized(), n_vocab=self.tokenizer.vocab_size, eos_token=[VOCABULARY_TOKENS - 1]
        )

    def takes(self, grammar: str, text: str) -> bool:
        problem = llguidance.LLMatcher.validate_grammar(grammar, self._library)
        assert not problem, (problem, grammar)
        matcher = llguidance.LLMatcher(self._library, grammar)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.validate_tokens(token_ids) == len(token_ids) and matcher.consume_tokens(token_ids)
        return taken and matcher.is_accepting()


@pytest.mark.parametrize("family", FAMILIES)
def test_grammar_of_forced_calls_uses_special_tokens_as_markers(tools, family):
    vocabulary = Vocabulary(TOOL_FAMILIES[family].special_tokens)
    special = vocabulary.tokenizer.special_ids()
    assert set(TOOL_FAMILIES[family].special_tokens) <= set(special)
    call_format = TOOL_FAMILIES[family].format_for(special)
    grammar = forced_calls(family, tools, may_repeat=True, special_token_ids=special).source
    assert vocabulary.takes(grammar, call_format.written([PARIS]))
    assert vocabulary.takes(grammar, call_format.written([PARIS, PARIS]))
    assert vocabulary.takes(grammar, call_format.written([WholeCall("get_weather", '{"city": "</a> </ <b"}')]))
    assert not vocabulary.takes(grammar, call_format.written([WRONG]))
    assert not vocabulary.takes(grammar, "Text. " + call_format.written([PARIS]))


@pytest.mark.parametrize("family", [name for name in FAMILIES if TOOL_FAMILIES[name].call_format.trigger])
def test_grammar_of_optional_strict_calls_uses_special_tokens_as_markers(tools, family):
    vocabulary = Vocabulary(TOOL_FAMILIES[family].special_tokens)
    special = vocabulary.tokenizer.special_ids()
    call_format = TOOL_FAMILIES[family].format_for(special)
    strict = [msgspec.structs.replace(tool, strict=True) for tool in tools]
    found = strict_calls(family, strict, may_repeat=True, special_token_ids=special)
    assert found is not None
    assert vocabulary.takes(found.source, "Text with < and </ in it.")
    assert vocabulary.takes(found.source, "Text. " + call_format.written([PARIS]))
    assert not vocabulary.takes(found.source, "Text. " + call_format.written([WRONG]))


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_keeps_special_tokens_if_the_request_offers_tools(family):
    tokenizer = Vocabulary(TOOL_FAMILIES[family].special_tokens).tokenizer
    families = ResponseFamilies(tokenizer, tool_call_parser=family, reasoning_parser="none")
    assert families.needs_special_tokens(has_tools=True)
    assert not families.needs_special_tokens(has_tools=False)


@pytest.mark.parametrize("family", REASONING)
def test_decoder_always_keeps_special_tokens_of_reasoning(family):
    tokenizer = Vocabulary(REASONING_FAMILIES[family].special_tokens).tokenizer
    families = ResponseFamilies(tokenizer, tool_call_parser="none", reasoning_parser=family)
    assert families.needs_special_tokens(has_tools=False)
    plain = ResponseFamilies(tokenizer, tool_call_parser="none", reasoning_parser="none")
    assert not plain.needs_special_tokens(has_tools=True)
