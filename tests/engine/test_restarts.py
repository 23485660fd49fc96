"""Tests of an engine that is reopened after a fault. Its streams resume, and a request that repeatedly breaks it is
ended.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining, EngineFault, EngineReopening, GpuLost
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.lifecycle.restarts import BACKOFF_SECONDS, FAULTS_IN_A_ROW_MAX, PERIOD_SECONDS, RestartBudget
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE
from trioserve.testing.fake_engine import FakeEngine, InjectedFault, open_fake_engine
from trioserve.testing.fake_executor import FakeModel
from trioserve.testing.memory_server import open_memory_server

LONG = SamplingParams(max_tokens=40, temperature=1.0, seed=3)


class PoisonedModel(FakeModel):
    """A model that fails when a request with `poison` in its prompt reaches `after` tokens."""

    def __init__(self, poison: str = "poison", after: int = 5) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE - 1)
        self._poison = poison.encode()
        self._after = after

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        prompt = bytes(token for token in request.prompt_token_ids if token < 256)
        if self._poison in prompt and len(tokens) - len(request.prompt_token_ids) >= self._after:
            raise InjectedFault(f"{prompt!r} cannot be borne")
        return super().next_token_id(request, tokens, digest)


class Reader:
    """Reads a request to its end, and stores its deltas."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: Exception | None = None

    async def read(self, fake: FakeEngine, prompt: str, sampling: SamplingParams = LONG, **options: Any) -> None:
        try:
            async with fake.generate(prompt, sampling, **options) as stream:
                async for delta in stream:
                    self.deltas.append(delta)
                self.usage = (stream.prompt_token_count, stream.completion_token_count)
                self.prompt_logprobs = stream.prompt_logprobs
        except Exception as error:
            self.error = error

    def told(self) -> tuple[dict[int, str], dict[int, list[int]], dict[int, object], list[object]]:
        """Return the text, tokens and finish reason of each choice, and all log probabilities of the first choice."""
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        ends: dict[int, object] = {}
        logprobs: list[object] = []
        for delta in self.deltas:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.index == 0:
                logprobs.extend(delta.logprobs or ())
            if delta.finish_reason is not None:
                ends[delta.index] = (delta.finish_reason, delta.stop_reason)
        return texts, tokens, ends, logprobs

    @property
    def end(self) -> Delta:
        return self.deltas[-1]


REQUESTS: tuple[tuple[str, SamplingParams], ...] = (
    ("one", LONG),
    ("two is longer than a block", SamplingParams(max_tokens=30, temperature=0.0, logprobs=2)),
    ("three", SamplingParams(max_tokens=25, temperature=1.0, n=3, seed=9)),
    ("four, whose prompt is looked at as well", SamplingParams(max_tokens=20, prompt_logprobs=1, seed=2)),
    ("five", SamplingParams(max_tokens=33, temperature=1.0, seed=5, stop=("e", "qq"), min_tokens=9)),
    ("six", SamplingParams(max_tokens=0)),
)


async def told_by(fault_at: float | None, **options: Any) -> list[object]:
    readers = [Reader() for _ in REQUESTS]
    async with open_fake_engine(
        step_seconds=0.01, engine_restarts=3, block_count=200, opening_seconds=2.0, **options
    ) as fake:
        async with trio.open_nursery() as nursery:
            for reader, (prompt, sampling) in zip(readers, REQUESTS, strict=True):
                nursery.start_soon(reader.read, fake, prompt, sampling)
            if fault_at is not None:
                await trio.sleep(fault_at)
                fake.break_next_step()
        fake.assert_all_free()
        assert fake.metrics.engine_restarts_total._value.get() == (0 if fault_at is None else 1)
    assert [reader.error for reader in readers] == [None] * len(readers)
    return [(reader.told(), reader.usage, reader.prompt_logprobs) for reader in readers]


@pytest.mark.parametrize(
    "options", [{}, {"overlap_steps": True}, {"speculative_ngram": 4}, {"draft_model_tokens": 4}], ids=str
)
async def test_streams_resume_with_equal_output_after_a_fault(autojump_clock, options):
    undisturbed = await told_by(None, **options)
    for fault_at in (0.0, 0.005, 0.015, 0.035, 0.105, 0.205):
        assert await told_by(fault_at, **options) == undisturbed, fault_at


async def test_grammar_state_is_restored_after_a_fault(autojump_clock):
    from trioserve.contracts.structured_output import SchemaKind, StructuredOutput

    sampling = SamplingParams(
        max_tokens=60,
        structured=StructuredOutput(kind=SchemaKind.REGEX, source="(ab|ba){8}-[0-9]{4}"),
        temperature=1.0,
        seed=4,
    )
    texts = []
    for fault_at in (None, 0.035, 0.065):
        reader = Reader()
        async with open_fake_engine(step_seconds=0.01, engine_restarts=1) as fake, trio.open_nursery() as nursery:
            nursery.start_soon(reader.read, fake, "form", sampling)
            if fault_at is not None:
                await trio.sleep(fault_at)
                fake.break_next_step()
        assert reader.end.finish_reason is FinishReason.STOP
        texts.append(reader.told())
    assert texts[0] == texts[1] == texts[2]


async def test_request_that_breaks_the_engine_repeatedly_is_ended_and_others_resume(autojump_clock, caplog):
    readers = {name: Reader() for name in ("a", "b", "poison", "c", "d")}
    async with open_fake_engine(step_seconds=0.01, engine_restarts=3, model=PoisonedModel()) as fake:
        async with trio.open_nursery() as nursery:
            for name, reader in readers.items():

                async def read(name: str = name, reader: Reader = reader) -> None:
                    await reader.read(fake, name, request_id=f"id-{name}")

                nursery.start_soon(read)
        # One failed step had all requests, one had some of them, and one had only the poison request.
        assert fake.metrics.engine_restarts_total._value.get() == 3
        assert fake.metrics.requests_poisoned_total._value.get() == 1
        ended = fake.metrics.request_success_total
        assert (ended.labels("error")._value.get(), ended.labels("length")._value.get()) == (1, 4)
        for counted in (fake.metrics.request_prompt_tokens, fake.metrics.request_params_n):
            assert sum(counted.counts()) == 5
        fake.assert_all_free()
    poisoned = readers.pop("poison")
    assert poisoned.end.finish_reason is FinishReason.ERROR
    assert "3 times in steps that computed this request, also in a step that computed nothing else" in str(
        poisoned.end.message
    )
    # The earlier tokens of this request are delivered once.
    assert sum(len(delta.token_ids) for delta in poisoned.deltas) == 5
    for reader in readers.values():
        assert reader.end.finish_reason is FinishReason.LENGTH
        assert len(reader.told()[1][0]) == 40
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR and "id-poison" in record.message]
    assert len(lines) == 1
    assert not [record for record in caplog.records if "id-a" in record.message]


async def test_restarts_that_found_a_poison_request_do_not_count_against_the_budget(autojump_clock):
    """Three restarts are needed to find one poison request. Three restarts are also the whole budget for ten
    minutes.
    """
    async with open_fake_engine(step_seconds=0.01, engine_restarts=3, model=PoisonedModel()) as fake:
        for _ in range(3):
            readers = {name: Reader() for name in ("a", "poison", "b")}
            async with trio.open_nursery() as nursery:
                for name, reader in readers.items():
                    nursery.start_soon(reader.read, fake, name)
            ends = {name: reader.end.finish_reason for name, reader in readers.items()}
            assert ends == {"a": FinishReason.LENGTH, "poison": FinishReason.ERROR, "b": FinishReason.LENGTH}
        assert fake.metrics.engine_restarts_total._value.get() > 3
        assert fake.metrics.requests_poisoned_total._value.get() == 3
        fake.assert_all_free()


async def test_http_stream_resumes_after_a_fault_and_a_poison_request_gets_an_error(autojump_clock):
    bodies: dict[str, str] = {}
    for model in (None, PoisonedModel()):
        async with open_memory_server(step_seconds=0.01, engine_restarts=3, model=model) as server:
            async with trio.open_nursery() as nursery:

                async def ask(prompt: str, server: Any = server, is_first: bool = model is None) -> None:
                    body = {"prompt": prompt, "max_tokens": 30, "stream": True, "seed": 1, "temperature": 1.0}
                    response = await server.client().post(
                        "/v1/completions", body, headers={"x-request-id": f"id-{prompt}"}
                    )
                    bodies[f"{prompt} {is_first}"] = (await response.read()).decode()

                nursery.start_soon(ask, "one")
                nursery.start_soon(ask, "poison")
            assert server.engine.metrics.engine_restarts_total._value.get() == (0 if model is None else 3)

    def told(name: str) -> list[str]:
        return [line for line in bodies[name].splitlines() if line.startswith("data:")]

    assert "".join(map(text_of, told("one False"))) == "".join(map(text_of, told("one True")))
    assert bodies["one False"].endswith("data: [DONE]\n\n")
    assert '"code":"request_poisoned"' in told("poison False")[-1]


def text_of(line: str) -> str:
    if line == "data: [DONE]":
        return ""
    return "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


async def test_other_requests_begin_when_a_suspect_leaves(autojump_clock):
    readers = [Reader(), Reader()]
    async with (
        open_fake_engine(step_seconds=0.01, engine_restarts=1, paused=True, opening_seconds=1.0) as fake,
        trio.open_nursery() as nursery,
    ):
        for index, reader in enumerate(readers):

            async def read(index: int = index, reader: Reader = reader) -> None:
                await reader.read(fake, "one", request_id=f"r{index}")

            nursery.start_soon(read)
        await fake.step(2)
        fake.break_next_step()
        fake.core.give_step()
        fake.wake()
        await trio.sleep(2)
        assert fake.stats().waiting_count == 1, "one is on trial, and the other one waits for it"
        on_trial = next(view.id for view in fake.live_requests() if view.state == "waiting")
        fake.abort(on_trial)
        await fake.step()
        fake.resume()
    reasons = sorted(str(reader.end.finish_reason) for reader in readers)
    assert reasons == sorted([str(FinishReason.ABORT), str(FinishReason.LENGTH)])


async def test_engine_that_reopens_is_not_ready_and_queued_requests_keep_waiting(autojump_clock):
    queued, late = Reader(), Reader()
    async with (
        open_memory_server(step_seconds=0.01, engine_restarts=1, opening_seconds=5.0, max_num_seqs=1) as server,
        trio.open_nursery() as nursery,
    ):
        fake = server.engine
        first = Reader()
        nursery.start_soon(first.read, fake, "first")
        await trio.sleep(0.05)
        for reader in [queued] * 1:
            nursery.start_soon(reader.read, fake, "queued")
        await trio.sleep(0.05)
        fake.break_next_step()
        await trio.sleep(1.0)
        client = server.client()
        response = await client.get("/ready")
        assert response.status == 503
        assert (await response.json())["reason"] == "engine_reopening"
        assert (await client.get("/health")).status == 200
        assert (await client.get("/metrics")).status == 200
        response = await client.post("/v1/completions", {"model": "fake", "prompt": "late"})
        assert response.status == 503
        assert response.headers["x-trioserve-reason"] == "engine_reopening"
        assert response.headers["retry-after"] == "5"
        await late.read(fake, "late")
        assert isinstance(late.error, EngineReopening)
        assert len(fake.live_requests()) == 2
        await trio.sleep(10)
        assert fake.ready
    assert first.end.finish_reason is queued.end.finish_reason is FinishReason.LENGTH


async def test_deadlines_aborts_and_leaving_work_while_the_engine_reopens(autojump_clock):
    late, aborted, stays = Reader(), Reader(), Reader()
    async with open_fake_engine(step_seconds=0.01, engine_restarts=1, opening_seconds=10.0) as fake:
        async with trio.open_nursery() as nursery:

            async def read(reader: Reader, name: str, **options: Any) -> None:
                await reader.read(fake, name, request_id=name, **options)

            nursery.start_soon(lambda: read(late, "late", deadlines=Deadlines(timeout=3.0)))
            nursery.start_soon(read, aborted, "aborted")
            nursery.start_soon(read, stays, "stays")
            with trio.move_on_after(2.0):
                async with fake.generate("left", LONG) as stream:
                    await stream.wait_until_begun()
                    await trio.sleep(0.05)
                    fake.break_next_step()
                    await trio.sleep_forever()
            assert fake.dispatch.core.stats().leases == {"local": 3}, "whoever leaves gives the lease back at once"
            fake.abort("aborted")
            await trio.sleep(3.0)
            assert late.end.finish_reason is FinishReason.DEADLINE
            assert aborted.end.finish_reason is FinishReason.ABORT
            assert [view.id for view in fake.live_requests()] == ["stays"]
        assert stays.end.finish_reason is FinishReason.LENGTH
        fake.assert_all_free()


async def test_drain_while_reopening_refuses_queued_requests_and_begun_ones_finish(autojump_clock):
    first, queued = Reader(), Reader()
    async with (
        open_fake_engine(step_seconds=0.01, engine_restarts=1, opening_seconds=5.0, max_num_seqs=1) as fake,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(first.read, fake, "first")
        await trio.sleep(0.05)
        nursery.start_soon(queued.read, fake, "queued")
        await trio.sleep(0.05)
        fake.break_next_step()
        await trio.sleep(1.0)
        fake.drain()
        await trio.sleep(1.0)
        assert isinstance(queued.error, Draining)
        await fake.wait_until_idle()
    assert first.end.finish_reason is FinishReason.LENGTH


async def test_closing_while_reopening_ends_every_reader_and_frees_everything(autojump_clock):
    threads, tasks = set(threading.enumerate()), trio.lowlevel.current_statistics().tasks_living
    reader = Reader()
    async with (
        trio.open_nursery() as nursery,
        open_fake_engine(
            step_seconds=0.01, engine_restarts=1, opening_seconds=5.0, new_text_threads=TextThreads
        ) as fake,
    ):
        nursery.start_soon(reader.read, fake, "first")
        await trio.sleep(0.05)
        fake.break_next_step()
        await trio.sleep(1.0)
    assert reader.end.finish_reason is FinishReason.ABORT
    assert not set(threading.enumerate()) - threads
    assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_repeated_faults_without_progress_end_the_engine_with_the_reason(autojump_clock):
    class Broken(FakeModel):
        def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
            raise InjectedFault("the memory is bad")

    readers = [Reader() for _ in range(6)]
    with pytest.raises(EngineFault, match=r"memory is bad; 3 times in a row it broke before it had computed anything"):
        async with (
            open_fake_engine(engine_restarts=50, model=Broken(vocab_size=BYTE_VOCAB_SIZE - 1)) as fake,
            trio.open_nursery() as nursery,
        ):
            for reader in readers:
                nursery.start_soon(reader.read, fake, "one")
            await trio.sleep_forever()
    assert all(isinstance(reader.error, EngineFault) for reader in readers), "none of them is blamed for the machine"


async def test_engine_on_a_lost_gpu_ends_at_once_and_every_reader_gets_an_error(autojump_clock):
    class Lost(FakeModel):
        def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
            raise GpuLost("an illegal address")

    readers = [Reader() for _ in range(6)]
    with pytest.raises(EngineFault, match=r"GpuLost: an illegal address; .* could not use the GPU either"):
        async with (
            open_fake_engine(engine_restarts=50, model=Lost(vocab_size=BYTE_VOCAB_SIZE - 1)) as fake,
            trio.open_nursery() as nursery,
        ):
            for reader in readers:
                nursery.start_soon(reader.read, fake, "one")
            await trio.sleep_forever()
    assert fake.metrics.engine_restarts_total._value.get() == 0
    assert all(isinstance(reader.error, EngineFault) for reader in readers)


@pytest.mark.parametrize(
    "pauses", [(0.0, 0.0), (0.0, 0.015), (0.015, 0.015), (0.045, 0.045), (0.1, 0.0), (0.13, 0.13)], ids=str
)
async def test_three_faults_of_the_machine_end_no_request(autojump_clock, pauses):
    """`pauses` contains the seconds between each reopening and the next fault."""
    readers = [Reader() for _ in range(8)]
    async with open_fake_engine(step_seconds=0.01, engine_restarts=3) as fake:
        async with trio.open_nursery() as nursery:
            for index, reader in enumerate(readers):
                nursery.start_soon(reader.read, fake, f"request {index}")
            await trio.sleep(0.035)
            for count, pause in enumerate((*pauses, 0.0), start=1):
                fake.break_next_step()
                while fake.metrics.engine_restarts_total._value.get() < count or not fake.ready:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                await trio.sleep(pause)
        assert fake.metrics.requests_poisoned_total._value.get() == 0
        fake.assert_all_free()
    assert [reader.end.finish_reason for reader in readers] == [FinishReason.LENGTH] * 8


async def test_new_requests_wait_for_the_first_token_of_a_suspect_that_runs_alone(autojump_clock):
    suspects, late = [Reader(), Reader()], Reader()
    async with (
        open_fake_engine(step_seconds=0.01, engine_restarts=1, opening_seconds=1.0) as fake,
        trio.open_nursery() as nursery,
    ):
        for reader in suspects:
            nursery.start_soon(reader.read, fake, "suspect")
        await trio.sleep(0.025)
        fake.break_next_step()
        await trio.sleep(1.0)
        fake.step_seconds = 1.0
        await trio.sleep(0.2)
        nursery.start_soon(late.read, fake, "late")
        await trio.sleep(0.2)
        assert len(fake.core.live_requests()) == 1
        await trio.sleep(1.0)
        assert len(fake.core.live_requests()) > 1
        fake.step_seconds = 0.01
    assert [reader.end.finish_reason for reader in (*suspects, late)] == [FinishReason.LENGTH] * 3


async def test_new_request_that_leaves_while_a_suspect_runs_alone_frees_everything(autojump_clock):
    suspect = Reader()
    async with (
        open_fake_engine(step_seconds=0.01, engine_restarts=1, opening_seconds=1.0) as fake,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(suspect.read, fake, "suspect")
        await trio.sleep(0.025)
        fake.break_next_step()
        await trio.sleep(1.0)
        fake.step_seconds = 1.0
        await trio.sleep(0.1)
        with trio.move_on_after(0.3):
            async with fake.generate("late", LONG) as stream:
                async for _ in stream:
                    pass
        assert fake.dispatch.core.stats().leases == {"local": 1}
        fake.step_seconds = 0.01
    assert suspect.end.finish_reason is FinishReason.LENGTH
    fake.assert_all_free()


async def test_failed_reopening_after_a_fault_is_retried(autojump_clock):
    reader = Reader()
    async with open_fake_engine(step_seconds=0.01, engine_restarts=5) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(reader.read, fake, "first")
        await trio.sleep(0.05)
        fake.break_openings(2)
        fake.break_next_step()
        await trio.sleep(3 * BACKOFF_SECONDS - 0.1)
        assert not fake.ready
        await trio.sleep(0.2)
        assert fake.ready
    assert reader.end.finish_reason is FinishReason.LENGTH


async def test_engine_ends_after_repeated_failed_reopenings(autojump_clock):
    reader = Reader()
    message = "could not be reopened: InjectedFault: a test made the restart fail; 3 times"
    with pytest.raises(EngineFault, match=message):
        async with open_fake_engine(step_seconds=0.01, engine_restarts=9) as fake, trio.open_nursery() as nursery:
            nursery.start_soon(reader.read, fake, "first")
            await trio.sleep(0.05)
            fake.break_openings(9)
            fake.break_next_step()
            await trio.sleep_forever()
    assert isinstance(reader.error, EngineFault)


async def test_no_reference_to_the_broken_engine_remains(autojump_clock, caplog):
    caplog.set_level(logging.CRITICAL)  # The captured log records would keep the frames of the failed step alive.
    import gc
    import weakref

    reader = Reader()
    async with open_fake_engine(step_seconds=0.01, engine_restarts=1, kv_events_max=64) as fake:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.read, fake, "first")
            await trio.sleep(0.05)
            old = weakref.ref(fake.core), weakref.ref(fake.executor), weakref.ref(fake.steps)
            fake.break_next_step()
            await trio.sleep(0.05)
            gc.collect()
            assert [ref() for ref in old] == [None, None, None]
        assert not fake.kv_events.is_over
    assert reader.end.finish_reason is FinishReason.LENGTH


@asynccontextmanager
async def pooled(fault_at: float | None) -> AsyncIterator[list[object]]:
    got: list[object] = []
    async with open_fake_engine(step_seconds=0.01, engine_restarts=1, max_num_seqs=4) as fake:
        async with trio.open_nursery() as nursery:

            async def embed() -> None:
                got.append(await fake.embed([f"text {number}" for number in range(20)]))

            nursery.start_soon(embed)
            if fault_at is not None:
                await trio.sleep(fault_at)
                fake.break_next_step()
        fake.assert_all_free()
    yield got


async def test_pooled_requests_resume_after_a_fault(autojump_clock):
    async with pooled(None) as undisturbed, pooled(0.035) as disturbed:
        assert disturbed == undisturbed


def check_budget(restarts_max: int, faults: Sequence[tuple[float, bool]], expect: Sequence[float | None]) -> str:
    budget = RestartBudget(restarts_max)
    assert [budget.take(at, has_progress=brought) for at, brought in faults] == list(expect)
    return budget.ended_by


def test_restart_budget_counts_restarts_of_the_last_period():
    assert check_budget(0, [(0, True)], [None]) == ""
    assert "2 times within 600 s" in check_budget(2, [(0, True), (1, True), (2, True)], [0.0, 0.0, None])
    later = PERIOD_SECONDS + 0.5
    assert check_budget(2, [(0, True), (1, True), (later, True)], [0.0, 0.0, 0.0]) == ""


def test_delay_before_reopening_grows_while_there_is_no_progress():
    faults = [(0.0, True), *[(float(index), False) for index in range(1, FAULTS_IN_A_ROW_MAX + 1)]]
    assert "3 times in a row" in check_budget(100, faults, [0.0, 1.0, 2.0, None])
