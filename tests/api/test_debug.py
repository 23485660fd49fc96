"""Tests the debug pages: the running tasks with the line where each task waits, and a trace of the last steps."""

from __future__ import annotations

import trio

from trioserve.engine.lifecycle.step_times import step_trace
from trioserve.testing.memory_router import open_memory_router
from trioserve.testing.memory_server import open_memory_server
from trioserve.trio_tools.task_tree import task_tree

PATH = "/v1/completions"
ADMIN = {"authorization": "Bearer admin"}


def every(view):
    yield view
    for nursery in view.get("nurseries", ()):
        for child in nursery:
            yield from every(child)


async def test_tasks_are_shown_with_the_place_where_they_wait(autojump_clock):
    asked = {"prompt": "xyzzy", "max_tokens": 9, "stream": True}
    async with open_memory_server(step_seconds=5) as server, server.client().ask(PATH, asked):
        await trio.sleep(1)
        tree = await (await server.client().get("/debug/tasks")).json()
    views = list(every(tree["root"]))
    assert tree["shown_count"] == tree["task_count"] == len(views)
    assert [view["is_running"] for view in views if view.get("is_running")] == [True]
    (deadlines,) = [view for view in views if "keep_deadlines" in view["name"]]
    assert "trioserve/" in deadlines["frames"][0]
    waits = {(view.get("waits_in", "").partition(":")[0], view.get("waits_for")) for view in views}
    assert any(place == "trioserve/engine/lifecycle/request_scope.py" for place, _ in waits)
    assert any(what and what.startswith("trio.") for _, what in waits)
    assert "xyzzy" not in str(tree)


async def test_tasks_beyond_the_limit_are_only_counted(nursery):
    for _ in range(30):
        nursery.start_soon(trio.sleep_forever)
    await trio.testing.wait_all_tasks_blocked()
    tree = task_tree(10)
    assert tree.shown_count == 10
    assert tree.task_count > 30
    nursery.cancel_scope.cancel()


async def test_only_the_admin_reads_debug_pages_of_a_server_with_keys(autojump_clock):
    async with open_memory_server(api_keys=("alice",), admin_api_key="admin") as server:
        for path in ("/debug/tasks", "/debug/steps"):
            statuses = [
                await (await server.client().get(path, headers=headers)).head()
                for headers in ({}, {"authorization": "Bearer alice"}, ADMIN)
            ]
            assert statuses == [401, 403, 200]


async def test_a_router_shows_its_tasks(autojump_clock):
    async with open_memory_router({}) as router:
        tree = await (await router.client().get("/debug/tasks")).json()
        assert tree["root"]["nurseries"]


async def test_debug_steps_are_a_trace_in_the_trace_event_format(autojump_clock):
    async with open_memory_server(step_seconds=2) as server:
        await server.client().post(PATH, {"prompt": "p" * 10, "max_tokens": 3, "ignore_eos": True})
        trace = await (await server.client().get("/debug/steps")).json()
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= set(event)
        assert event["ph"] in ("M", "X", "C")
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    forward = [event for event in events if event["name"] == "forward"]
    assert [(event["ts"], event["dur"]) for event in forward] == [(0, 2e6), (2e6, 2e6), (4e6, 2e6)]
    assert {rows[event["tid"]] for event in forward} == {"compute"}
    assert [event["args"]["prefill_tokens"] for event in forward] == [10, 0, 0]
    assert [event["args"]["decode_tokens"] for event in forward] == [0, 1, 1]
    on_loop = [event for event in events if event["ph"] == "X" and rows[event["tid"]] == "event loop"]
    assert [event["name"] for event in on_loop] == ["schedule", "update", "deliver"] * 3
    ends = [event["ts"] + event["dur"] for event in on_loop]
    assert all(end <= event["ts"] for end, event in zip(ends, on_loop[1:], strict=False)), "steps do not overlap"


def test_a_server_without_steps_sends_an_empty_trace():
    assert b'"ph":"X"' not in step_trace([])
