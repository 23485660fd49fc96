"""What a step that begins may hold, and who may start or lose its blocks before whom. Judged from the plan and the
stories, by rules of its own: it asks the core only how many blocks there are to be had."""

from __future__ import annotations

from collections.abc import Mapping

from trioserve.contracts.request import PRIORITY_MIN
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.core.drafting import NGRAM_MIN
from trioserve.core.engine import EngineCore
from trioserve.testing.story import Story
from trioserve.testing.transfer_watch import TransferWatch

__all__ = ["check_begun_step"]


def check_begun_step(
    core: EngineCore,
    plan: StepPlan,
    live: Mapping[str, Story],
    transfers: TransferWatch | None,
    *,
    knows_hashes: bool,
) -> None:
    """Assert the rules of one step. live: sequences that have not ended, in order of arrival, running or not as the
    plan says, and not yet told of their chunks. knows_hashes: blocks have the same name only when they hold the same
    tokens."""
    settings = core.settings
    assert 1 <= plan.token_count <= settings.step_tokens_max, f"{plan.token_count} tokens in one step"
    assert len(plan.chunks) <= settings.running_requests_max, f"{len(plan.chunks)} sequences in one step"
    running = [story for story in live.values() if story.is_running]
    assert len(set(plan.preempted)) == len(plan.preempted), f"preempted twice: {plan.preempted}"
    # Who is admitted in the same step has not been made room for: it uses what a load had reserved.
    stayed = [story.order for story in running if story.request.id not in plan.admitted]
    last_order = max(stayed, default=(PRIORITY_MIN, 0))
    for name in plan.preempted:
        assert live[name].order > last_order, f"{name} made room for one that comes after it"
    admitted = [_turn(live[name]) for name in plan.admitted]
    assert admitted == sorted(admitted), f"admitted out of order: {plan.admitted}"
    waiting = [
        story for name, story in live.items() if not (story.is_running or (transfers and transfers.is_loading(name)))
    ]
    for chunk in plan.chunks:
        if chunk.draft:
            assert not waiting, f"{chunk.request.id} guesses, and {waiting[0].request.id} waits"
            assert plan.token_count <= settings.draft_step_tokens_max, f"{plan.token_count} tokens, with guesses"
            _check_draft(chunk, settings.draft_tokens_max)
    if waiting and not plan.preempted:
        waiting.sort(key=_turn)
        sharing = [story for story in waiting if _may_wait_for_a_hit(core, plan, live, story, knows_hashes)]
        ready_count = sum(map(_is_ready, waiting))
        loading_later = [
            story
            for story in waiting
            if transfers is not None and transfers.may_wait_to_load(story.request.id, ready_count)
        ]
        _check_nobody_was_overtaken(waiting, [*sharing, *loading_later], plan, admitted)
        seats = settings.running_requests_max - len(running) - len(sharing)
        if (
            seats > 0
            and plan.token_count < settings.step_tokens_max
            and len(loading_later) <= settings.running_requests_max  # beyond that nobody looks any further
        ):
            _check_nobody_waits_in_vain(core, waiting, [*sharing, *loading_later])


def _check_draft(chunk: ScheduledChunk, tokens_max: int) -> None:
    """It fits what the request may have, and it is what followed some earlier place of its text."""
    name, known, draft = chunk.request.id, list(chunk.tokens), chunk.draft
    assert len(draft) <= tokens_max, f"{name} guesses {len(draft)} tokens, {tokens_max} are allowed"
    output_count = len(known) - len(chunk.request.prompt_token_ids)
    assert output_count + len(draft) < chunk.request.output_tokens_max, f"{name} guesses beyond its last token"
    assert output_count > 0, f"{name} guesses before its first token"
    text = [*known, *draft]
    for place in range(NGRAM_MIN, len(known)):
        if known[place - NGRAM_MIN : place] == known[-NGRAM_MIN:] and text[place : place + len(draft)] == list(draft):
            return
    raise AssertionError(f"{name} guesses {draft}, which follows nothing that is like its last tokens")


Turn = tuple[bool, tuple[int, int]]


def _turn(story: Story) -> Turn:
    """Who goes first, the smaller one: what a connector has brought is used before anything new is begun."""
    return (not _is_ready(story), story.order)


def _is_ready(story: Story) -> bool:
    return story.loaded_count > 0 and story.cached_count is None


def _check_nobody_was_overtaken(
    waiting: list[Story], passed_over: list[Story], plan: StepPlan, admitted: list[Turn]
) -> None:
    for story in waiting:
        if not admitted or _turn(story) > admitted[-1]:
            break
        assert story in passed_over, f"{story.request.id} waits, and was overtaken by {plan.admitted[-1]}"


def _check_nobody_waits_in_vain(core: EngineCore, waiting: list[Story], passed_over: list[Story]) -> None:
    """Seats and tokens are left for the first who waits, so why does it?"""
    for story in waiting:
        if not _is_ready(story) and -(-len(story.known) // core.settings.block_size) > core.pool.available_count:
            return  # nobody overtakes one that does not fit
        assert story in passed_over, f"{story.request.id} could start, and waits"


def _may_wait_for_a_hit(
    core: EngineCore, plan: StepPlan, live: Mapping[str, Story], story: Story, knows_hashes: bool
) -> bool:
    """Whether its next block is being computed by another, so that waiting for a step saves computing it. What a
    connector has brought can be found after the first step, too."""
    settings = core.settings
    if _is_ready(story) or not settings.enable_prefix_caching or story.request.sampling.prompt_logprobs is not None:
        return False
    block_size = settings.block_size
    for chunk in plan.chunks:
        other = live[chunk.request.id]
        index = (chunk.start - (other.loaded_count if _is_ready(other) else 0)) // block_size
        end = (index + 1) * block_size
        if chunk.count < 2 or end > chunk.start + chunk.count:
            continue  # completes no block
        if not knows_hashes:
            return True  # any block may look like the one it needs
        if end >= len(story.known):
            continue
        if chunk.request.cache_salt == story.request.cache_salt and chunk.tokens[:end] == story.known[:end]:
            return True
    return False
