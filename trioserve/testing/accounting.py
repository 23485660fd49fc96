"""Checks that an engine has released everything that its requests used."""

from __future__ import annotations

from trioserve.engine.engine import Engine
from trioserve.engine.images.image_engine import ImageEngine

__all__ = ["assert_all_free"]


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
