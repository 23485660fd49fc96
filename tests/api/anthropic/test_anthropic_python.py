"""Tests the unmodified client library anthropic-python with the whole server in memory: threads and the tool runner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
import trio

from trioserve.testing.httpx_transport import MemoryTransport
from trioserve.testing.memory_server import open_memory_server

USER: Any = {"role": "user", "content": "Weather in Oslo?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Transport(httpx2.AsyncBaseTransport):
    """MemoryTransport for the httpx module of this library. Responses are read whole."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        asked = httpx.Request(
            request.method, str(request.url), headers=request.headers.multi_items(), content=await request.aread()
        )
        response = await self._transport.handle_async_request(asked)
        body = await response.aread()
        await response.aclose()
        return httpx2.Response(response.status_code, headers=response.headers.multi_items(), content=body)


@asynccontextmanager
async def opened(response: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        open_memory_server(
            response=response, block_count=512, max_model_len=2048, max_num_batched_tokens=2048
        ) as server,
        httpx2.AsyncClient(transport=Transport(MemoryTransport(server.client))) as web,
        anthropic.AsyncAnthropic(base_url="http://memory", api_key="none", http_client=web, max_retries=0) as client,
    ):
        yield client
        await trio.testing.wait_all_tasks_blocked()
        await server.assert_all_free()


async def test_client_library_continues_a_thread_by_sending_the_whole_conversation() -> None:
    async with opened("Hello.") as client:
        thread = client.beta.messages.thread(
            model="fake", max_tokens=20, messages=[USER], unsupported_request_behavior="continue_unthreaded"
        )
        first = await thread.send()
        second = await thread.send({"role": "user", "content": "And?"})
        assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens


async def test_client_library_gets_the_refusal_of_a_thread() -> None:
    async with opened("Hello.") as client:
        thread = client.beta.messages.thread(model="fake", max_tokens=20, messages=[USER])
        with pytest.raises(anthropic.BadRequestError) as caught:
            await thread.send()
        assert caught.value.body["error"]["details"] == {  # type: ignore[index]
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }


async def test_tool_runner_of_the_client_library_gets_calls_and_sends_results() -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    async with opened(CALL) as client:
        runner = client.beta.messages.tool_runner(
            model="fake", max_tokens=200, tools=[get_weather], messages=[USER], max_iterations=2
        )
        messages = [message async for message in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert asked[0] == "Oslo"
