"""Tests that a long text does not delay shorter texts, and that aside jobs delay no request and are limited.

The tests use real threads and the real clock. No test waits for time to pass.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import trio

from trioserve.admission.text_threads import (
    ASIDE_CHARACTERS_MAX,
    ASIDE_JOBS_MAX,
    ASIDE_JOBS_OF_ONE_MAX,
    LONG_CHARACTERS_MAX,
    SHORT_CHARACTERS_MAX,
    TextThreads,
)
from trioserve.contracts.errors import AlreadyEnded, Overloaded, RequestFailed
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.memory_server import open_memory_server
from trioserve.trio_tools.fair_slots import FairSlots
from trioserve.trio_tools.worker_thread import JobCancelled

WAIT_SECONDS_MAX = 60  # This limit ends a failing test. It is long enough for a busy machine.


class Gate:
    """Creates jobs that block their threads until the gate opens."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._begun = threading.Semaphore(0)

    def job(self, *_: object) -> None:
        self._begun.release()
        self._open.wait(WAIT_SECONDS_MAX)

    async def wait_until_begun(self) -> None:
        await trio.to_thread.run_sync(self._begun.acquire, True, WAIT_SECONDS_MAX)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def block_long_texts(engine: FakeEngine, gate: Gate, longer_than: int) -> None:
    encode = engine.tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        if len(text) > longer_than:
            gate.job()
        return encode(text, **options)

    engine.tokenizer.encode = slow  # type: ignore[method-assign]


ENGINE: dict[str, Any] = {
    "max_model_len": 150_000,
    "block_size": 64,
    "block_count": 2400,
    "max_num_batched_tokens": 8192,
    "new_text_threads": TextThreads,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("long", "short"),
    [
        (SHORT_CHARACTERS_MAX + 1, SHORT_CHARACTERS_MAX),
        (LONG_CHARACTERS_MAX + 1, SHORT_CHARACTERS_MAX + 1),
        (LONG_CHARACTERS_MAX + 1, 2000),
    ],
)
async def test_long_prompt_does_not_delay_a_much_shorter_prompt(long, short, gate):
    async with open_fake_engine(**ENGINE) as fake:
        block_long_texts(fake, gate, short)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.encode, "x" * long)
            await gate.wait_until_begun()
            with trio.fail_after(WAIT_SECONDS_MAX):
                assert len(await fake.encode("x" * short)) == short
            gate.open()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x" * 5000}), ("/tokenize", {"messages": [{"role": "user", "content": "x" * 5000}]})],
)
async def test_tokenize_endpoint_does_not_delay_prompts(path, body, gate):
    async with open_memory_server(**ENGINE) as server:
        block_long_texts(server.engine, gate, 4999)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.client().post, path, body)
            await gate.wait_until_begun()
            with trio.fail_after(WAIT_SECONDS_MAX):
                response = await server.client().post("/v1/completions", {"prompt": "x" * 4000, "max_tokens": 1})
            assert response.status == 200
            gate.open()


async def test_number_of_waiting_tokenize_requests_is_limited(gate):
    async with open_memory_server(**ENGINE) as server:
        block_long_texts(server.engine, gate, 4999)
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await server.client().post("/tokenize", {"prompt": "x" * 5000})).status)

        async with trio.open_nursery() as nursery:
            for _ in range(ASIDE_JOBS_MAX):
                nursery.start_soon(ask)
            await gate.wait_until_begun()
            await trio.testing.wait_all_tasks_blocked()
            for path, body in (("/tokenize", {"prompt": "x" * 5000}), ("/detokenize", {"tokens": [120] * 5000})):
                with trio.fail_after(WAIT_SECONDS_MAX):
                    response = await server.client().post(path, body)
                assert response.status == 429
                said = json.loads(response.body)["error"]
                assert response.headers["x-trioserve-reason"] == "text_queue_full"
                assert int(response.headers["retry-after"]) >= 1
                assert f"at most {ASIDE_JOBS_MAX} may" in said["message"]
            assert (await server.client().post("/tokenize", {"prompt": "short"})).status == 200
            gate.open()
        assert statuses == [200] * ASIDE_JOBS_MAX
        assert (await server.client().post("/tokenize", {"prompt": "x" * 5000})).status == 200
        shown = server.engine.metrics.expose().decode().splitlines()
        [refused] = [line for line in shown if "requests_rejected_total{" in line and "text_queue_full" in line]
        assert refused.endswith(" 2.0")


async def test_number_of_text_jobs_of_one_key_is_limited(gate):
    async with TextThreads() as threads, trio.open_nursery() as nursery:

        async def tokenize(owner: str | None) -> None:
            with threads.aside(owner) as texts:
                await texts.run(gate.job, size=5000)

        for _ in range(ASIDE_JOBS_OF_ONE_MAX):
            nursery.start_soon(tokenize, "greedy")
        await gate.wait_until_begun()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match=f"calls of this key run or wait, at most {ASIDE_JOBS_OF_ONE_MAX}"):
            await tokenize("greedy")
        nursery.start_soon(tokenize, "other")
        nursery.start_soon(tokenize, None)
        await trio.testing.wait_all_tasks_blocked()
        gate.open()


async def test_text_is_refused_while_a_text_above_the_character_limit_is_tokenized(gate):
    async with TextThreads() as threads, trio.open_nursery() as nursery:

        async def tokenize(size: int) -> None:
            with threads.aside(None) as texts:
                await texts.run(gate.job, size=size)

        nursery.start_soon(tokenize, 3 * ASIDE_CHARACTERS_MAX)
        await gate.wait_until_begun()
        with pytest.raises(Overloaded, match="would make more than") as refused:
            await tokenize(1)
        assert refused.value.retry_after_seconds > 10
        nursery.cancel_scope.cancel()
        gate.open()


@pytest.mark.slow
async def test_cancelled_caller_frees_its_slot_and_its_text(gate):
    class Text:
        pass

    async with TextThreads() as threads:

        async def tokenize(text: Text) -> None:
            with threads.aside("key") as texts:
                await texts.run(lambda: gate.job(text), size=5000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tokenize, Text())
            await gate.wait_until_begun()
            gc.freeze()  # Without this call, each collection scans all objects of earlier tests, which takes a second.
            for _ in range(3 * ASIDE_JOBS_OF_ONE_MAX):
                text = Text()
                is_kept = weakref.ref(text)
                async with trio.open_nursery() as inner:
                    inner.start_soon(tokenize, text)
                    await trio.testing.wait_all_tasks_blocked()
                    del text
                    inner.cancel_scope.cancel()
                gc.collect()
                assert is_kept() is None, "the thread holds a text that it has not processed"
            gc.unfreeze()
            gate.open()
        with threads.aside("key") as texts:
            assert await texts.run(lambda: 1, size=5000) == 1
    with pytest.raises(AlreadyEnded):
        await threads.run(lambda: 1, size=5000)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trioserve-text")]


STAGES: dict[str, Any] = {
    "short texts": lambda threads, key, job: threads.run(job, size=2000, tenant=key),
    "long texts": lambda threads, key, job: threads.run(job, size=SHORT_CHARACTERS_MAX + 1, tenant=key),
    "longest texts": lambda threads, key, job: threads.run(job, size=LONG_CHARACTERS_MAX + 1, tenant=key),
    "schemas and grammars": lambda threads, key, job: threads.run_compile(job, tenant=key),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_tenant_waits_for_at_most_one_job_of_a_busy_tenant(stage, gate):
    run, order = STAGES[stage], []
    async with TextThreads() as threads, trio.open_nursery() as nursery:
        nursery.start_soon(run, threads, "flood", gate.job)
        await gate.wait_until_begun()
        for _ in range(200):
            nursery.start_soon(run, threads, "flood", lambda *_: order.append("flood"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(run, threads, "other", lambda *_: order.append("other"))
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
    assert order.index("other") == 0
    assert len(order) == 201


async def test_owners_of_aside_jobs_take_turns(gate):
    order: list[str] = []

    async def ask(threads: TextThreads, owner: str, job: Any) -> None:
        with threads.aside(owner) as texts:
            await texts.run(job, size=10)

    async with TextThreads() as threads, trio.open_nursery() as nursery:
        nursery.start_soon(ask, threads, "flood", gate.job)
        await gate.wait_until_begun()
        for _ in range(ASIDE_JOBS_OF_ONE_MAX - 1):
            nursery.start_soon(ask, threads, "flood", lambda: order.append("flood"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, threads, "other", lambda: order.append("other"))
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
    assert order[0] == "other"


async def test_compiling_ends_early_after_its_caller_is_cancelled(gate):
    ended: list[str] = []

    def compile_parts(check: Any) -> None:
        gate.job()
        try:
            check()
        except JobCancelled:
            ended.append("in the middle")
            raise

    async with TextThreads() as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(threads.run_compile, compile_parts, tenant="a"))
            await gate.wait_until_begun()
            nursery.cancel_scope.cancel()
        gate.open()
    assert ended == ["in the middle"]


async def test_tenant_with_too_many_waiting_texts_is_refused(gate, monkeypatch):
    monkeypatch.setattr("trioserve.admission.text_threads.FairSlots", partial(FairSlots, waiting_of_one_max=2))
    async with open_memory_server(**ENGINE) as server:
        block_long_texts(server.engine, gate, 4999)
        statuses: list[int] = []

        async def ask(tenant: str) -> None:
            headers = {"x-tenant-id": tenant}
            body = {"prompt": "x" * 5000, "max_tokens": 1}
            statuses.append((await server.client().post("/v1/completions", body, headers=headers)).status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            await gate.wait_until_begun()
            for tenant in "aabb":
                nursery.start_soon(ask, tenant)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(WAIT_SECONDS_MAX):
                response = await server.client().post(
                    "/v1/completions", {"prompt": "x" * 5000}, headers={"x-tenant-id": "a"}
                )
            assert response.status == 429
            assert response.headers["x-trioserve-reason"] == "stage_full"
            assert int(response.headers["retry-after"]) >= 1
            assert "2 texts of this key wait already" in json.loads(response.body)["error"]["message"]
            gate.open()
        assert statuses == [200] * 5
        shown = server.engine.metrics.expose().decode().splitlines()
        [refused] = [line for line in shown if "requests_rejected_total{" in line and "stage_full" in line]
        assert refused.endswith(" 1.0")


class PanicException(BaseException):
    """A replacement for a panic in Rust code, with the name and base class that PyO3 uses."""


async def test_library_panic_fails_its_job_but_not_the_thread():
    def panic(*_):
        raise PanicException("index out of bounds")

    async with TextThreads() as threads:
        for _ in range(2):
            with pytest.raises(RequestFailed, match="a library of the server broke"):
                await threads.run(panic, size=1)
            with pytest.raises(RequestFailed, match="index out of bounds"):
                await threads.run_compile(panic, tenant=None)
        assert await threads.run(lambda: 7, size=1) == 7


async def test_library_panic_fails_only_one_request(monkeypatch, autojump_clock):
    async with open_memory_server() as server:
        body = {"prompt": "Hi", "max_tokens": 4}

        def panic(*_, **__):
            raise PanicException("index out of bounds")

        for place in ("trioserve.text.output.ChoiceOutput.feed", "trioserve.api.openai.completions._sampling"):
            with monkeypatch.context() as patch:
                patch.setattr(place, panic)
                answer = await server.client().post("/v1/completions", body)
                assert answer.status == 500
        assert (await server.client().post("/v1/completions", body)).status == 200
        await server.assert_all_free()
