"""Checks that something runs whenever a request waits and could run.

The rule computes everything from the requests and the pool. It believes the scheduler only how often a request was
overtaken.
"""

from __future__ import annotations

from collections.abc import Callable

from trioserve.contracts.ids import NO_BLOCK
from trioserve.core.engine import EngineCore
from trioserve.core.live_request import LiveRequest
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.request_state import RequestStatus

__all__ = ["check_nobody_could_start"]


def check_nobody_could_start(core: EngineCore, may_load: Callable[[LiveRequest], bool]) -> None:
    """Assert that no waiting request could start. Call this when schedule() has returned None.

    Then every slot and the whole token budget of a step are free. So each waiting request needs more blocks than there
    are, is behind a request that does, or waits for its KV.

    Args:
        core: the core.
        may_load: returns True if a request could load KV, and so may wait until fewer requests load.
    """
    assert not core.flights, "a step is in flight"
    loading_count = passed_count = 0
    waiting = []
    for live in core.live_requests():
        if live.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            loading_count += 1
        else:
            waiting.append(live)
    slots = core.settings.max_num_seqs
    for live in sorted(waiting, key=lambda live: (not live.blocks, live.order)):
        name = live.request.id
        assert not live.blocks, f"{name} has loaded its KV and could run, but nothing is computed"
        if _blocks_lacking(core, live) > core.pool.available_count:
            if live.status is RequestStatus.PREEMPTED or live.overtaken_count >= core.settings.overtakes_max:
                return  # This request blocks the queue.
            passed_count += 1
            if passed_count > slots:
                return  # The scheduler looks at no further request.
            continue
        is_first_time = live.status is RequestStatus.WAITING and not live.load_was_tried
        if loading_count >= slots and is_first_time and may_load(live):
            passed_count += 1
            if passed_count > slots:
                return  # The scheduler looks at no further request.
            continue
        raise AssertionError(f"{name} could start, but nothing is computed")


def _blocks_lacking(core: EngineCore, live: LiveRequest) -> int:
    """Return the number of blocks that a request needs, without those that it shares with other requests or holds."""
    if not core.settings.keeps_kv:
        return 0
    size, window = core.settings.block_size, core.settings.window_tokens
    needed = -(-len(live.tokens) // size)
    held_max = needed if window is None else 1 - (1 - window - core.settings.step_tokens_max) // size
    if not core.settings.enable_prefix_caching or live.needs_every_row:
        return min(needed, held_max)
    states = core.scheduler.states
    can_resume = None if states is None else states.has_snapshot
    hits = core.cache.match(PrefixChain(live.request.cache_salt), live.tokens, can_resume)
    done = hits.count(NO_BLOCK)
    done += sum(not core.pool.is_idle(block) for block in hits if block != NO_BLOCK)
    return min(needed - done, held_max)
