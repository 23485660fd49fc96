"""Tests reasoning, tool calls and schemas in the Responses API with the whole engine."""

from __future__ import annotations

import json

import pytest

from .conftest import text_of

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
WASH = {"type": "function", "name": "wash", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "description": "Freely."}
THINKS = "<think>\nI should look.\n</think>\n\nIt rains."
CALLS = 'So:\n<tool_call>\n{"name": "wash", "arguments": {"colour": "blue"}}\n</tool_call>'


async def both(api, **fields):
    """Return a whole response, and the events of a streamed response. Check that both responses are equal except for
    their ids.
    """
    whole = await api.ask(**fields, store=False)
    *events, last = await api.stream(**fields, store=False)

    def shape(response):
        drop = ("id", "call_id")
        return [{name: value for name, value in item.items() if name not in drop} for item in response["output"]]

    assert shape(last["response"]) == shape(whole)
    return whole, events


async def test_reasoning_is_a_separate_item_of_a_response(opened, autojump_clock):
    async with opened(response=THINKS, reasoning_parser="qwen3") as api:
        response, events = await both(api, input="Oslo?")
        thought, message = response["output"]
        assert [part["text"].strip() for part in thought["content"]] == ["I should look."]
        assert message["content"][0]["text"].strip() == "It rains."
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 10
        deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought["content"][0]["text"]
        response, _ = await both(api, input="Oslo?", reasoning={"summary": "auto"})
        assert response["output"][0]["summary"] == [{**thought["content"][0], "type": "summary_text"}]


async def test_thinking_budget_ends_the_reasoning(opened, autojump_clock):
    async with opened(response=THINKS, reasoning_parser="qwen3") as api:
        response, _ = await both(api, input="Oslo?", thinking_token_budget=4)
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] < 10 + len("</think>")


async def test_tool_call_and_its_result_continue_a_conversation(opened, autojump_clock):
    async with opened(response=CALLS, tool_call_parser="hermes") as api:
        response, _ = await both(api, input="Go.", tools=[WASH])
        message, call = response["output"]
        assert message["content"][0]["text"].strip() == "So:"
        assert (call["type"], call["name"], call["status"]) == ("function_call", "wash", "completed")
        assert json.loads(call["arguments"]) == {"colour": "blue"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        stored = await api.ask(input="Go.", tools=[WASH])
        await api.ask(input=[result], previous_response_id=stored["id"], tools=[WASH])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "wash"}])
async def test_tool_choice_of_a_response_forces_a_tool_call(opened, autojump_clock, choice):
    async with opened(response=None, max_num_batched_tokens=2048) as api:
        response, _ = await both(api, input="Go.", tools=[WASH], tool_choice=choice, seed=1)
        assert {item["type"] for item in response["output"]} == {"function_call"}
        for call in response["output"]:
            assert json.loads(call["arguments"]) == {"colour": "blue"}


async def test_forced_custom_tool_call_has_plain_text_input(opened, autojump_clock):
    said = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}\n</tool_call>'
    async with opened(response=said, tool_call_parser="hermes") as api:
        choice = {"type": "custom", "name": "patch"}
        fields = {"input": "Go.", "tools": [PATCH, WASH], "tool_choice": choice, "parallel_tool_calls": False}
        response, events = await both(api, **fields)
        [call] = response["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "*** Begin\n+x")
        assert "response.custom_tool_call_input.done" in [event["type"] for event in events]


@pytest.mark.parametrize("strict", [True, None, False])
async def test_output_of_a_response_follows_the_schema(opened, autojump_clock, strict):
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": strict}
    async with opened(response=None) as api:
        response, _ = await both(api, input="Go.", text={"format": form})
        assert json.loads(text_of(response)) == {"colour": "blue"}
        assert response["text"]["format"]["schema"] == SCHEMA


async def test_unsupported_schema_is_refused_with_its_path(opened, autojump_clock):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}
    async with opened() as api:
        error = await api.ask(input="Go.", text={"format": form}, status=400)
        assert error["param"].startswith("text.format")
