"""Invariants of both cores, which must hold after every event. The checks read the core and change nothing."""

from __future__ import annotations

import math
from collections import Counter

from trioserve.contracts.ids import NO_BLOCK, BlockIndex
from trioserve.contracts.kv_transfer import HoldKind
from trioserve.contracts.media import rows_material
from trioserve.core.block_holds import Hold
from trioserve.core.engine import EngineCore
from trioserve.core.iterative_core import IterativeCore, LiveIteration
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["check_core", "check_idle", "check_iterative_core", "check_iterative_idle"]


def check_core(core: EngineCore) -> None:
    """Assert every invariant of block ownership, states, order and counts.

    A caller may call this function at any time, between steps and while a step is running.

    Args:
        core: the core to check.

    Cost:
        O(blocks + known tokens).
    """
    core.pool.check()
    core.cache.check()
    running: list[LiveRequest] = []
    loading: list[LiveRequest] = []
    ready: list[LiveRequest] = []
    waiting: list[LiveRequest] = []
    for live in core.live_requests():
        _check_progress(core, live)
        _check_table(core, live)
        is_running = live.status is RequestStatus.RUNNING
        assert (live.state is not None) == (is_running and core.settings.state_slot_count > 0), (
            f"{live.request.id} is {live.status.value}, and has {'no state' if live.state is None else 'a state'}"
        )
        if live.status is RequestStatus.RUNNING:
            _check_running(core, live)
            running.append(live)
        elif live.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            _check_loading(core, live)
            loading.append(live)
        elif live.blocks:
            _check_ready(core, live)
            ready.append(live)
        else:
            _check_waiting(live)
            waiting.append(live)
    prefetching = [prefetch.live for prefetch in core.prefetches.loading.values() if prefetch.live is not None]
    for live in prefetching:
        _check_prefetch(core, live)
    owners = [*running, *loading, *ready, *prefetching]
    owners += [live for live, _reason in core.flights.ended.values()]
    for live, _reason in core.flights.ended.values():
        _check_ended(core, live)
        _check_table(core, live)
    _check_claims(core, owners)
    _check_states(core, owners)
    _check_holds(core)
    _check_sharing(core, owners)
    _check_order(core, waiting, loading, ready, prefetching)
    _check_stats(core, running, owners)


def check_idle(core: EngineCore) -> None:
    """Assert that the core has no request, no block in use or held, and no deadline.

    Args:
        core: the core to check.
    """
    check_core(core)
    stats = core.stats()
    assert not list(core.live_requests())
    assert stats.running_count == stats.waiting_count == stats.blocks_used == stats.blocks_held == 0, stats
    assert not core.flights.ended, "no request is left, but an ended request has blocks"
    assert stats.states_used == 0, "no request is left, but a state is in use"
    assert core.next_deadline() is None, "no request is left, but there is a deadline"
    assert core.schedule(0.0) is None, "no request is left, but the core schedules a step"


def _blocks_for(core: EngineCore, token_count: int) -> int:
    return -(-token_count // core.settings.block_size) if core.settings.keeps_kv else 0


def _read_from(core: EngineCore, position: int) -> int:
    """Return the index of the first block in a block table that the token at a position attends to."""
    window = core.settings.window_tokens
    return 0 if window is None else max(0, position - window + 1) // core.settings.block_size


def _held_max(core: EngineCore, token_count: int, step_count: int = 1) -> int:
    """Return how many blocks a sliding window needs while a number of further steps are computed."""
    settings = core.settings
    if settings.window_tokens is None:
        return _blocks_for(core, token_count)
    reached = settings.window_tokens + step_count * settings.step_tokens_max
    return min(_blocks_for(core, token_count), 1 - (1 - reached) // settings.block_size)


def _check_table(core: EngineCore, live: LiveRequest) -> None:
    """Check that blocks before the sliding window are freed at once, and that no other blocks are freed."""
    name, freed_count = live.request.id, live.absent_block_count
    assert list(live.blocks[:freed_count]) == [NO_BLOCK] * freed_count, (
        f"{name}: the table has a block where it was freed"
    )
    assert all(0 <= block < core.pool.block_count for block in live.own_blocks), f"{name}: no such block"
    if not live.blocks:
        assert not freed_count, f"{name} has no blocks, but counts {freed_count} as freed"
        return
    first = _read_from(core, live.computed_count)
    # A request that loads KV has no blocks before the window that is valid at the end of the load.
    if live.status is RequestStatus.WAITING_FOR_REMOTE_KV:
        assert first <= freed_count <= _read_from(core, len(live.tokens) - 1), (
            f"{name} loads KV without its first {freed_count} blocks"
        )
        return
    # The window of the previous token is kept, too, because another engine may have to compute the last token again.
    kept = _read_from(core, live.computed_count - 1)
    assert freed_count <= first, f"{name}: {freed_count} blocks are freed, but the window begins at block {first}"
    assert freed_count >= kept, f"{name}: {freed_count} blocks are freed, but {kept} are before the window"
    steps = 2 if core.settings.overlap_steps else 1
    rows_max = len(live.tokens) + steps + core.settings.draft_tokens_max
    held_max = _held_max(core, rows_max, steps)
    assert live.own_block_count <= held_max, f"{name}: {live.own_block_count} blocks, but at most {held_max} are needed"


def _check_progress(core: EngineCore, live: LiveRequest) -> None:
    request = live.request
    assert live.status is not RequestStatus.FINISHED, f"{request.id} has finished but is still listed"
    known = request.known_token_ids
    assert tuple(live.tokens[: len(known)]) == known, f"{request.id}: its known tokens have changed"
    tokens_max = 1 if request.pooling is not None else request.output_tokens_max  # A vector counts as one token.
    assert 0 <= live.output_count < tokens_max, f"{request.id}: {live.output_count} tokens, but it has not finished"
    assert len(live.tokens) <= core.settings.context_tokens_max
    # A request that is marked for abort ignores its token, but a later step may still compute the next token.
    is_ignored = live.abort_reason is not None and core.settings.overlap_steps
    assert live.due_count >= (0 if is_ignored else 1), f"{request.id} has nothing to compute"
    assert 0 <= live.steps_in_flight <= len(core.flights), f"{request.id} is in {live.steps_in_flight} steps"
    assert live.abort_reason is None or live.steps_in_flight, (
        f"{request.id} is marked for abort, but no step in flight will end it"
    )
    assert (live.cached_token_count is None) <= (len(live.tokens) == len(known))
    if request.sampling.prompt_logprobs is not None and len(live.tokens) > len(known):
        assert live.prompt_logprobs_count == live.prompt_count, f"{request.id}: prompt logprobs are missing"


def _check_running(core: EngineCore, live: LiveRequest) -> None:
    name, held_count = live.request.id, len(live.blocks)
    assert len(set(live.own_blocks)) == live.own_block_count, f"{name}: its table has a block twice"
    if live.reserved_blocks and core.settings.window_tokens is None:
        assert held_count + len(live.reserved_blocks) == _blocks_for(core, len(live.tokens)), name
    assert held_count + len(live.reserved_blocks) <= _blocks_for(
        core, len(live.tokens) + 2 + core.settings.draft_tokens_max
    ), name
    if live.steps_in_flight:
        # The second step computes a token that is not known yet. If the request is marked for abort, this token never
        # becomes known.
        is_marked = core.settings.overlap_steps and live.abort_reason is not None
        rows_max = len(live.tokens) + (1 if is_marked else live.steps_in_flight - 1)
        rows_max += core.settings.draft_tokens_max if live.drafter is not None else 0
        assert _blocks_for(core, live.computed_count + 1) <= held_count <= _blocks_for(core, rows_max), name
        return
    assert held_count == _blocks_for(core, live.computed_count), f"{name}: {held_count} blocks"
    is_published = core.settings.enable_prefix_caching and not live.chain.is_private
    published_count = live.computed_count // core.settings.block_size if is_published else 0
    assert live.chain.block_count == published_count, f"{name}: the prefix cache lists not all of its computed blocks"


def _check_loading(core: EngineCore, live: LiveRequest) -> None:
    name = live.request.id
    assert not live.steps_in_flight, f"{name} waits for KV, but a step computes it"
    assert live.computed_count == live.chain.block_count * core.settings.block_size, (
        f"{name}: its computed tokens are not whole cached blocks"
    )
    assert not live.reserved_blocks, f"{name} reserves blocks before the load has ended"
    _check_reserved(core, live)
    _check_written(core, live)


def _check_prefetch(core: EngineCore, live: LiveRequest) -> None:
    name = live.request.id
    assert live.status is RequestStatus.WAITING_FOR_REMOTE_KV, f"{name} loads KV, but is {live.status.value}"
    assert live.computed_count == live.chain.block_count * core.settings.block_size, (
        f"{name}: its cached tokens are not whole blocks"
    )
    assert len(live.blocks) > live.chain.block_count, f"{name} is a prefetch of no block"
    _check_written(core, live)


def _check_written(core: EngineCore, live: LiveRequest) -> None:
    name = live.request.id
    for block in live.blocks[max(live.absent_block_count, live.chain.block_count) :]:
        assert core.pool.user_count(block) == 1, f"{name}: block {block} is written to, but another request uses it"
        assert core.pool.hold_count(block) == 0, f"{name}: block {block} is written to, but it is held"


def _check_ready(core: EngineCore, live: LiveRequest) -> None:
    name = live.request.id
    assert not live.steps_in_flight, f"{name} waits to run, but a step computes it"
    assert live.load_was_tried, f"{name} waits and has blocks, but no load was tried"
    assert live.computed_count >= live.chain.block_count * core.settings.block_size, name
    assert len(live.blocks) == _blocks_for(core, live.computed_count), f"{name}: {len(live.blocks)} blocks"
    _check_reserved(core, live)


def _check_reserved(core: EngineCore, live: LiveRequest) -> None:
    """Check that a request has reserved all blocks that it still needs, whatever other requests allocate."""
    table_count = len(live.blocks) + len(live.reserved_blocks)
    expected = min(_blocks_for(core, len(live.tokens)), live.absent_block_count + _held_max(core, len(live.tokens)))
    assert table_count == expected, f"{live.request.id}: has or reserves {table_count} blocks, expected are {expected}"


def _check_waiting(live: LiveRequest) -> None:
    name = live.request.id
    assert not live.reserved_blocks, f"{name} waits, but has reserved blocks"
    assert live.computed_count == 0, f"{name} waits, but counts computed tokens"
    assert live.chain.block_count == 0, f"{name} waits, but uses blocks of the prefix cache"
    assert not live.steps_in_flight, f"{name} waits, but a step computes it"


def _check_ended(core: EngineCore, live: LiveRequest) -> None:
    name = live.request.id
    assert live.status is RequestStatus.ENDED, f"{name} has ended, but its status is {live.status.value}"
    assert live.steps_in_flight == 1, (
        f"{name} has ended, and {live.steps_in_flight} steps read its blocks, expected is one"
    )
    assert name not in core.scheduler.running, f"{name} has ended, but is listed as running"
    assert live.blocks, f"{name} has ended, but a step reads blocks that were freed"


def _check_claims(core: EngineCore, owners: list[LiveRequest]) -> None:
    users = Counter(block for live in owners for block in live.own_blocks)
    holds = Counter(block for hold in _holds(core) for block in hold.blocks)
    for index in range(core.pool.block_count):
        block = BlockIndex(index)
        assert core.pool.user_count(block) == users[block], (
            f"block {block} has {users[block]} users, but counts {core.pool.user_count(block)}"
        )
        assert core.pool.hold_count(block) == holds[block], (
            f"block {block} has {holds[block]} holds, but counts {core.pool.hold_count(block)}"
        )


def _check_states(core: EngineCore, owners: list[LiveRequest]) -> None:
    """Check the number of users of every state slot, and that every cached snapshot belongs to a cached block."""
    states = core.scheduler.states
    if states is None:
        return
    states.check(core.cache.resident_contents())
    own, snapshots = Counter[int](), Counter[int]()
    for live in owners:
        state = live.state
        assert state is not None, f"{live.request.id} runs without a state"
        own[state.slot] += 1
        written = [slot for _end, slot in state.being_written]
        snapshots.update(written if state.source is None else [*written, state.source])
        assert live.steps_in_flight or not written, f"{live.request.id} waits for a snapshot, but no step writes it"
        assert live.steps_in_flight or state.source is None, (
            f"{live.request.id} still holds a snapshot that it has read"
        )
    for pool, users in ((states.own, own), (states.snapshots, snapshots)):
        for index in range(pool.block_count):
            slot = BlockIndex(index)
            assert pool.user_count(slot) == users[slot], (
                f"state {slot} has {users[slot]} users, but counts {pool.user_count(slot)}"
            )
    assert max(own.values(), default=1) == 1, "two requests have one state"


def _holds(core: EngineCore) -> list[Hold]:
    return [] if core.transfers is None else list(core.transfers.holds)


def _check_holds(core: EngineCore) -> None:
    """Check the blocks that are held for another engine.

    Every hold has a deadline. A block that is being read is not written. A block that may still be written has no other
    user.
    """
    holds = _holds(core)
    live_ids = {live.request.id for live in core.live_requests()}
    deadlines = [hold.deadline for hold in holds]
    assert deadlines == sorted(deadlines), "the first hold is not the first to expire"
    for hold in holds:
        name = f"{hold.request_id} ({hold.kind.value})"
        assert math.isfinite(hold.deadline), f"{name} has no deadline"
        assert len(set(hold.blocks)) == len(hold.blocks), f"{name}: the hold has a block twice"
        if hold.kind is HoldKind.SEND:
            assert hold.request_id not in live_ids, f"{name} has not finished, but its blocks are held for sending"
            continue
        assert not hold.is_aborted, f"{name} is a load, but is marked as aborted after its end"
        for block in hold.blocks:
            assert core.pool.user_count(block) == 0, (
                f"{name}: block {block} may still be written, but a request uses it"
            )
            assert core.pool.hold_count(block) == 1, (
                f"{name}: block {block} may still be written, but another hold has it"
            )
    deadline = core.next_deadline()
    assert not holds or (deadline is not None and deadline <= deadlines[0]), (
        "the next deadline is later than the first hold's deadline"
    )


def _check_sharing(core: EngineCore, owners: list[LiveRequest]) -> None:
    """Check that two requests share a block only if it is fully computed, has the same index in both block tables, and
    follows equal prefixes with equal cache salts.
    """
    block_size = core.settings.block_size
    first_users: dict[BlockIndex, tuple[LiveRequest, int]] = {}
    for live in owners:
        for index, block in enumerate(live.own_blocks, start=live.absent_block_count):
            first, first_index = first_users.setdefault(block, (live, index))
            if first is live:
                continue
            names = f"{first.request.id} and {live.request.id} share block {block}"
            end = (index + 1) * block_size
            assert first_index == index, f"{names} at different places"
            is_alike = first.request.cache_salt == live.request.cache_salt
            # A private chain belongs to a request that began before the weights were replaced.
            was_alike = first.chain.is_private or live.chain.is_private
            assert is_alike or was_alike, f"{names} across salts"
            assert first.tokens[:end] == live.tokens[:end], f"{names} after different prefixes"
            material = [rows_material(sharer.request.given, 0, end) for sharer in (first, live)]
            assert material[0] == material[1], f"{names} after different images"
            assert end <= min(first.computed_count, live.computed_count), f"{names}, but it is still being written"


def _check_order(
    core: EngineCore,
    waiting: list[LiveRequest],
    loading: list[LiveRequest],
    ready: list[LiveRequest],
    prefetching: list[LiveRequest],
) -> None:
    _check_line(core.scheduler.waiting, waiting)
    deferred = list(core.scheduler.deferred)
    assert all(live in waiting for live in deferred), "a deferred request does not wait"
    assert not deferred or core.next_deadline() is not None, "a request is deferred without a deadline"
    if core.transfers is None:
        assert not loading, "a request waits for KV, but there is no connector"
        assert not ready, "a request has loaded KV, but there is no connector"
        return
    loads = core.transfers.loads
    _check_line(loads.ready, ready)
    assert loads.pending_count == len(loading), "the number of loads differs from the requests that wait for KV"
    overdue = loads.overdue(math.inf)
    assert {load.live.request.id for load in overdue} == {live.request.id for live in (*loading, *prefetching)}, (
        "the loads differ from the requests that wait for KV"
    )
    deadline, load_deadline = core.next_deadline(), loads.next_deadline()
    assert (load_deadline is None) == (not loading and not prefetching), "a request waits for KV without a deadline"
    assert load_deadline is None or (deadline is not None and deadline <= load_deadline)


def _check_line(line: WaitingQueue[LiveRequest], expected: list[LiveRequest]) -> None:
    lives = list(line)
    orders = [live.order for live in lives]
    assert orders == sorted(orders), f"a queue is out of order: {[live.request.id for live in lives]}"
    assert len(line) == len(lives)
    assert {live.request.id for live in lives} == {live.request.id for live in expected}, (
        "a queue differs from the states of its requests"
    )


def _check_stats(core: EngineCore, running: list[LiveRequest], owners: list[LiveRequest]) -> None:
    stats, settings = core.stats(), core.settings
    used = {block for live in owners for block in live.own_blocks}
    held = {block for hold in _holds(core) for block in hold.blocks}
    parts = (stats.blocks_free, stats.blocks_cached, stats.blocks_used, stats.blocks_held)
    assert sum(parts) == stats.blocks_total == len({*range(core.pool.limit), *used, *held}) <= settings.block_count
    assert min(parts) >= 0
    assert stats.blocks_used == len(used)
    assert stats.blocks_held == len(held - used)
    assert stats.blocks_cached == 0 or settings.enable_prefix_caching
    assert stats.running_count == len(running) <= settings.max_num_seqs
    assert stats.waiting_count == len(list(core.live_requests())) - len(running)
    assert 0 <= stats.prefix_hit_tokens_total <= stats.prefix_query_tokens_total
    assert 0 <= stats.accepted_tokens_total <= stats.draft_tokens_total


def check_iterative_core(core: IterativeCore) -> None:
    """Assert every invariant of slots, states, order and counts. A caller may call this function at any time.

    Args:
        core: the core to check.

    Cost:
        O(live requests + slots).
    """
    slots = core.scheduler.slots
    slots.own.check()
    slots.kept.check()
    lives = list(core.live_requests())
    for live in lives:
        _check_iteration(core, live)
    running = [live for live in lives if live.status is RequestStatus.RUNNING]
    preempted = [live for live in lives if live.status is RequestStatus.PREEMPTED]
    waiting = [live for live in lives if live.status is not RequestStatus.RUNNING]
    assert {live.request.id: live for live in running} == core.scheduler.running
    assert list(core.scheduler.waiting) == sorted(waiting, key=lambda live: live.order), (
        "the waiting queue is out of order"
    )
    own, kept = {live.slot for live in running}, {live.kept_slot for live in preempted}
    assert len(own) == len(running), "two requests have one slot"
    assert len(kept) == len(preempted), "two latents are kept in one slot"
    assert slots.own.used_count == len(running), (
        f"{slots.own.used_count} slots are in use, but {len(running)} requests run"
    )
    assert slots.kept.used_count == len(preempted), (
        f"{slots.kept.used_count} latents are kept, but {len(preempted)} requests are preempted"
    )
    assert len(core.scheduler.waiting) == len(waiting)


def check_iterative_idle(core: IterativeCore) -> None:
    """Assert that the core has no request, and that no slot is in use.

    Args:
        core: the core to check.
    """
    check_iterative_core(core)
    stats = core.stats()
    assert not list(core.live_requests())
    assert stats.running_count == stats.waiting_count == stats.slots_used == stats.kept_used == 0, stats
    assert core.schedule(0.0) is None, "the core has no request, but it schedules a step"


def _check_iteration(core: IterativeCore, live: LiveIteration) -> None:
    name = live.request.id
    has = (live.slot is not None, live.kept_slot is not None)
    expected = (live.status is RequestStatus.RUNNING, live.status is RequestStatus.PREEMPTED)
    assert has == expected, f"{name} is {live.status.value}, and (has a slot, has a kept latent) is {has}"
    assert live.status in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED), name
    assert 0 <= live.steps_done <= (live.request.step_count if live.is_encoded else 0), name
    assert 0 <= live.steps_in_flight <= len(core.flights), f"{name} is in {live.steps_in_flight} steps"
    assert live.abort_reason is None or live.steps_in_flight, (
        f"{name} is marked for abort, but no step in flight will end it"
    )
    assert live.is_encoded or live.status is not RequestStatus.PREEMPTED, (
        f"{name} was preempted before it had a latent to keep"
    )
    is_new = live.status is RequestStatus.RUNNING and not live.is_encoded
    assert not is_new or live.steps_in_flight, f"{name} has a slot, but no step encodes it"
