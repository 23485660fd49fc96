"""Tests POST /v1/chat/completions. OpenAI's own client reads the responses."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
import trio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trioserve.contracts.errors import ContextTooLong, Draining, EngineFault, Overloaded
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


def chunks(exchange: Any) -> list[ChatCompletionChunk]:
    *events, done = exchange.events()
    assert done == "[DONE]"
    return [ChatCompletionChunk.model_validate(event, strict=True) for event in events]


async def test_whole_chat_response_is_a_chat_completion(api: Any) -> None:
    api.engine.cached_token_count = 3
    exchange = await api.chat(model="org/letters")
    response = ChatCompletion.model_validate(exchange.json(), strict=True)
    assert exchange.status == 200
    assert response.object == "chat.completion"
    assert response.model == "org/letters"
    assert response.id == "chatcmpl-" + exchange.response_headers["x-request-id"]
    [choice] = response.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (9, 6, 15)
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 3
    assert api.left()


async def test_chat_without_a_model_gets_a_response_of_the_served_model(api: Any) -> None:
    assert (await api.chat()).json()["model"] == "letters"


async def test_chat_stream_sends_role_then_text_then_finish_reason_then_done(api: Any) -> None:
    exchange = await api.chat(stream=True)
    response = chunks(exchange)
    assert [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in response] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": "!"},
        {},
    ]
    assert [chunk.choices[0].finish_reason for chunk in response] == [None, None, None, "stop"]
    assert {chunk.id for chunk in response} == {"chatcmpl-" + exchange.response_headers["x-request-id"]}
    assert all("usage" not in event for event in exchange.events()[:-1])


async def test_last_event_of_a_chat_with_one_choice_is_sent_with_done(api: Any) -> None:
    assert (await api.chat(stream=True, stream_options={"include_usage": True})).write_count == 2
    both_ends = await api.chat(stream=True, n=2)
    # The server writes two deltas of each choice, and the end. No choice waits for another choice.
    assert both_ends.write_count == 5


async def test_stream_ends_with_usage_if_requested(api: Any) -> None:
    exchange = await api.chat(stream=True, stream_options={"include_usage": True})
    *before, last = exchange.events()[:-1]
    assert all(event["usage"] is None for event in before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert chunks(exchange)[-1].usage is not None


async def test_stream_shows_usage_so_far_in_every_chunk_if_requested(api: Any) -> None:
    exchange = await api.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks(exchange)] == [5, 5, 6, 6, 6]


async def test_head_of_a_stream_is_sent_before_the_first_token(
    api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    """Scenario S25 of tests/README.md: the head has the id of the request, so a client can abort a prefill."""
    may_speak = trio.Event()
    api.engine.script = lambda *_: [may_speak, *api.say("late")(*_)]
    exchange = api.exchange("POST", CHAT, {"messages": [USER], "stream": True}, {"x-request-id": "mine"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.app, exchange)
        await exchange.head_sent.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert exchange.response_headers["x-request-id"] == "mine"
        assert exchange.data == b""
        may_speak.set()
    assert "late" in str(exchange.events())


async def test_each_choice_has_its_own_text(api: Any) -> None:
    whole = ChatCompletion.model_validate((await api.chat(n=3)).json())
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(i, "Hello!") for i in range(3)]
    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks(await api.chat(n=3, stream=True)):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "Hello!", 1: "Hello!", 2: "Hello!"}


async def test_the_official_client_reads_whole_and_streamed_responses(api: Any) -> None:
    exchanges = {False: await api.chat(logprobs=True, top_logprobs=2), True: await api.chat(stream=True)}

    def response(request: httpx.Request) -> httpx.Response:
        exchange = exchanges[b'"stream":true' in request.content]
        return httpx.Response(exchange.status, headers=exchange.response_headers, content=exchange.data)

    with openai.OpenAI(
        api_key="k", base_url="http://x/v1", http_client=httpx.Client(transport=httpx.MockTransport(response))
    ) as client:
        whole = client.chat.completions.create(model="letters", messages=[{"role": "user", "content": "Hi"}])
        assert whole.choices[0].message.content == "Hello!"
        assert whole._request_id == exchanges[False].response_headers["x-request-id"]
        stream = client.chat.completions.create(
            model="letters", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello!"


async def test_the_official_client_raises_the_error_that_ends_a_stream(api: Any) -> None:
    api.engine.script = lambda *_: [
        Delta(index=0, text="He", token_ids=(1,)),
        EngineFault("the engine broke"),
    ]
    exchange = await api.chat(stream=True)
    transport = httpx.MockTransport(
        lambda _: httpx.Response(200, headers=exchange.response_headers, content=exchange.data)
    )
    with openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=httpx.Client(transport=transport)) as client:
        stream = client.chat.completions.create(
            model="letters", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the engine broke"):
            list(stream)


# --- logprobs ---


async def test_logprobs_list_every_token_with_its_alternatives(api: Any) -> None:
    response = ChatCompletion.model_validate((await api.chat(logprobs=True, top_logprobs=2)).json(), strict=True)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "Hello!"
    first = logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("H", -0.5), ("I", -1.5)]
    assert api.engine.streams[0].sampling.logprobs == 2


async def test_streamed_logprobs_are_in_the_event_of_their_text(api: Any) -> None:
    for chunk in chunks(await api.chat(logprobs=True, stream=True)):
        text = chunk.choices[0].delta.content
        if text:
            assert chunk.choices[0].logprobs is not None
            assert chunk.choices[0].logprobs.content is not None
            assert "".join(entry.token for entry in chunk.choices[0].logprobs.content) == text
    assert api.engine.streams[0].sampling.logprobs == 0


async def test_the_logprob_of_an_impossible_token_is_a_number(api: Any) -> None:
    api.engine.script = lambda *_: [
        Delta(
            index=0,
            text="x",
            token_ids=(120,),
            logprobs=(TokenLogprob(120, float("-inf")),),
            finish_reason=FinishReason.LENGTH,
        )
    ]
    response = (await api.chat(logprobs=True)).json()
    assert response["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    assert response["choices"][0]["finish_reason"] == "length"


async def test_prompt_logprobs_are_objects_by_token_id(api: Any) -> None:
    response = (await api.chat(prompt_logprobs=2)).json()
    assert response["prompt_logprobs"][0] is None
    assert response["prompt_logprobs"][1] == {
        "117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"},
        "118": {"logprob": -1.5, "rank": 2, "decoded_token": "v"},
    }


# --- values that reach the engine ---


async def test_every_sampling_field_reaches_the_engine(api: Any) -> None:
    await api.chat(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=-5,
        max_completion_tokens=8,
        max_tokens=99,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias={"50": -100, "51": 1.5},
        priority=-3,
        cache_salt="mine",
    )
    assert api.engine.streams[0].sampling == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=-5,
        max_tokens=8,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias={50: -100.0, 51: 1.5},
    )
    options = api.engine.options[0]
    assert (options["priority"], options["cache_salt"]) == (-3, "mine")


async def test_a_null_or_missing_field_has_the_server_default(api: Any) -> None:
    api.engine.default_sampling = SamplingParams(temperature=0.6, top_k=20)
    await api.chat(temperature=None, top_k=None, stop=None, n=None, max_tokens=None, stream=None, tools=None, seed=None)
    assert api.engine.streams[0].sampling == api.engine.default_sampling


async def test_harmless_and_unknown_fields_are_accepted(api: Any) -> None:
    exchange = await api.chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        response_format={"type": "text"},
        modalities=["text"],
        stop="x",
        parallel_tool_calls=True,
        tomorrow={"deep": [1]},
    )
    assert exchange.status == 200
    assert api.engine.streams[0].sampling.stop == ("x",)


async def test_messages_reach_the_template_unchanged(api: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    await api.chat(messages=messages, tools=tools, tool_choice="auto", chat_template_kwargs={"thinking": False})
    prompt = api.engine.streams[0].prompt
    assert prompt.messages == messages
    assert prompt.tools == tools
    assert prompt.template_arguments == {"thinking": False}
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (True, False)


async def test_tools_stay_in_the_prompt_if_none_may_be_called(api: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    await api.chat(tools=tools, tool_choice="none")
    assert api.engine.streams[0].prompt.tools == tools


async def test_the_last_message_can_be_continued_and_echoed(api: Any) -> None:
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    exchange = await api.chat(messages=messages, continue_final_message=True, echo=True)
    prompt = api.engine.streams[0].prompt
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    assert exchange.json()["choices"][0]["message"]["content"] == "Well, Hello!"
    streamed = chunks(await api.chat(messages=messages, continue_final_message=True, echo=True, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "Well, Hello!"


async def test_a_template_in_the_request_needs_the_operators_option(api: Any, make_api: Any) -> None:
    await api.check_refused(CHAT, {"messages": [USER], "chat_template": "x"}, param="chat_template")
    trusting = make_api(trust_request_chat_template=True)
    await trusting.chat(chat_template="{{ messages }}")
    assert trusting.engine.streams[0].prompt.chat_template == "{{ messages }}"


async def test_token_ids_are_in_the_response_if_requested(api: Any) -> None:
    response = (await api.chat(return_token_ids=True)).json()
    assert response["choices"][0]["token_ids"] == list(map(ord, "Hello!"))
    assert response["prompt_token_ids"] == list(api.engine.streams[0].prompt_token_ids)
    events = (await api.chat(return_token_ids=True, stream=True)).events()[:-1]
    assert events[0]["prompt_token_ids"] == response["prompt_token_ids"]
    streamed = [token_id for event in events for token_id in event["choices"][0].get("token_ids", [])]
    assert streamed == response["choices"][0]["token_ids"]


# --- refusals ---


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": 3, "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_k": 10**30}, "top_k"),
        ({"seed": 10**400}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**20]}, "stop_token_ids[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"priority": 101}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_error_of_an_invalid_chat_names_the_field(api: Any, fields: dict[str, Any], param: str) -> None:
    await api.check_refused(CHAT, {"messages": [USER], **fields}, param=param)
    assert api.engine.streams == []


async def test_deeply_nested_values_do_not_reach_the_template(api: Any) -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    for field, value in (("tools", [{"f": deep}]), ("chat_template_kwargs", {"f": deep})):
        await api.check_refused(CHAT, {"messages": [USER], field: value}, param=field)
    await api.check_refused(CHAT, {"messages": [{**USER, "f": deep}]}, param="messages")


async def test_request_for_an_unknown_model_is_404(api: Any) -> None:
    message = await api.check_refused(CHAT, {"messages": [USER], "model": "gpt-9"}, status=404, param="model")
    assert "letters" in message
    exchange = await api.chat(model="gpt-9")
    assert exchange.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_engine_has_a_status_even_for_a_stream(api: Any, stream: bool) -> None:
    api.engine.enter_errors = [Overloaded("full", reason="queue_full", retry_after_seconds=2.2)]
    exchange = await api.chat(stream=stream)
    assert exchange.status == 429
    assert exchange.response_headers["retry-after"] == "3"
    assert exchange.response_headers["x-trioserve-reason"] == "queue_full"
    assert exchange.json()["error"]["code"] == "overloaded"

    api.engine.enter_errors = [Draining("bye", reason="draining", retry_after_seconds=0)]
    exchange = await api.chat(stream=stream)
    assert (exchange.status, exchange.response_headers["retry-after"]) == (503, "1")

    api.engine.enter_errors = [ContextTooLong("too long", param="messages")]
    exchange = await api.chat(stream=stream)
    assert exchange.status == 400
    assert exchange.json()["error"]["code"] == "context_length_exceeded"


# --- ends by an abort, a deadline or a fault ---

ENDS = [
    (FinishReason.ABORT, 503, "request_aborted"),
    (FinishReason.DEADLINE, 504, "deadline_exceeded"),
    (FinishReason.ERROR, 500, "request_failed"),
]


@pytest.mark.parametrize("reason, status, code", ENDS)
async def test_partial_chat_response_is_an_error(api: Any, reason: FinishReason, status: int, code: str) -> None:
    api.engine.script = api.say("Hel", reason=reason, message="because")
    exchange = await api.chat()
    assert exchange.status == status
    assert exchange.json()["error"]["code"] == code
    assert exchange.json()["error"]["message"] == "because"
    assert api.left()


@pytest.mark.parametrize("reason, status, code", ENDS)
async def test_partial_chat_stream_ends_with_an_error_and_without_done(
    api: Any, reason: FinishReason, status: int, code: str
) -> None:
    api.engine.script = api.say("Hel", "lo", reason=reason)
    *text, error = (await api.chat(stream=True)).events()
    assert error["error"]["code"] == code
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in text) == "Hello"
    assert all(event["choices"][0]["finish_reason"] is None for event in text)
    assert api.left()


async def test_an_engine_fault_ends_streams_and_whole_responses(api: Any) -> None:
    api.engine.script = lambda *_: [Delta(index=0, text="x", token_ids=(1,)), EngineFault("broken")]
    whole = await api.chat()
    assert (whole.status, whole.json()["error"]["code"]) == (500, "engine_fault")
    assert (await api.chat(stream=True)).events()[-1]["error"]["code"] == "engine_fault"


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "first token", "slow client"])
async def test_a_client_that_leaves_cancels_its_request(
    api: Any, stream: bool, phase: str, autojump_clock: trio.testing.MockClock
) -> None:
    exchange = api.exchange("POST", CHAT, {"messages": [USER], "stream": stream})
    if phase == "queued":
        api.engine.queue = trio.Event()
    elif phase == "first token":
        api.engine.script = lambda *_: [trio.Event()]
    else:
        exchange.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.app, exchange)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert api.left()
    assert not exchange.finished
    assert b'trioserve:streams_open{model_name="letters"} 0.0' in api.engine.metrics.expose()


async def test_a_slow_client_of_a_whole_response_keeps_no_engine_resources(api: Any) -> None:
    exchange = api.exchange("POST", CHAT, {"messages": [USER]})
    exchange.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.app, exchange)
        await trio.testing.wait_all_tasks_blocked()
        assert api.left()
        exchange.gate.set()
    assert exchange.finished
