"""Tests a router in front of two real engines. If one engine breaks, the client's response is the same as an
uninterrupted response.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Oslo?"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOT_COMPARED = {"prompt_tokens_details"}  # These fields are not compared, because the number of cached tokens differs.

CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "text": (TEXT, "good morning", {"prompt": "hello", "max_tokens": 8}),
    "sampled": (TEXT, None, {"prompt": "hello", "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}),
    "two choices": (TEXT, None, {"prompt": "hi", "max_tokens": 5, "temperature": 1.0, "n": 2}),
    "two prompts": (TEXT, None, {"prompt": ["one", "two"], "max_tokens": 5, "ignore_eos": True}),
    "a stop string": (TEXT, "one two STop three STOP four", {"prompt": "x", "max_tokens": 40, "stop": ["STOP", "zz"]}),
    "many bytes": (TEXT, "zwölf 🍎 für 5 €", {"prompt": "x", "max_tokens": 60}),
    "log probabilities": (TEXT, "good", {"prompt": "hello", "max_tokens": 4, "logprobs": 2, "echo": True}),
    "a chat": (CHAT, "good morning", {"messages": USER, "max_tokens": 8}),
    "a call": (CHAT, CALL, {"messages": USER, "max_tokens": 200, "tools": [WEATHER]}),
}


def said(body: bytes) -> dict[str, Any]:
    """Return the content of the events, regardless of how the tokens are grouped into events."""
    made: dict[str, Any] = {"heads": set(), "choices": {}, "usage": None, "ends": 0}
    for line in body.splitlines():
        if line == b"data: [DONE]":
            made["ends"] += 1
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            made["heads"].add((event["id"], event["object"], event["created"]))
            if event.get("usage"):
                assert made["usage"] is None, "usage is sent once"
                made["usage"] = {name: value for name, value in event["usage"].items() if name not in NOT_COMPARED}
            for choice in event["choices"]:
                _add(made["choices"].setdefault(choice.pop("index"), {}), choice)
        else:
            assert not line or line.startswith(b":"), line
    return made


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif isinstance(value, str) and name in ("text", "content", "arguments", "reasoning_content"):
            whole[name] = whole.get(name, "") + value
        elif name == "tool_calls":
            for call in value:
                _add(whole.setdefault("calls", {}).setdefault(call.pop("index"), {}), call)
        elif isinstance(value, list):
            whole[name] = whole.get(name, []) + value
        elif value is not None:
            whole.setdefault(name, []).append(value)  # If a value came twice, the two lists would differ.


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_response_is_the_same_wherever_its_endpoint_breaks(open_setup, read_cut, name):
    path, response, fields = CASES[name]
    body = {"model": "fake", "seed": 5, **USAGE, **fields}
    engine = {
        "paused": True,
        "response": response,
        "block_count": 512,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
    }
    async with open_setup(engine=engine, failures_max=1_000_000, continuations_per_second_max=1e6) as setup:
        # The loop starts at step 1, because the response may differ before the first token.
        step, undisturbed, is_over = 1, None, False
        while not is_over:
            answer, is_over = await read_cut(setup, path, body, step=step)
            made = said(answer.body)
            assert made.pop("ends") == 1
            undisturbed = undisturbed or made
            without_time = [
                {**each, "heads": {(id, kind) for id, kind, _ in each["heads"]}} for each in (made, undisturbed)
            ]
            assert without_time[0] == without_time[1], f"cut behind step {step}"
            assert len(made["heads"]) == 1
            step += 1
        assert step > 3
        for id in "ab":
            setup.servers[id].engine.resume()
        await setup.assert_all_free()
