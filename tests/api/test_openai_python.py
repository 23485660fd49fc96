"""Tests the unmodified openai-python with the whole server in memory: parse(), tools, and the stream helper of
chats.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import trio

from trioserve.testing.httpx_transport import MemoryTransport
from trioserve.testing.memory_server import open_memory_server

# The client drops its async generators after the last event without closing them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

USER: Any = {"role": "user", "content": "Weather in Oslo?"}
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo", "unit": "celsius"}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    unit: Literal["celsius"]


class Verdict(pydantic.BaseModel):
    ok: bool
    colour: Literal["red", "green"]


@asynccontextmanager
async def opened(response: str | None, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Open a server whose model outputs `response`. None: random text, unless a grammar restricts it."""
    async with (
        open_memory_server(
            response=response, block_count=512, max_model_len=2048, max_num_batched_tokens=2048, **options
        ) as server,
        httpx.AsyncClient(transport=MemoryTransport(server.client)) as web,
        openai.AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        yield client
        await trio.testing.wait_all_tasks_blocked()
        await server.assert_all_free()


async def test_openai_parse_returns_a_value_of_the_type() -> None:
    async with opened(None) as client:
        completion = await client.chat.completions.parse(model="fake", messages=[USER], response_format=Verdict)
        assert isinstance(completion.choices[0].message.parsed, Verdict)


async def test_openai_parse_returns_the_arguments_of_a_tool() -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    async with opened(None) as client:
        completion = await client.chat.completions.parse(
            model="fake", messages=[USER], tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        [call] = completion.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)


async def test_openai_client_continues_a_conversation_with_a_tool_result() -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    async with opened(CALL) as client:
        first = await client.chat.completions.create(model="fake", messages=[USER], tools=[tool])
        message = first.choices[0].message
        assert message.tool_calls is not None
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        said: Any = message.model_dump(exclude_none=True)
        second = await client.chat.completions.create(model="fake", messages=[USER, said, result], tools=[tool])
        assert second.usage is not None
        assert first.usage is not None
        assert second.usage.prompt_tokens > first.usage.prompt_tokens + len("rain")


async def test_openai_stream_helper_follows_a_tool_call() -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    async with opened("I look. " + CALL) as client:
        async with client.chat.completions.stream(model="fake", messages=[USER], tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.done") == 1
        assert {"content.delta", "tool_calls.function.arguments.delta", "chunk"} <= set(kinds)
        [choice] = final.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        call = choice.message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("Weather", {"city": "Oslo", "unit": "celsius"})
        assert call.parsed_arguments == Weather(city="Oslo", unit="celsius")


async def test_openai_stream_helper_refuses_a_partial_tool_call() -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    async with opened(CALL) as client:
        with pytest.raises(openai.LengthFinishReasonError):
            async with client.chat.completions.stream(
                model="fake", messages=[USER], tools=[tool], max_tokens=len(CALL) - 25
            ) as stream:
                await stream.get_final_completion()


async def test_openai_stream_helper_returns_a_value_of_the_type() -> None:
    async with opened(None) as client:
        async with client.chat.completions.stream(model="fake", messages=[USER], response_format=Verdict) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Verdict)


async def test_a_client_without_reasoning_support_receives_reasoning() -> None:
    async with opened("<think>Hm.</think>Yes.", reasoning_parser="qwen3") as client:
        whole = await client.chat.completions.create(model="fake", messages=[USER], reasoning_effort="low")
        message = whole.choices[0].message
        assert (message.content, (message.model_extra or {})["reasoning_content"]) == ("Yes.", "Hm.")
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens
        async with client.chat.completions.stream(model="fake", messages=[USER]) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "Yes."
