"""Tests grammars of forced calls with random texts: each text that a grammar allows is parsed as valid calls."""

from __future__ import annotations

import json
import random

import llguidance
import llguidance.numpy
import pytest

from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import JoinedResponse
from trioserve.text.restraints import forced_calls

jsonschema = pytest.importorskip("jsonschema", reason="it comes with canitoolcall: pip install trioserve[test]")

TOOLS = [
    OfferedTool(
        name="get_weather",
        strict=True,
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["c", "f"]},
                "hot": {"type": "boolean"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    OfferedTool(name="get_time", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
    OfferedTool(
        name="write",
        parameters={
            "type": "object",
            "properties": {
                "content": {"type": ["string", "null"]},
                "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
                "mark": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            },
            "$defs": {
                "line": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
            },
            "additionalProperties": False,
        },
    ),
]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
WALK_BYTES_MAX = 250
FAMILIES = sorted({id(family): name for name, family in TOOL_FAMILIES.items()}.values())


def walk(grammar: str, drawn: random.Random) -> str | None:
    """Return a random text that the grammar allows, or None if it exceeds WALK_BYTES_MAX."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, grammar)
    mask = llguidance.numpy.allocate_token_bitmask(1, tokens.vocab_size)
    text = bytearray()
    while len(text) < WALK_BYTES_MAX:
        if matcher.is_stopped() or (matcher.is_accepting() and drawn.random() < 0.7):
            return text.decode("utf-8", errors="replace")
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = [byte for byte in range(256) if mask[0, byte // 32] >> (byte % 32) & 1]
        telling = [byte for byte in allowed if chr(byte) in "ab1<>/\"\n}],\\' "]
        byte = drawn.choice(telling if telling and drawn.random() < 0.9 else allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_of_the_grammar_is_parsed_as_calls_that_follow_their_schemas(family):
    walked = 0
    for seed in range(6):
        drawn = random.Random(seed)
        tools = TOOLS if seed % 4 else [TOOLS[seed // 4 % 3]]
        structured = forced_calls(family, tools, may_repeat=bool(seed % 2), special_token_ids={})
        text = walk(structured.source, drawn)
        if text is None:
            continue
        walked += 1
        parser = make_response_parser(family, None, tools=TOOLS)
        joined = JoinedResponse(parser.feed(text))
        joined.take(parser.end())
        assert joined.content.strip() == "", text
        assert len(joined.calls) == 1 or (joined.calls and seed % 2), text
        for call in joined.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert walked or TOOL_FAMILIES[family].call_format.before  # Reasoning of random bytes hardly ever ends.
