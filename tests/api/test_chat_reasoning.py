"""Tests reasoning in /v1/chat/completions: split from content, counted, limited, hidden, and before schemas and
calls.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.text.response_parts import JoinedResponse

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "Oslo?"}
THOUGHT = "I should look."
SAID = f"<think>\n{THOUGHT}\n</think>\n\nIt rains."
WASH = {
    "type": "function",
    "function": {
        "name": "wash",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


@asynccontextmanager
async def opened(make_api: Any, response: Any = SAID, **options: Any) -> AsyncIterator[tuple[Any, FakeEngine]]:
    async with open_fake_engine(
        response=response,
        reasoning_parser="qwen3",
        block_count=512,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        **options,
    ) as engine:
        api = make_api()
        api.engine = engine
        yield api, engine
        await trio.testing.wait_all_tasks_blocked()
        engine.assert_all_free()


def streamed(exchange: Any) -> tuple[str, str, list[str]]:
    """Return the reasoning, the content, and the kinds of the deltas in the order of the stream."""
    *events, done = exchange.events()
    assert done == "[DONE]"
    thought = content = ""
    kinds: list[str] = []
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            thought += delta.get("reasoning_content", "")
            content += delta.get("content") or ""
            kind = "thought" if delta.get("reasoning_content") else "content" if delta.get("content") else ""
            if kind and kinds[-1:] != [kind]:
                kinds.append(kind)
    return thought, content, kinds


async def test_reasoning_of_a_chat_is_not_in_its_content(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        whole = (await api.chat(messages=[USER])).json()
        ChatCompletion.model_validate(whole, strict=True)
        message = whole["choices"][0]["message"]
        assert message["content"] == "It rains."
        assert message["reasoning_content"] == message["reasoning"] == THOUGHT
        thought, content, kinds = streamed(await api.chat(messages=[USER], stream=True))
        assert (thought, content, kinds) == (THOUGHT, "It rains.", ["thought", "content"])


async def test_usage_counts_reasoning_tokens(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        usage = (await api.chat(messages=[USER])).json()["usage"]
        told = usage["completion_tokens_details"]["reasoning_tokens"]
        assert len(THOUGHT) <= told <= SAID.index("It rains.")
        events = (await api.chat(messages=[USER], stream=True, stream_options={"include_usage": True})).events()
        streamed_count = events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert len(THOUGHT) <= streamed_count <= SAID.index("It rains.")


async def test_response_omits_reasoning_if_the_request_excludes_it(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        message = (await api.chat(messages=[USER], include_reasoning=False)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "It rains.", "refusal": None}
        exchange = await api.chat(messages=[USER], include_reasoning=False, stream=True)
        assert streamed(exchange) == ("", "It rains.", ["content"])


@pytest.mark.parametrize("field", ["thinking_token_budget", "thinking_budget", "max_reasoning_tokens"])
async def test_thinking_budget_ends_the_reasoning_of_a_chat(make_api: Any, field: str) -> None:
    """The scripted model continues to write reasoning, but after the forced end that text is content."""
    async with opened(make_api, "<think>" + "and so on, " * 20) as (api, _):
        whole = (await api.chat(messages=[USER], max_tokens=60, **{field: 10})).json()
        message = whole["choices"][0]["message"]
        assert 0 < len(message["reasoning_content"]) <= 10
        assert message["content"]
        assert whole["choices"][0]["finish_reason"] == "length"
        thought, content, _ = streamed(await api.chat(messages=[USER], max_tokens=60, stream=True, **{field: 10}))
        assert (thought, content) == (message["reasoning_content"], message["content"])


async def test_structured_output_begins_after_the_reasoning(make_api: Any) -> None:
    async with opened(make_api, f"<think>\n{THOUGHT}\n</think>yes, of course") as (api, _):
        message = (await api.chat(messages=[USER], guided_choice=["yes", "no"])).json()["choices"][0]["message"]
        assert message["reasoning_content"] == THOUGHT
        assert message["content"] == "yes"


async def test_a_forced_call_follows_the_reasoning(make_api: Any) -> None:
    async with opened(make_api, f"<think>\n{THOUGHT}\n</think>\n\nI would rather not call.") as (api, _):
        for stream in (False, True):
            exchange = await api.chat(messages=[USER], tools=[WASH], tool_choice="required", stream=stream)
            text = exchange.data.decode()
            assert "rather" not in text
            if not stream:
                choice = exchange.json()["choices"][0]
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["reasoning_content"] == THOUGHT
                for call in choice["message"]["tool_calls"]:
                    assert json.loads(call["function"]["arguments"]) == {"colour": "blue"}


async def test_a_call_inside_the_reasoning_is_not_a_tool_call(make_api: Any) -> None:
    call = '<tool_call>\n{"name": "wash", "arguments": {"colour": "blue"}}\n</tool_call>'
    async with opened(make_api, f"<think>\nPerhaps {call}?\n</think>\n\nNo.") as (api, _):
        choice = (await api.chat(messages=[USER], tools=[WASH])).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "No."
        assert "tool_calls" not in choice["message"]
        assert call in choice["message"]["reasoning_content"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            {"reasoning_effort": "high", "enable_thinking": True, "thinking": False},
        ),
    ],
)
async def test_reasoning_fields_reach_the_template(api: Any, fields: dict[str, Any], told: dict[str, Any]) -> None:
    await api.chat(messages=[USER], **fields)
    assert api.engine.streams[0].prompt.template_arguments == told


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_earlier_reasoning_reaches_the_template_as_reasoning_content(api: Any, name: str) -> None:
    await api.chat(messages=[USER, {"role": "assistant", "content": "Rain.", name: THOUGHT}, USER])
    assert api.engine.streams[0].prompt.messages[1]["reasoning_content"] == THOUGHT


async def test_unfinished_reasoning_is_shown_as_reasoning(make_api: Any) -> None:
    async with opened(make_api) as (api, _):
        choice = (await api.chat(messages=[USER], max_tokens=15)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["reasoning_content"] == THOUGHT[: len(choice["message"]["reasoning_content"])]
        assert choice["message"]["content"] == ""


LITERAL = "Models write\n<think>\nfirst, and then answer.\n</think>\nThe end."


def content_in(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return reasoning and content of a whole response of any API."""
    if path == "/v1/chat/completions":
        message = body["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]
    if path == "/api/chat":
        return body["message"].get("thinking", ""), body["message"]["content"]
    if path == "/v1/messages":
        blocks = body["content"]
        return (
            "".join(block.get("thinking", "") for block in blocks),
            "".join(block.get("text", "") for block in blocks),
        )
    reasoning = [item for item in body["output"] if item["type"] == "reasoning"]
    messages = [item for item in body["output"] if item["type"] == "message"]
    return (
        "".join(part["text"] for item in reasoning for part in item["content"]),
        "".join(part["text"] for item in messages for part in item["content"]),
    )


@pytest.mark.parametrize(
    ("said", "thought", "content"),
    [
        (LITERAL, "", LITERAL),
        (f"<think>\nHm.\n</think>\n\n{LITERAL}", "Hm.", LITERAL),
        ("<think>\nHm.\n</think>\n<think>a</think>", "Hm.", "<think>a</think>"),
    ],
)
async def test_every_api_shows_tags_inside_content_as_content(
    make_api: Any, said: str, thought: str, content: str
) -> None:
    async with opened(make_api, said) as (api, engine):
        for path, fields in (
            ("/v1/chat/completions", {"messages": [USER]}),
            ("/v1/responses", {"input": "Oslo?", "store": False}),
            ("/v1/messages", {"messages": [USER], "max_tokens": 200}),
            ("/api/chat", {"messages": [USER], "stream": False}),
        ):
            exchange = await api.context("POST", path, {"model": "fake", **fields})
            assert exchange.status == 200, exchange.data
            assert content_in(path, exchange.json()) == (thought, content), path
        assert streamed(await api.chat(messages=[USER], stream=True))[:2] == (thought, content)
        found = JoinedResponse()
        async with engine.generate(ChatPrompt(messages=[USER]), SamplingParams(max_tokens=200)) as stream:
            async for choice in engine.read_parts(stream):
                found.take(choice.parts)
        assert (found.reasoning, found.content) == (thought, content)


async def test_structured_output_may_contain_an_opening_tag(make_api: Any) -> None:
    async with opened(make_api, LITERAL) as (api, _):
        for stream in (False, True):
            exchange = await api.chat(messages=[USER], guided_choice=[LITERAL], stream=stream)
            if stream:
                assert streamed(exchange)[:2] == ("", LITERAL)
            else:
                assert exchange.json()["choices"][0]["message"]["content"] == LITERAL


@pytest.mark.parametrize(
    ("last", "said", "thought", "content"),
    [
        ("<think>\nI was thinking", " about it.\n</think>\n\nParis", "about it.", "Paris"),
        ("<think>\n", "Hm.\n</think>\n\nParis", "Hm.", "Paris"),
        ("<think>\nhm\n</think>\n\nIt is", " Paris.", "", " Paris."),
    ],
)
@pytest.mark.parametrize(
    "signs", [("<|im_start|>", "<|im_end|>", "<think>", "</think>"), ("<|im_start|>", "<|im_end|>")]
)
async def test_a_continued_message_shows_if_reasoning_is_open(
    make_api: Any, signs: tuple[str, ...], last: str, said: str, thought: str, content: str
) -> None:
    tokenizer = byte_tokenizer(CHATML, signs=signs)
    async with opened(make_api, said, tokenizer=tokenizer) as (api, _):
        fields = {
            "messages": [USER, {"role": "assistant", "content": last}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        message = (await api.chat(**fields)).json()["choices"][0]["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (thought, content)
        if "<think>" in signs:
            return  # The fake engine compiles grammars for a vocabulary without these tokens.
        form = {"guided_choice": [content], "max_tokens": 60}
        message = (await api.chat(**fields, **form)).json()["choices"][0]["message"]
        assert message["content"] == content
        assert streamed(await api.chat(**fields, **form, stream=True))[1] == content


async def test_an_abort_during_reasoning_is_an_error(make_api: Any) -> None:
    async with opened(make_api, paused=True) as (api, engine):
        exchange = api.exchange(
            "POST", "/v1/chat/completions", {"messages": [USER], "stream": True}, {"x-request-id": "mine"}
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.app, exchange)
            await engine.step(15)
            engine.abort(["mine"])
        *events, error = exchange.events()
        assert error["error"]["code"] == "request_aborted"
        assert any(event["choices"][0]["delta"].get("reasoning") for event in events)


# --- reasoning that is ended while it is written ---


async def control(api: Any, request_id: str, body: object = None, **headers: str) -> Any:
    given = {"end_thinking": True} if body is None else body
    return await api.context("POST", f"/v1/requests/{request_id}", given, **headers)


async def test_reasoning_ends_on_request_while_it_is_written(make_api: Any) -> None:
    async with opened(make_api, "<think>" + "and so on, " * 20, paused=True) as (api, engine):
        exchange = api.exchange(
            "POST",
            "/v1/chat/completions",
            {"messages": [USER], "stream": True, "max_tokens": 60},
            {"x-request-id": "mine"},
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.app, exchange)
            await engine.step(12)
            response = await control(api, "mine")
            assert (response.status, response.json()) == (
                200,
                {"id": "mine", "object": "request.control", "result": "ending"},
            )
            engine.resume()
        thought, content, kinds = streamed(exchange)
        assert 0 < len(thought) < 15
        assert content
        assert kinds == ["thought", "content"]


async def test_ending_the_reasoning_is_refused_if_there_is_none(make_api: Any) -> None:
    async with opened(make_api, paused=True) as (api, engine), trio.open_nursery() as nursery:
        nursery.start_soon(
            api.app,
            api.exchange("POST", "/v1/chat/completions", {"messages": [USER]}, {"x-request-id": "mine"}),
        )
        await engine.step(SAID.index("It") + 5)
        late = await control(api, "mine")
        assert (late.status, late.json()["error"]["code"]) == (409, "no_thought")
        unknown = await control(api, "yours")
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "request_not_found")
        for body in ({}, {"end_thinking": False}, {"end_thinking": None}):
            assert (await control(api, "mine", body)).json()["error"]["param"] == "end_thinking"
        engine.resume()


async def test_a_key_ends_the_reasoning_of_its_own_requests_only(make_api: Any) -> None:
    async with opened(make_api, paused=True) as (api, engine):
        api.options = {"api_keys": ["one", "two"], "admin_api_key": "admin"}
        async with trio.open_nursery() as nursery:
            exchange = api.exchange(
                "POST",
                "/v1/chat/completions",
                {"messages": [USER]},
                {"x-request-id": "mine", "authorization": "Bearer one"},
            )
            nursery.start_soon(api.app, exchange)
            await engine.step(12)
            assert (await control(api, "mine", authorization="Bearer two")).status == 404
            assert (await control(api, "mine", authorization="Bearer one")).status == 200
            assert (await control(api, "mine", authorization="Bearer admin")).status == 200
            engine.resume()
