"""Tests that a seed gives the same trace, byte for byte, in every process. Another seed gives another trace."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from trioserve.commands.simulate import STEPS
from trioserve.contracts.errors import StartupError
from trioserve.simulation.runs import runs_of
from trioserve.simulation.stack import http_server as stack_http_server
from trioserve.simulation.stack.plan import drawn_stack_plan
from trioserve.testing.inline_work import SOURCE, SWITCH, seeded_schedule

MODES = [[], ["--stack"], ["--router"], ["--routers"], ["--pair"], ["--lasting"], ["--ranks"], ["--images"]]
BOTH_PROTOCOLS = """\
stage block_count=8 max_num_seqs=2 step_tokens_max=6 waiting_requests_max=4 step_seconds=[0.01] schedule_seed=1
connection number=0 http=1
ask number=0 connection=0 prompts=[[104,105]] output=4 streamed=true
connection number=1
ask number=1 connection=1 prompts=[[104,111]] output=4
"""


def trace_of(seed: int, hash_seed: int, *mode: str) -> bytes:
    command = [sys.executable, "-m", "trioserve", "simulate", "--replay", str(seed), *mode]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    ran = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stdout.decode() + ran.stderr.decode()
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "".join(mode) or "core")
@pytest.mark.parametrize("seed", [3, 5])
def test_seed_gives_the_same_trace_in_every_process(seed, mode):
    first = trace_of(seed, 1, *mode)
    assert first.count(b"\n") > 30
    assert trace_of(seed, 4242, *mode) == first


@pytest.mark.slow
@pytest.mark.parametrize("mode", STEPS)
def test_traces_do_not_depend_on_earlier_runs(mode):
    def traces() -> list[list[str]]:
        told: list[list[str]] = []
        for seed in range(2, 9):
            lines: list[str] = []
            assert runs_of(mode).run_seed(seed, STEPS[mode], trace=lines.append).failure is None
            told.append(lines)
        return told

    assert traces() == traces()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "".join(mode) or "core")
def test_another_seed_gives_another_trace(mode):
    assert trace_of(3, 1, *mode) != trace_of(4, 1, *mode)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 4, 6])
def test_http_bytes_are_the_same_in_every_process(seed):
    first = trace_of(seed, 7, "--stack")
    assert first.count(b"server sends on ") > 10  # Each of these lines has a digest of the sent bytes.
    assert trace_of(seed, 99, "--stack") == first


def test_trace_contains_every_byte_that_the_server_sends(monkeypatch):
    """In a run that begins a second later, only the header `date` and the field `created` may differ."""

    def lines() -> list[str]:
        told: list[str] = []
        assert runs_of("stack").run_script(BOTH_PROTOCOLS, trace=told.append).failure is None
        return told

    first = lines()
    assert lines() == first
    monkeypatch.setattr(stack_http_server, "BEGAN_AT", stack_http_server.BEGAN_AT + 1)
    later = lines()
    different = [line for line, line_later in zip(first, later, strict=True) if line != line_later]
    assert {line.split()[-3] for line in different} == {"0", "1"}, different  # numbers of the connections
    assert all(" server sends on " in line for line in different)


def order_of(seed: int) -> tuple[int, ...]:
    order: list[int] = []

    async def race(number: int) -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            order.append(number)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(race, number)

    with seeded_schedule(seed):
        trio.run(main)
    return tuple(order)


def test_order_of_trio_tasks_depends_on_the_seed():
    assert [order_of(seed) for seed in range(5)] == [order_of(seed) for seed in range(5)]
    assert len({order_of(seed) for seed in range(10)}) == 10


def test_other_threads_do_not_use_the_seeded_random_source():
    def numbers() -> tuple[float, list[int], list[int]]:
        source, order = getattr(trio._core._run, SOURCE), list(range(8))
        source.shuffle(order)
        return source.random(), [source.getrandbits(8) for _ in range(4)], order

    with seeded_schedule(7):
        expected = numbers()
    with ThreadPoolExecutor(1) as other, seeded_schedule(7):
        assert other.submit(numbers).result() != expected
        assert numbers() == expected


@pytest.mark.parametrize("name", [SWITCH, SOURCE])
def test_trio_without_its_private_names_is_refused(monkeypatch, name):
    """If this test fails with a new version of Trio, the task order must be made repeatable in another way."""
    monkeypatch.delattr(trio._core._run, name)
    with pytest.raises(StartupError, match="cannot be repeated"), seeded_schedule(0):
        pass


def test_order_of_trio_tasks_is_random_again_after_a_simulation():
    source = getattr(trio._core._run, SOURCE)
    state, was_on = source.getstate(), getattr(trio._core._run, SWITCH)
    with seeded_schedule(7):
        getattr(trio._core._run, SOURCE).random()
    assert getattr(trio._core._run, SOURCE) is source
    assert (source.getstate(), getattr(trio._core._run, SWITCH)) == (state, was_on)


def test_plan_does_not_depend_on_task_order():
    from random import Random

    assert drawn_stack_plan(Random(5), 12) == drawn_stack_plan(Random(5), 12)
