"""Rules for a step that begins: its size, and the order in which requests may start and be preempted.

The rules use the plan and the expected sequences. From the core, they only read how many blocks are available, which
request has which blocks, and which requests are deferred. SessionWatch checks that these may be deferred.

One more rule, check_no_request_could_start, uses only the requests and the pool: some request runs whenever a waiting
request could run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence

from trioserve.contracts.ids import NO_BLOCK
from trioserve.contracts.request import PRIORITY_MIN
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.core.drafting import NGRAM_MIN
from trioserve.core.engine import EngineCore
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.simulation.core.expected import ExpectedSequence
from trioserve.simulation.core.transfer_watch import TransferWatch

__all__ = ["block_count", "check_begun_step", "check_no_step_ahead", "check_no_request_could_start"]


def check_begun_step(
    core: EngineCore,
    plan: StepPlan,
    live: Mapping[str, ExpectedSequence],
    transfers: TransferWatch | None,
    *,
    knows_hashes: bool,
    computed: Sequence[ScheduledChunk] = (),
) -> None:
    """Assert the rules of one step.

    Args:
        core: the core under test, after `schedule`.
        plan: the step.
        live: sequences that have not ended, in order of arrival. Their `is_running` already follows the plan, but
            their chunks of this step are not recorded yet.
        transfers: checks the connector. None: there is no connector.
        knows_hashes: True if blocks have equal hashes only if their tokens are equal.
        computed: chunks of the step in flight, if this step was planned ahead.
    """
    settings = core.settings
    assert 1 <= plan.token_count <= settings.step_tokens_max, f"{plan.token_count} tokens in one step"
    assert len(plan.chunks) <= settings.max_num_seqs, f"{len(plan.chunks)} sequences in one step"
    running = [entry for entry in live.values() if entry.is_running]
    if settings.steps_apart:
        in_flight = {chunk.request.id for chunk in computed}
        both = in_flight & {chunk.request.id for chunk in plan.chunks}
        assert not both, f"{both.pop()} is in two steps at the same time"
        stayed_count = sum(chunk.request.id not in plan.admitted for chunk in plan.chunks)
        running_count = len(running) - len(plan.admitted) + len(plan.preempted)
        assert 2 * stayed_count <= running_count + 1, f"{stayed_count} of {running_count} are in one step"
    if plan.is_ahead:
        paced = {name for name, own in core.scheduler.running.items() if own.due_count > 1}
        _check_all_continue(plan, live, settings.step_tokens_max, paced)
    if not settings.steps_apart:
        _check_first_prompt_continues(plan, running)
    assert len(set(plan.preempted)) == len(plan.preempted), f"preempted twice: {plan.preempted}"
    # Requests that are admitted in this step do not count, since they use blocks that a load had reserved.
    stayed = [entry.order for entry in running if entry.request.id not in plan.admitted]
    last_order = max(stayed, default=(PRIORITY_MIN, 0))
    assert not (plan.preempted and core.prefetches.loading), f"{plan.preempted} preempted, but a prefetch keeps blocks"
    for name in plan.preempted:
        assert live[name].order > last_order, f"{name} was preempted for a request that comes after it"
    admitted = [_turn(live[name]) for name in plan.admitted]
    assert admitted == sorted(admitted), f"admitted out of order: {plan.admitted}"
    deferred = {own.request.id for own in core.scheduler.deferred}
    waiting = [
        entry
        for name, entry in live.items()
        if not (entry.is_running or name in deferred or (transfers and transfers.is_loading(name)))
    ]
    by_model, by_head = settings.draft_source != "text", settings.draft_source == "head"
    for chunk in plan.chunks:
        if chunk.draft:
            assert not waiting, f"{chunk.request.id} has draft tokens, but {waiting[0].request.id} waits"
            assert plan.token_count <= settings.draft_step_tokens_max, f"{plan.token_count} tokens, with draft tokens"
            _check_draft(chunk, settings.draft_tokens_max, live[chunk.request.id] if by_model else None)
        if chunk.draft_task is not None:
            task = chunk.draft_task
            is_proposed_to = task.token_count > 0 or not by_head
            assert not (waiting and is_proposed_to), (
                f"{chunk.request.id} has a draft task, but {waiting[0].request.id} waits"
            )
            assert task.start == chunk.start or not by_head, (
                f"{chunk.request.id}: the head does not compute the same tokens as the model"
            )
            assert task.token_count <= settings.draft_tokens_max, f"{chunk.request.id}: {task}"
    waiting.sort(key=_turn)
    overtaking: dict[str, list[str]] = {entry.request.id: _later_ones(entry, plan, live) for entry in waiting}
    for entry in waiting:
        entry.overtaken_count_max += len(overtaking[entry.request.id])
    if waiting and not plan.preempted:
        chunks = [*computed, *plan.chunks]
        sharing = [
            entry for entry in waiting if _may_wait_for_a_hit(core, chunks, plan.admitted, live, entry, knows_hashes)
        ]
        ready_count = sum(map(_is_ready, waiting))
        loading_later = [
            entry
            for entry in waiting
            if transfers is not None
            and (
                transfers.may_wait_to_load(entry.request.id, ready_count)
                or transfers.awaits(entry.request, entry.known)
            )
        ]
        _check_overtaken(core, [entry for entry in waiting if entry not in (*sharing, *loading_later)], overtaking)
        free_seqs = settings.max_num_seqs - len(running) - len(sharing)
        if core.scheduler.states is not None:
            free_seqs = min(free_seqs, core.scheduler.states.available_count - len(sharing))
        if (
            free_seqs > 0
            and plan.token_count < settings.step_tokens_max
            and len(loading_later) <= settings.max_num_seqs  # The scheduler examines no request after this many.
        ):
            _check_waits_have_reasons(
                core,
                waiting,
                [*sharing, *loading_later],
                may_overtake=transfers is None and not sharing,
                tokens_left=settings.step_tokens_max - plan.token_count,
            )


def check_no_step_ahead(core: EngineCore, live: Mapping[str, ExpectedSequence]) -> None:
    """Assert that the core had a reason to plan no step ahead.

    There are three reasons: no request could be in that step, the pool has too few blocks for all requests, or the
    guide of a request has not accepted the token of the step in flight yet.

    Args:
        live: sequences that have not ended.
    """
    is_apart = core.settings.steps_apart
    if not is_apart and any(map(_awaits_its_token, live.values())):
        return
    needed, budget = 0, core.settings.step_tokens_max
    continuing = [
        own
        for own in core.scheduler.running.values()
        if _continues(live[own.request.id]) and not (is_apart and live[own.request.id].steps_in_flight)
    ]
    for own in sorted(continuing, key=lambda own: _due_count(live[own.request.id]) != 1):
        entry = live[own.request.id]
        count = min(_due_count(entry), budget)
        block_count = -(-(entry.computed_end + count) // core.settings.block_size) if core.settings.keeps_kv else 0
        needed += max(0, block_count - len(own.blocks) - len(own.reserved_blocks))
        budget -= count
    assert not continuing or needed > core.pool.available_count, (
        f"{continuing[0].request.id} could continue, but no step is planned ahead"
    )


def _awaits_its_token(entry: ExpectedSequence) -> bool:
    """Return True if the sequence's guide must first accept the token that the step in flight samples."""
    samples = entry.steps_in_flight > 0 and entry.computed_end == len(entry.known)
    return entry.automaton is not None and samples and entry.is_running and entry.aborted_for is None


def _due_count(entry: ExpectedSequence) -> int:
    """Return the number of tokens to compute after the step in flight, including the token that this step samples."""
    return max(1, len(entry.known) - entry.computed_end)


def _check_all_continue(
    plan: StepPlan, live: Mapping[str, ExpectedSequence], tokens_max: int, paced: Container[str]
) -> None:
    """Check that a step that is planned ahead contains all running requests, within its token budget.

    If the budget is too small, requests that decode come before prompts.

    `paced` contains the prompts. The scheduler leaves them out of some steps in favour of requests that decode.
    """
    planned = {chunk.request.id for chunk in plan.chunks}
    missing = [entry for entry in live.values() if _continues(entry) and entry.request.id not in planned]
    if any(chunk.count == 1 for chunk in plan.chunks):
        missing = [entry for entry in missing if entry.request.id not in paced]
    assert not missing or plan.token_count == tokens_max, f"{missing[0].request.id} runs, but is not planned ahead"
    for entry in missing:
        assert _due_count(entry) > 1, f"{entry.request.id} decodes, but is left out for a prompt"


def _check_first_prompt_continues(plan: StepPlan, running: Sequence[ExpectedSequence]) -> None:
    """Check that the first running prompt in order is not left out of two steps in a row.

    A step without prompt tokens measures the time of decodes. A step that is planned ahead may lack blocks for the
    prompt, because it preempts no request. So it may leave the prompt out a second time, and a third time fails. Later
    prompts may wait for the first prompt.
    """
    planned = {chunk.request.id for chunk in plan.chunks}
    prompts = [entry for entry in running if _continues(entry) and _due_count(entry) > 1]
    for entry in running:
        if entry.request.id in planned:
            entry.left_out_count = 0
    if prompts:
        first = min(prompts, key=lambda entry: entry.order)
        first.left_out_count += first.request.id not in planned
        steps = first.left_out_count
        assert steps <= 1 + plan.is_ahead, f"{first.request.id} is left out of {steps} steps in a row"


def _continues(entry: ExpectedSequence) -> bool:
    return entry.is_running and entry.aborted_for is None and not entry.will_have_ended


def _check_draft(chunk: ScheduledChunk, tokens_max: int, proposed_to: ExpectedSequence | None) -> None:
    """Check the length of a draft and the origin of its tokens.

    With a draft model, `proposed_to` is the sequence for which the model proposed the tokens. Otherwise, `proposed_to`
    is None, and the draft must repeat tokens that follow the same n-gram earlier in the text.
    """
    name, known, draft = chunk.request.id, list(chunk.tokens), chunk.draft
    assert len(draft) <= tokens_max, f"{name} has {len(draft)} draft tokens, but {tokens_max} are allowed"
    output_count = len(known) - len(chunk.request.prompt_token_ids)
    assert output_count + len(draft) < chunk.request.output_tokens_max, f"{name} has draft tokens beyond its last token"
    assert output_count > 0, f"{name} has draft tokens before its first token"
    if proposed_to is not None:
        proposed = proposed_to.proposed
        assert draft == proposed[: len(draft)], f"{name} has draft tokens {draft}, but {proposed} were proposed"
        return
    text = [*known, *draft]
    for place in range(NGRAM_MIN, len(known)):
        if known[place - NGRAM_MIN : place] == known[-NGRAM_MIN:] and text[place : place + len(draft)] == list(draft):
            return
    raise AssertionError(f"{name} has draft tokens {draft}, but its text does not contain them")


Turn = tuple[bool, tuple[int, int]]


def _turn(entry: ExpectedSequence) -> Turn:
    """Return the sort key of a waiting request. Requests with loaded KV come before new requests."""
    return (not _is_ready(entry), entry.order)


def _is_ready(entry: ExpectedSequence) -> bool:
    return entry.loaded_count > 0 and entry.cached_count is None


def _later_ones(entry: ExpectedSequence, plan: StepPlan, live: Mapping[str, ExpectedSequence]) -> list[str]:
    """Return the requests that the plan admits before `entry`, although they come after it in the queue."""
    return [name for name in plan.admitted if _turn(live[name]) > _turn(entry)]


def _check_overtaken(core: EngineCore, waiting: list[ExpectedSequence], overtaking: Mapping[str, list[str]]) -> None:
    """Check that no overtaken request would have fitted, was preempted before, or was overtaken too often.

    `waiting` contains the requests that wait only for blocks.
    """
    overtakes_max = core.settings.overtakes_max
    pool, running = core.pool, core.scheduler.running
    for entry in waiting:
        name = entry.request.id
        before = overtaking[name]
        if not before:
            continue
        entry.overtaken_count_min += len(before)
        assert entry.cached_count is None, f"{name} was preempted, but is overtaken by {before[-1]}"
        # Blocks that only the overtaking requests use were available for the overtaken request.
        taken = [
            block
            for own in running.values()
            if own.request.id in before
            for block in own.blocks[own.absent_block_count :]
        ]
        own_count = sum(pool.user_count(block) == 1 and pool.hold_count(block) == 0 for block in taken)
        is_unfit = block_count(core, entry) > pool.available_count + own_count
        assert is_unfit, f"{name} would have fitted, but was overtaken by {before[-1]}"
        count = entry.overtaken_count_min
        assert count <= overtakes_max, f"{name} was overtaken {count} times, but {overtakes_max} are allowed"


def _check_waits_have_reasons(
    core: EngineCore,
    waiting: list[ExpectedSequence],
    passed_over: list[ExpectedSequence],
    *,
    may_overtake: bool,
    tokens_left: int,
) -> None:
    """Check that waiting requests have a reason to wait, although the step has free slots and tokens.

    `passed_over` contains requests that wait for KV. If `may_overtake` is True, a request that does not fit may be
    overtaken, so the requests after it are checked too.
    """
    unfit_count = 0
    for entry in waiting:
        if entry.is_whole and len(entry.known) > tokens_left:
            return  # A prompt that must be computed whole blocks the queue until a step has enough tokens left.
        if not _is_ready(entry) and block_count(core, entry) > core.pool.available_count:
            unfit_count += 1
            awaits_kv = entry in passed_over
            assert awaits_kv or not core.prefetches.loading, (
                f"{entry.request.id} lacks blocks, but a prefetch keeps some"
            )
            is_held = entry.cached_count is not None or entry.overtaken_count_max >= core.settings.overtakes_max
            if is_held or not may_overtake or unfit_count > core.settings.max_num_seqs:
                return
            continue
        assert entry in passed_over, f"{entry.request.id} could start, but waits"


def block_count(core: EngineCore, entry: ExpectedSequence) -> int:
    """Return the most blocks that a request has at the same time until all of its known tokens are computed.

    Args:
        core: the core under test, for its settings.
        entry: the request.
    """
    if not core.settings.keeps_kv:
        return 0
    needed = -(-len(entry.known) // core.settings.block_size)
    window = core.settings.window_tokens
    if window is None:
        return needed
    return min(needed, 1 - (1 - window - core.settings.step_tokens_max) // core.settings.block_size)


def _may_wait_for_a_hit(
    core: EngineCore,
    chunks: Sequence[ScheduledChunk],
    admitted: Collection[str],
    live: Mapping[str, ExpectedSequence],
    entry: ExpectedSequence,
    knows_hashes: bool,
) -> bool:
    """Return True if a request may wait because another request computes a block that both can share.

    The other request is a prompt that this step may leave out in favour of decodes, or it starts in this step, perhaps
    again after a preemption and with one due token. The request waits until the other request has computed the block.
    In a model with states, it may wait until the other request reaches the end of a common block. In the other
    request's first step, blocks with loaded KV count as computed.
    """
    settings = core.settings
    if _is_ready(entry) or not settings.enable_prefix_caching or entry.needs_every_row:
        return False
    block_size = settings.block_size
    planned = {chunk.request.id for chunk in chunks}
    starts = [(live[chunk.request.id], chunk.start) for chunk in chunks if chunk.request.id in live]
    starts += [(other, other.computed_end) for name, other in live.items() if other.is_running and name not in planned]
    if settings.state_slot_count:
        first = (entry.request.cache_salt, *entry.known[:block_size])
        return not knows_hashes or any(
            first == (other.request.cache_salt, *other.known[:block_size])
            and start < len(other.request.known_token_ids)
            for other, start in starts
        )
    for other, start in starts:
        is_first = other.cached_count is None or start == other.cached_count + other.loaded_count
        index = (start - (other.loaded_count if is_first else 0)) // block_size
        if other.aborted_for is not None:
            # The result of the step before may have been dropped, together with the hashes of its blocks.
            index = start = 0
        end = (index + 1) * block_size
        starts_now = is_first or other.request.id in admitted
        if (len(other.known) - start < 2 and not starts_now) or end > len(other.known):
            continue  # This request decodes, or its next block is not full.
        if not knows_hashes:
            return True  # Hashes collide, so any block may have the hash of the needed block.
        if end >= len(entry.known):
            continue
        if other.request.cache_salt == entry.request.cache_salt and other.known[:end] == entry.known[:end]:
            return True
    return False


def check_no_request_could_start(
    core: EngineCore,
    may_load: Callable[[LiveRequest], bool],
    may_defer: Callable[[LiveRequest], bool],
    awaits_prefetch: Callable[[LiveRequest], bool] = lambda live: False,
) -> None:
    """Assert that no waiting request could start. Call this function when schedule() has returned None.

    At that time, every slot and the whole token budget of a step are free. So each waiting request needs more blocks
    than the pool has, is behind such a request, waits for its KV, or is deferred.

    Args:
        core: the core under test, after `schedule`.
        may_load: returns True if a request could load KV. Such a request may wait until fewer requests load KV.
        may_defer: returns True if a request needs blocks of sessions that may return.
        awaits_prefetch: returns True if a prefetch loads the prefix of a request.
    """
    assert not core.flights, "a step is in flight"
    loading_count = passed_count = 0
    waiting = []
    deferred = list(core.scheduler.deferred)
    for live in core.live_requests():
        if live.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            loading_count += 1
        else:
            waiting.append(live)
    slots = core.settings.max_num_seqs
    for live in sorted(waiting, key=lambda live: (not live.blocks, live.order)):
        name = live.request.id
        if live in deferred:
            assert may_defer(live), f"{name} is deferred, but would evict no blocks of sessions that return"
            continue
        assert not live.blocks, f"{name} has loaded its KV and could run, but nothing is computed"
        is_first_time = live.status is RequestStatus.WAITING and not live.load_was_tried
        if is_first_time and awaits_prefetch(live):
            passed_count += 1
            if passed_count > slots:
                return  # The scheduler examines no request after this one.
            continue
        if _blocks_lacking(core, live) > core.pool.available_count:
            if live.status is RequestStatus.PREEMPTED or live.overtaken_count >= core.settings.overtakes_max:
                return  # This request may not be overtaken, so it blocks the queue.
            assert not core.prefetches.loading, f"{name} lacks blocks, but a prefetch keeps some"
            passed_count += 1
            if passed_count > slots:
                return  # The scheduler examines no request after this one.
            continue
        if loading_count >= slots and is_first_time and may_load(live):
            passed_count += 1
            if passed_count > slots:
                return  # The scheduler examines no request after this one.
            continue
        raise AssertionError(f"{name} could start, but nothing is computed")


def _blocks_lacking(core: EngineCore, live: LiveRequest) -> int:
    """Return the number of blocks that a request must allocate, because no request or hold has them to share."""
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
