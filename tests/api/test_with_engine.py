"""Tests the API with a real engine and a scripted model: whole, streamed, echoed and scored responses."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.invariants import check_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def opened(make_api: Any, **options: Any) -> AsyncIterator[tuple[Any, FakeEngine]]:
    async with open_fake_engine(**options) as fake:
        api = make_api()
        api.engine = fake
        yield api, fake
        await trio.sleep(1)  # A step in flight ends in this time.
        check_idle(fake.core)


def content(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
        if choice["index"] == index
    )


async def test_whole_and_streamed_responses_have_the_same_content(
    make_api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(make_api, step_seconds=0.01) as (api, _):
        for fields in ({"temperature": 0}, {"seed": 7, "n": 3}, {"seed": 7, "logprobs": True}):
            whole = (await api.chat(max_tokens=20, **fields)).json()
            events = (await api.chat(max_tokens=20, stream=True, **fields)).events()
            assert events[-1] == "[DONE]"
            for choice in whole["choices"]:
                assert content(events, choice["index"]) == choice["message"]["content"] != ""
            assert whole["usage"]["completion_tokens"] == 20 * len(whole["choices"])


@pytest.mark.parametrize("depth", [100, 990, 100_000])
async def test_deep_json_in_tool_arguments_is_the_clients_error(
    make_api: Any, autojump_clock: trio.testing.MockClock, depth: int
) -> None:
    context = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [context]}, {"role": "user", "content": "go on"}]
    async with opened(make_api) as (api, _):
        for path in (CHAT, "/tokenize"):
            await api.check_refused(path, {"messages": messages}, param="messages[0].tool_calls[0]")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
        (COMPLETIONS, {"prompt": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/v1/responses", {"model": "letters", "input": "Hi", "store": False}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"prompt": "Hi"}),
    ],
)
async def test_missing_sampling_fields_have_the_models_default(api: Any, path: str, fields: Any) -> None:
    api.engine.default_sampling = SamplingParams(temperature=0.2, top_p=0.9, top_k=7)
    for said, expect in (({}, (0.2, 0.9, 7)), ({"temperature": 1, "top_p": 1}, (1, 1, 7))):
        exchange = await api.context("POST", path, fields | ({"options": said} if path.startswith("/api/") else said))
        assert exchange.status == 200, exchange.data
        sampling = api.engine.streams[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == expect


async def test_several_prompts_in_one_request_get_the_same_responses_as_single_prompts(
    make_api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(make_api, step_seconds=0.01) as (api, _):
        prompts = ["first", "second one", "a third"]
        alone = [(await api.complete(prompt=p, temperature=0)).json()["choices"][0]["text"] for p in prompts]
        together = (await api.complete(prompt=prompts, temperature=0)).json()
        events = (await api.complete(prompt=prompts, temperature=0, stream=True)).events()
        assert [choice["text"] for choice in together["choices"]] == alone
        assert [content(events, index) for index in range(3)] == alone
        assert together["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_a_prompt_is_scored_with_and_without_a_response(
    make_api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(make_api) as (api, _):
        scored = (await api.complete(prompt="score me", echo=True, logprobs=2, max_tokens=0)).json()
        [choice] = scored["choices"]
        assert choice["text"] == "score me"
        assert choice["logprobs"]["tokens"] == list("score me")
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
        assert scored["usage"]["completion_tokens"] == 0
        longer = (await api.complete(prompt="score me", echo=True, logprobs=2, max_tokens=4, temperature=0)).json()
        logprobs = longer["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][:8] == choice["logprobs"]["token_logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 12


async def test_usage_reports_cached_tokens(make_api: Any, autojump_clock: trio.testing.MockClock) -> None:
    async with opened(make_api, block_size=4) as (api, _):
        for cached in (0, 8):
            response = (await api.complete(prompt="0123456789", max_tokens=2)).json()
            assert response["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_a_prompt_beyond_the_context_is_refused_with_its_code(
    make_api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(make_api, max_model_len=16) as (api, _):
        for stream in (False, True):
            exchange = await api.complete(prompt="x" * 17, stream=stream)
            assert (exchange.status, exchange.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_burst_beyond_the_queue_is_refused_with_retry_after(
    make_api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    """Scenario S42 of tests/README.md: the prompts of one request wait for each other, and do not count as a burst."""
    async with opened(make_api, max_num_seqs=2, max_queued_requests=1) as (api, fake):
        assert (await api.complete(prompt=["a", "b", "c", "d"])).status == 200
        fake.steps.hold()
        async with trio.open_nursery() as nursery:
            for prompt in ("a", "b", "c"):
                nursery.start_soon(functools.partial(api.complete, prompt=prompt))
            await trio.testing.wait_all_tasks_blocked()
            exchange = await api.complete(prompt="d")
            assert exchange.status == 429
            assert int(exchange.response_headers["retry-after"]) >= 1
            assert exchange.response_headers["x-trioserve-reason"] == "queue_full"
            fake.steps.release()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_abort_by_the_id_in_the_head_ends_the_request(
    make_api: Any, path: str, stream: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(make_api, step_seconds=0.01) as (api, fake):
        body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": ["a", "b"], "stream": stream}
        exchange = api.exchange("POST", path, {**body, "max_tokens": 64, "ignore_eos": True}, {"x-request-id": "mine"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.app, exchange)
            await trio.sleep(0.1)
            assert fake.abort(["mine"], FinishReason.ABORT) == {"mine": AbortOutcome.ABORTED}
        error = exchange.events()[-1] if stream else exchange.json()
        assert error["error"]["code"] == "request_aborted"
        assert exchange.status == (200 if stream else 503)


async def test_a_client_that_leaves_frees_its_blocks(make_api: Any, autojump_clock: trio.testing.MockClock) -> None:
    async with opened(make_api, step_seconds=0.01) as (api, fake):
        body = {"prompt": ["a", "b"], "max_tokens": 64, "ignore_eos": True, "stream": True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(api.app, api.exchange("POST", COMPLETIONS, body))
            await trio.sleep(0.1)
            assert fake.stats().blocks_used > 0
            nursery.cancel_scope.cancel()
        await trio.sleep(0.02)
        assert fake.stats().blocks_used == 0
        exposed = fake.metrics.expose()
        assert b'trioserve:aborts_total{engine="0",model_name="fake",phase="decode"} 2.0' in exposed


async def test_tokenize_and_detokenize_convert_text_to_tokens_and_back(
    make_api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(make_api) as (api, _):
        tokens = (await api.context("POST", "/tokenize", {"prompt": "grüß"})).json()["tokens"]
        assert tokens == list("grüß".encode())
        assert (await api.context("POST", "/detokenize", {"tokens": tokens})).json() == {"prompt": "grüß"}
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert (await api.context("POST", "/tokenize", chat)).json()["count"] == len("user: a\nassistant: ")
