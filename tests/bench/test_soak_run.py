"""Tests whole soaks in memory, with the real front end and an engine without weights."""

from __future__ import annotations

import io
import re
import signal

import pytest
import trio
import trio.testing

from trioserve.bench.runner import CannotMeasure, Measured, PlainResponse
from trioserve.bench.settings import SoakSettings
from trioserve.bench.soak import soak
from trioserve.bench.soak_plan import LeaveMethod, Moment, SoakClients, SoakPlan
from trioserve.testing.invariants import check_idle
from trioserve.testing.memory_server import open_memory_server

ENGINE = {"max_num_seqs": 4, "max_queued_requests": 64, "max_num_batched_tokens": 16, "step_seconds": 0.01}


def settings(**changes) -> SoakSettings:
    small = {
        "requests": 60,
        "concurrency": 8,
        "warmup_requests": 20,
        "prompt_tokens": 8,
        "long_prompt_tokens": 60,
        "output_tokens": 8,
        "vocab_size": 200,
    }
    return SoakSettings(**{**small, **changes})


async def outcome_of(server, wanted: SoakSettings) -> Measured | CannotMeasure:
    async def open_stream() -> trio.abc.Stream:
        return server.connect()

    return await soak(wanted, opener=lambda http: open_stream, progress=io.StringIO())


async def soaked(server, wanted: SoakSettings) -> Measured:
    outcome = await outcome_of(server, wanted)
    assert isinstance(outcome, Measured), outcome
    return outcome


def broken(outcome: Measured) -> set[str]:
    return {claim.name for claim in outcome.report.figures.claims if claim.holds is False}


@pytest.mark.slow
async def test_clients_leave_in_every_way_and_all_resources_are_released(autojump_clock):
    async with open_memory_server(**ENGINE) as server:
        outcome = await soaked(server, settings(requests=200))
        figures = outcome.report.figures
        assert broken(outcome) == set(), figures.claims
        assert outcome.exit_code == 0
        assert figures.requests == 200
        assert figures.completed_requests + figures.left_requests + figures.finished_early_requests == 200
        assert 60 < figures.left_requests < 130
        assert all(count > 0 for count in figures.left_by_moment.values()), figures.left_by_moment
        assert all(count > 0 for count in figures.left_by_way.values()), figures.left_by_way
        assert all(phase.aborts > 0 for phase in figures.cancel_to_free), figures.cancel_to_free
        decode = figures.cancel_to_free[-1]
        assert decode.max_steps == 1
        assert decode.p99_ms is not None
        assert decode.p99_ms <= 15.0  # A step of this engine takes 10 ms, and its bucket ends at 15 ms.
        assert figures.itl_ms is not None
        assert figures.control_itl_ms is not None
        check_idle(server.engine.core)
        await trio.testing.wait_all_tasks_blocked()
        assert server.connection_count == 0


@pytest.mark.slow
async def test_engine_aborts_every_client_that_reached_it(autojump_clock):
    async with open_memory_server(**ENGINE) as server:
        figures = (await soaked(server, settings(warmup_requests=0))).report.figures
        before_the_engine = figures.left_by_moment[Moment.BODY.value]
        assert figures.aborts <= figures.left_requests - before_the_engine
        # A few clients leave while their last token is being sent, or with a connection whose body was not read yet.
        assert figures.aborts >= 0.8 * (figures.left_requests - before_the_engine)


@pytest.mark.slow
async def test_soak_without_leaving_clients_aborts_nothing(autojump_clock):
    async with open_memory_server(**ENGINE) as server:
        outcome = await soaked(server, settings(abort_fraction=0.0, requests=50))
        assert (outcome.report.figures.left_requests, outcome.report.figures.aborts) == (0, 0)
        assert outcome.report.figures.completed_requests == 50
        assert outcome.exit_code == 0


@pytest.mark.slow
async def test_soak_fails_its_request_claims_if_a_request_stays_in_the_engine(autojump_clock):
    async with open_memory_server(**ENGINE) as server, trio.open_nursery() as nursery:

        async def forgotten() -> None:
            await trio.sleep(0.5)  # The request must begin after the soak has begun.
            async with server.engine.generate("x" * 20) as stream:
                while True:
                    await anext(stream)
                    await trio.sleep_forever()

        nursery.start_soon(forgotten)
        outcome = await soaked(server, settings())
        assert {"leases of requests, at the end", "tasks more than before, at the end"} & broken(outcome)
        assert "leases of requests, at the end" in broken(outcome)
        assert outcome.exit_code == 1
        assert outcome.report.figures.quiet_seconds == pytest.approx(30.0)
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_soak_fails_only_its_task_claim_if_a_task_stays(autojump_clock):
    async with open_memory_server(**ENGINE) as server, trio.open_nursery() as nursery:

        async def multiply() -> None:
            await trio.sleep(0.5)
            for _ in range(3):
                nursery.start_soon(trio.sleep_forever)

        nursery.start_soon(multiply)
        outcome = await soaked(server, settings())
        assert broken(outcome) == {"tasks more than before, at the end"}
        nursery.cancel_scope.cancel()


async def test_refused_requests_of_a_soak_are_failures(autojump_clock):
    async with open_memory_server(**{**ENGINE, "max_queued_requests": 1}) as server:
        outcome = await soaked(server, settings(abort_fraction=0.0, requests=40))
        assert "failed requests" in broken(outcome)
        assert outcome.report.figures.errors["status 429"] > 0
        assert outcome.report.figures.control_failed_requests > 0
        assert outcome.exit_code == 1


async def test_soak_refuses_a_busy_server(autojump_clock):
    async with open_memory_server(**ENGINE) as server, server.engine.generate("hello"):
        outcome = await outcome_of(server, settings())
        assert isinstance(outcome, CannotMeasure)
        assert outcome.exit_code == 1
        assert "has other requests" in outcome.message


async def test_soak_refuses_a_server_of_another_project_in_one_sentence(start_server, tokens, autojump_clock):
    server = start_server(tokens, http=1)
    outcome = await soak(settings(), opener=lambda http: server.open_stream, progress=io.StringIO())
    assert isinstance(outcome, CannotMeasure)
    assert outcome.exit_code == 2
    assert "bench soak reads metrics of trioserve" in outcome.message
    assert "without trioserve:kv_blocks" in outcome.message
    assert "\n" not in outcome.message
    assert not server.calls


async def test_soak_of_an_unreachable_server_gives_exit_code_2(autojump_clock):
    async def refuse() -> trio.abc.Stream:
        raise ConnectionRefusedError("nobody listens")

    outcome = await soak(settings(), opener=lambda http: refuse, progress=io.StringIO())
    assert isinstance(outcome, CannotMeasure)
    assert outcome.exit_code == 2
    assert "nobody listens" in outcome.message


async def interrupted(wanted: SoakSettings, *, after_seconds: float) -> Measured | CannotMeasure:
    async with open_memory_server(**ENGINE) as server, trio.open_nursery() as nursery:

        async def interrupt() -> None:
            await trio.sleep(after_seconds)
            signal.raise_signal(signal.SIGINT)

        nursery.start_soon(interrupt)
        return await outcome_of(server, wanted)


@pytest.mark.slow
async def test_interrupted_soak_is_judged_after_all_clients_have_left(autojump_clock):
    outcome = await interrupted(settings(requests=10_000), after_seconds=3.0)
    assert isinstance(outcome, Measured)
    assert outcome.exit_code == 130
    assert broken(outcome) == set()
    assert 10 < outcome.report.figures.requests < 1000
    assert outcome.report.figures.duration_seconds < 3.0


async def test_soak_interrupted_in_its_warmup_reports_that_it_cannot_measure(autojump_clock):
    outcome = await interrupted(settings(warmup_requests=10_000), after_seconds=1.0)
    assert isinstance(outcome, CannotMeasure)
    assert outcome.exit_code == 130
    assert "warm-up" in outcome.message


async def test_unanswered_half_close_is_counted_and_ends_after_a_time(autojump_clock):
    servers = []

    async def open_stream() -> trio.abc.Stream:
        client, server = trio.testing.memory_stream_pair()
        servers.append(server)
        return client

    plan = SoakPlan(settings(), model="m")
    requests = [one for piece in plan.slices() for one in plan.requests(piece)]
    request = next(one for one in requests if one.leave is not None and one.leave.way is LeaveMethod.HALF_CLOSE)
    received = b""
    async with trio.open_nursery() as nursery:
        clients = SoakClients(nursery, settings(), lambda http: open_stream)
        began_at = trio.current_time()
        with trio.move_on_after(1.0):
            await clients.client_for(request).request("POST", "/p", b"body", PlainResponse())
        assert trio.current_time() - began_at == pytest.approx(11.0)
        assert clients.unanswered_half_closes == 1
        while data := await servers[0].receive_some():  # The loop ends when the client has half-closed the connection.
            received += data
        assert received.endswith(b"body")
        with pytest.raises(trio.BrokenResourceError):
            await servers[0].send_all(b"too late")


@pytest.mark.slow
@pytest.mark.parametrize(("grows_until", "verdict"), [(30, True), (10_000, False)])
async def test_memory_of_a_soak_is_judged_after_the_warmup(autojump_clock, grows_until, verdict):
    async with open_memory_server(**{**ENGINE, "step_seconds": 0.5}) as server:
        metrics = server.engine.metrics
        expose = metrics.expose

        def with_memory() -> bytes:
            text = expose()
            ended = sum(value for name, value in _series(text) if name.startswith("trioserve:request_success_total"))
            resident = 1_000_000 * (100 + min(ended, grows_until))
            return re.sub(rb"process_resident_memory_bytes \S+", b"process_resident_memory_bytes %d" % resident, text)

        metrics.expose = with_memory
        outcome = await soaked(server, settings(warmup_requests=60))
        verdicts = {claim.name: claim.holds for claim in outcome.report.figures.claims}
        assert verdicts["resident memory, last half to first"] is verdict
        assert outcome.exit_code == (0 if verdict else 1)


def _series(text: bytes):
    for line in text.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            yield name, float(value)


@pytest.mark.slow
async def test_soak_progress_without_a_terminal_is_a_line_every_half_minute(autojump_clock):
    progress = io.StringIO()
    async with open_memory_server(**{**ENGINE, "step_seconds": 1.0}) as server:

        async def open_stream() -> trio.abc.Stream:
            return server.connect()

        await soak(settings(warmup_requests=60), opener=lambda http: open_stream, progress=progress)
    lines = progress.getvalue().splitlines()
    assert " requests of the warm-up, " in lines[0]
    assert lines[0].endswith(" MiB resident, 30 s")
    assert any("/60 requests, " in line for line in lines)


@pytest.mark.parametrize("way", list(LeaveMethod))
async def test_server_notices_each_way_in_which_a_client_disconnects(way, autojump_clock, monkeypatch):
    from trioserve.bench import soak_plan as soak_plan

    monkeypatch.setattr(soak_plan, "HTTP2_SHARE", float(way in (LeaveMethod.RESET, LeaveMethod.HANG_UP)))
    monkeypatch.setattr(soak_plan, "HALF_CLOSE_SHARE", float(way is LeaveMethod.HALF_CLOSE))
    monkeypatch.setattr(soak_plan, "HANG_UP_SHARE", float(way is LeaveMethod.HANG_UP))
    async with open_memory_server(**ENGINE) as server:
        outcome = await soaked(server, settings(abort_fraction=1.0, requests=40, concurrency=6))
        figures = outcome.report.figures
        assert broken(outcome) == set(), figures.claims
        assert figures.left_by_way[way.value] == figures.left_requests > 30
        assert server.server.counters().exchanges_left_total >= 30
