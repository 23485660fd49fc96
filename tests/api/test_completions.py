"""Tests POST /v1/completions: types of prompts, several prompts, echoes, and OpenAI's older format of logprobs."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from openai.types import Completion

from trioserve.contracts.errors import EngineFault, Overloaded
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta

PATH = "/v1/completions"


def chunks(exchange: Any) -> list[Any]:
    *events, done = exchange.events()
    assert done == "[DONE]"
    for event in events:
        # The client reads chunks with the class of whole responses, which allows no nulls, although nulls are usual in
        # chunks.
        filled = [
            {**choice, "finish_reason": choice["finish_reason"] or "stop", "logprobs": None}
            for choice in event["choices"]
        ]
        Completion.model_validate({**event, "choices": filled}, strict=True)
    return events


def streamed_texts(exchange: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks(exchange):
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_whole_response_is_a_text_completion(api: Any) -> None:
    exchange = await api.complete()
    response = Completion.model_validate(exchange.json(), strict=True)
    assert (response.object, response.model) == ("text_completion", "letters")
    assert response.id == "cmpl-" + exchange.response_headers["x-request-id"]
    [choice] = response.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello!", "stop", None)
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (3, 6, 9)
    assert api.left()


async def test_stream_sends_text_then_the_finish_reason_then_done(api: Any) -> None:
    exchange = await api.complete(stream=True, stream_options={"include_usage": True})
    assert streamed_texts(exchange) == {0: "Hello!"}
    *texts, usage = exchange.events()[:-1]
    assert [event["choices"][0]["finish_reason"] for event in texts] == [None, "stop"]
    assert all(event["usage"] is None for event in texts)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 9


async def test_last_event_of_a_single_completion_is_sent_with_done(api: Any) -> None:
    assert (await api.complete(stream=True, stream_options={"include_usage": True})).write_count == 2
    both_ends = await api.complete(stream=True, n=2)
    # The server writes two deltas of each choice, and the end. No choice waits for another choice.
    assert both_ends.write_count == 5


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("ab", ["ab"]),
        ([97, 98], [[97, 98]]),
        (["a", "bc"], ["a", "bc"]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_completion_prompt_may_have_each_of_four_types(api: Any, prompt: Any, prompts: list[Any]) -> None:
    response = (await api.complete(prompt=prompt)).json()
    assert [stream.prompt for stream in api.engine.streams] == prompts
    assert [choice["index"] for choice in response["choices"]] == list(range(len(prompts)))


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_error_of_an_invalid_completion_names_the_field(api: Any, fields: dict[str, Any], param: str) -> None:
    await api.check_refused(PATH, {"prompt": "ab", **fields}, param=param)
    assert api.engine.streams == []


async def test_completion_without_a_prompt_is_refused(api: Any) -> None:
    await api.check_refused(PATH, {"model": "letters"}, param="prompt")


async def test_best_of_equal_to_n_is_accepted(api: Any) -> None:
    assert (await api.complete(best_of=1)).status == 200
    assert (await api.complete(best_of=2, n=2)).status == 200


async def test_max_tokens_is_sixteen_by_default(api: Any) -> None:
    for fields in ({}, {"max_tokens": 5}, {"max_tokens": None}):
        await api.complete(**fields)
    assert [stream.sampling.max_tokens for stream in api.engine.streams] == [16, 5, None]


async def test_special_tokens_of_a_completion_can_be_omitted(api: Any) -> None:
    await api.complete(prompt="ab")
    await api.complete(prompt="ab", add_special_tokens=False)
    assert [options["add_special_tokens"] for options in api.engine.options] == [True, False]


# --- several prompts ---


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(api: Any, stream: bool) -> None:
    def repeat(prompt_token_ids: tuple[int, ...], sampling: Any) -> list[Delta]:
        return [
            Delta(
                index=index,
                text=f"{chr(prompt_token_ids[-1])}{index}",
                token_ids=(1, 2),
                finish_reason=FinishReason.LENGTH,
            )
            for index in range(sampling.n)
        ]

    api.engine.script = repeat
    exchange = await api.complete(prompt=["x", "y"], n=2, stream=stream)
    expected = {0: "x0", 1: "x1", 2: "y0", 3: "y1"}
    if stream:
        assert streamed_texts(exchange) == expected
    else:
        response = exchange.json()
        assert {choice["index"]: choice["text"] for choice in response["choices"]} == expected
        assert response["usage"]["prompt_tokens"] == 4
        assert response["usage"]["completion_tokens"] == 8
    assert len({stream.id for stream in api.engine.streams}) == 1
    assert api.left()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_prompt_cancels_the_other_prompts(
    api: Any, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    def script(prompt_token_ids: tuple[int, ...], sampling: Any) -> list[Any]:
        if prompt_token_ids[-1] == ord("b"):
            return [Delta(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR, message="no memory")]
        return [trio.Event()]

    api.engine.script = script
    with trio.fail_after(1):
        exchange = await api.complete(prompt=["a", "b", "c"], stream=stream)
    error = exchange.events()[-1] if stream else exchange.json()
    assert error["error"]["message"] == "no memory"
    assert error["error"]["code"] == "request_failed"
    assert api.left()


async def test_an_engine_fault_in_all_streams_is_reported_once(api: Any) -> None:
    api.engine.script = lambda *_: [EngineFault("broken")]
    exchange = await api.complete(prompt=["a", "b"], stream=True)
    assert [event["error"]["code"] for event in exchange.events()] == ["engine_fault"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_prompt_cancels_the_other_prompts(api: Any, stream: bool) -> None:
    api.engine.enter_errors = [None, Overloaded("full", reason="queue_full", retry_after_seconds=1)]
    exchange = await api.complete(prompt=["a", "b", "c"], stream=stream)
    assert exchange.status == 429
    assert [stream.entered for stream in api.engine.streams] == [True, False]
    assert api.left()


async def test_a_client_that_leaves_cancels_all_prompts(api: Any, autojump_clock: trio.testing.MockClock) -> None:
    api.engine.script = lambda *_: [trio.Event()]
    exchange = api.exchange("POST", PATH, {"prompt": ["a", "b", "c"], "stream": True})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.app, exchange)
        await trio.testing.wait_all_tasks_blocked()
        assert len(api.engine.streams) == 3
        nursery.cancel_scope.cancel()
    assert all(stream.left for stream in api.engine.streams)


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_a_slow_client_stops_reading_of_deltas(
    api: Any, prompt: Any, autojump_clock: trio.testing.MockClock
) -> None:
    api.engine.script = api.say(*["word "] * 50)
    exchange = api.exchange("POST", PATH, {"prompt": prompt, "stream": True})
    exchange.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.app, exchange)
        await trio.testing.wait_all_tasks_blocked()
        # One delta is being sent to the client, and another delta waits to be sent.
        assert sum(stream.taken_count for stream in api.engine.streams) <= 1 + len(api.engine.streams)
        exchange.gate.set()
    assert set(streamed_texts(exchange).values()) == {"word " * 50}


# --- logprobs and echoes ---


async def test_logprobs_of_a_completion_are_four_lists(api: Any) -> None:
    response = Completion.model_validate((await api.complete(logprobs=2)).json(), strict=True)
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hello!")
    assert logprobs.token_logprobs == [-0.5] * 6
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"H": -0.5, "I": -1.5}
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]


async def test_text_offsets_continue_from_chunk_to_chunk(api: Any) -> None:
    events = (await api.complete(logprobs=0, stream=True)).events()[:-1]
    offsets = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("prompt", ["ab", [1, 97, 98]])
async def test_echo_puts_the_prompt_before_each_choice(api: Any, prompt: Any) -> None:
    response = (await api.complete(prompt=prompt, echo=True, n=2)).json()
    assert [choice["text"] for choice in response["choices"]] == ["abHello!"] * 2
    assert streamed_texts(await api.complete(prompt=prompt, echo=True, n=2, stream=True)) == {
        0: "abHello!",
        1: "abHello!",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_has_the_prompts_logprobs_first(api: Any, stream: bool) -> None:
    exchange = await api.complete(echo=True, logprobs=1, stream=stream)
    pieces = [event["choices"][0]["logprobs"] for event in exchange.events()[:-1]] if stream else []
    pieces = pieces or [exchange.json()["choices"][0]["logprobs"]]
    joined = {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}
    assert joined["tokens"] == ["\x01", "a", "b", *"Hello!"]
    assert joined["token_logprobs"] == [None] + [-0.5] * 8
    assert joined["top_logprobs"][0] is None
    assert joined["text_offset"] == [0, *range(8)]  # The text does not contain the first token.
    assert api.engine.streams[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_without_output_can_be_scored(api: Any, stream: bool) -> None:
    exchange = await api.complete(echo=True, logprobs=0, max_tokens=0, stream=stream)
    if stream:
        assert streamed_texts(exchange) == {0: "ab"}
        assert exchange.events()[-2]["choices"][0]["finish_reason"] == "length"
    else:
        response = exchange.json()
        [choice] = response["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert (response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"]) == (3, 0)


async def test_prompt_logprobs_are_objects_by_token_id(api: Any) -> None:
    response = (await api.complete(prompt_logprobs=1)).json()
    assert [entry and list(entry) for entry in response["choices"][0]["prompt_logprobs"]] == [
        None,
        ["97", "98"],
        ["98", "99"],
    ]


async def test_token_ids_are_in_the_response_if_requested(api: Any) -> None:
    choice = (await api.complete(return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == list(map(ord, "Hello!"))
    assert choice["prompt_token_ids"] == [1, 97, 98]
    events = (await api.complete(return_token_ids=True, stream=True)).events()[:-1]
    assert events[0]["choices"][0]["prompt_token_ids"] == [1, 97, 98]
    assert [i for event in events for i in event["choices"][0].get("token_ids", [])] == list(map(ord, "Hello!"))


async def test_stop_reason_is_in_the_completion(api: Any) -> None:
    def script(*_: Any) -> list[Delta]:
        return [Delta(index=0, text="a", token_ids=(97,), finish_reason=FinishReason.STOP, stop_reason="END")]

    api.engine.script = script
    assert (await api.complete()).json()["choices"][0]["stop_reason"] == "END"
    assert (await api.complete(stream=True)).events()[-2]["choices"][0]["stop_reason"] == "END"
