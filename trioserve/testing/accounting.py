"""Whether everything that requests had was given back."""

from __future__ import annotations

from trioserve.engine.engine import Engine

__all__ = ["assert_all_free"]


def assert_all_free(engine: Engine) -> None:
    """Assert that no KV block is in use or held and that no request has a place, and name those that do.

    Of any engine, also one with weights. Blocks of a request that left during a forward pass are free right after it,
    so ask when no step runs. Cached blocks are free: nobody uses them.
    """
    stats, live = engine.stats(), engine.live_requests()
    lines = [
        f"  {view.id}: {view.state}, {view.phase.value}, {view.prompt_token_count} + {view.completion_token_count} "
        f"tokens, {view.block_count} blocks, entered {view.age_seconds:g} s ago"
        for view in live
    ]
    if stats.running_count + stats.waiting_count and not live:
        lines.append("  (every reader has left: a step in flight still reads their blocks)")
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
        taken += f", {claimed_bytes} bytes of images claimed, {waiting_claims} requests waiting for some"
    blocks = (stats.blocks_used, stats.blocks_held)
    held = (*blocks, stats.running_count, stats.waiting_count, queue.waiting, leases, claimed_bytes, waiting_claims)
    is_free = not (any(held) or adapter_leases or live)
    assert is_free, "\n".join([f"not all is free: {taken}", *lines])
