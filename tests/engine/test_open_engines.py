"""Tests of several engines in one program, with real models and memory for one of them."""

from __future__ import annotations

import asyncio
import ctypes
import threading

import pytest
import trio

import trioserve
import trioserve.asyncio
from trioserve.contracts.errors import NoEndpoint, StartupError
from trioserve.model.loading.default_model import find_default_model

MODELS = {"a": {"model": "smollm2"}, "b": {"model": "smollm2", "max_model_len": 512}}
SMALL = {"memory": 0.9, "kv_cache_memory": 0.25, "threads": 1, "max_num_seqs": 4}
PARAMS = trioserve.SamplingParams(max_tokens=4, temperature=0)

pytestmark = pytest.mark.skipif(find_default_model("smollm2") is None, reason="smollm2 is not on this machine")


async def said(engine: trioserve.Engine) -> str:
    async with engine.generate("The capital of France is", PARAMS) as stream:
        return "".join([delta.text async for delta in stream])


async def test_engines_take_turns_in_the_memory_and_leave_nothing():
    threads = threading.active_count()
    async with trioserve.open_engines(MODELS, **SMALL) as engines:
        assert {name: status.state for name, status in engines.statuses().items()} == dict.fromkeys("ab", "unloaded")
        async with engines.engine("a") as a:
            first = await said(a)
            async with engines.engine("a") as same:
                assert same is a
        async with engines.engine("b") as b:
            assert await said(b) == first
            assert engines.statuses()["a"].reason == "b needs its memory"
        assert engines.held_bytes == engines.statuses()["b"].bytes
        engines.unload("b")
        assert (await engines.wait_until_settled("b")).state == "unloaded"
        assert engines.held_bytes == 0
        with pytest.raises(KeyError, match="there is no model 'c'; models are: a, b"):
            async with engines.engine("c"):
                pass
    assert threading.active_count() <= threads + 2  # Trio keeps idle worker threads for a while.


class AllocatorFigures(ctypes.Structure):
    """The struct mallinfo2 of glibc 2.33 and later."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")] + [
        (name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def allocated_bytes() -> int:
    """Return the bytes that the C library has allocated and not freed, in heaps and in mappings of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = AllocatorFigures
    figures = mallinfo2()
    return figures.uordblks + figures.hblkhd


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc reports allocated bytes")
async def test_allocated_memory_returns_after_each_close():
    """Resident memory grows for some cycles, because fragments of freed memory stay. Allocated memory does not."""
    allocated: list[int] = []
    async with trioserve.open_engines({"a": MODELS["a"]}, **SMALL) as engines:
        for _ in range(12):
            async with engines.engine("a") as engine:
                await said(engine)
            engines.unload("a")
            await engines.wait_until_settled("a")
            allocated.append(allocated_bytes())
    assert max(allocated[2:]) <= 1.02 * allocated[1], allocated


async def test_two_engines_fit_when_the_cache_of_one_becomes_smaller():
    models = {"a": {"model": "smollm2", "max_model_len": 2048}, "b": MODELS["b"]}
    async with trioserve.open_engines(models, **(SMALL | {"memory": 1.3, "kv_cache_memory": 0.5})) as engines:
        full = engines.statuses()["a"].bytes
        async with engines.engine("a") as a:
            first, blocks = await said(a), a.stats().blocks_total
        async with engines.engine("b") as b, engines.engine("a") as same:
            assert same is a
            assert a.stats().blocks_total < blocks
            assert await said(b) == await said(a) == first
        assert engines.statuses()["a"].bytes < full
        assert engines.held_bytes <= 1.3 * 2**30


async def test_opening_is_cancelled_when_the_last_caller_leaves():
    async with trioserve.open_engines(MODELS, **SMALL) as engines:
        with trio.move_on_after(0.01):
            async with engines.engine("a"):
                pass
        assert (await engines.wait_until_settled("a")).state == "unloaded"
        assert (engines.held_bytes, engines.statuses()["a"].waiting, engines.statuses()["a"].loads) == (0, 0, 0)


async def test_every_waiting_caller_gets_the_reason_of_a_failed_model_load(monkeypatch):
    async with trioserve.open_engines({"a": {"model": "smollm2", "memory": 0.1}}, threads=1) as engines:
        # The size of the model was given by hand, and its KV cache does not fit into the memory of the machine.
        monkeypatch.setattr("trioserve.model.device.free_host_bytes", lambda: 1)

        async def fail() -> None:
            with pytest.raises(NoEndpoint, match="the model a could not be loaded: the KV cache is set to"):
                async with engines.engine("a"):
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(fail)


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ({"a": {}}, 'the hosted model "a" has no model'),
        ({"a": {"model": "smollm2", "block_size": "many"}}, 'the hosted model "a": block_size is'),
        ({"a": {"model": "smollm2", "port": 1}}, 'the hosted model "a": port is not an option'),
        ({"a": {"model": "/nowhere"}}, 'the hosted model "a" cannot be read'),
    ],
)
async def test_wrong_models_are_refused_at_once(models, sentence):
    with pytest.raises(StartupError, match=sentence):
        async with trioserve.open_engines(models, memory=1.0):
            pass


async def test_memory_of_a_model_includes_its_draft_model():
    drafting = {**MODELS["a"], "speculative_model": "smollm2", "speculative_quantization": "none"}
    async with trioserve.open_engines({**MODELS, "c": drafting}, **SMALL) as engines:
        statuses = engines.statuses()
        weights_min = 2 * 130_000_000  # parameters in bfloat16
        assert statuses["c"].bytes - statuses["a"].bytes > weights_min


async def test_engine_sleeps_for_another_one_and_wakes_with_equal_output():
    models = {"a": {"model": "smollm2"}, "b": MODELS["b"]}
    async with trioserve.open_engines(models, **(SMALL | {"memory": 1.0, "kv_cache_memory": 0.3})) as engines:
        async with engines.engine("a") as a:
            first = await said(a)
            full = engines.statuses()["a"].bytes
        async with engines.engine("b"):
            assert (engines.statuses()["a"].state, a.is_sleeping) == ("sleeping", True)
            assert engines.statuses()["a"].bytes < full
        async with engines.engine("a") as same:
            assert same is a
            assert await said(a) == first


def test_asyncio_engines_take_turns_and_a_cancelled_caller_leaves_nothing():
    async def said_on_asyncio(engines: trioserve.asyncio.Engines, name: str) -> str:
        async with engines.engine(name) as engine, engine.generate("The capital of France is", PARAMS) as stream:
            return "".join([delta.text async for delta in stream])

    async def main() -> None:
        async with trioserve.asyncio.open_engines(MODELS, **SMALL) as engines:
            texts = [said_on_asyncio(engines, name) for name in ("a", "b", "a")]
            assert len(set(await asyncio.gather(*texts))) == 1
            loads = {name: status.loads for name, status in engines.statuses().items()}
            assert set(loads.values()) == {1}
            engines.unload("a")
            engines.unload("b")
            for name in MODELS:
                await engines.wait_until_settled(name)
            waiting = asyncio.create_task(said_on_asyncio(engines, "a"))
            while not engines.statuses()["a"].waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            status = await engines.wait_until_settled("a")
            assert (status.state, status.waiting, status.leases, engines.held_bytes) == ("unloaded", 0, 0, 0)
            with pytest.raises(KeyError, match="there is no model 'c'; models are: a, b"):
                await said_on_asyncio(engines, "c")

    threads = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= threads + 2  # Trio keeps idle worker threads for a while.
