"""Tests of LoRA adapters in an engine. Each request has a lease on its adapter, and releases it however the request
ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve import EngineFault, FinishReason, SamplingParams
from trioserve.contracts.errors import AdapterRefused, ModelLoadError, ResumeMismatch, UnknownModel
from trioserve.testing import FakeEngine, open_fake_engine

TEN = SamplingParams(max_tokens=10, temperature=0.0)
PROMPT = "a prompt of some blocks"


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[FakeEngine]:
    async with open_fake_engine(lora_modules=("a=/one", "b=/two"), **options) as engine:
        yield engine
        await wait_all_tasks_blocked()
        engine.assert_all_free()


async def text_of(engine: FakeEngine, adapter: str | None, prompt: str = PROMPT) -> tuple[str, int]:
    async with engine.generate(prompt, TEN, adapter=adapter) as stream:
        return "".join([delta.text async for delta in stream]), stream.cached_token_count


def in_memory(engine: FakeEngine) -> set[int]:
    return engine.executor.adapters


async def test_each_adapter_has_its_own_output_and_blocks():
    async with opened() as engine:
        texts = {}
        for adapter in (None, "a", "b"):
            texts[adapter], cached = await text_of(engine, adapter)
            assert cached == 0, "blocks of another adapter were hit"
        assert len(set(texts.values())) == 3
        for adapter in (None, "a", "b"):
            text, cached = await text_of(engine, adapter)
            assert text == texts[adapter]
            assert cached > 0


async def test_equal_adapter_content_under_another_name_shares_blocks():
    async with opened() as engine:
        said, _ = await text_of(engine, "a")
        await engine.load_adapter("again", "/one")
        assert await text_of(engine, "again") == (said, 20)
        await engine.unload_adapter("a")
        await engine.load_adapter("a", "/other")
        other, cached = await text_of(engine, "a")
        assert (other != said, cached) == (True, 0), "its name is not what blocks are known by"


async def test_unknown_adapter_is_refused_on_entering():
    async with opened() as engine:
        stream = engine.generate(PROMPT, adapter="c")
        with pytest.raises(UnknownModel, match='the adapter "c" is not loaded'):
            async with stream:
                pass


@pytest.mark.parametrize("phase", ["queued", "waiting", "preparing", "prefill", "forward", "decode", "ended"])
async def test_request_that_leaves_its_engine_releases_its_adapter_lease(phase: str):
    options: dict[str, Any] = {"max_num_seqs": 1} if phase == "waiting" else {}
    if phase == "preparing":
        options = {"max_model_len": 100_000, "block_count": 25_000}
    prompt = "x" * 60_000 if phase == "preparing" else (PROMPT * 3)[:60]
    async with opened(paused=True, max_num_batched_tokens=8, **options) as engine, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def ask(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            with scope:
                task_status.started()
                async with engine.generate(prompt, TEN, adapter="a") as stream:
                    async for _ in stream:
                        pass
                    await trio.sleep_forever()

        if phase == "waiting":
            nursery.start_soon(_forever, engine)
            await wait_all_tasks_blocked()
            await engine.step()
        await nursery.start(ask)
        while engine.adapters.book.lease_count == 0:
            await trio.lowlevel.checkpoint()
        if phase != "preparing":
            await wait_all_tasks_blocked()
        assert engine.adapters.book.lease_count == 1
        if phase == "prefill":
            await engine.step()
        if phase in ("decode", "forward"):
            await engine.step(15)
        if phase == "ended":
            await engine.step(40)
            assert engine.adapters.book.lease_count == 0, "the core has nothing of it any more"
        if phase == "forward":
            async with engine.held_step():
                scope.cancel()
                await wait_all_tasks_blocked()
                assert engine.adapters.book.lease_count == 1, "a step reads it"
        scope.cancel()
        await wait_all_tasks_blocked()
        assert engine.adapters.book.lease_count == 0
        nursery.cancel_scope.cancel()


async def _forever(engine: FakeEngine) -> None:
    async with engine.generate("hold", SamplingParams(max_tokens=100)) as stream:
        async for _ in stream:
            pass


async def test_unload_of_an_adapter_waits_for_users_and_frees_the_name_at_once():
    async with opened(paused=True) as engine, trio.open_nursery() as nursery:  # noqa: SIM117
        async with engine.generate(PROMPT, TEN, adapter="a") as stream:
            await engine.step()
            id = engine.adapters.book.get("a").id
            ended = trio.Event()

            async def unload() -> None:
                await engine.unload_adapter("a")
                ended.set()

            nursery.start_soon(unload)
            await wait_all_tasks_blocked()
            assert engine.adapters.names == ("b",)
            with pytest.raises(UnknownModel):
                async with engine.generate(PROMPT, adapter="a"):
                    pass
            assert not ended.is_set()
            assert id in in_memory(engine)
            engine.resume()
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            await wait_all_tasks_blocked()
            assert ended.is_set()
            assert id not in in_memory(engine)


async def test_unload_of_an_adapter_ends_remaining_users_at_its_deadline(autojump_clock: trio.testing.MockClock):
    async with (
        opened(step_seconds=1.0, max_model_len=1000, block_count=512) as engine,
        engine.generate("x", SamplingParams(max_tokens=500), adapter="a") as stream,
        engine.generate("x", SamplingParams(max_tokens=20), adapter="b") as other,
    ):
        await trio.sleep(3)
        with trio.fail_after(10):
            await engine.unload_adapter("a", seconds=5.0)
        last = [delta async for delta in stream][-1]
        assert last.finish_reason is FinishReason.ABORT
        assert last.stop_reason == "adapter_unloaded"
        assert "the adapter a was unloaded" in str(last.message)
        assert [delta async for delta in other][-1].finish_reason is FinishReason.LENGTH


async def test_adapter_unload_deadline_applies_after_its_caller_has_left(autojump_clock: trio.testing.MockClock):
    async with opened(step_seconds=1.0, max_model_len=1000, block_count=512) as engine:
        async with engine.generate("x", SamplingParams(max_tokens=500), adapter="a") as stream:
            with trio.move_on_after(1):
                await engine.unload_adapter("a", seconds=5.0)
            with trio.fail_after(10):
                assert [delta async for delta in stream][-1].finish_reason is FinishReason.ABORT
        await trio.sleep(2)  # The step in flight used the adapter until now.
        assert in_memory(engine) == {2}


async def test_running_request_keeps_its_adapter_weights_when_the_adapter_is_replaced():
    async with opened(paused=True) as engine:
        before, _ = await _unpaused(engine, "a")
        async with engine.generate(PROMPT, TEN, adapter="a") as stream:
            await engine.step(2)
            with pytest.raises(AdapterRefused, match="already been loaded"):
                await engine.load_adapter("a", "/three")
            await engine.load_adapter("a", "/three", replaces=True)
            assert len(in_memory(engine)) == 3
            engine.resume()
            assert "".join([delta.text async for delta in stream]) == before
        await wait_all_tasks_blocked()
        assert len(in_memory(engine)) == 2
        assert (await text_of(engine, "a"))[0] != before


async def _unpaused(engine: FakeEngine, adapter: str) -> tuple[str, int]:
    engine.resume()
    found = await text_of(engine, adapter)
    engine.pause()
    return found


async def test_unreadable_adapter_leaves_no_memory():
    async with opened() as engine:
        with pytest.raises(ModelLoadError, match="missing"):
            await engine.load_adapter("c", "/missing")
        for name in ("", "fake", "x" * 300, "new\nline"):
            with pytest.raises(AdapterRefused):
                await engine.load_adapter(name, "/c")
        await wait_all_tasks_blocked()
        assert engine.adapters.names == ("a", "b")
        assert in_memory(engine) == {1, 2}


async def test_adapter_load_that_is_cancelled_or_unloaded_leaves_no_memory(monkeypatch: pytest.MonkeyPatch):
    async with opened() as engine:
        gate = trio.Event()
        place = engine.adapters._place
        add = place.add

        async def add_slowly(id: Any, content: Any) -> None:
            await gate.wait()
            await add(id, content)

        monkeypatch.setattr(place, "add", add_slowly)
        with trio.move_on_after(0.05):
            await engine.load_adapter("c", "/c")
        await wait_all_tasks_blocked()
        assert engine.adapters.names == ("a", "b")
        assert in_memory(engine) == {1, 2}
        async with trio.open_nursery() as nursery:
            refused = trio.Event()

            async def load() -> None:
                with pytest.raises(AdapterRefused, match="while it was being loaded"):
                    await engine.load_adapter("c", "/c")
                refused.set()

            nursery.start_soon(load)
            while engine.adapters.book.retire("c") == []:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            assert not refused.is_set()
            gate.set()
        await wait_all_tasks_blocked()
        assert in_memory(engine) == {1, 2}, "what was put into memory behind its unloading is let go of"


async def test_reopened_engine_keeps_its_adapters():
    async with opened(engine_restarts=2) as engine:
        said, _ = await text_of(engine, "a")
        async with engine.generate(PROMPT, TEN, adapter="a") as stream:
            engine.break_next_step()
            assert "".join([delta.text async for delta in stream]) == said
        assert in_memory(engine) == {1, 2}
        assert (await text_of(engine, "b"))[0] != said


async def test_final_fault_releases_all_adapter_leases():
    with pytest.raises(EngineFault):
        async with open_fake_engine(lora_modules=("a=/one",)) as engine:
            try:
                async with engine.generate(PROMPT, TEN, adapter="a") as stream:
                    engine.break_next_step()
                    async for _ in stream:
                        pass
            finally:
                assert engine.adapters.book.lease_count == 0


async def test_response_resumes_only_with_the_same_adapter():
    async with opened() as engine:
        whole, _ = await text_of(engine, "a")
        async with engine.generate(PROMPT, TEN, adapter="a") as stream:
            first = await anext(aiter(stream))
            state = stream.resume_state()
        async with engine.generate(PROMPT, TEN, adapter="a", resume=state) as stream:
            assert first.text + "".join([delta.text async for delta in stream]) == whole
        for other in ("b", None):
            with pytest.raises(ResumeMismatch):
                async with engine.generate(PROMPT, TEN, adapter=other, resume=state):
                    pass


async def test_pooled_requests_can_use_an_adapter():
    async with opened() as engine:
        vectors = [(await engine.embed(["one", "two"], adapter=adapter)) for adapter in (None, "a", "b", "a")]
        assert vectors[1] == vectors[3]
        assert len({str(vector) for vector in vectors}) == 3
