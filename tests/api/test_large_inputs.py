"""Tests large inputs: the number of values is limited, threads process the inputs, and the work stops when the client
leaves.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.text_threads import TextThreads
from trioserve.api.openai.request_types import ChatBody, decode_body
from trioserve.contracts.errors import InvalidRequest
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine


def test_brackets_in_a_body_count_as_values():
    """Nested empty lists have no commas, and cost as much as other values."""
    deep = b'{"messages":[' + b",".join([b"[" * 50 + b"]" * 50] * 50_000) + b"]}"
    with pytest.raises(InvalidRequest, match="the body has too many values"):
        decode_body(deep, ChatBody)


async def test_many_tokens_are_processed_in_a_thread(api: Any) -> None:
    api.engine.model.context_tokens_max = 10**6
    for count, jobs in ((1000, 0), (1001, 1)):
        api.engine.text_jobs.clear()
        response = await api.context("POST", "/detokenize", {"tokens": [97] * count})
        assert (len(response.json()["prompt"]), len(api.engine.text_jobs)) == (count, jobs)
        api.engine.text_jobs.clear()
        asked = {"prompt": "a" * count, "return_token_strs": True, "add_special_tokens": False}
        response = await api.context("POST", "/tokenize", asked)
        assert (response.json()["token_strs"], len(api.engine.text_jobs)) == (["a"] * count, jobs)
        api.engine.text_jobs.clear()
        await api.context("POST", "/tokenize", {"prompt": "a" * count})
        assert api.engine.text_jobs == []


async def test_error_names_the_invalid_token_id_among_many(api: Any) -> None:
    await api.check_refused("/detokenize", {"tokens": [97] * 5000 + [-1]}, param="tokens[5000]")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [97] * 5000}),
        ("/tokenize", {"prompt": "a" * 5000, "return_token_strs": True}),
    ],
)
async def test_a_client_that_leaves_does_not_wait_for_the_thread(api: Any, path, body, autojump_clock) -> None:
    api.engine.text_gate = trio.Event()
    exchange = api.exchange("POST", path, body)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.app, exchange)
        await wait_all_tasks_blocked()
        assert len(api.engine.text_jobs) == 1
        nursery.cancel_scope.cancel()
    assert not exchange.started
    assert api.left()


async def test_tokenizing_uses_no_request_and_a_cancelled_caller_leaves_at_once():
    release = threading.Event()
    begun = threading.Event()
    names: list[str] = []

    def job(name: str) -> str:
        names.append(threading.current_thread().name)
        begun.set()
        release.wait(20)  # The timeout limits the wait if the test fails.
        return name

    async def tokenize(fake: FakeEngine, name: str) -> str:
        with fake.tokenizing() as texts:
            return await texts.run(lambda: job(name), size=5000)

    async with open_fake_engine(new_text_threads=TextThreads) as fake:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tokenize, fake, "left behind")
                await trio.to_thread.run_sync(begun.wait)
                nursery.cancel_scope.cancel()
            assert not release.is_set()  # The nursery was left while the thread still ran.
        finally:
            release.set()
        assert await tokenize(fake, "waited for") == "waited for"
    assert names == ["trioserve-text-aside"] * 2
