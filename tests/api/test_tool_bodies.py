"""Tests random bodies with tools, choices, schemas and reasoning: responses match their description, and no response is
a server fault.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from trioserve.api.error_responses import Error
from trioserve.api.openai import response_types as responses
from trioserve.testing.fake_engine import open_fake_engine

NAMES = ["look", "get_time", "a.b-c", "x" * 128]
SCHEMAS: list[Any] = [
    None,
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"enum": ["x", 1, None]}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
    {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(("}}, "required": ["a"]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HISTORY: list[Any] = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "gone"},
]
# The limit max_tokens may end these outputs at any position.
SAID = [
    '<tool_call>\n{"name": "look", "arguments": {"a": "x"}}\n</tool_call>',
    '<think>Hm.</think>Well. {"name": "look", "arguments": {}}',
    "<think>" * 3 + "</tool_call>" + '<tool_call>{"name": "look", "argum',
    '```json\n[{"name": "get_time", "arguments": {"a": [1, 2]}}]\n```\nDone.',
]
TOKENS = [1, 3, 8, 40, 120]


def body_of(draw: random.Random) -> dict[str, Any]:
    def named() -> dict[str, Any]:
        return {"type": "function", "function": {"name": draw.choice(NAMES)}}

    def tool() -> dict[str, Any]:
        function: dict[str, Any] = {"name": draw.choice(NAMES), "parameters": draw.choice(SCHEMAS)}
        return {"type": "function", "function": {**function, "strict": draw.choice([None, True, False])}}

    optional: dict[str, Any] = {
        "tool_choice": draw.choice(["auto", "none", "required", named()]),
        "parallel_tool_calls": draw.choice([None, True, False]),
        "response_format": draw.choice([{"type": "json_object"}, {"type": "text"}, None]),
        "guided_regex": "[ab]{2}",
        "reasoning_effort": draw.choice(["none", "low", "high"]),
        "thinking_token_budget": draw.choice([0, 1, 5]),
        "include_reasoning": draw.choice([True, False]),
        "logprobs": draw.choice([True, False]),
        "return_token_ids": True,
        "n": draw.choice([1, 3]),
        "stop": draw.choice(["}", "tool", "</"]),
        "ignore_eos": True,
        "stream_options": None,
    }
    chosen = {name: value for name, value in optional.items() if draw.random() < 0.35}
    if draw.random() < 0.2:
        choice = draw.choice(["auto", "required"])
        allowed = [named() for _ in range(draw.randint(0, 2))]
        chosen["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": choice, "tools": allowed}}
    tools = [tool() for _ in range(draw.randint(0, 2))]
    return {
        "messages": HISTORY[: draw.choice([1, 3])],
        "max_tokens": draw.choice(TOKENS),
        "stream": draw.random() < 0.5,
        **({"tools": tools} if draw.random() < 0.8 else {"functions": [one["function"] for one in tools]}),
        **chosen,
    }


@pytest.mark.slow
@pytest.mark.parametrize("said", [*SAID, None], ids=["call", "thought", "broken", "fenced", "random"])
async def test_every_response_matches_its_description(make_api: Any, said: str | None) -> None:
    draw = random.Random(repr(said))
    statuses = []
    async with open_fake_engine(
        response=said, reasoning_parser="qwen3", block_count=1024, max_model_len=4096, max_num_batched_tokens=4096
    ) as engine:
        api = make_api()
        api.engine = engine
        for _ in range(60):
            body = body_of(draw)
            exchange = await api.chat(**body)
            statuses.append(exchange.status)
            if exchange.status != 200:
                assert exchange.status == 400, (body, exchange.data)
                assert msgspec.json.decode(exchange.data, type=Error).error.param is not None, body
            elif not body["stream"]:
                whole = msgspec.json.decode(exchange.data, type=responses.ChatCompletion)
                for choice in whole.choices:
                    for call in choice.message.tool_calls or ():
                        assert isinstance(msgspec.json.decode(call.function.arguments), dict), body
            else:
                *events, done = exchange.events()
                assert done == "[DONE]", (body, done)
                for event in events:
                    msgspec.convert(event, responses.ChatCompletionChunk)
        assert statuses.count(200) > 10
        assert statuses.count(400) > 5
        engine.assert_all_free()
