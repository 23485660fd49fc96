"""Tests that a stream of vLLM resumes by token ids through /v1/completions. Scripted endpoints send the same events as
vLLM.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from trioserve.api.openai.request_types import CompletionBody
from trioserve.contracts.sampling import SamplingParams
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.router_context import RoutingRules
from trioserve.proxy.streams.foreign_stream import ForeignStream, foreign_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
BODIES = {
    CHAT: {"model": "fake", "messages": USER, "max_tokens": 10, "temperature": 0.5, "stream": True},
    TEXT: {"model": "fake", "prompt": "hello", "max_tokens": 10, "temperature": 0.5, "stream": True},
}
WATCH = WatchSettings(health_seconds=3600, load_seconds=0.5)


async def the_ask(pair):
    await trio.sleep(0.1)
    [(id, ask)] = [(id, ask) for id, each in pair.endpoints.items() for ask in each.open]
    return id, ask


def chunk(path: str, text: str | None, token_ids: list[int], *, finish: str | None = None, **fields: Any) -> str:
    """Make an event in vLLM's format. If text is None, the event is the first event of a chat and has the role."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "token_ids": token_ids or None}
    if path == CHAT:
        choice["delta"] = {"role": "assistant", "content": ""} if text is None else {"content": text}
    else:
        choice["text"] = text or ""
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    made = {"id": "first", "object": kind, "created": 1, "model": "fake", "choices": [choice], **fields}
    return f"data: {json.dumps(made)}\n\n"


def begin(ask, path: str, *, prompt: tuple[int, ...] = (7, 8, 9)) -> None:
    ids = {"prompt_token_ids": list(prompt)}
    ask.say(chunk(path, None, [], **(ids if path == CHAT else {"choices": [{"index": 0, "text": "", **ids}]})))


async def goes_on(ask) -> None:
    ask.say(chunk(TEXT, " two", [30], id="second", created=2))
    ask.say(chunk(TEXT, " three", [40], finish="stop", id="second", created=2))
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    ask.say(f"data: {json.dumps({'id': 'second', 'created': 2, 'choices': [], 'usage': usage})}\n\n")
    ask.finish()
    await trio.sleep(0.1)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_broken_vllm_stream_resumes_and_the_client_reads_one_response(open_pair, autojump_clock, path):
    async with open_pair("v1 v2", watch=WATCH) as pair:
        await trio.sleep(2)
        async with pair.client().ask(path, BODIES[path]) as response:
            first, ask = await the_ask(pair)
            assert ask.body["return_token_ids"] is True
            begin(ask, path)
            ask.say(chunk(path, " one", [10]))
            ask.say(chunk(path, " and", [20]))
            ask.say(chunk(path, "", [21]))  # The token is only a part of a character, so the client does not get it.
            await trio.sleep(0.1)
            ask.hang_up()
            second, again = await the_ask(pair)
            assert second != first
            assert again.path == TEXT
            assert again.body == {
                "model": "fake",
                "prompt": [7, 8, 9, 10, 20],
                "max_tokens": 8,
                "temperature": 0.5,
                "stream": True,
                "add_special_tokens": False,
                "return_token_ids": True,
            }
            await goes_on(again)
            events = [event async for event in response]
        assert {(event["id"], event["created"]) for event in events} == {("first", 1)}
        choices = [event["choices"][0] for event in events if event["choices"]]
        said = "".join(each["delta"]["content"] if path == CHAT else each["text"] for each in choices)
        assert said == " one and two three"
        assert [each["finish_reason"] for each in choices if each.get("finish_reason")] == ["stop"]
        if path == CHAT:
            assert {event["object"] for event in events if event["choices"]} == {"chat.completion.chunk"}
            assert sum("role" in each["delta"] for each in choices) == 1
        assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert b"prompt_token_ids" not in response.body
        remark = f": x-trioserve-continued endpoint={second} tokens=not-promised\n\n".encode()
        assert response.body.count(remark) == 1
        assert response.body.endswith(b"data: [DONE]\n\n")
        await pair.assert_all_free()


async def test_vllm_stream_resumes_twice(open_pair, autojump_clock):
    async with open_pair("v1 v2 v3", watch=WATCH, progress_tokens_min=1) as pair:
        await trio.sleep(2)
        async with pair.client().ask(CHAT, BODIES[CHAT]) as response:
            _, ask = await the_ask(pair)
            begin(ask, CHAT)
            ask.say(chunk(CHAT, " one", [10]))
            await trio.sleep(0.1)
            ask.hang_up()
            _, ask = await the_ask(pair)
            ask.say(chunk(TEXT, " and", [20], prompt_token_ids=[7, 8, 9, 10]))
            await trio.sleep(0.1)
            ask.hang_up()
            _, ask = await the_ask(pair)
            assert ask.body["prompt"] == [7, 8, 9, 10, 20]
            assert ask.body["max_tokens"] == 8
            await goes_on(ask)
            events = [event async for event in response]
        assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-1]) == " one and two three"
        assert events[-1]["usage"]["prompt_tokens"] == 3
        await pair.assert_all_free()


async def test_stream_that_breaks_after_its_finish_reason_counts_as_complete(open_pair, autojump_clock):
    async with open_pair("v1 v2", watch=WATCH) as pair:
        await trio.sleep(2)
        async with pair.client().ask(TEXT, BODIES[TEXT]) as response:
            _, ask = await the_ask(pair)
            begin(ask, TEXT)
            ask.say(chunk(TEXT, " one", [10], finish="length"))
            await trio.sleep(0.1)
            ask.hang_up()
            await response.read()
        assert response.body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in response.body
        await pair.assert_all_free()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"stop": ["x"]},
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
    ],
)
async def test_request_that_needs_more_than_text_does_not_resume(open_pair, autojump_clock, fields):
    async with open_pair("v1 v2", watch=WATCH) as pair:
        await trio.sleep(2)
        async with pair.client().ask(CHAT, {**BODIES[CHAT], **fields}) as response:
            _, ask = await the_ask(pair)
            assert "return_token_ids" not in ask.body
            ask.say(chunk(CHAT, " one", []))
            await trio.sleep(0.1)
            ask.hang_up()
            events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        await pair.assert_all_free()


@pytest.mark.parametrize("fields", [{"prompt": ["one", "two"]}, {"prompt": [[1], [2]]}, {"logprobs": 0}])
async def test_completion_with_several_prompts_or_logprobs_does_not_resume(open_pair, autojump_clock, fields):
    async with open_pair("v1 v2", watch=WATCH) as pair:
        await trio.sleep(2)
        async with pair.client().ask(TEXT, {**BODIES[TEXT], **fields}) as response:
            _, ask = await the_ask(pair)
            assert "return_token_ids" not in ask.body
            ask.say(chunk(TEXT, " one", []))
            await trio.sleep(0.1)
            ask.hang_up()
            events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        await pair.assert_all_free()


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": None, "completion_tokens": 3}, [1], "much"])
async def test_vllm_stream_without_usage_is_forwarded_without_usage(open_pair, autojump_clock, usage):
    async with open_pair("v1 v2", watch=WATCH) as pair:
        await trio.sleep(2)
        async with pair.client().ask(TEXT, BODIES[TEXT]) as response:
            _, ask = await the_ask(pair)
            begin(ask, TEXT)
            ask.say(chunk(TEXT, " one", [10]))
            await trio.sleep(0.1)
            ask.hang_up()
            _, again = await the_ask(pair)
            again.say(chunk(TEXT, " two", [20], finish="stop", usage=usage))
            again.finish()
            await response.read()
        assert b"error" not in response.body
        assert response.body.endswith(b"data: [DONE]\n\n")
        await pair.assert_all_free()


@pytest.mark.parametrize("what", ["no ids", "thoughts", "too many"])
async def test_stream_without_token_ids_does_not_resume(open_pair, autojump_clock, what):
    rules = RoutingRules(continuation_bytes_max=16 if what == "too many" else 1000)
    async with open_pair("v1 v2", watch=WATCH, rules=rules) as pair:
        await trio.sleep(2)
        async with pair.client().ask(CHAT, BODIES[CHAT]) as response:
            _, ask = await the_ask(pair)
            begin(ask, CHAT)
            ask.say(chunk(CHAT, " one", [] if what == "no ids" else [10]))
            if what == "thoughts":
                thought = {"index": 0, "delta": {"reasoning_content": "hm"}, "token_ids": [11]}
                ask.say(f"data: {json.dumps({'choices': [thought]})}\n\n")
            ask.say(chunk(CHAT, " two", [20]))
            await trio.sleep(0.1)
            ask.hang_up()
            events = [event async for event in response]
        assert events[-1]["error"]["code"] == "endpoint_lost"
        assert not any(endpoint.open for endpoint in pair.endpoints.values())
        await pair.assert_all_free()


async def test_stream_does_not_resume_at_a_server_with_other_software(open_pair, autojump_clock):
    async with open_pair("v1 w1", watch=WATCH, policy="round_robin", continuation_seconds_max=20) as pair:
        await trio.sleep(2)
        async with pair.client().ask(f"{TEXT}", BODIES[TEXT]) as response:
            first, ask = await the_ask(pair)
            if first == "w1":
                ask.hang_up()
                first, ask = await the_ask(pair)
            begin(ask, TEXT)
            ask.say(chunk(TEXT, " one", [10]))
            await trio.sleep(0.1)
            pair["v1"].is_reachable = False
            sent = len(pair["w1"].asks)
            ask.hang_up()
            events = [event async for event in response]
            assert len(pair["w1"].asks) == sent
        assert events[-1]["error"]["code"] == "endpoint_lost"
        await pair.assert_all_free()


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_parser_of_vllm_streams_accepts_events_in_pieces_that_end_anywhere(end):
    said = chunk(TEXT, " one", [10], prompt_token_ids=[7]) + ": ping\n\n" + chunk(TEXT, " two", [20])
    data = said.replace("\n\n", end).encode()
    wholes = []
    for length in (1, 2, 7, len(data)):
        stream = ForeignStream(TEXT, {}, bytes_max=1000)
        stream.begin()
        sent = b"".join(stream.feed(data[at : at + length]) for at in range(0, len(data), length))
        assert stream.resume_field()["prompt"] == [7, 10, 20]
        wholes.append([line for line in sent.splitlines() if line])
    assert wholes == [wholes[0]] * 4
    assert wholes[0][1] == b": ping"


def test_error_event_of_a_vllm_stream_is_kept_and_not_forwarded():
    stream = ForeignStream(TEXT, {}, bytes_max=1000)
    stream.begin()
    stream.feed(chunk(TEXT, " one", [10], prompt_token_ids=[7]).encode())
    assert stream.feed(b'data: {"error": {"message": "m", "type": "internal_server_error", "code": 500}}\n\n') == b""
    assert stream.failure_code == "internal_server_error"
    assert stream.resume_field()["prompt"] == [7, 10]


@pytest.mark.parametrize("name", sorted(set(SamplingParams.__struct_fields__) & set(CompletionBody.__struct_fields__)))
def test_no_sampling_parameter_is_lost_when_a_stream_resumes(name):
    sent = json.dumps({"prompt": "a", name: 1}).encode()
    fields = foreign_body(TEXT, sent, choice_count=1)
    if fields is not None and name != "n":  # n is 1 here: streams with more choices do not resume.
        stream = ForeignStream(TEXT, fields, bytes_max=1000)
        stream.begin()
        stream.feed(chunk(TEXT, " one", [10], prompt_token_ids=[7]).encode())
        assert name in stream.resume_field()
