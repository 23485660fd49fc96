"""The scheduler plans one step. It decides which requests compute which tokens, and which requests are preempted.

The scheduler has one rule: every request catches up with its known tokens, within one token budget per step. The known
tokens of a request that are not computed yet are called due. A decode has one due token. A new prompt has all of its
tokens due, or fewer after a prefix hit. A preempted request starts again. Requests with one due token are planned
first, so a long prompt delays their next token by at most one step.

A prompt that was started continues before a waiting request starts, even if the waiting request has a better priority.
The reason is that a started request owns blocks, and frees them only when it finishes. Priorities decide which request
starts next and which request is preempted. For the same reason, a request whose KV has arrived from another engine
starts before requests without KV. A turn of a session that lost its blocks may be deferred (waiting_queue.py).

Beside decodes, prompts get only so many tokens per step that decodes stay fast (prompt_pace.py). Prompts with few due
tokens come first, so a short prompt does not wait for a long one. But half of these tokens belong to the first prompt
in order, so every prompt is completed.

Draft tokens (drafting.py) are planned last, with the remaining tokens and blocks. There are no draft tokens while a
request waits. A draft model proposes its tokens at the end of the previous step (model_drafts.py).

A step may be planned while another step is in flight (fill_step_ahead). Requests of the step in flight are assumed to
continue, and no request is preempted. If that is not possible, the next step is planned after the step in flight has
returned. With steps_apart, the next step contains no request of the step in flight. Then each step has at most half of
the running requests, which take turns.

The cost of planning a step is O(running requests + computed tokens). It does not depend on the number of waiting
requests, because the scheduler looks only at as many waiting requests as may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from trioserve.contracts.ids import NO_BLOCK, BlockHash, BlockIndex, RequestId
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.core.drafting import Drafter, ModelDraft
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.model_drafts import ModelDrafts
from trioserve.core.prefetches import Prefetches
from trioserve.core.prefix_cache import PrefixCache
from trioserve.core.prompt_pace import PromptPace
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.core.sessions import Session, Sessions
from trioserve.core.settings import CoreSettings
from trioserve.core.state_slots import OwnState, StateSlots
from trioserve.core.steps_in_flight import STEPS_IN_FLIGHT_MAX
from trioserve.core.transfers import RemoteLoads
from trioserve.core.waiting_queue import DeferredTurns, WaitingQueue

__all__ = ["Scheduler"]


class Scheduler:
    """Owns the queues of waiting and running requests, and moves blocks between the pool and requests.

    Args:
        settings: limits of the engine core.
        pool: the pool that owns the blocks.
        cache: the prefix cache.
        sessions: the open sessions.
        prefetches: loads for sessions that wait for their next turn.
        loads: loads of KV from other engines. None if the engine has no connector.
    """

    def __init__(
        self,
        settings: CoreSettings,
        pool: BlockPool,
        cache: PrefixCache,
        sessions: Sessions,
        prefetches: Prefetches,
        loads: RemoteLoads | None = None,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._cache = cache
        self._sessions = sessions
        self._prefetches = prefetches
        self._loads = loads
        self.states = StateSlots.made(settings, cache)
        self.step_tokens_max = settings.step_tokens_max
        self.pace = PromptPace(settings.wide_prompt_stretch)
        self.waiting = WaitingQueue[LiveRequest]()
        self.deferred = DeferredTurns(settings)
        self.running: dict[RequestId, LiveRequest] = {}
        self.preemptions_total = 0
        self.blocks_given_back_total = 0
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.model_drafts = ModelDrafts(settings, pool) if settings.draft_source != "text" else None

    def fill_step(
        self, now: float
    ) -> tuple[list[ScheduledChunk], list[LiveRequest], int, list[RequestId], list[RequestId]]:
        """Plan the next step. No step may be in flight.

        Args:
            now: time in seconds.

        Returns:
            Chunks, the request of each chunk, the number of tokens to compute, ids of admitted requests, and ids of
            preempted requests. There are no chunks if there is no live request, or if all live requests wait for a
            connector.
        """
        planned: dict[RequestId, int] = {}  # Number of tokens in each chunk.
        preempted: list[RequestId] = []
        prompts = _PromptTokens(self, planned)
        budget = self._plan_running(planned, preempted, prompts, now)
        if not planned and self.running:
            # Prompts were left out for the decodes, which then all preempted themselves. So plan the prompts.
            prompts = _PromptTokens(self, planned)
            budget = self._plan_running(planned, preempted, prompts, now)
        if self._settings.steps_apart:
            self._rotate_running(planned)

        admitted: list[RequestId] = []
        # After a preemption, no request is admitted, so that running requests get the freed blocks.
        # But if no chunk is planned, held blocks fill the pool, and no running request could get the freed blocks.
        if not preempted or not planned:
            admitted = self._admit(planned, budget, prompts, now)
        chunks: list[ScheduledChunk] = []
        lives: list[LiveRequest] = []
        for request_id, count in planned.items():
            live = self.running[request_id]
            lives.append(live)
            start, tokens = live.computed_count, live.tokens
            samples = start + count == len(tokens) and not live.is_pooling
            if live.state is None:
                chunks.append(ScheduledChunk(live.request, tokens, start, count, live.blocks, samples))
            else:
                spans = self._spans(live.state, start, count)
                chunks.append(ScheduledChunk(live.request, tokens, start, count, live.blocks, samples, states=spans))
        token_count = sum(planned.values())
        if self._settings.draft_tokens_max:
            has_waiting = self._has_waiting(besides=len(self.deferred.turns))
            if not has_waiting:
                self._add_drafts(chunks)
            if self.model_drafts is not None:
                self.model_drafts.add_tasks(chunks, lives, has_waiting=has_waiting)
            token_count += sum(len(chunk.draft) for chunk in chunks)
        return chunks, lives, token_count, admitted, preempted

    def _plan_running(
        self, planned: dict[RequestId, int], preempted: list[RequestId], prompts: _PromptTokens, now: float
    ) -> int:
        """Plan chunks for running requests until the budget is used. Preempt other requests if blocks are needed.

        Args:
            planned: receives the token count of each chunk.
            preempted: receives the ids of requests that lost their blocks.
            prompts: limits the tokens of prompts.
            now: time in seconds.

        Returns:
            The number of tokens that remain in the budget.
        """
        budget = self._settings.step_tokens_max
        block_size = self._settings.block_size
        count_max = self._count_max_apart() if self._settings.steps_apart else len(self.running)
        for live in self._running_in_turn():
            if budget == 0 or len(planned) == count_max:
                break
            if preempted and live.status is not RequestStatus.RUNNING:
                continue  # This request was preempted for an earlier request in this loop.
            count = len(live.tokens) - live.computed_count
            if count > budget:
                count = budget
            if count > 1:
                count = prompts.take(live, count)
                if count == 0:
                    continue
            if live.joint_spans:
                count = live.chunk_tokens(live.computed_count, count, budget)
                if count == 0:
                    return 0  # No later prompt gets the tokens, so that a later step has enough of them.
            # This is true for about one of block_size decodes.
            if live.computed_count + count > len(live.blocks) * block_size:
                budget += self._make_room(live, count, planned, preempted, now)
                if live.status is not RequestStatus.RUNNING:
                    continue  # The request was last in the queue, so it preempted itself.
                self._extend(live, live.computed_count + count)
            planned[live.request.id] = count
            budget -= count
        return budget

    def fill_step_ahead(
        self, in_flight: StepPlan, now: float
    ) -> tuple[list[ScheduledChunk], list[LiveRequest], int, list[RequestId]]:
        """Plan the next step while one step is in flight, as if all requests of that step continued.

        Args:
            in_flight: the plan that is being computed.
            now: time in seconds.

        Returns:
            Chunks, the request of each chunk, the number of tokens to compute, and ids of admitted requests. There are
            three cases without chunks: no token is due, a request would have to be preempted while its blocks are read,
            or a guide needs the next token first.
        """
        block_size = self._settings.block_size
        ends = {chunk.request.id: chunk.start + chunk.count for chunk in in_flight.chunks}
        is_apart = self._settings.steps_apart
        if not is_apart and any(live.guide is not None and _guide_waits(live, ends) for live in self.running.values()):
            return [], [], 0, []
        planned: dict[RequestId, int] = {}
        budget = self._settings.step_tokens_max
        needed = 0
        prompts = _PromptTokens(self, planned)
        count_max = self._count_max_apart() if self._settings.steps_apart else len(self.running)
        for live, due_count in self._due_behind(ends):
            if budget == 0 or len(planned) == count_max:
                break
            count = min(due_count, budget)
            if count > 1:
                count = prompts.take(live, count)
                if count == 0:
                    continue
            start = ends.get(live.request.id, live.computed_count)
            if live.joint_spans:
                count = live.chunk_tokens(start, count, budget)
                if count == 0:
                    budget = 0
                    break
            end = start + count
            needed += max(0, self._settings.blocks_for(end) - len(live.blocks) - len(live.reserved_blocks))
            budget -= count
            planned[live.request.id] = count
        if needed > self._pool.available_count:
            return [], [], 0, []
        for request_id, count in planned.items():
            live = self.running[request_id]
            end = ends.get(request_id, live.computed_count) + count
            if end > len(live.blocks) * block_size:
                live.blocks = live.blocks.copy()  # The step in flight reads the old table.
                self._extend(live, end)
        if self._settings.steps_apart:
            self._rotate_running(planned)
        admitted = self._admit(planned, budget, prompts, now, in_flight)
        chunks = []
        lives = [self.running[request_id] for request_id in planned]
        for live, (request_id, count) in zip(lives, planned.items(), strict=True):
            start, known_count = ends.get(request_id, live.computed_count), len(live.tokens)
            chunks.append(
                ScheduledChunk(
                    live.request,
                    live.tokens,
                    start,
                    count,
                    live.blocks,
                    samples=start + count >= known_count and not live.is_pooling,
                    awaits_token=start == known_count,
                    states=() if live.state is None else self._spans(live.state, start, count),
                )
            )
        return chunks, lives, sum(planned.values()), admitted

    def leave_batch(self, live: LiveRequest) -> None:
        """Remove an ended request from the running requests. The request keeps its blocks.

        Args:
            live: a running request.
        """
        del self.running[live.request.id]

    def release(self, live: LiveRequest) -> None:
        """Remove a request from its queue and free its blocks. The caller must change the request's state.

        Args:
            live: a request that waits or runs.
        """
        if live.status is RequestStatus.RUNNING:
            del self.running[live.request.id]
            self._release_blocks(live)
        elif not live.blocks:
            self.waiting.remove(live)
            self.deferred.discard(live)
        else:
            if live.status is RequestStatus.WAITING:
                assert self._loads is not None
                self._loads.ready.remove(live)
            self._release_blocks(live)

    def free_draft_blocks(self, live: LiveRequest) -> None:
        """Free the blocks after the computed tokens, which wrong draft tokens occupied.

        Args:
            live: a running request.
        """
        needed = self._settings.blocks_for(live.computed_count)
        if needed < len(live.blocks):
            self._pool.release(live.blocks[needed:])
            del live.blocks[needed:]

    def free_blocks_behind_window(self, live: LiveRequest) -> None:
        """Free the blocks that a request's sliding window has passed.

        A step in flight may read other blocks of the request, but it does not read these blocks. It computes later
        positions, whose windows do not reach these blocks.

        Args:
            live: a running request.
        """
        first = self._settings.first_block_kept(live.computed_count)
        if first > live.absent_block_count:
            self.blocks_given_back_total += first - live.absent_block_count
            self._free_blocks_before(first, live)

    def start_over(self, live: LiveRequest) -> None:
        """Let a request wait again and compute its KV itself, because its load ended without KV.

        Args:
            live: a request in WAITING_FOR_REMOTE_KV.
        """
        self._release_blocks(live)
        live.move(RequestStatus.WAITING)
        live.blocks_wanted = 0
        self.waiting.put_back(live)

    def preempt_all(self) -> list[RequestId]:
        """Free the blocks of all running requests, and of requests whose loaded KV has arrived.

        The requests return to their old positions in the queue.

        Returns:
            Ids of the requests that were running.
        """
        preempted = sorted(self.running.values(), key=lambda live: live.order, reverse=True)
        for live in preempted:
            self._preempt(live)
        for live in [] if self._loads is None else self._loads.pop_ready():
            self._release_blocks(live)
            live.loaded_token_count = 0
            live.blocks_wanted = 0
            self.waiting.put_back(live)
        return [live.request.id for live in preempted]

    def _spans(self, state: OwnState, start: int, count: int) -> tuple[StateSpan, ...]:
        assert self.states is not None, "a model without states has no spans"
        return self.states.spans(state, start, count)

    def _running_in_turn(self) -> list[LiveRequest]:
        running = self.running.values()
        # This line does the same as due_count without function calls, because it is the most frequent operation here.
        decodes = [live for live in running if len(live.tokens) - live.computed_count == 1]
        if len(decodes) == len(running):
            return decodes
        prompts = [live for live in running if len(live.tokens) - live.computed_count != 1]
        if len(prompts) > 1:
            if decodes:
                prompts.sort(key=lambda live: (len(live.tokens) - live.computed_count, live.order))
            elif not self._settings.steps_apart:  # Otherwise, _rotate_running determines the order.
                prompts.sort(key=lambda live: live.order)
        return decodes + prompts

    def _due_behind(self, ends: Mapping[RequestId, int]) -> list[tuple[LiveRequest, int]]:
        """Return running requests with tokens that the step after the step in flight can compute. Decodes come first.

        The result contains no aborted request, and no request that will have all its tokens when the step in flight has
        returned. With steps_apart, it contains no request of the step in flight.

        Args:
            ends: maps each request of the step in flight to the position after its chunk.

        Returns:
            Each request with its number of due tokens.
        """
        decodes: list[tuple[LiveRequest, int]] = []
        others: list[tuple[LiveRequest, int]] = []
        for live in self.running.values():
            if self._settings.steps_apart and live.request.id in ends:
                continue
            if live.abort_reason is not None:
                continue
            due_count = len(live.tokens) - ends.get(live.request.id, live.computed_count)
            if due_count == 0:
                if live.output_count + 1 >= live.request.output_tokens_max:
                    continue
                due_count = 1  # The step in flight samples this token.
            (decodes if due_count == 1 else others).append((live, due_count))
        if len(others) > 1:
            if decodes:
                others.sort(key=lambda other: (other[1], other[0].order))
            elif not self._settings.steps_apart:
                others.sort(key=lambda other: other[0].order)
        return decodes + others

    def _count_max_apart(self) -> int:
        """Return how many running requests one step may contain if two steps in flight share no request."""
        return -(-len(self.running) // STEPS_IN_FLIGHT_MAX)

    def _rotate_running(self, planned: Mapping[RequestId, int]) -> None:
        """Move the planned requests to the end of the order, so that the next step begins with other requests."""
        for request_id in planned:
            self.running[request_id] = self.running.pop(request_id)

    def _make_room(
        self, live: LiveRequest, count: int, planned: dict[RequestId, int], preempted: list[RequestId], now: float
    ) -> int:
        """Preempt the last requests of the queue until `live` can compute `count` tokens.

        Before that, cancel all prefetches. If `live` becomes the last request in the queue, it is preempted, too.

        Returns:
            Number of budget tokens that were planned for the preempted requests and are now unused.
        """
        budget_back = 0
        needed = self._settings.blocks_for(live.computed_count + count) - len(live.blocks) - len(live.reserved_blocks)
        while needed > self._pool.available_count:
            if self._prefetches.cancel_all(now):
                continue
            victim = max(self.running.values(), key=lambda other: other.order)
            budget_back += planned.pop(victim.request.id, 0)
            self._preempt(victim)
            preempted.append(victim.request.id)
            if victim is live:
                break
        return budget_back

    def _extend(self, live: LiveRequest, end: int) -> None:
        """Allocate the missing blocks of a request for the positions from 0 to `end` - 1."""
        needed = self._settings.blocks_for(end) - len(live.blocks)
        if needed > 0:
            if live.reserved_blocks:
                own, live.reserved_blocks = live.reserved_blocks[:needed], live.reserved_blocks[needed:]
                live.blocks += own
                needed -= len(own)
            live.blocks += self._pool.allocate(needed, _owner(live))

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Add draft tokens to the decodes of a small step. The remaining tokens are divided evenly among them."""
        settings = self._settings
        left = min(settings.step_tokens_max, settings.draft_step_tokens_max) - sum([chunk.count for chunk in chunks])
        for index, chunk in enumerate(chunks):
            share = left // (len(chunks) - index) if left > 0 else 0
            if share > 0 and chunk.count == 1 and chunk.samples:
                draft = self._drafted(self.running[chunk.request.id], share)
                if draft:
                    left -= len(draft)
                    chunks[index] = msgspec.structs.replace(chunk, draft=draft)

    def _drafted(self, live: LiveRequest, count_max: int) -> tuple[int, ...]:
        """Return up to `count_max` draft tokens for a request, and allocate their blocks.

        As for any other token, a cached block may be evicted for draft tokens. If the draft tokens are wrong, this
        block is allocated next, so no second block is evicted.
        """
        known_count = len(live.tokens)
        room = (len(live.blocks) + self._pool.available_count) * self._settings.block_size - known_count
        # The last output token is only sampled, and never computed. So it is not drafted.
        count_max = min(count_max, room, live.request.output_tokens_max - live.output_count - 1)
        if count_max <= 0 or live.output_count == 0:
            return ()
        if live.drafter is None:
            if self.model_drafts is not None:
                return ()  # The draft model has not proposed any tokens yet.
            tokens_max = live.prompt_count + live.request.output_tokens_max
            live.drafter = Drafter(self._settings.draft_tokens_max, tokens_max)
        draft = live.drafter.draft(live.tokens, count_max)
        if draft and live.guide is not None:
            draft = draft[: live.guide.acceptable_count(draft)]
        self._extend(live, live.computed_count + 1 + len(draft))
        return draft

    def _preempt(self, live: LiveRequest) -> None:
        del self.running[live.request.id]
        self._release_blocks(live)
        live.move(RequestStatus.PREEMPTED)
        self.waiting.put_back(live)
        self.preemptions_total += 1

    def _free_blocks_before(self, first: int, live: LiveRequest) -> None:
        """Free the blocks of the first `first` entries of the block table. The table may have fewer entries."""
        self._pool.release(live.blocks[live.absent_block_count : first])
        # Create a new list, because a step in flight reads the old table.
        live.blocks = [NO_BLOCK] * first + live.blocks[first:]
        live.absent_block_count = first

    def _release_blocks(self, live: LiveRequest) -> None:
        if live.session is None:
            self._pool.release(live.blocks[live.absent_block_count :])
        else:
            self._sessions.release(live.session, live.blocks[live.absent_block_count :])
        live.blocks = []
        live.absent_block_count = 0
        if live.reserved_blocks:
            self._pool.release(live.reserved_blocks)
            live.reserved_blocks = []
        if isinstance(live.drafter, ModelDraft):
            live.drafter = None  # The draft model's KV was in these blocks, so it is lost.
        live.computed_count = 0
        live.chain.restart()
        state, live.state = live.state, None
        if state is not None:
            assert self.states is not None
            self.states.release(state)

    def _admit(
        self,
        planned: dict[RequestId, int],
        budget: int,
        prompts: _PromptTokens,
        now: float,
        in_flight: StepPlan | None = None,
    ) -> list[RequestId]:
        """Start waiting requests in order, as long as batch slots, tokens and blocks are available.

        A prompt that must be computed in one step waits until a step has enough tokens for it, and blocks the queue
        meanwhile. This wait ends, because decodes use few tokens and started prompts finish.

        A request is passed over if there are not enough blocks for it, and each later request that starts is counted.
        After overtakes_max of these requests, the passed-over request blocks the queue. Running requests then end, and
        their blocks are kept for it. So the first request of the best priority always starts eventually, and the wait
        of later requests is bounded too. A preempted request blocks the queue at once, because requests that start
        before it would use the blocks that it needs.

        A request is admitted only if the pool has space for all of its known tokens, so that a prompt in chunks never
        starts without being able to finish. With a sliding window, there must be space for the blocks that it owns at
        one time. A request is also passed over if another request computes its next block in this step (a shared
        prefix, or n choices). After the step, that block is a hit. A request whose KV can be loaded gets its blocks and
        waits for the load, without a batch slot. It is passed over while max_num_seqs loads are pending, and while its
        session's prefetch loads its prefix. A request that lacks blocks cancels all prefetches.

        Beside decodes, a request starts with one token if other prompts use all tokens that the decodes allow. So it
        gets its batch slot at once, and the next step divides the tokens among all prompts.

        Args:
            planned: token count of each chunk so far. The chunks of admitted requests are added to it.
            budget: number of tokens that remain in the step.
            prompts: limits the tokens of prompts.
            now: time in seconds.
            in_flight: the step in flight, if this step is planned to follow it. Otherwise None. Blocks that the step in
                flight computes are hits only for later steps.

        Returns:
            Ids of the requests that start.
        """
        free_seqs = self._settings.max_num_seqs - len(self.running)
        if self.states is not None:
            free_seqs = min(free_seqs, self.states.available_count)
        loads = self._loads
        if free_seqs == 0 or budget == 0 or not self._has_waiting():
            return []
        admission = _Admission(planned, prompts, free_seqs=free_seqs, budget=budget)
        chunks = () if in_flight is None else in_flight.chunks
        ends = {chunk.request.id: chunk.start + chunk.count for chunk in chunks}
        for request_id, live in self.running.items():
            if live.due_count > 1:
                end = ends.get(request_id, live.computed_count) + planned.get(request_id, 0)
                admission.being_computed.update(self._hashes_until(live, end))
        if loads is not None:
            self._start_loaded(loads, admission)
        self._start_waiting(admission, now)
        for live in admission.chosen:
            live.move(RequestStatus.RUNNING)
            self.running[live.request.id] = live
        return [live.request.id for live in admission.chosen]

    def _has_waiting(self, besides: int = 0) -> bool:
        """Return True if more requests than `besides` wait for a batch slot.

        A request that waits for KV from another engine does not count, because it already has its blocks and needs no
        step.
        """
        return len(self.waiting) > besides or (self._loads is not None and len(self._loads.ready) > 0)

    def _start_loaded(self, loads: RemoteLoads, admission: _Admission) -> None:
        """Start requests whose KV has arrived. These requests already own their blocks, and only need a batch slot."""
        for live in loads.ready:
            if not admission.has_capacity:
                break
            self._start(live, admission)
        for live in admission.chosen:
            loads.ready.remove(live)

    def _start_waiting(self, admission: _Admission, now: float) -> None:
        passed_max = self._settings.max_num_seqs
        overtakes_max = self._settings.overtakes_max
        for live in self.waiting:
            if not admission.has_capacity or admission.passed_count > passed_max:
                break
            if admission.planned and self._stays_deferred(live):
                continue
            if live.joint_tokens_max > admission.budget or (live.is_whole and live.due_count > admission.budget):
                break  # Block the queue. A later step has enough tokens, when started prompts have finished.
            if not self._consider(live, admission, now):
                if live.status is RequestStatus.PREEMPTED or live.overtaken_count >= overtakes_max:
                    break
                admission.unfit.append(live)
                admission.passed_count += 1
            elif admission.unfit and admission.leaving and admission.leaving[-1] is live:
                for overtaken in admission.unfit:
                    overtaken.overtaken_count += 1
                if any(overtaken.overtaken_count >= overtakes_max for overtaken in admission.unfit):
                    break
        for live in admission.leaving:
            self.waiting.remove(live)
            self.deferred.discard(live)

    def _consider(self, live: LiveRequest, admission: _Admission, now: float) -> bool:
        """Consider the next request of the queue: start it, begin its load, or pass it over.

        Returns:
            False if the pool has too few blocks for the request.
        """
        if live.wants_load and self._loading_is_full():
            admission.passed_count += 1
            return True
        if self._prefetches.is_awaited_by(live):
            self.deferred.discard(live)
            admission.passed_count += 1
            return True
        # The full check is expensive, so repeat it only if no other chunk is planned.
        # blocks_wanted may be too high, because other requests may now use blocks that this request could share.
        if admission.planned and live.blocks_wanted > self._pool.available_count:
            return False
        hit_blocks = self._match(live)
        if self._is_being_computed(live, admission):
            live.chain.restart()
            admission.free_seqs -= 1  # Passed-over requests count, too. This limits how many requests are considered.
            return True
        fits = self._fits(live, hit_blocks)
        if not fits and self._prefetches.cancel_all(now):
            fits = self._fits(live, hit_blocks)
        load_count = self._loadable_count(live, hit_blocks) if fits else 0
        if live.session is not None and self._defer(live, live.session, hit_blocks, load_count, now):
            live.chain.restart()
            return True
        if not fits:
            live.chain.restart()
            return False
        if load_count > 0 and self._loading_is_full():
            live.chain.restart()
            live.wants_load = True
            admission.passed_count += 1
            return True
        admission.leaving.append(live)
        if live.session is not None:
            self._sessions.note_turn(live.session, live.request.priority)
        self._share_hits(live, hit_blocks)
        if load_count > 0:
            self._begin_load(live, load_count, now)
        else:
            self._start(live, admission)
        return True

    def _fits(self, live: LiveRequest, hit_blocks: list[BlockIndex]) -> bool:
        # A cached block without users saves computation but no space, because sharing makes it unavailable.
        settings = self._settings
        first = settings.first_block_read(len(hit_blocks) * settings.block_size)
        busy_hits = sum(1 for block in hit_blocks[first:] if not self._pool.is_idle(block))
        wanted = settings.blocks_for(len(live.tokens)) - first - busy_hits
        live.blocks_wanted = min(wanted, settings.blocks_held_max(len(live.tokens)))
        return live.blocks_wanted <= self._pool.available_count

    def _defer(
        self, live: LiveRequest, session: Session, hit_blocks: list[BlockIndex], load_count: int, now: float
    ) -> bool:
        """Defer a cold turn that would evict blocks of expected sessions. Otherwise end the deferral of the request.

        Args:
            live: a waiting request.
            session: its session.
            hit_blocks: the blocks of its prefix that are in the cache.
            load_count: number of further tokens that can be loaded.
            now: time in seconds.

        Returns:
            True if the request is deferred.
        """
        order, settings = self._pool.order, self._settings
        found_count = len(hit_blocks) * settings.block_size + load_count
        is_first = session.turn_count == 0 and session.live_count == 1
        is_cold = is_first or 2 * found_count < len(live.tokens)
        if is_cold and live.status is RequestStatus.WAITING and not live.output_count:
            self._sessions.note_turn(session, live.request.priority)
            # The turn shares cached hits and evicts none of them. So hits of expected sessions do not count.
            first = settings.first_block_read(len(hit_blocks) * settings.block_size)
            shared = sum(1 for block in hit_blocks[first:] if self._pool.is_idle(block) and order.is_expected(block))
            wanted = live.blocks_wanted - shared
            if self._would_evict_expected(live, wanted) and self.deferred.defer(live, wanted, now):
                return True
        self.deferred.discard(live)
        return False

    def _stays_deferred(self, live: LiveRequest) -> bool:
        """Return True if a request is deferred and must stay deferred, as far as its last full check shows."""
        wanted = self.deferred.blocks_wanted(live)
        if wanted is not None and self._would_evict_expected(live, wanted):
            return True
        self.deferred.discard(live)
        return False

    def _would_evict_expected(self, live: LiveRequest, count: int) -> bool:
        """Return True if sessions are expected, and `count` blocks are not available without blocks of them."""
        others_count = self._pool.available_count - self._pool.order.expected_count
        return count > others_count and self._sessions.expects(live.request.priority)

    def _loading_is_full(self) -> bool:
        return self._loads is not None and self._loads.is_full

    def _loadable_count(self, live: LiveRequest, hit_blocks: list[BlockIndex]) -> int:
        if self._loads is None:
            return 0
        return self._loads.matched_count(live, len(hit_blocks) * self._settings.block_size)

    def _begin_load(self, live: LiveRequest, load_count: int, now: float) -> None:
        assert self._loads is not None
        settings = self._settings
        self._free_blocks_before(settings.first_block_read(live.computed_count + load_count), live)
        table_count = settings.blocks_for(len(live.tokens))
        table_count = min(table_count, live.absent_block_count + settings.blocks_held_max(len(live.tokens)))
        live.blocks += self._pool.allocate(table_count - len(live.blocks), _owner(live))
        self._loads.begin(live, load_count, now)

    def _start(self, live: LiveRequest, admission: _Admission) -> None:
        """Give a request a batch slot, and plan its first chunk."""
        if live.cached_token_count is None:
            live.cached_token_count = live.computed_count - live.loaded_token_count
            if self._may_use_hits(live):
                self.prefix_query_tokens_total += len(live.tokens)
                self.prefix_hit_tokens_total += live.cached_token_count
                if live.session is not None:
                    self._sessions.note_hits(live.cached_token_count)
        count = min(live.due_count, admission.budget)
        if count > 1 and not live.is_whole:
            count = max(1, admission.prompts.take(live, count))
        if live.joint_spans:
            count = live.chunk_tokens(live.computed_count, count, admission.budget)
        end = live.computed_count + count
        self._extend(live, end)
        if self.states is not None:
            live.state = self.states.take(live.chain, len(live.tokens), live.computed_count)
        admission.planned[live.request.id] = count
        admission.being_computed.update(self._hashes_until(live, end))
        admission.budget -= count
        admission.free_seqs -= 1
        admission.chosen.append(live)

    def _may_use_hits(self, live: LiveRequest) -> bool:
        # Pooling and prompt logprobs need hidden states, and cached tokens have none.
        return self._settings.enable_prefix_caching and not live.needs_every_row

    def _match(self, live: LiveRequest) -> list[BlockIndex]:
        if not self._may_use_hits(live):
            return []
        can_end_at = None if self.states is None else self.states.has_snapshot
        return self._cache.match(live.chain, live.tokens, can_end_at)

    def _is_being_computed(self, live: LiveRequest, admission: _Admission) -> bool:
        """Return True if this step computes blocks that the request could share afterwards.

        These blocks are the request's next block or, for a model with states, any of its blocks that will have a
        snapshot.
        """
        if self.states is None:
            return self._next_hash(live) in admission.being_computed
        if not admission.being_computed or not self._may_use_hits(live):
            return False
        full_count = (len(live.tokens) - 1) // self._settings.block_size
        hashes = (
            self._cache.hash_at(live.chain, index, live.tokens) for index in range(live.chain.block_count, full_count)
        )
        return not admission.being_computed.isdisjoint(hashes)

    def _next_hash(self, live: LiveRequest) -> BlockHash | None:
        """Return the hash of the first full block that is not a hit. None if there is no such block, or hits are not
        allowed.
        """
        if not self._may_use_hits(live):
            return None
        index = live.chain.block_count
        if index >= (len(live.tokens) - 1) // self._settings.block_size:
            return None
        return self._cache.hash_at(live.chain, index, live.tokens)

    def _hashes_until(self, live: LiveRequest, end: int) -> Iterator[BlockHash]:
        """Yield the hashes of the full blocks that a prompt completes with the tokens before position `end`.

        If the prompt continues behind `end`, its next block is included, because a later step completes that block. For
        a model with states, only blocks that will have a snapshot, now or later, are included.
        """
        block_size = self._settings.block_size
        if live.state is not None:
            for snapshot_end in live.state.snapshot_ends:
                if snapshot_end > live.computed_count:
                    yield self._cache.hash_at(live.chain, snapshot_end // block_size - 1, live.tokens)
            return
        if self._settings.enable_prefix_caching:
            for index in range(live.chain.block_count, min(end // block_size + 1, len(live.tokens) // block_size)):
                yield self._cache.hash_at(live.chain, index, live.tokens)

    def _share_hits(self, live: LiveRequest, hit_blocks: list[BlockIndex]) -> None:
        live.computed_count = len(hit_blocks) * self._settings.block_size
        live.absent_block_count = self._settings.first_block_read(live.computed_count)
        live.blocks = list(hit_blocks)
        self._pool.share(live.blocks[live.absent_block_count :], _owner(live))


def _owner(live: LiveRequest) -> int:
    return 0 if live.session is None else live.session.serial


def _guide_waits(live: LiveRequest, ends: Mapping[RequestId, int]) -> bool:
    """Return True if the request's guide must know the token that the step in flight samples.

    Args:
        ends: maps each request of the step in flight to the position after its chunk.
    """
    assert live.guide is not None
    if live.abort_reason is not None or ends.get(live.request.id) != len(live.tokens):
        return False
    return not live.guide.is_free_ahead


class _PromptTokens:
    """The number of prompt tokens that a step may still compute.

    The number is determined at its first use, when all decodes are already planned. Beside decodes, half of it is
    reserved for the first running prompt in order, until that prompt takes its part.

    Args:
        scheduler: the scheduler that plans the step.
        planned: chunks that the step has so far. More chunks are added while the step is planned.
    """

    __slots__ = ("_first", "_left", "_planned", "_reserved", "_scheduler")

    def __init__(self, scheduler: Scheduler, planned: Mapping[RequestId, int]) -> None:
        self._scheduler = scheduler
        self._planned = planned
        self._first: LiveRequest | None = None
        self._left: int | None = None
        self._reserved = 0

    def take(self, live: LiveRequest, count: int) -> int:
        """Take and return up to `count` tokens for a prompt."""
        if self._left is None:
            self._left = self._tokens_max()
        if live is self._first:
            self._reserved = 0
        taken = min(count, self._left - self._reserved)
        self._left -= taken
        return taken

    def _tokens_max(self) -> int:
        decode_count = len(self._planned)
        budget = self._scheduler.step_tokens_max - decode_count
        prompts = [live for live in self._scheduler.running.values() if live.due_count > 1]
        tokens = self._scheduler.pace.tokens_max(decode_count, max(1, len(prompts)))
        left = budget if tokens is None else min(tokens, budget)
        if decode_count and len(prompts) > 1:
            self._first = min(prompts, key=lambda live: live.order)
            self._reserved = min(self._first.due_count, (left + 1) // 2)
        return left


class _Admission:
    """Admission of requests to one step: the remaining batch slots and tokens, and the requests that start.

    Args:
        planned: chunks that the step has so far.
        prompts: limits the tokens of prompts.
        free_seqs: number of free batch slots.
        budget: number of tokens that remain in the step.

    Attributes:
        being_computed: hashes of the full blocks that the chunks will complete.
        chosen: requests that start.
        leaving: requests that leave the waiting queue, to run or to load.
        unfit: requests that were passed over because there are too few blocks for them.
        passed_count: number of requests that were passed over because of too few blocks or too many pending loads.
    """

    __slots__ = (
        "being_computed",
        "budget",
        "chosen",
        "free_seqs",
        "leaving",
        "passed_count",
        "planned",
        "prompts",
        "unfit",
    )

    def __init__(self, planned: dict[RequestId, int], prompts: _PromptTokens, *, free_seqs: int, budget: int) -> None:
        self.planned = planned
        self.prompts = prompts
        self.free_seqs = free_seqs
        self.budget = budget
        self.being_computed: set[BlockHash] = set()
        self.chosen: list[LiveRequest] = []
        self.leaving: list[LiveRequest] = []
        self.unfit: list[LiveRequest] = []
        self.passed_count = 0

    @property
    def has_capacity(self) -> bool:
        return self.free_seqs > 0 and self.budget > 0
