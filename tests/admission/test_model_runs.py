"""Tests of tasks that wait for models on demand. The models are only names."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.model_runs import ModelFollower, ModelRuns
from trioserve.contracts.errors import InvalidRequest, NoEndpoint
from trioserve.contracts.tracing import Span, Tracer
from trioserve.router.hosted_models import ModelSpec
from trioserve.router.settings import HostedModelsSettings


async def load(name, *, on_loaded, on_progress, stopping):
    on_loaded(name)
    await stopping.wait()
    return "it was unloaded"


async def fail(name, *, on_loaded, on_progress, stopping):
    return "it is damaged"


@pytest.fixture
async def runs():
    settings = HostedModelsSettings(memory_bytes=1, turn_seconds=10)
    models = ModelRuns(settings, [ModelSpec(name=name, bytes=1) for name in "ab"], load)
    async with trio.open_nursery() as nursery:
        await nursery.start(models.run)
        yield models
        nursery.cancel_scope.cancel()


async def test_task_gets_a_draining_model_when_no_other_model_needs_its_memory(runs, autojump_clock):
    got = trio.Event()

    async def wait_for_a() -> None:
        async with runs.leased("a") as loaded:
            assert loaded == "a"
            got.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery, runs.leased("a"):
        scope = trio.CancelScope()

        async def wait_for_b() -> None:
            with scope:
                async with runs.leased("b"):
                    raise AssertionError("a is in use")

        nursery.start_soon(wait_for_b)
        await trio.sleep(11)
        assert runs.status("a").state == "draining"
        nursery.start_soon(wait_for_a)
        await wait_all_tasks_blocked()
        assert not got.is_set()
        scope.cancel()
        with trio.fail_after(1):
            await got.wait()
        assert (runs.status("a").state, runs.status("a").leases) == ("loaded", 2)
        nursery.cancel_scope.cancel()
    assert (runs.status("a").leases, runs.status("b").waiting) == (0, 0)


async def test_task_gets_the_memory_of_a_busy_model_after_its_turn(runs, autojump_clock):
    got = trio.Event()

    async def wait_for_b() -> None:
        async with runs.leased("b"):
            got.set()

    async with trio.open_nursery() as nursery:
        async with runs.leased("a"):
            nursery.start_soon(wait_for_b)
            await trio.sleep(15)
            assert runs.status("a").state == "draining"
        with trio.fail_after(60):
            await got.wait()


async def test_load_that_hangs_is_stopped_and_reaches_all_tasks_that_wait(autojump_clock):
    ended = trio.Event()

    async def hang(name, *, on_loaded, on_progress, stopping):
        await trio.sleep(25)
        on_progress("loading a", 0.5)
        for _ in range(3):
            await trio.sleep(10)
            on_progress("loading a", 0.5)
        await stopping.wait()
        await ended.wait()
        return "it was stopped"

    models = ModelRuns(HostedModelsSettings(memory_bytes=1, stall_seconds=30), [ModelSpec(name="a", bytes=1)], hang)
    models.tracer = tracer = ModelTracer()
    refused: list[float] = []

    async def wait() -> None:
        with pytest.raises(NoEndpoint, match="its load made no progress for 30 s") as caught:
            async with models.leased("a"):
                pass
        assert caught.value.retry_after_seconds == 5
        refused.append(trio.current_time() - start)

    async with trio.open_nursery() as nursery:
        await nursery.start(models.run)
        start = trio.current_time()
        for _ in range(2):
            nursery.start_soon(wait)
        await trio.sleep(56)
        assert refused == pytest.approx([55, 55], abs=0.5)
        status = models.status("a")
        assert (status.state, status.waiting, models.held_bytes) == ("unloading", 0, 1)
        ended.set()
        await wait_all_tasks_blocked()
        assert (models.held_bytes, models.failures_total["a"], models.status("a").state) == (0, 1, "unloaded")
        assert [span[::3] for span in tracer.spans] == [["load a", "model_load_failed"], ["unload a", None]]
        nursery.cancel_scope.cancel()


async def test_failed_load_reaches_all_tasks_that_wait(autojump_clock):
    models = ModelRuns(HostedModelsSettings(memory_bytes=1), [ModelSpec(name="a", bytes=1)], fail)
    failures = 0

    async def wait() -> None:
        nonlocal failures
        with pytest.raises(NoEndpoint, match="the model a could not be loaded: it is damaged") as caught:
            async with models.leased("a"):
                pass
        assert caught.value.retry_after_seconds == 5
        failures += 1

    async with trio.open_nursery() as nursery:
        await nursery.start(models.run)
        for _ in range(3):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert failures == 3
        assert (models.held_bytes, models.status("a").waiting) == (0, 0)
        nursery.cancel_scope.cancel()


class ModelTracer(Tracer):
    """Records the spans of models.

    Attributes:
        spans: name, reason, waiting requests and error of each span. The error is "open" until the span ends.
    """

    def __init__(self) -> None:
        self.spans: list[list[object]] = []

    def begin(self, name, *, attributes, **others):
        assert attributes["gen_ai.request.model"] == name.rpartition(" ")[2]
        record = [name, attributes["trioserve.reason"], attributes["trioserve.model.waiting_requests"], "open"]
        self.spans.append(record)

        class OpenSpan(Span):
            def end(self, error=None):
                if record[3] == "open":
                    record[3] = error

        return OpenSpan()


async def test_each_change_of_a_model_has_a_span_that_ends_with_the_change(autojump_clock):
    tracer = ModelTracer()

    async def load_only_a(name, *, on_loaded, on_progress, stopping):
        await trio.sleep(3)
        return await (load if name == "a" else fail)(
            name, on_loaded=on_loaded, on_progress=on_progress, stopping=stopping
        )

    settings = HostedModelsSettings(memory_bytes=1, turn_seconds=10)
    models = ModelRuns(settings, [ModelSpec(name=name, bytes=1) for name in "ab"], load_only_a)
    models.tracer = tracer

    async def wait_for_b() -> None:
        with pytest.raises(NoEndpoint):
            async with models.leased("b"):
                pass

    async with trio.open_nursery() as nursery:
        await nursery.start(models.run)
        with trio.move_on_after(1):
            async with models.leased("a"):
                raise AssertionError("a is not loaded yet")
        await trio.sleep(10)
        async with models.leased("a"):
            nursery.start_soon(wait_for_b)
            await trio.sleep(15)
            assert tracer.spans[-1][::3] == ["drain a", "open"]
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert tracer.spans == [
        ["load a", "requests wait for it", 1, None],
        ["unload a", "no request waits for it any more", 0, None],
        ["load a", "requests wait for it", 1, None],
        ["drain a", "b needs its memory", 0, None],
        ["unload a", "its last request has ended", 0, None],
        ["load b", "requests wait for it", 1, "model_load_failed"],
    ]


async def test_span_of_a_failed_sleep_ends_with_an_error(autojump_clock):
    class Follower(ModelFollower[str]):
        async def set_asleep(self, loaded, asleep):
            await trio.sleep(2)
            raise InvalidRequest("its cache is in use")

    tracer = ModelTracer()
    spec = ModelSpec(name="a", bytes=2, kv_blocks=2, kv_blocks_min=1, kv_block_bytes=1)
    models = ModelRuns(HostedModelsSettings(memory_bytes=2), [spec], load)
    models.tracer, models.follower = tracer, Follower()
    async with trio.open_nursery() as nursery:
        await nursery.start(models.run)
        async with models.leased("a"):
            pass
        models.sleep("a")
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert [span[::3] for span in tracer.spans] == [["load a", None], ["sleep a", "model_sleep_failed"]]
