"""Tests the limits of the waiting queue and of the running batch.

A request is counted before expensive work begins, the limits are never exceeded, and capacity returns however a client
leaves. Each test has hundreds of rounds, because small leaks become visible only in large numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.text_threads import TextThreads
from trioserve.config import make_config
from trioserve.contracts.ids import RequestId
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.memory_server import MemoryServer, open_memory_server

STEP_SECONDS = 0.01
ROUNDS = 300


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": False, **more}


def metric_values(server: MemoryServer) -> dict[str, float]:
    """Return the value of each metric except buckets.

    Returns:
        Values by the metric's name and labels, such as `num_requests_running` or `aborts_total decode`.
    """
    found = {}
    for line in server.engine.metrics.expose().decode().splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name.startswith("trioserve:") and not name.endswith("_bucket"):
            words = [
                label.split('"')[1]
                for label in labels.split(",")
                if '"' in label and not label.startswith(("engine=", "model_name="))
            ]
            found[" ".join([name.removeprefix("trioserve:"), *words])] = float(value)
    return found


def on_plan(server: MemoryServer, look: Callable[[StepPlan], None]) -> None:
    """Call `look` with each plan before the plan is computed."""
    execute = server.engine.executor.execute

    def looked_at(plan, *more):
        look(plan)
        return execute(plan, *more)

    server.engine.executor.execute = looked_at


@asynccontextmanager
async def served(**options):
    """Open a server. At the end, check that no request, block, exchange or task is left."""
    async with open_memory_server(**{"step_seconds": STEP_SECONDS, "block_count": 128, **options}) as server:
        await wait_all_tasks_blocked()
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        yield server
        await trio.sleep(1)  # The step in flight ends.
        check_idle(server.engine.core)
        await server.hang_up()
        await wait_all_tasks_blocked()
        assert server.server.counters().exchanges_open == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before


async def check_capacity(server: MemoryServer, new_client, count: int) -> None:
    """Check that the server accepts `count` requests at a time, and refuses one more."""
    assert (server.engine.core.stats().running_count, server.engine.core.stats().waiting_count) == (0, 0)
    clients = [new_client(server) for _ in range(count + 1)]
    statuses = []

    async def ask(client) -> None:
        await client.ask(body("are there places?"))
        statuses.append((await client.response()).status)

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(ask, client)
    assert sorted(statuses) == [200] * count + [429]


# --- the queue is bounded in length and in time ---


@pytest.mark.slow
async def test_burst_of_long_prompts_never_exceeds_the_queue_bound(http1_client, http2_client):
    """Scenarios S13, S14 and S42 of tests/README.md: requests are counted before tokenization. Refused requests get a
    retry time and a reason.

    The test blocks the tokenizer in its real thread, so the clock is real. But the test does not wait for time to pass.
    """
    async with open_memory_server(
        max_num_seqs=2,
        max_queued_requests=3,
        max_model_len=4096,
        block_count=8192,
        new_text_threads=TextThreads,
    ) as server:
        tokenizer = server.engine.tokenizer
        encode, proceed = tokenizer.encode, threading.Event()
        tokenized: list[str] = []

        def held_encode(text: str, **options):
            assert proceed.wait(60)
            tokenized.append(text)
            return encode(text, **options)

        tokenizer.encode = held_encode
        most_live = 0

        def look(plan: StepPlan) -> None:
            nonlocal most_live
            stats = server.engine.core.stats()
            most_live = max(most_live, stats.running_count + stats.waiting_count)

        on_plan(server, look)
        responses = []
        all_refused = trio.Event()

        async def ask(index: int) -> None:
            client = (http1_client, http2_client)[index % 2](server)
            await client.ask(body(f"{index} " + "long " * 500))
            responses.append(await client.response())
            if len(responses) == 35:
                all_refused.set()

        async with trio.open_nursery() as nursery:
            for index in range(40):
                nursery.start_soon(ask, index)
            await all_refused.wait()
            assert [response.status for response in responses] == [429] * 35
            assert tokenized == []
            assert metric_values(server)["num_requests_waiting"] == 5
            proceed.set()
        assert [response.status for response in responses[35:]] == [200] * 5
        assert len(tokenized) == 5
        assert 1 <= most_live <= 5
        for response in responses[:35]:
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["x-trioserve-reason"] == "queue_full"
            assert response.json["error"]["type"] == "rate_limit_error"
        assert metric_values(server)["requests_rejected_total queue_full"] == 35
        check_idle(server.engine.core)


async def test_queue_is_bounded_by_default(http1_client, autojump_clock):
    """Scenario S13 of tests/README.md: a server has this bound by default."""
    waiting_max = make_config().engine_settings().waiting_requests_max
    assert waiting_max < 1000
    async with (
        served(max_num_seqs=1, max_queued_requests=waiting_max) as server,
        trio.open_nursery() as nursery,
    ):

        async def wait() -> None:
            async with server.engine.generate("waits"):
                await trio.sleep_forever()

        server.engine.steps.hold()
        for _ in range(1 + waiting_max):
            nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        client = http1_client(server)
        await client.ask(body("one too many"))
        assert (await client.response()).status == 429
        nursery.cancel_scope.cancel()
        server.engine.steps.release()


async def test_request_is_refused_at_once_if_the_queue_is_full_or_ends_at_its_queue_deadline(
    new_client, autojump_clock
):
    """Scenario S35 of tests/README.md: both the length of the queue and the time in the queue are bounded."""
    async with served(max_num_seqs=1, max_queued_requests=2, max_model_len=512) as server:
        async with server.engine.generate("in the way", SamplingParams(max_tokens=400, ignore_eos=True)):
            await trio.sleep(0.1)
            ended: list[tuple[int, str, float]] = []

            async def ask(seconds: float) -> None:
                asked_at = trio.current_time()
                client = new_client(server)
                await client.ask(body("waits", queue_timeout=seconds))
                response = await client.response()
                reason = response.headers["x-trioserve-reason"]
                ended.append((response.status, reason, round(trio.current_time() - asked_at, 6)))

            async with trio.open_nursery() as nursery:
                for seconds in (1.0, 2.0):
                    nursery.start_soon(ask, seconds)
                await trio.sleep(0.5)
                nursery.start_soon(ask, 1.0)
            assert ended == [(429, "queue_full", 0.0), (504, "queue_timeout", 1.0), (504, "queue_timeout", 2.0)]
        await trio.sleep(0.1)
        await check_capacity(server, new_client, 3)


async def test_running_request_counts_until_the_end_of_its_response_not_only_until_its_head(new_client, autojump_clock):
    """Scenario S26 of tests/README.md: running requests count until their end, and waiting requests have their own
    count.
    """
    async with served(max_num_seqs=1, max_queued_requests=1) as server, trio.open_nursery() as nursery:
        first, second = new_client(server), new_client(server)
        for client in (first, second):
            nursery.start_soon(client.read)
            await client.ask(body("a stream", stream=True, max_tokens=50))
            await trio.sleep(0.05)
        assert b"data: " in first.received
        assert (metric_values(server)["num_requests_running"], metric_values(server)["num_requests_waiting"]) == (1, 1)
        late = new_client(server)
        await late.ask(body("late"))
        assert (await late.response()).status == 429
        await trio.sleep(0.5)  # The first response completes.
        assert b"[DONE]" in first.received
        again = new_client(server)
        await again.ask(body("again"))
        assert (await again.response()).status == 200
        assert b"[DONE]" in second.received
        nursery.cancel_scope.cancel()


# --- clients that leave the queue ---


@pytest.mark.slow
async def test_request_whose_client_left_the_queue_is_never_planned(http1_client, http2_client, autojump_clock):
    """Scenarios S32 and S37 of tests/README.md: of 200 waiting clients, 199 leave. They use both protocols, streamed or
    not, and each way to leave.
    """
    async with served(max_num_seqs=1, max_queued_requests=300, step_seconds=0.0) as server:
        core, steps = server.engine.core, server.engine.steps
        planned: dict[RequestId, bytes] = {}
        on_plan(
            server,
            lambda plan: planned.update(
                (chunk.request.id, bytes(chunk.request.prompt_token_ids)) for chunk in plan.chunks
            ),
        )
        steps.hold()
        async with server.engine.generate("in the way", SamplingParams(max_tokens=8)) as in_the_way:
            await steps.entered()
            used_before = core.stats().blocks_used
            clients = []
            for index in range(200):
                clients.append((http1_client, http2_client)[index % 2](server))
                await clients[-1].ask(body(f"{index} waits", stream=index % 4 < 2))
            await wait_all_tasks_blocked()
            assert metric_values(server)["num_requests_waiting"] == 200
            stays = clients.pop(100)
            for index, client in enumerate(clients):
                await client.leave(client.ways_to_leave[index // 4 % len(client.ways_to_leave)])
            await wait_all_tasks_blocked()
            # The queue shrinks while the same step is in flight, so no client waits for the step.
            assert (metric_values(server)["num_requests_waiting"], core.stats().blocks_used) == (1, used_before)
            assert metric_values(server)["aborts_total queued"] == 199
            check_core(core)
            steps.release()
            async for _ in in_the_way:
                pass
        with trio.move_on_after(10):
            await stays.read()
        assert b"[DONE]" in stays.received
        assert sorted(planned.values()) == [b"100 waits", b"in the way"]
        assert core.stats().prefix_query_tokens_total == len("in the way") + len("100 waits")


# --- capacity returns ---

# Each case has the seconds until the client leaves, and the phase label of its abort.
# The label is None if no abort is counted. A prompt takes three steps, and a response takes three more.
PHASES = {
    "sending its body": (0.005, None),
    "being tokenized": (0.005, None),
    "waiting in the queue": (0.015, "queued"),
    "before its first chunk is computed": (0.0, "prefill"),
    "in its prompt": (0.015, "prefill"),
    "in its last chunk": (0.025, "prefill"),
    "in its response": (0.045, "decode"),
    "in its last token": (0.055, "decode"),
    "after its end": (0.5, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_capacity_is_unchanged_after_300_clients_left_in_one_phase(
    phase, http1_client, http2_client, autojump_clock
):
    """Scenarios S22 and S48 of tests/README.md: the server accepts three requests at the same time. 300 clients leave
    one after the other, in each way.

    Each request has ended when the step in flight ends.
    """
    seconds, counted_as = PHASES[phase]
    async with served(max_num_seqs=2, max_queued_requests=1, max_num_batched_tokens=16) as server:
        core, engine = server.engine.core, server.engine
        if phase == "being tokenized":
            prompts = engine._texts.prompts
            encode = prompts.encode_prompt

            async def slow_encode(*arguments, **options):
                await trio.sleep(STEP_SECONDS)
                return await encode(*arguments, **options)

            prompts.encode_prompt = slow_encode

        async def ask_and_leave(index: int) -> None:
            client = (http1_client, http2_client)[index % 2](server)
            before = core.stats()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.read)
                prompt = f"{index:04} and so many characters more, 40 of them"
                missing_bytes = 9 if phase == "sending its body" else 0
                await client.ask(body(prompt[:40], stream=index % 16 < 8), missing_bytes=missing_bytes)
                if seconds:
                    await trio.sleep(seconds)
                else:
                    await wait_all_tasks_blocked()
                assert server.server.counters().exchanges_open == (phase != "after its end")
                await client.leave(client.ways_to_leave[index // 2 % len(client.ways_to_leave)])
                await trio.sleep(1.2 * STEP_SECONDS)
                assert server.server.counters().exchanges_open == 0
                await client.stream.aclose()
            after = core.stats()
            for count in ("blocks_used", "running_count", "waiting_count"):
                assert getattr(after, count) == getattr(before, count), count
            check_core(core)

        if phase == "waiting in the queue":
            server.engine.steps.hold()
            async with engine.generate("one in the way"), engine.generate("another one in the way"):
                await server.engine.steps.entered()
                for index in range(ROUNDS):
                    await ask_and_leave(index)
                server.engine.steps.release()
        else:
            for index in range(ROUNDS):
                await ask_and_leave(index)
        await trio.sleep(0.1)
        values = metric_values(server)
        if counted_as is None:
            assert sum(values.get(f"aborts_total {name}", 0) for name in ("queued", "prefill", "decode")) == 0
        else:
            assert values[f"aborts_total {counted_as}"] == ROUNDS
        await check_capacity(server, http1_client, 3)


@pytest.mark.slow
async def test_gauges_of_requests_return_to_zero_and_are_never_negative(http1_client, http2_client, autojump_clock):
    """Scenarios S20 and S29 of tests/README.md: 400 requests overlap and end in each possible way. The test checks all
    metrics at each step.
    """
    async with served(max_num_seqs=4, max_queued_requests=8, max_num_batched_tokens=32) as server:
        engine, core = server.engine, server.engine.core
        most_live = 0

        def look(plan: StepPlan) -> None:
            nonlocal most_live
            for chunk in plan.chunks:
                if bytes(chunk.request.prompt_token_ids[:1]) == b"!":
                    server.engine.executor.errors[chunk.request.id] = "bad luck"
            check_core(core)
            values = metric_values(server)
            assert min(values.values()) >= 0, values
            assert values["streams_open"] == server.server.counters().exchanges_open
            assert sum(values[f"kv_blocks {state}"] for state in ("free", "cached", "used", "held")) == 128
            most_live = max(most_live, values["num_requests_running"] + values["num_requests_waiting"])

        on_plan(server, look)
        statuses: list[int] = []
        kinds = [
            body("fine"),
            body("! breaks"),
            body("leaves", stream=True, max_tokens=50, timeout=1000),
            body("leaves whole", max_tokens=50),
            body("out of time", timeout=0.035, max_tokens=50),
            body("refused", temperature=-1),
            body("too long" * 100),
        ]

        async def ask(index: int) -> None:
            await trio.sleep(index * 0.002)
            client = (http1_client, http2_client)[index % 2](server)
            asked = kinds[index % len(kinds)]
            await client.ask({**asked, "prompt": f"{asked['prompt']} {index % 3}"})
            if str(asked["prompt"]).startswith("leaves"):
                with trio.move_on_after(index % 11 * 0.007):
                    await client.read()
                await client.leave(client.ways_to_leave[index // 2 % len(client.ways_to_leave)])
            else:
                statuses.append((await client.response()).status)

        async with trio.open_nursery() as nursery:
            for index in range(400):
                nursery.start_soon(ask, index)
        await trio.sleep(1)
        assert {200, 400, 429, 500, 504} == set(statuses)
        assert most_live == 12, "the queue was full, and never more than full"
        check_idle(core)
        values = metric_values(server)
        for name in (
            "streams_open",
            "num_requests_running",
            "num_requests_waiting",
            "kv_blocks used",
            "kv_blocks held",
        ):
            assert values[name] == 0, name
        await check_capacity(server, http2_client, 12)
        assert len(engine._deadline_keeper) == 0
