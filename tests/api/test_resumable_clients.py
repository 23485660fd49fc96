"""Tests that the unmodified openai-python reads resumable streams, whose events have ids, and resumed streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
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
HEADERS = {"x-trioserve-resumable": "1", "x-request-id": "mine"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SAID = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@asynccontextmanager
async def opened(response: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        open_memory_server(
            response=response, block_count=512, max_model_len=2048, max_num_batched_tokens=2048
        ) as server,
        httpx.AsyncClient(transport=MemoryTransport(server.client)) as web,
        openai.AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        yield client
        await trio.testing.wait_all_tasks_blocked()
        await server.assert_all_free()


async def test_openai_client_reads_a_chat_stream_with_event_ids_and_its_continuation() -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": [USER], "tools": [TOOL]}
    async with opened(SAID) as client:
        async with client.chat.completions.stream(**asked) as stream:
            plain = (await stream.get_final_completion()).choices[0].message
        async with client.chat.completions.stream(**asked, extra_headers=HEADERS) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == plain.content == "Let me see."
        assert final.message.tool_calls is not None
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        text = "Let me"
        resume = {"token_ids": [list(text.encode())], "finished": [False]}
        rest = await client.chat.completions.create(
            **asked, stream=True, extra_headers=HEADERS, extra_body={"resume": resume}
        )
        said = [chunk.choices[0].delta.content or "" async for chunk in rest if chunk.choices]
        assert text + "".join(said) == plain.content


async def test_openai_client_reads_completions_and_responses_with_event_ids() -> None:
    async with opened("Hello you") as client:
        stream = await client.completions.create(
            model="fake", prompt="x", max_tokens=50, stream=True, extra_headers=HEADERS
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello you"
        async with client.responses.stream(model="fake", input="x", store=False, extra_headers=HEADERS) as events:
            assert (await events.get_final_response()).output_text == "Hello you"
