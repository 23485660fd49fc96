"""Tests endpoints that push their load: how the router uses pushed loads, and when it still requests the load."""

from __future__ import annotations

import pytest
import trio

from trioserve.admission.admission_scope import KEPT_SECONDS, SentTimes
from trioserve.contracts.endpoint import EndpointId, EndpointLoad
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.pushed_reports import ANCHOR_SECONDS, SILENT_SECONDS, PushedLoad
from trioserve.testing.memory_server import MemoryServer, open_memory_server

A = EndpointId("a")
STREAM = "/kv_events?load=only"
WATCH = WatchSettings(health_seconds=100, load_seconds=0.25)


def told(at: float, *, clock: str = "c", running: int = 0) -> EndpointLoad:
    return EndpointLoad(running=running, waiting=0, clock=clock, told_at=at)


# --- times of pushed loads ---


def test_time_of_a_pushed_load_is_computed_from_the_endpoints_clock():
    pushed = PushedLoad()
    pushed.note_asked(told(5000.0), asked_at=100.0)
    assert pushed.asked_at(told(5001.0)) == pytest.approx(101.0, abs=0.002)
    assert pushed.asked_at(told(5001.0)) < 101.0, "drifting clocks never make the time later"


def test_pushed_load_with_another_clock_is_ignored_until_the_router_asks():
    pushed = PushedLoad()
    assert pushed.asked_at(told(5000.0)) is None
    pushed.note_asked(told(5000.0), asked_at=100.0)
    assert pushed.asked_at(told(1.0, clock="started anew")) is None
    pushed.note_asked(told(2.0, clock="started anew"), asked_at=200.0)
    assert pushed.asked_at(told(3.0, clock="started anew")) == pytest.approx(201.0, abs=0.002)


def test_server_without_clock_does_not_push():
    pushed = PushedLoad()
    pushed.note_asked(EndpointLoad(running=1, waiting=0), asked_at=100.0)
    assert pushed.asked_at(EndpointLoad(running=1, waiting=0)) is None


def test_requests_sent_before_a_time_are_counted():
    times = SentTimes()
    for moment in (1.0, 2.0, 2.0, 3.0):
        times.note(moment)
    assert [times.count_at(moment) for moment in (0.5, 1.0, 2.0, 2.5, 9.0)] == [0, 1, 3, 3, 4]


def test_sent_requests_are_still_counted_after_their_send_times_are_dropped():
    times = SentTimes()
    for index in range(10_000):
        times.note(index * 0.1)
    assert len(times._times) < 64 + 2 * KEPT_SECONDS / 0.1
    assert times.count_at(999.0) == 9_991
    assert times.count_at(5.0) == 0, "the count of such an old time is unknown"


# --- tests with an engine and a router ---


async def test_load_stream_sends_changes_at_once_and_heartbeats_between_them(autojump_clock):
    async with open_memory_server() as server, server.client().ask(STREAM) as events:
        first = await anext(events)
        assert (first["type"], first["load"]["running"]) == ("load", 0)
        server.engine.pause()
        await trio.sleep(0.3)  # Wait until the stream waits for a change.
        began = trio.current_time()
        async with server.client().ask("/v1/completions", {"prompt": "hello", "max_tokens": 4}):
            busy = await anext(events)
            assert busy["load"]["running"] + busy["load"]["waiting"] == 1
            assert trio.current_time() - began < 0.5
        server.engine.resume()
        load = busy["load"]
        while load["running"] or load["waiting"]:
            load = (await anext(events))["load"]
        idle_at = trio.current_time()
        assert (await anext(events))["load"]["clock"] == load["clock"]
        assert 0.5 < trio.current_time() - idle_at <= 1.1


async def test_router_seldom_requests_the_load_of_an_endpoint_that_pushes_it(open_setup, autojump_clock):
    async with open_setup("a", watch=WATCH) as setup:
        await trio.sleep(10)
        reports = setup.router.dispatch.load_reports_total
        assert reports["asked"] <= 8, "the router asks only in the beginning"
        assert reports["pushed"] >= 8, "the endpoint pushes a load every second"
        server, state = setup.servers["a"], setup.router.dispatch.core.endpoints[A]
        server.engine.pause()
        async with server.client().ask("/v1/completions", {"prompt": "of somebody else"}):
            await trio.sleep(0.5)
            assert state.others == 1
        server.engine.resume()
        asked = reports["asked"]
        await trio.sleep(ANCHOR_SECONDS + 1)
        assert asked < reports["asked"] < asked + 8, "the router compares the clocks again"


async def test_router_asks_again_while_the_load_stream_is_silent(open_setup, autojump_clock, monkeypatch):
    monkeypatch.setattr("trioserve.api.operations.kv_events.LOAD_ALIVE_SECONDS", 1e6)
    async with open_setup("a", watch=WATCH) as setup:
        await trio.sleep(SILENT_SECONDS + 1)
        reports = setup.router.dispatch.load_reports_total
        asked = reports["asked"]
        await trio.sleep(10)
        assert reports["asked"] > asked + 30


async def test_silent_load_stream_is_reopened(open_setup, autojump_clock, monkeypatch):
    """The connection stays open. Meanwhile, the router requests the load."""
    ends = []
    connect = MemoryServer.connect

    def recorded(server: MemoryServer):
        ends.append(connect(server))
        return ends[-1]

    monkeypatch.setattr(MemoryServer, "connect", recorded)
    watch = WatchSettings(health_seconds=1, load_seconds=0.5, response_seconds_max=1)
    async with open_setup("a", watch=watch) as setup:
        await trio.sleep(5)
        reports = setup.router.dispatch.load_reports_total
        assert reports["pushed"] > 1
        for end in ends:
            end.go_silent()
        await trio.sleep(5)
        pushed = reports["pushed"]
        await trio.sleep(15)
        assert reports["pushed"] > pushed
