"""Whenever somebody waits and something could run, something runs: whom an engine may leave waiting when it computes
nothing. Reckoned anew from the requests and the pool; of what the scheduler remembers, only how often a request was
overtaken is believed."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.contracts.ids import NO_BLOCK
from trioserve.core.engine import EngineCore
from trioserve.core.live_request import LiveRequest
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.request_state import RequestStatus

__all__ = ["check_nobody_could_start"]


def check_nobody_could_start(core: EngineCore, may_load: Callable[[LiveRequest], bool]) -> None:
    """Assert that nothing is computed for a reason: every slot and the whole budget of a step are free, so whoever
    waits has no room, or stands behind one that has none, or waits for its KV to come. To be called when schedule() has
    said None. may_load: whether a request could take KV from elsewhere, and so may wait until fewer do."""
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
        assert not live.blocks, f"{name} has its KV and could run, and nothing is computed"
        if _blocks_lacking(core, live) > core.pool.available_count:
            if live.status is RequestStatus.PREEMPTED or live.overtaken_count >= core.settings.overtakes_max:
                return  # it holds the queue
            passed_count += 1
            if passed_count > slots:
                return  # nobody looks any further
            continue
        is_first_time = live.status is RequestStatus.WAITING and not live.load_was_tried
        if loading_count >= slots and is_first_time and may_load(live):
            passed_count += 1
            if passed_count > slots:
                return  # nobody looks any further
            continue
        raise AssertionError(f"{name} could start, and nothing is computed")


def _blocks_lacking(core: EngineCore, live: LiveRequest) -> int:
    """How many blocks it needs beyond those that others use or hold, and it shares."""
    if not core.settings.keeps_kv:
        return 0
    size, window = core.settings.block_size, core.settings.window_tokens
    needed = -(-len(live.tokens) // size)
    held_max = needed if window is None else 1 - (1 - window - core.settings.step_tokens_max) // size
    if not core.settings.enable_prefix_caching or live.needs_every_row:
        return min(needed, held_max)
    states = core.scheduler.states
    can_go_on = None if states is None else states.has_snapshot
    hits = core.cache.match(PrefixChain(live.request.cache_salt), live.tokens, can_go_on)
    done = hits.count(NO_BLOCK)
    done += sum(not core.pool.is_idle(block) for block in hits if block != NO_BLOCK)
    return min(needed - done, held_max)
