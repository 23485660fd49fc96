"""Tests the phases in which a service stops: readiness, the queue, running requests, the grace period, the end."""

from __future__ import annotations

import signal

import pytest
import trio

from trioserve.contracts.deadlines import StoppingSettings
from trioserve.contracts.errors import Draining, EngineFault
from trioserve.contracts.events import FinishReason
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle
from trioserve.testing.scripted_connector import ScriptedConnector
from trioserve.trio_tools.service import Service


class ScriptedFrontEnd:
    """A front end whose clients send requests as soon as it serves. It records how each request ended.

    Args:
        engine: Answers the requests.
        prompts: One request for each prompt.
        tell_seconds: Time that it takes to send the end of a response to its client.
    """

    def __init__(self, engine: Engine, prompts: list[str], *, tell_seconds: float = 0.0) -> None:
        self.engine = engine
        self.prompts = prompts
        self.tell_seconds = tell_seconds
        self.ends: dict[str, object] = {}
        self.drained = trio.Event()
        self.asking = len(prompts)
        self.answered = trio.Event()
        self.announced_at = self.drained_at = -1.0
        self.reloads = 0

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        async with trio.open_nursery() as nursery:
            for prompt in self.prompts:
                nursery.start_soon(self.ask, prompt)
            nursery.start_soon(self.drained.wait)

    async def ask(self, prompt: str) -> None:
        end: object = "cancelled"
        try:
            async with self.engine.generate(prompt, SamplingParams(max_tokens=100)) as stream:
                async for delta in stream:
                    end = delta.finish_reason
        except (Draining, EngineFault) as error:
            end = type(error)
        finally:
            self.ends[prompt] = end
        await trio.sleep(self.tell_seconds)
        self.asking -= 1
        if not self.asking:
            self.answered.set()

    def announce_drain(self) -> None:
        self.announced_at = trio.current_time()
        if not self.asking:
            self.answered.set()

    async def wait_until_answered(self) -> None:
        await self.answered.wait()

    def drain(self) -> None:
        self.drained_at = trio.current_time()
        self.drained.set()

    def reload(self) -> None:
        self.reloads += 1


async def run_with_orders_at(service: Service, *times: float, order: object = "stop") -> None:
    sender, orders = trio.open_memory_channel[object](8)

    async def give_orders() -> None:
        for time in times:
            await trio.sleep_until(time)
            sender.send_nowait(order)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_orders)
        await service.run(orders)
        nursery.cancel_scope.cancel()


async def test_drain_ends_when_the_last_running_request_has_ended(autojump_clock):
    """Scenario S36 of tests/README.md: the server unloads the model only after the last request has ended."""
    async with open_fake_engine(step_seconds=0.1, max_num_seqs=2) as fake:
        front_end = ScriptedFrontEnd(fake, ["one", "two", "three"])
        await run_with_orders_at(Service(fake, front_end, StoppingSettings(drain_seconds_max=60)), 1)
        # 100 steps of 0.1 s, well before the drain's deadline.
        assert trio.current_time() == pytest.approx(10.0, abs=0.3)
        assert sorted(map(str, front_end.ends.values())) == sorted(map(str, [FinishReason.LENGTH] * 2 + [Draining]))
        check_idle(fake.core)


@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGTERM, 2.0), (signal.SIGINT, 0.0)], ids=["SIGTERM", "SIGINT"]
)
async def test_idle_server_answers_for_the_drain_delay_only_after_sigterm(autojump_clock, number, seconds):
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, [])
        await run_with_orders_at(Service(fake, front_end, StoppingSettings()), 1, order=number)
        assert (front_end.announced_at, front_end.drained_at) == (1.0, 1.0 + seconds)
        assert trio.current_time() == pytest.approx(1.0 + seconds, abs=0.01)


async def test_second_command_to_stop_ends_the_drain_delay_at_once(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        service = Service(fake, ScriptedFrontEnd(fake, []), StoppingSettings(drain_delay_seconds=20))
        await run_with_orders_at(service, 1, 1.5, order=signal.SIGTERM)
        assert trio.current_time() == pytest.approx(1.5, abs=0.01)


async def test_drain_timeout_limits_the_drain_delay(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        settings = StoppingSettings(drain_seconds_max=3, drain_delay_seconds=20)
        await run_with_orders_at(Service(fake, ScriptedFrontEnd(fake, []), settings), 1)
        assert trio.current_time() == pytest.approx(4.0, abs=0.01)


async def test_front_end_answers_during_a_drain_until_the_last_request_has_ended(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, ["one"])
        await run_with_orders_at(Service(fake, front_end, StoppingSettings(drain_seconds_max=60)), 1)
        assert front_end.announced_at == 1.0
        assert front_end.drained_at == pytest.approx(10.0, abs=0.3)


async def test_sighup_reloads_a_service_without_stopping_it(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, [])
        with trio.move_on_after(100) as patience:
            await run_with_orders_at(Service(fake, front_end, StoppingSettings()), 1, 2, order=signal.SIGHUP)
        assert patience.cancelled_caught
        assert (front_end.reloads, front_end.announced_at) == (2, -1.0)


async def test_drain_deadline_ends_running_requests_with_a_reason(autojump_clock):
    """Scenario S21 of tests/README.md: clients whose requests end at the deadline get the reason."""
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, ["one"])
        await run_with_orders_at(Service(fake, front_end, StoppingSettings(drain_seconds_max=3)), 1)
        assert trio.current_time() == pytest.approx(4.0, abs=0.01)
        assert front_end.ends == {"one": FinishReason.ABORT}


async def test_second_command_to_stop_ends_the_drain(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, ["one"])
        await run_with_orders_at(Service(fake, front_end, StoppingSettings(drain_seconds_max=60)), 1, 2)
        assert trio.current_time() == pytest.approx(2.0, abs=0.01)
        assert front_end.ends == {"one": FinishReason.ABORT}


async def test_third_command_to_stop_ends_the_grace_period(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, ["one"], tell_seconds=1000)
        settings = StoppingSettings(drain_seconds_max=60, grace_seconds_max=60)
        await run_with_orders_at(Service(fake, front_end, settings), 1, 2, 3)
        assert trio.current_time() == pytest.approx(3.0, abs=0.01)
        assert front_end.ends == {"one": FinishReason.ABORT}


async def test_clients_that_do_not_read_their_response_do_not_block_the_exit(autojump_clock):
    async with open_fake_engine(step_seconds=0.1) as fake:
        front_end = ScriptedFrontEnd(fake, ["one"], tell_seconds=1000)
        settings = StoppingSettings(drain_seconds_max=3, grace_seconds_max=2)
        await run_with_orders_at(Service(fake, front_end, settings), 1)
        assert trio.current_time() == pytest.approx(6.0, abs=0.01)


async def test_a_fault_of_the_engine_reaches_every_client_before_the_server_ends(autojump_clock):
    """Scenario S21 of tests/README.md: clients get an error after a fault of the engine."""
    with pytest.raises(EngineFault):
        async with open_fake_engine(step_seconds=0.1) as fake:
            front_end = ScriptedFrontEnd(fake, ["one", "two"], tell_seconds=1)
            service = Service(fake, front_end, StoppingSettings())
            fake.on_fault = service.pass_on_fault

            async def break_it() -> None:
                await trio.sleep(0.5)
                fake.steps.fault = RuntimeError("broken")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(break_it)
                await run_with_orders_at(service)
    assert front_end.ends == {"one": EngineFault, "two": EngineFault}
    assert trio.current_time() == pytest.approx(1.6, abs=0.11)


async def test_drain_waits_for_held_blocks_as_for_running_requests(autojump_clock):
    async def serve_with_a_hold(seconds: float, settings: StoppingSettings) -> None:
        async with open_fake_engine(connector=ScriptedConnector, kv_hold_timeout=seconds) as fake:
            asked = KVTransferParams(do_remote_decode=True)
            async with fake.generate("prompt", SamplingParams(max_tokens=1), kv_transfer=asked) as stream:
                assert [delta async for delta in stream]
                stream.keep_hold()
            service = Service(fake, ScriptedFrontEnd(fake, []), settings, wait_for_rest=fake.wait_until_idle)
            await run_with_orders_at(service, trio.current_time() + 1)

    await serve_with_a_hold(20.0, StoppingSettings(drain_seconds_max=60))
    assert trio.current_time() == pytest.approx(20.0, abs=0.01)
    begun_at = trio.current_time()
    await serve_with_a_hold(200.0, StoppingSettings(drain_seconds_max=60, grace_seconds_max=2))
    assert trio.current_time() - begun_at == pytest.approx(1 + 60 + 2, abs=0.01)


class HandsOver:
    """A worker that hands its requests over to other engines at the drain's deadline, as a server's engine does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.drain = engine.drain

    def abort_all(self, message: str) -> None:
        self.engine.abort_all(message, hands_over=True)


@pytest.mark.parametrize(("fetched_after", "seconds"), [(0.5, 1 + 3 + 0.5), (None, 1 + 3 + 2)])
async def test_blocks_handed_over_at_the_deadline_are_held_until_fetched_or_the_grace_period_ends(
    autojump_clock, fetched_after, seconds
):
    class Reader(ScriptedFrontEnd):
        async def ask(self, prompt: str) -> None:
            async with self.engine.generate(prompt, SamplingParams(max_tokens=100), resumable=True) as stream:
                deltas = [delta async for delta in stream]
            self.ends[prompt] = deltas[-1].finish_reason
            assert self.engine.stats().blocks_held > 0
            if fetched_after is not None:
                await trio.sleep(fetched_after)
                fake.connector.release_all()

    async with open_fake_engine(step_seconds=0.1, connector=ScriptedConnector, kv_hold_timeout=100) as fake:
        front_end = Reader(fake, ["one"])
        settings = StoppingSettings(drain_seconds_max=3, grace_seconds_max=2)
        service = Service(HandsOver(fake), front_end, settings, wait_for_rest=fake.wait_until_idle)
        await run_with_orders_at(service, 1)
        assert trio.current_time() == pytest.approx(seconds, abs=0.2)
        assert front_end.ends == {"one": FinishReason.HANDED_OVER}
        assert (fake.stats().blocks_held == 0) == (fetched_after is not None)


async def test_stopping_service_does_not_wait_for_held_blocks_of_a_failed_engine(autojump_clock):
    with pytest.raises(EngineFault):
        async with open_fake_engine(connector=ScriptedConnector) as fake:
            asked = KVTransferParams(do_remote_decode=True)
            async with fake.generate("prompt", SamplingParams(max_tokens=1), kv_transfer=asked) as stream:
                assert [delta async for delta in stream]
                stream.keep_hold()
            service = Service(fake, ScriptedFrontEnd(fake, []), StoppingSettings(), wait_for_rest=fake.wait_until_idle)
            fake.on_fault = service.pass_on_fault
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_with_orders_at, service)
                await trio.sleep(1)
                fake.connector.break_down(OSError("the network is gone"))
    assert trio.current_time() == pytest.approx(1.0, abs=0.01)
