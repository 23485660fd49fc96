"""Tests that a snapshot with all later changes applied equals a new snapshot, after any history."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.api.page import change_between, fold, snapshot_fields
from trioserve.contracts.page import HISTORY_POINTS_MAX, HistoryShown, PageSnapshot, ServerShown
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.live_feed import LiveFeed
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.scripted_connector import ScriptedConnector

Snapshots = dict[str | None, PageSnapshot]


def decoded(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def forget_caches(feed: LiveFeed) -> None:
    """Drop all values that the feed has cached about requests."""
    for watched in feed._watched.values():
        watched.blocks, watched.runs, watched.shown = [], (), None


async def live(engine: FakeEngine, rng: random.Random, scopes: dict[str, trio.CancelScope], name: str) -> None:
    prompt = "a beginning that many share " * rng.randint(0, 2) + "x" * rng.randint(1, 20)
    holds = KVTransferParams(do_remote_decode=True) if engine.connector and rng.random() < 0.5 else None
    choices = 1 if holds else rng.choice((1, 1, 1, 3))
    sampling = SamplingParams(max_tokens=rng.randint(1, 20), n=choices, ignore_eos=True)
    request_id, owner = rng.choice((name, "same")), rng.choice(("a", "b"))
    with trio.CancelScope() as scope:
        scopes[name] = scope
        async with engine.generate(prompt, sampling, request_id=request_id, kv_transfer=holds, owner=owner) as stream:
            async for _delta in stream:
                if rng.random() < 0.1:
                    break
            if holds is not None and rng.random() < 0.5:
                stream.keep_hold()
    scopes.pop(name, None)


async def happen(engine: FakeEngine, rng: random.Random, scopes: dict[str, trio.CancelScope]) -> None:
    """Run a step of the engine, or cause another random event."""
    event = rng.random()
    if event < 0.15 and scopes:
        scopes[rng.choice(sorted(scopes))].cancel()
    elif event < 0.25 and scopes:
        engine.abort([rng.choice([*sorted(scopes), "same"])])
    elif event < 0.4 and engine.stats().running_count:
        async with engine.held_step():
            if scopes:
                scopes[rng.choice(sorted(scopes))].cancel()
            await wait_all_tasks_blocked()
    elif event < 0.5 and engine.connector is not None:
        engine.connector.release_all()
    else:
        await engine.step()


@pytest.mark.parametrize("seed", range(12))
async def test_a_snapshot_with_all_changes_equals_a_new_snapshot(seed: int, mock_clock: MockClock) -> None:
    rng = random.Random(seed)
    connector = ScriptedConnector if seed % 2 else None
    scopes: dict[str, trio.CancelScope] = {}
    async with open_fake_engine(
        paused=True,
        block_count=40,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_queued_requests=60,
        connector=connector,
    ) as engine:
        feed = engine.live_feed
        with feed.watching():
            last = {owner: feed.snapshot(owner) for owner in (None, "a")}
            shown = {owner: decoded(snapshot_fields(snapshot)) for owner, snapshot in last.items()}
            async with trio.open_nursery() as nursery:
                for number in range(120):
                    if rng.random() < 0.4 and len(scopes) < 12:
                        nursery.start_soon(live, engine, rng, scopes, f"r{number}")
                    await happen(engine, rng, scopes)
                    mock_clock.jump(rng.choice((0.0, 0.3, 5.0)))
                    await wait_all_tasks_blocked()
                    if rng.random() < 0.6:
                        for owner in last:
                            check(feed, owner, last, shown)
                engine.resume()
            for _ in range(2):
                mock_clock.jump(31)
                await wait_all_tasks_blocked()
                for owner in last:
                    check(feed, owner, last, shown)
            assert shown[None]["requests"] == {}
        engine.assert_all_free()


def check(feed: LiveFeed, owner: str | None, last: Snapshots, shown: dict[str | None, Any]) -> None:
    before, last[owner] = last[owner], feed.snapshot(owner)
    change = change_between(before, last[owner])
    if change is None:
        last[owner] = before
    else:
        fold(shown[owner], decoded(change))
    forget_caches(feed)
    new = feed.snapshot(owner)
    expected = decoded(snapshot_fields(new))
    for name in ("now", "steps"):  # Both values depend on the time and on the previous snapshot.
        shown[owner][name] = expected[name]
    assert shown[owner] == expected
    assert new.blocks is not None
    counts = [new.blocks.count(state) for state in range(5)]
    assert counts == [new.stats[f"blocks_{name}"] for name in ("free", "cached", "used", "held", "retired")]
    for request in new.requests.values():
        for first, count in request.blocks:
            assert set(new.blocks[first : first + count]) <= {2, 3}, "each block with an owner is used or held"


def test_slow_page_reader_gets_all_missed_points_together() -> None:
    def snapshot(number: int) -> PageSnapshot:
        values = tuple(float(i) for i in range(max(0, number - HISTORY_POINTS_MAX + 1), number + 1))
        history = HistoryShown(interval_seconds=5, at=number * 5.0, number=number, series={"queue": values})
        return PageSnapshot(now=0.0, server=ServerShown(kind="engine", model="m", version="1"), history=history)

    for first, second in ((-1, 0), (0, 3), (10, 10 + HISTORY_POINTS_MAX), (5, 700), (178, 179), (179, 181)):
        shown = decoded(snapshot_fields(snapshot(first)))
        change = change_between(snapshot(first), snapshot(second))
        assert change is not None
        fold(shown, decoded(change))
        assert shown["history"] == decoded(snapshot_fields(snapshot(second)))["history"]


def test_change_of_the_page_has_all_blocks_if_the_pool_size_changed() -> None:
    def snapshot(blocks: bytes) -> PageSnapshot:
        server = ServerShown(kind="engine", model="m", version="1", block_count=len(blocks))
        return PageSnapshot(now=0.0, server=server, blocks=blocks)

    for first, second in ((b"\0\1\2", b"\2\2"), (b"\3", b"\0\0\1\1\1"), (b"", b"\1"), (b"\1", b"")):
        shown = decoded(snapshot_fields(snapshot(first)))
        change = change_between(snapshot(first), snapshot(second))
        assert change is not None
        fold(shown, decoded(change))
        assert shown["blocks"] == decoded(snapshot_fields(snapshot(second)))["blocks"]
