"""Tests POST /v1/responses, whole and streamed: response fields, prompt, stored items and refusals."""

from __future__ import annotations

import msgspec
import pytest
import trio
from openai.types.responses import Response

from trioserve.api.responses.response_types import ResponseEvent, ResponseItems, ResponseObject
from trioserve.contracts.errors import DiskFull
from trioserve.store.settings import StoreSettings

from .conftest import PATH, text_of


async def test_response_to_a_text_is_stored(opened, autojump_clock):
    async with opened() as api:
        response = await api.ask(input="Hi", metadata={"a": "b"}, max_output_tokens=50)
        Response.model_validate(response)
        assert response["id"].startswith("resp_")
        assert (response["status"], text_of(response)) == ("completed", "Hello!")
        assert response["usage"]["input_tokens"] == len("user: Hi\nassistant: ")
        assert response["usage"]["output_tokens"] == 7
        assert await api.call(response["id"]) == response


async def test_streamed_and_whole_response_are_equal(opened, autojump_clock):
    async with opened(response=None, step_seconds=0.01) as api:
        fields = {"input": "Hi", "seed": 7, "max_output_tokens": 20, "top_logprobs": 2, "store": False}
        whole = await api.ask(**fields)
        events = await api.stream(**fields)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        streamed = events[-1]["response"]
        assert text_of(streamed) == text_of(whole) != ""
        assert streamed["usage"] == whole["usage"] | {"input_tokens_details": streamed["usage"]["input_tokens_details"]}
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(delta["delta"] for delta in deltas) == text_of(whole)
        logprobs = whole["output"][0]["content"][0]["logprobs"]
        assert len(logprobs) == whole["usage"]["output_tokens"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == logprobs
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"input": "Hi"}, "user: Hi\n"),
        ({"input": "Hi", "instructions": "Be."}, "system: Be.\nuser: Hi\n"),
        ({"input": [{"role": "user", "content": "Hi"}]}, "user: Hi\n"),
        (
            {
                "instructions": "A",
                "input": [
                    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
                    {"role": "system", "content": "C"},
                    {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "text", "text": "y"}]},
                    {"role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "z"}]},
                    {"role": "user", "content": "w"},
                ],
            },
            "system: A\n\nB\n\nC\nuser: x\ny\nassistant: z\nuser: w\n",
        ),
    ],
)
async def test_input_items_of_a_response_become_the_chat_prompt(opened, autojump_clock, fields, prompt):
    seen = []
    async with opened(response=lambda text: seen.append(text) or "ok") as api:
        await api.ask(**fields, store=False)
        assert seen[-1] == prompt + "assistant: "


async def test_previous_response_id_continues_a_conversation(opened, autojump_clock):
    seen = []
    async with opened(response=lambda text: seen.append(text) or f"r{len(text)}") as api:
        first = await api.ask(input="one", instructions="not carried over")
        second = await api.ask(input="two", previous_response_id=first["id"])
        await api.ask(input="three", previous_response_id=second["id"], store=False)
        history = f"user: one\nassistant: {text_of(first)}\nuser: two\nassistant: {text_of(second)}\n"
        assert seen[-1] == history + "user: three\nassistant: "
        # A reference can name an input item or an output item.
        items = [
            {"type": "item_reference", "id": second["output"][0]["id"]},
            {"id": (await api.call(f"{first['id']}/input_items"))["data"][0]["id"]},
        ]
        await api.ask(input=items, store=False)
        assert seen[-1] == f"assistant: {text_of(second)}\nuser: one\nassistant: "


async def test_response_that_was_not_stored_cannot_be_continued(opened, autojump_clock):
    async with opened() as api:
        response = await api.ask(input="one", store=False)
        assert response["store"] is False
        error = await api.ask(input="two", previous_response_id=response["id"], status=404)
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
        await api.call(response["id"], status=404)
        reference = {"type": "item_reference", "id": response["output"][0]["id"]}
        assert (await api.ask(input=[reference], status=404))["code"] == "item_not_found"


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
async def test_size_of_referenced_items_is_limited(opened, autojump_clock, role):
    """A short reference can name a long item, and the same item many times."""
    async with opened() as api:
        long = await api.ask(input=[{"role": role, "content": "x" * 200_000}], background=True)
        await api.server.app.wait_until_idle()
        items = (await api.call(f"{long['id']}/input_items"))["data"]
        error = await api.ask(input=[{"type": "item_reference", "id": items[0]["id"]}] * 100, status=400)
        assert error["param"] == "input"
        assert "16777216 bytes" in error["message"]


async def test_missing_earlier_response_is_reported(opened, autojump_clock):
    async with opened() as api:
        first = await api.ask(input="one")
        second = await api.ask(input="two", previous_response_id=first["id"])
        await api.call(first["id"], method="DELETE")
        error = await api.ask(input="three", previous_response_id=second["id"], status=404)
        assert first["id"] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "mcp_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"tools": [{"type": "functoin", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"user": "x" * 513}, "user"),
        ({"background": True, "store": False}, "store"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"priority": 101}, "priority"),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, "input"),
        # A type that is not a string or not hashable must not break the lookup of the type.
        *(({"input": [{"type": kind, "role": "user", "content": "x"}]}, "input[0].type") for kind in ([], {}, 1)),
        *(
            ({"input": [{"role": "user", "content": [{"type": kind}]}]}, "input[0].content[0].type")
            for kind in ([], {})
        ),
        *(({"tools": [{"type": kind}]}, "tools[0].type") for kind in ([], {})),
        *(({"tool_choice": {"type": kind}}, "tool_choice") for kind in ([], {})),
    ],
)
async def test_invalid_input_is_refused_with_its_path(opened, autojump_clock, fields, param):
    async with opened() as api:
        error = await api.ask(**{"input": "Hi", **fields}, status=400)
        assert error["param"] == param, error
        assert error["message"]


async def test_response_request_without_a_model_is_refused(opened, autojump_clock):
    async with opened() as api:
        response = await api.client().post(PATH, {"input": "Hi"})
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "model"
        assert (await api.ask(model="other", input="Hi", status=404))["code"] == "model_not_found"


async def test_hosted_tools_of_a_response_request_are_ignored(opened, autojump_clock):
    async with opened() as api:
        tools = [{"type": "function", "name": "f"}, {"type": "web_search", "external_web_access": False}]
        response = await api.ask(input="Hi", tools=tools)
        assert [tool["type"] for tool in response["tools"]] == ["function"]


async def test_full_store_refuses_a_whole_response_and_fails_a_stream(opened, autojump_clock):
    async with opened(store_settings=StoreSettings(bytes_max=1000)) as api:
        error = await api.ask(input="Hi", status=507)
        assert error["code"] == "store_full"
        assert "--store-max-bytes" in error["message"]
        *_, last = await api.stream(input="Hi")
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "store_full")
        assert text_of(await api.ask(input="Hi", store=False)) == "Hello!"


async def test_full_disk_keeps_a_response_in_memory_until_it_can_be_written(opened, autojump_clock):
    async with opened() as api:
        await api.ask(input="Hi")
        api.server.store.set_disk_full(True)
        whole = [await api.ask(input="Hi" * 500) for _ in range(20)]
        *_, last = await api.stream(input="Hi")
        for response in (*whole, last["response"]):
            assert response["store"] is True
            assert await api.call(response["id"]) == response
        more = await api.ask(input="More", previous_response_id=whole[-1]["id"])
        assert api.server.store.usage().unwritten_bytes > 0
        api.server.store.set_disk_full(False)
        await trio.sleep(6)
        assert api.server.store.usage().unwritten_bytes == 0
        assert await api.call(more["id"]) == more
        await api.call(whole[0]["id"], method="DELETE")


async def test_response_that_cannot_be_stored_is_sent_with_store_false(opened, monkeypatch, autojump_clock):
    async with opened() as api:
        await api.ask(input="Hi")
        api.server.store.set_disk_full(True)
        monkeypatch.setattr(api.server.store._database._unwritten, "_bytes_max", 0)
        monkeypatch.setattr(api.server.store._database, "_write", refuse)
        response = await api.ask(input="Hi")
        *_, last = await api.stream(input="Hi")
        for told in (response, last["response"]):
            assert (told["status"], text_of(told), told["store"]) == ("completed", "Hello!", False)
            await api.call(told["id"], status=404)


def refuse(*_):
    raise DiskFull("the disk is full")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_that_leaves_cancels_the_response_and_nothing_is_stored(opened, autojump_clock, is_streamed):
    async with opened(response=None, paused=True) as api:
        engine = api.server.engine
        async with api.client().ask(PATH, {"model": "fake", "input": "Hi", "stream": is_streamed}) as response:
            await engine.step(3)
            if is_streamed:
                await response.head()
        await engine.step()
        await api.server.assert_all_free()
        assert api.server.app._store.usage().objects == 0


async def test_abort_during_a_stream_fails_the_response(opened, autojump_clock):
    async with opened(response=None, paused=True) as api:
        async with api.client().ask(PATH, {"model": "fake", "input": "Hi", "stream": True}) as response:
            await api.server.engine.step(3)
            await response.head()
            api.server.engine.abort([response.headers["x-request-id"]])
            await api.server.engine.step()
            events = [event async for event in response]
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "request_aborted"
        assert events[-1]["response"]["status"] == "failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_input_tokens_of_a_response_request_are_counted(opened, autojump_clock):
    async with opened() as api:
        response = await api.client().post(f"{PATH}/input_tokens", {"model": "fake", "input": "Hi"})
        assert await response.json() == {"object": "response.input_tokens", "input_tokens": 20}


async def test_unsupported_compact_path_is_not_found(opened, autojump_clock):
    async with opened() as api:
        assert (await api.client().post(f"{PATH}/compact", {"model": "fake", "input": "Hi"})).status == 404


async def test_responses_match_the_openapi_types(opened, autojump_clock):
    async with opened(response=None) as api:
        tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
        fields = {"input": "Hi", "tools": tools, "max_output_tokens": 5, "top_logprobs": 1}
        msgspec.convert(response := await api.ask(**fields), ResponseObject)
        msgspec.convert(await api.call(f"{response['id']}/input_items"), ResponseItems)
        for event in await api.stream(**fields):
            msgspec.convert(event, ResponseEvent)


async def test_input_items_are_listed_in_pages(opened, autojump_clock):
    async with opened() as api:
        items = [{"role": "user", "content": str(number)} for number in range(5)]
        path = (await api.ask(input=items))["id"] + "/input_items"

        async def page(query):
            found = await api.call(f"{path}?{query}")
            return [item["content"][0]["text"] for item in found["data"]], found["has_more"], found["last_id"]

        texts, has_more, last_id = await page("limit=2")
        assert (texts, has_more) == (["4", "3"], True)
        texts, has_more, _ = await page(f"limit=3&after={last_id}")
        assert (texts, has_more) == (["2", "1", "0"], False)
        assert (await page("order=asc"))[0] == ["0", "1", "2", "3", "4"]
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_none"):
            assert (await api.call(f"{path}?{query}", status=400))["param"] == query.partition("=")[0]
