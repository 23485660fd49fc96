"""Tests the unmodified client library ollama-python with the whole server in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ollama
import pydantic
import pytest
import trio

from trioserve.testing.httpx_transport import MemoryTransport
from trioserve.testing.memory_server import open_memory_server

# The client library stops reading its async generators at the last line, without closing them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

USER = {"role": "user", "content": "Weather in Oslo?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Verdict(pydantic.BaseModel):
    # If further fields were allowed, the random output might never end.
    model_config = pydantic.ConfigDict(extra="forbid")

    ok: bool


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


@asynccontextmanager
async def opened(response: str | None = "Hello!", **options: Any) -> AsyncIterator[ollama.AsyncClient]:
    """Open a server and a client. If response is None, the model writes random text unless a grammar restrains it."""
    async with open_memory_server(
        response=response, block_count=512, max_model_len=2048, max_num_batched_tokens=2048, **options
    ) as server:
        client = ollama.AsyncClient(host="http://memory", transport=MemoryTransport(server.client))
        async with client._client:
            yield client
        await trio.testing.wait_all_tasks_blocked()
        await server.assert_all_free()


async def test_ollama_client_chats_and_generates_streamed_and_whole() -> None:
    async with opened() as client:
        whole = await client.chat("fake", [USER])
        assert (whole.message.role, whole.message.content, whole.done_reason) == ("assistant", "Hello!", "stop")
        assert whole.prompt_eval_count
        assert whole.eval_count == 7
        pieces = [piece async for piece in await client.chat("fake:latest", [USER], stream=True)]
        assert "".join(piece.message.content or "" for piece in pieces) == "Hello!"
        assert (pieces[-1].done, pieces[-1].eval_count) == (True, whole.eval_count)
        assert {piece.model for piece in pieces} == {"fake:latest"}
        text = await client.generate("fake", "Hi", system="Be short.", keep_alive="10m", options={"num_ctx": 2048})
        assert text.response == "Hello!"
        assert "".join([piece.response async for piece in await client.generate("fake", "Hi", stream=True)]) == "Hello!"
        assert (await client.generate("fake")).done_reason == "load"


async def test_ollama_durations_measure_the_phases_of_a_request(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(step_seconds=0.5) as client:
        for stream in (False, True):
            said = await client.chat("fake", [USER], stream=stream)
            last = [piece async for piece in said][-1] if stream else said
            assert last.load_duration == 0
            assert last.prompt_eval_duration == 500_000_000
            assert last.eval_duration == 500_000_000 * (last.eval_count - 1)
            assert last.total_duration >= last.prompt_eval_duration + last.eval_duration


async def test_ollama_client_continues_after_a_tool_call() -> None:
    async with opened(CALL) as client:
        first = await client.chat("fake", [USER], tools=[weather])
        assert first.message.tool_calls is not None
        [call] = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
        assert first.message.content == ""
        result = {"role": "tool", "content": weather(**call.function.arguments), "tool_name": call.function.name}
        second = await client.chat("fake", [USER, first.message, result], tools=[weather])
        assert second.done
        pieces = [piece async for piece in await client.chat("fake", [USER], tools=[weather], stream=True)]
        calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
        assert [call.function.arguments for call in calls] == [{"city": "Oslo"}]


async def test_ollama_client_gets_a_value_of_the_schema() -> None:
    async with opened(None) as client:
        said = await client.chat("fake", [USER], format=Verdict.model_json_schema())
        assert isinstance(Verdict.model_validate_json(said.message.content or ""), Verdict)
        text = await client.generate("fake", "Hi", format="json", options={"num_predict": 400, "seed": 3})
        assert text.response.startswith("{")


async def test_reasoning_is_separate_from_content() -> None:
    async with opened("<think>\nHm.\n</think>\n\nYes.", reasoning_parser="qwen3") as client:
        for think in (None, True):
            said = await client.chat("fake", [USER], think=think)
            assert (said.message.thinking, said.message.content) == ("Hm.", "Yes.")
        pieces = [piece async for piece in await client.generate("fake", "Hi", think=True, stream=True)]
        assert "".join(piece.thinking or "" for piece in pieces) == "Hm."
        assert "".join(piece.response or "" for piece in pieces) == "Yes."
        assert "thinking" in ((await client.show("fake")).capabilities or [])
    async with opened() as client:
        with pytest.raises(ollama.ResponseError, match="does not support thinking"):
            await client.chat("fake", [USER], think="high")


async def test_ollama_client_lists_and_shows_models() -> None:
    async with opened() as client:
        [model] = (await client.list()).models
        assert model.model == "fake:latest"
        [running] = (await client.ps()).models
        assert (running.model, running.digest, running.context_length) == (model.model, model.digest, 2048)
        shown = await client.show("fake:latest")
        assert shown.modelinfo is not None
        assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 2048
        assert {"completion", "tools", "embedding"} <= set(shown.capabilities or ())
        assert shown.template


async def test_ollama_client_gets_embeddings() -> None:
    async with opened() as client:
        together = await client.embed("fake", ["one", "two"])
        alone = await client.embed("fake", "two")
        assert together.prompt_eval_count == 6
        assert together.embeddings[1] == pytest.approx(alone.embeddings[0], abs=1e-6)
        assert sum(number**2 for number in alone.embeddings[0]) == pytest.approx(1, abs=1e-4)
        assert len((await client.embeddings("fake", "one")).embedding) == len(alone.embeddings[0])
        assert (await client.embed("fake", "x" * 3000)).prompt_eval_count == 2048
        with pytest.raises(ollama.ResponseError) as refused:
            await client.embed("fake", ["one", "x" * 3000], truncate=False)
        assert refused.value.status_code == 400
        with pytest.raises(ollama.ResponseError):
            await client.embed("fake", [])


async def test_errors_become_exceptions_of_the_ollama_client() -> None:
    async with opened() as client:
        with pytest.raises(ollama.ResponseError, match="not served here") as unknown:
            await client.chat("nobody", [USER])
        assert unknown.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match=r"options\.temperature is -1"):
            await client.chat("fake", [USER], options={"temperature": -1})
        with pytest.raises(ollama.ResponseError, match="is an image"):
            await client.chat("fake", [{**USER, "images": [b"pixels"]}])
        with pytest.raises(ollama.ResponseError, match="there is nothing at /api/pull"):
            await client.pull("fake")


async def test_leaving_an_ollama_stream_frees_its_blocks(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(None, step_seconds=0.01) as client:
        stream = await client.chat("fake", [USER], options={"num_predict": 1000}, stream=True)
        async for _ in stream:
            break
        await stream.aclose()
        await trio.sleep(1)  # The virtual clock jumps, and the running step ends.


async def test_silent_stream_sends_spaces_as_keep_alive(autojump_clock: trio.testing.MockClock) -> None:
    async with open_memory_server(response="Hi", step_seconds=100.0) as server:
        body = {"messages": [USER], "options": {"num_predict": 2}}
        async with server.client().ask("/api/chat", body) as response:
            said = await response.read()
        assert b" {" in said
        values = [json.loads(line) for line in said.decode().splitlines()]
        assert values[-1]["done"]
        await server.assert_all_free()


def values_of(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.split("\n")[0].removeprefix("data: ")) for event in events.decode().split("\n\n")[:-1]]


def text_of(values: list[dict[str, Any]]) -> str:
    return "".join(value["message"]["content"] for value in values)


async def test_stream_resumes_after_the_known_tokens() -> None:
    """The ids of the events name the tokens that a client has. After these tokens, the resumed stream equals an
    uninterrupted stream.
    """
    async with open_memory_server(block_count=512, max_model_len=2048) as server:
        asked = {"messages": [USER], "options": {"num_predict": 30, "seed": 5, "temperature": 1}}
        resumable = {"x-trioserve-resumable": "1", "x-request-id": "mine"}
        async with server.client().ask("/api/chat", asked, headers=resumable) as response:
            said = await response.read()
            head = json.loads(response.headers["x-trioserve-resume"])
        groups = said.decode().removesuffix("\n\n").split("\n\n")
        ids = [group.rpartition("\nid: ")[2] for group in groups]
        assert ids[-1] == "."
        known = [int(token) for id in ids[:10] for token in id.removeprefix("0:").split(",")]
        resume = {**head, "token_ids": [known], "finished": [False]}
        async with server.client().ask("/api/chat", {**asked, "resume": resume}, headers=resumable) as response:
            rest = await response.read()
        values = values_of(said)
        again = values_of(rest)
        assert text_of(again) == text_of(values[10:])
        assert again[0]["created_at"] == values[0]["created_at"]
        assert again[-1]["eval_count"] == values[-1]["eval_count"] == 30
        await server.assert_all_free()
