"""Places of the waiting queue and of the batch: counted before anything costly, never more than there are, and
back however their clients leave. Hundreds of rounds each, since a leak shows only when it adds up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.text_threads import TextThreads
from trioserve.config import engine_settings, make_config
from trioserve.contracts.ids import RequestId
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.memory_server import MemoryServer, open_memory_server

STEP_SECONDS = 0.01
ROUNDS = 300


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": False, **more}


def counted(server: MemoryServer) -> dict[str, float]:
    """Every series without buckets, by its name and labels: `num_requests_running`, `aborts_total decode`."""
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
    """Have every plan looked at before it is computed."""
    execute = server.engine.executor.execute

    def looked_at(plan, *more):
        look(plan)
        return execute(plan, *more)

    server.engine.executor.execute = looked_at


@asynccontextmanager
async def served(**options):
    """A server that nothing is left in at the end, and whose tasks are all gone."""
    async with open_memory_server(**{"step_seconds": STEP_SECONDS, "block_count": 128, **options}) as server:
        await wait_all_tasks_blocked()
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        yield server
        await trio.sleep(1)  # a step that was in flight ends
        check_idle(server.engine.core)
        await server.hang_up()
        await wait_all_tasks_blocked()
        assert server.server.counters().exchanges_open == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before


async def check_places(server: MemoryServer, new_client, count: int) -> None:
    """That many requests are served at a time, and the next one is refused."""
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


# --- the queue is bounded, in places and in time ---


@pytest.mark.slow
async def test_a_burst_of_long_prompts_never_overshoots(http1_client, http2_client):
    """S13, S14, S42: places are counted before the prompts are tokenized, and whoever finds none is told when to come
    again and why. The tokenizer is held in its real thread, so the clock is real; nothing waits for time to pass."""
    async with open_memory_server(
        max_num_seqs=2,
        max_queued_requests=3,
        max_model_len=4096,
        block_count=8192,
        new_text_threads=TextThreads,
    ) as server:
        tokenizer = server.engine.tokenizer
        encode, go_on = tokenizer.encode, threading.Event()
        tokenized: list[str] = []

        def held_encode(text: str, **options):
            assert go_on.wait(60)
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
            assert counted(server)["num_requests_waiting"] == 5
            go_on.set()
        assert [response.status for response in responses[35:]] == [200] * 5
        assert len(tokenized) == 5
        assert 1 <= most_live <= 5
        for response in responses[:35]:
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["x-trioserve-reason"] == "queue_full"
            assert response.json["error"]["type"] == "rate_limit_error"
        assert counted(server)["requests_rejected_total queue_full"] == 35
        check_idle(server.engine.core)


async def test_the_line_is_bounded_without_a_setting(http1_client, autojump_clock):
    """S13: with the defaults that a server starts with."""
    waiting_max = engine_settings(make_config()).waiting_requests_max
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


async def test_a_request_is_refused_at_once_or_waits_as_long_as_it_says(new_client, autojump_clock):
    """S35: both, a bounded queue and a bounded wait in it."""
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
        await check_places(server, new_client, 3)


async def test_a_place_is_held_until_the_end_of_the_response_and_not_only_until_its_head(new_client, autojump_clock):
    """S26: those who run count as long as they run, and those who wait are counted themselves."""
    async with served(max_num_seqs=1, max_queued_requests=1) as server, trio.open_nursery() as nursery:
        first, second = new_client(server), new_client(server)
        for client in (first, second):
            nursery.start_soon(client.read)
            await client.ask(body("a stream", stream=True, max_tokens=50))
            await trio.sleep(0.05)
        assert b"data: " in first.received
        assert (counted(server)["num_requests_running"], counted(server)["num_requests_waiting"]) == (1, 1)
        late = new_client(server)
        await late.ask(body("late"))
        assert (await late.response()).status == 429
        await trio.sleep(0.5)  # the first response is complete
        assert b"[DONE]" in first.received
        again = new_client(server)
        await again.ask(body("again"))
        assert (await again.response()).status == 200
        assert b"[DONE]" in second.received
        nursery.cancel_scope.cancel()


# --- who left the queue ---


@pytest.mark.slow
async def test_who_left_the_queue_is_in_no_plan(http1_client, http2_client, autojump_clock):
    """S32, S37: two hundred wait, in either protocol, streamed or whole, and leave in every way. One of them stays."""
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
            assert counted(server)["num_requests_waiting"] == 200
            stays = clients.pop(100)
            for index, client in enumerate(clients):
                await client.leave(client.ways_to_leave[index // 4 % len(client.ways_to_leave)])
            await wait_all_tasks_blocked()
            # All of it while the same step is in flight: there is nothing to wait for.
            assert (counted(server)["num_requests_waiting"], core.stats().blocks_used) == (1, used_before)
            assert counted(server)["aborts_total queued"] == 199
            check_core(core)
            steps.release()
            async for _ in in_the_way:
                pass
        with trio.move_on_after(10):
            await stays.read()
        assert b"[DONE]" in stays.received
        assert sorted(planned.values()) == [b"100 waits", b"in the way"]
        assert core.stats().prefix_query_tokens_total == len("in the way") + len("100 waits")


# --- places come back ---

# When it leaves, and as what its abort is counted. A prompt takes three steps, a response three more.
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
async def test_places_come_back_from_whoever_leaves_again_and_again(phase, http1_client, http2_client, autojump_clock):
    """S22, S48: three places, and 300 clients one after another who leave in the same phase, in every way there is.
    Each is gone with the step in flight, before another one has ended."""
    seconds, counted_as = PHASES[phase]
    async with served(max_num_seqs=2, max_queued_requests=1, max_num_batched_tokens=16) as server:
        core, engine = server.engine.core, server.engine
        if phase == "being tokenized":
            prompts = engine._prompts
            encode = prompts.encode_prompt

            async def slow_encode(*arguments, **options):
                await trio.sleep(STEP_SECONDS)
                return await encode(*arguments, **options)

            prompts.encode_prompt = slow_encode

        async def come_and_go(index: int) -> None:
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
                    await come_and_go(index)
                server.engine.steps.release()
        else:
            for index in range(ROUNDS):
                await come_and_go(index)
        await trio.sleep(0.1)
        values = counted(server)
        if counted_as is None:
            assert sum(values.get(f"aborts_total {name}", 0) for name in ("queued", "prefill", "decode")) == 0
        else:
            assert values[f"aborts_total {counted_as}"] == ROUNDS
        await check_places(server, http1_client, 3)


@pytest.mark.slow
async def test_counters_come_back_and_are_never_below_zero(http1_client, http2_client, autojump_clock):
    """S20, S29: four hundred requests that end in every way there is, many at a time; looked at in every step."""
    async with served(max_num_seqs=4, max_queued_requests=8, max_num_batched_tokens=32) as server:
        engine, core = server.engine, server.engine.core
        most_live = 0

        def look(plan: StepPlan) -> None:
            nonlocal most_live
            for chunk in plan.chunks:
                if bytes(chunk.request.prompt_token_ids[:1]) == b"!":
                    server.engine.executor.errors[chunk.request.id] = "bad luck"
            check_core(core)
            values = counted(server)
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
        values = counted(server)
        for name in (
            "streams_open",
            "num_requests_running",
            "num_requests_waiting",
            "kv_blocks used",
            "kv_blocks held",
        ):
            assert values[name] == 0, name
        await check_places(server, http2_client, 12)
        assert len(engine._deadline_keeper) == 0
