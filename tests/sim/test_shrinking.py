"""Tests that a failing history is reduced to the needed events, and still fails in the same way."""

from __future__ import annotations

import pytest

from trioserve.core.kv_blocks import BlockPool
from trioserve.engine.delivery import Delivery
from trioserve.http.http2.stream import H2Stream
from trioserve.router.endpoint_state import EndpointState
from trioserve.router.leases import Leases
from trioserve.router.ticket import TicketState
from trioserve.simulation.runs import cut, runs_of


@pytest.mark.parametrize(
    ("needed", "tries_max"),
    [((), 100), ((0,), 100), ((99,), 100), ((3, 50), 200), ((0, 1, 98, 99), 400), (tuple(range(0, 100, 10)), 900)],
)
def test_shrinking_keeps_only_needed_parts(needed, tries_max):
    tries = 0

    def fails(items: tuple[int, ...]) -> bool:
        nonlocal tries
        tries += 1
        return set(needed) <= set(items)

    assert cut(tuple(range(100)), fails) == needed
    assert tries <= tries_max


def first_failure(run, step_count):
    return next(failure for seed in range(200) if (failure := run(seed, step_count).failure) is not None)


def test_failing_core_history_is_shrunk(monkeypatch):
    def free_for_good(pool, blocks):
        pool._free.extend(blocks)  # This bug frees blocks that other requests still use.

    monkeypatch.setattr(BlockPool, "release", free_for_good)
    failure = first_failure(runs_of("core").run_seed, 100)
    plainest = runs_of("core").shrunk(failure, replays_max=2_000)
    assert plainest.is_like(failure)
    # The script has a world, one request, and at most one event.
    assert plainest.script.count("\n") <= 3, plainest.script
    again = runs_of("core").run_script(plainest.script).failure
    assert again is not None
    assert (again.script, str(again)) == (plainest.script, str(plainest))


def test_failing_router_history_is_shrunk(monkeypatch):
    def keep(leases, ticket, now):
        if ticket.state is TicketState.WAITING:
            leases._queues.of(ticket).leave(ticket)  # This bug never returns a granted lease.

    monkeypatch.setattr(Leases, "release", keep)
    failure = first_failure(runs_of("router").run_seed, 150)
    plainest = runs_of("router").shrunk(failure, replays_max=2_000)
    assert plainest.is_like(failure)
    # The script has the settings, a healthy endpoint, and a request that arrives and ends.
    assert plainest.script.count("\n") <= 5, plainest.script
    again = runs_of("router").run_script(plainest.script).failure
    assert again is not None
    assert (again.script, str(again)) == (plainest.script, str(plainest))


def test_failing_history_of_several_routers_is_shrunk(monkeypatch):
    monkeypatch.setattr(EndpointState, "set_lease_share", lambda state, share: None)
    failure = first_failure(runs_of("routers").run_seed, 100)
    plainest = runs_of("routers").shrunk(failure, replays_max=1_000)
    assert plainest.is_like(failure)
    # The script has the settings, and one request more than the share of one router.
    assert plainest.script.count("\n") <= 4, plainest.script
    again = runs_of("routers").run_script(plainest.script).failure
    assert again is not None
    assert (again.script, str(again)) == (plainest.script, str(plainest))


@pytest.mark.slow
def test_failing_stack_plan_is_shrunk(monkeypatch):
    def stay(delivery, request, reason):
        for choice in request.choices:
            choice.is_ended = True

    monkeypatch.setattr(Delivery, "end", stay)
    failure = first_failure(runs_of("stack").run_seed, 12)
    plainest = runs_of("stack").shrunk(failure, replays_max=300)
    assert plainest.is_like(failure)
    # The script has the stage, a client that disconnects, and at most one more client.
    assert plainest.script.count("\n") <= 3, plainest.script
    assert runs_of("stack").run_script(plainest.script).failure is not None


@pytest.mark.slow
def test_failing_http_plan_is_shrunk(monkeypatch):
    def stay(stream):
        stream.gone = True

    monkeypatch.setattr(H2Stream, "leave", stay)
    failure = first_failure(runs_of("stack").run_seed, 12)
    plainest = runs_of("stack").shrunk(failure, replays_max=300)
    assert plainest.is_like(failure)
    # The script has the stage, a connection, and a request whose client disconnects.
    assert plainest.script.count("\n") <= 4, plainest.script
    assert runs_of("stack").run_script(plainest.script).failure is not None


def test_shrinking_ends_at_its_limit_of_replays(monkeypatch):
    monkeypatch.setattr(BlockPool, "release", lambda pool, blocks: None)
    failure = first_failure(runs_of("core").run_seed, 100)
    plainest = runs_of("core").shrunk(failure, replays_max=5)
    assert plainest.is_like(failure)
    assert len(plainest.script) <= len(failure.script)
