"""Checks that an engine has released everything that its requests used, and describes waiting requests."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import trio

from trioserve.core.request_state import RequestStatus
from trioserve.engine.engine import Engine
from trioserve.engine.image_engine import ImageEngine

__all__ = ["EngineWatch", "WATCH", "assert_all_free", "waits_of"]


def assert_all_free(engine: Engine | ImageEngine) -> None:
    """Assert that no request uses a KV block or a latent slot, or waits in a queue. The error names such requests.

    The function works for every engine, also for an engine with weights. If a request is cancelled during a forward
    pass, its blocks become free at the end of that pass. So call this function when no step runs. Cached blocks count
    as free, because no request uses them.

    Args:
        engine: the engine to check.

    Raises:
        AssertionError: a resource is still in use. The text lists the resources and the requests.
    """
    if isinstance(engine, ImageEngine):
        _assert_image_engine_free(engine)
    else:
        _assert_text_engine_free(engine)


def _assert_image_engine_free(engine: ImageEngine) -> None:
    stats, live = engine.stats(), engine.live_requests()
    lines = [
        f"  {view.id}: {view.state}, {view.phase.value}, {view.steps_done} of {view.step_count} steps, "
        f"{view.slot_count} slots, entered {view.age_seconds:g} s ago"
        for view in live
    ]
    if stats.running_count + stats.waiting_count and not live:
        lines.append("  (every client has left, but a step in flight still reads their slots)")
    queue = engine.dispatch.core.stats()
    leases = sum(queue.leases.values())
    taken = (
        f"{stats.slots_used} latent slots in use, {stats.kept_used} latents kept, {stats.running_count} images "
        f"running, {stats.waiting_count} waiting, {len(live)} requests entered, {queue.waiting} in the queue, "
        f"{leases} leases out"
    )
    held = (stats.slots_used, stats.kept_used, stats.running_count, stats.waiting_count, queue.waiting, leases)
    is_free = not (any(held) or live)
    assert is_free, "\n".join([f"not all is free: {taken}", *lines])


def _assert_text_engine_free(engine: Engine) -> None:
    stats, live = engine.stats(), engine.live_requests()
    lines = [
        f"  {view.id}: {view.state}, {view.phase.value}, {view.prompt_token_count} + {view.completion_token_count} "
        f"tokens, {view.block_count} blocks, entered {view.age_seconds:g} s ago"
        for view in live
    ]
    if stats.running_count + stats.waiting_count and not live:
        lines.append("  (every client has left, but a step in flight still reads their blocks)")
    taken = (
        f"{stats.blocks_used} KV blocks in use, {stats.blocks_held} held, {stats.running_count} sequences running, "
        f"{stats.waiting_count} waiting, {len(live)} requests entered"
    )
    outputs = engine.image_outputs
    claimed_bytes = 0 if outputs is None else outputs.claimed_bytes
    waiting_claims = 0 if outputs is None else outputs.waiting_count
    queue = engine.dispatch.core.stats()
    leases = sum(queue.leases.values())
    taken += f", {queue.waiting} in the queue, {leases} leases out"
    adapter_leases = engine.adapters.book.lease_count
    taken += f", {adapter_leases} leases on adapters" if adapter_leases else ""
    engine.adapters.book.check()
    if outputs is not None:
        taken += f", {claimed_bytes} bytes of images claimed, {waiting_claims} requests waiting for image memory"
    blocks = (stats.blocks_used, stats.blocks_held)
    held = (*blocks, stats.running_count, stats.waiting_count, queue.waiting, leases, claimed_bytes, waiting_claims)
    is_free = not (any(held) or adapter_leases or live)
    assert is_free, "\n".join([f"not all is free: {taken}", *lines])


BURST_SECONDS = 0.1
"""Requests that leave within this time were cancelled together. When the first one leaves, all of them are recorded."""


def waits_of(engine: Any) -> list[str]:
    """Describe the unfinished requests of a fake engine in one line each. Then describe the resources in use, and the
    state of the steps.

    Args:
        engine: a FakeEngine or a FakeImageEngine. Its Trio program may have ended.

    Returns:
        The lines. Empty if every request has finished.
    """
    core = engine.current_core
    lives = {live.request.id: live for live in core.live_requests()}
    unfinished = [request for request in engine.open_requests if not request.is_finished]
    if not unfinished:
        return []
    lines, queue_place = [], 0
    for request in sorted(unfinished, key=lambda request: (request.priority, request.entered_at)):
        active = [live for choice in request.choices if (live := lives.get(choice.sequence_id)) is not None]
        if not request.is_leased or (active and all(live.status is RequestStatus.WAITING for live in active)):
            queue_place += 1
            lines.append(f"{request.id} waits in the queue at place {queue_place}")
        elif not active:
            lines.append(f"{request.id} is being prepared: the core does not have it yet")
        else:
            states = sorted({live.status.name.lower().replace("_", " ") for live in active})
            lines.append(f"{request.id} waits for {_next_of(active)}: {', '.join(states)}")
    stats = core.stats()
    if hasattr(stats, "blocks_used"):
        lines.append(f"{stats.blocks_used} of {stats.blocks_total} blocks used")
    else:
        lines.append(f"{stats.slots_used} of {stats.slots_total} latent slots used")
    if engine.steps.is_held:
        lines.append("the test holds a step: it ends with `async with engine.held_step()`")
    elif engine.steps.plan is not None:
        lines.append(f"a step is being computed, which takes {engine.step_seconds:g} s")
    elif engine.core.is_paused:
        lines.append("the engine is paused: no step begins until engine.step() or engine.resume()")
    elif engine.is_paused:
        lines.append("generation is paused: no step begins until it is resumed")
    return lines


def _next_of(active: list[Any]) -> str:
    if hasattr(active[0], "steps_done"):
        done, total = sum(live.steps_done for live in active), sum(live.request.step_count for live in active)
        return f"denoising step {done + 1} of {total}" if done < total else "its decoded image"
    if active[0].is_pooling:
        return "its vector"
    done = sum(live.output_count for live in active)
    return f"token {done + 1} of {sum(live.request.output_tokens_max for live in active)}"


class EngineWatch:
    """Tracks the fake engines of the running test, and what their requests waited for when they were cancelled.

    Attributes:
        is_used: True if the test has opened a fake engine, or has tried to open one.
    """

    def __init__(self) -> None:
        self._engines: WeakSet[Any] = WeakSet()
        self._left: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._last: list[str] = []
        self.is_used = False

    def begin_test(self) -> None:
        """Forget the engines of earlier tests."""
        self._engines.clear()
        self._left.clear()
        self._last = []
        self.is_used = False

    def note_use(self) -> None:
        """Record that the test tries to open a fake engine."""
        self.is_used = True

    def add(self, engine: Any) -> None:
        self._engines.add(engine)

    def note_leaving(self, engine: Any, request: Any) -> None:
        """If a request is cancelled before it has finished, record what the requests of its engine wait for.

        Args:
            request: the request whose scope ends.
        """
        if request.is_finished or not request.choices:
            return
        now = trio.current_time()
        if engine not in self._left or now > self._left[engine] + BURST_SECONDS:
            self._last = waits_of(engine)
        self._left[engine] = now

    def lines(self) -> list[str]:
        """Return what the open requests wait for.

        If no request is open, return what the last cancelled requests waited for.
        """
        waiting = [line for engine in self._engines for line in waits_of(engine)]
        return waiting or self._last


WATCH = EngineWatch()
