"""Tests of the scripted chat model: its rules, its default responses, and its output under a token mask."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing import open_memory_server
from trioserve.testing.byte_tokenizer import END_TOKEN_ID, byte_tokenizer
from trioserve.testing.scripted_model import FAMILIES, Call, PreferringModel, Rule, ScriptedChat, chat_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get_weather", "arguments": "{}"}}]}
RULES = [
    Rule(says="two cities", reasoning="Both.", calls=[Call(name=["fetch", "get_weather"], arguments={"city": "Bonn"})]),
    Rule(says="two cities", after=1, content="Warm."),
]


def prompt_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    template = byte_tokenizer(chat_template("hermes")).chat_template
    assert template is not None
    return template.render(ChatPrompt(messages=messages, tools=tools))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "messages, tools, said",
    [
        ([user("Hi")], None, "You said: Hi"),
        ([user("Hi")], [WEATHER], "You said: Hi"),
        (
            [user("What is the weather in Paris?")],
            [WEATHER],
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        ),
        (
            [user("two cities")],
            [WEATHER],
            "<think>\nBoth.\n</think>\n\n"
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
        ),
        ([user("two cities")], None, "You said: two cities"),
        ([user("two cities"), CALL, {"role": "tool", "content": "18"}], [WEATHER], "Warm."),
        ([user("one city"), CALL, {"role": "tool", "content": "18"}], [WEATHER], "The tool says: 18"),
    ],
)
def test_matching_rule_has_priority_over_the_default_response(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, said: str
) -> None:
    assert ScriptedChat("hermes", RULES).drafts(prompt_of(messages, tools))[0] == said


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_writes_a_tool_call_with_its_arguments(family: str) -> None:
    [first, *_] = ScriptedChat(family).drafts(prompt_of([user("The weather in Paris")], [WEATHER]))
    assert "get_weather" in first
    assert "Paris" in first


def said_under(is_allowed: Callable[[bytes, int], bool], *drafts: str, limit: int = 200) -> bytes:
    """Return the output of the model if a mask allows only some of the next bytes (256 is the end token)."""
    model = PreferringModel(lambda _: drafts)
    request = EngineRequest(
        id="a",  # type: ignore[arg-type]
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        output_tokens_max=limit,
        stop_token_ids=frozenset({END_TOKEN_ID}),
        seed=0,
    )
    said = b""
    for _ in range(limit):
        token_id = model.chosen_token_id(request, [1, *said], 0, functools.partial(is_allowed, said))
        assert token_id is not None
        if token_id == END_TOKEN_ID:
            return said
        said += bytes([token_id])
    raise AssertionError(f"it does not end: {said!r}")


def one_of(*texts: bytes) -> Callable[[bytes, int], bool]:
    def is_allowed(said: bytes, token_id: int) -> bool:
        if token_id == END_TOKEN_ID:
            return said in texts
        return any(text.startswith(said + bytes([token_id])) for text in texts)

    return is_allowed


def test_token_mask_has_priority_over_the_script() -> None:
    assert said_under(lambda *_: True, "Hello") == b"Hello"
    assert said_under(one_of(b"yes", b"no"), "no, never") == b"no"
    assert said_under(one_of(b'{ "city":"Paris" }'), "Well.", '{"city": "Paris"}') == b'{ "city":"Paris" }'


def test_scripted_chat_output_ends_soon_if_a_mask_prevents_the_script() -> None:
    def json_prefix(said: bytes, token_id: int) -> bool:
        """Allow any bytes, but the end token only after a JSON object."""
        if token_id != END_TOKEN_ID:
            return said != b"" or token_id == ord("{")
        try:
            return isinstance(json.loads(said), dict)
        except ValueError:
            return False

    assert said_under(json_prefix, "Hello") == b"{}"


async def test_server_answers_with_the_scripted_text() -> None:
    model = PreferringModel(ScriptedChat("hermes", RULES).drafts)
    tokenizer = byte_tokenizer(chat_template("hermes"))
    options: dict[str, Any] = {"max_model_len": 2000, "block_count": 600, "max_num_batched_tokens": 500}
    async with open_memory_server(
        model=model, tokenizer=tokenizer, served_model_name=("scripted",), **options
    ) as server:
        response = await server.client().post("/v1/chat/completions", {"messages": [user("Hello")]})
        body = await response.json()
    assert body["model"] == "scripted"
    assert body["choices"][0]["message"]["content"] == "You said: Hello"
