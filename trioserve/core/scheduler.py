"""Fills one step: who computes which tokens next, within one token budget, and who has to give its blocks back for it.

One rule: every request catches up to its known tokens. A decode is one token behind, a prompt many, a prefix hit starts
further along, a preempted request starts over. Requests that are one token behind go first, so that a long prompt
delays nobody's next token by more than one step.

A prompt that is being computed goes on before one that waits, also when the waiting one has the better priority: what
was begun holds blocks, and finishing it is how they come back. Priorities decide who starts next and who is preempted.
For the same reason a request whose KV has arrived from elsewhere starts before one that has nothing yet.

Of a prompt that needs several steps each takes what costs the decodes little time (prompt_pace.py).

Draft tokens (drafting.py, model_draft.py) come last: they use the tokens and blocks that are left over, and none while
anybody waits. A draft model proposes them at the end of the step before (model_drafts.py).

A step may be filled behind one that is in flight (fill_step_ahead): whoever is computed there is taken to go on, and
nobody loses its blocks for it. Where that does not do, the step is filled when the other has come back, as ever. With
steps_apart whoever is computed there is left out instead, and each step has at most half of those that run, in turn.

The cost of a step is O(running requests and computed tokens), whatever waits: of those that wait, no more are looked at
than may run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.ids import NO_BLOCK, BlockIndex, RequestId
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.core.drafting import Drafter
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.live_request import LiveRequest
from trioserve.core.model_draft import ModelDraft
from trioserve.core.model_drafts import ModelDrafts
from trioserve.core.prefix_cache import PrefixCache
from trioserve.core.prompt_pace import CHUNK_TOKENS_MIN, PromptPace
from trioserve.core.remote_loads import RemoteLoads
from trioserve.core.request_state import RequestStatus
from trioserve.core.settings import CoreSettings
from trioserve.core.state_slots import OwnState, StateSlots
from trioserve.core.steps_in_flight import STEPS_IN_FLIGHT_MAX
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["Scheduler"]


class Scheduler:
    """Owns the queues of waiting and running requests, and moves blocks between pool and requests."""

    def __init__(
        self, settings: CoreSettings, pool: BlockPool, cache: PrefixCache, loads: RemoteLoads | None = None
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._cache = cache
        self._loads = loads
        self.states = StateSlots.made(settings, cache)
        self.pace = PromptPace(settings.wide_prompt_stretch)
        self.waiting = WaitingQueue[LiveRequest]()
        self.running: dict[RequestId, LiveRequest] = {}
        self.preemptions_total = 0
        self.blocks_given_back_total = 0
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.model_drafts = ModelDrafts(settings, pool) if settings.draft_source != "text" else None

    def fill_step(self, now: float) -> tuple[list[ScheduledChunk], list[LiveRequest], list[RequestId], list[RequestId]]:
        """Returns the chunks of the next step, whose they are, and who was admitted and preempted for it. No chunks:
        nothing to do, or whoever lives waits for a connector."""
        planned: dict[RequestId, int] = {}  # token count of each chunk
        preempted: list[LiveRequest] = []
        budget = self._plan_running(planned, preempted)
        if not planned and self.running:
            # Decodes lost their blocks, and wide prompts had been left out for them.
            budget = self._plan_running(planned, preempted)
        self._let_others_go_first(planned)

        admitted: list[RequestId] = []
        # With nothing planned everybody who ran has lost its blocks, to holds: then nobody is favoured by waiting.
        if not preempted or not planned:
            admitted = self._admit(planned, budget, now)
        chunks = []
        lives = [self.running[request_id] for request_id in planned]
        for live, count in zip(lives, planned.values(), strict=True):
            start, tokens = live.computed_count, live.tokens
            samples = start + count == len(tokens) and not live.is_pooled
            if live.state is None:
                chunks.append(ScheduledChunk(live.request, tokens, start, count, live.blocks, samples))
            else:
                spans = self._spans(live.state, start, count)
                chunks.append(ScheduledChunk(live.request, tokens, start, count, live.blocks, samples, states=spans))
        if self._settings.draft_tokens_max:
            somebody_waits = self._somebody_waits()
            if not somebody_waits:
                self._add_drafts(chunks)
            if self.model_drafts is not None:
                self.model_drafts.add_tasks(chunks, lives, somebody_waits=somebody_waits)
        return chunks, lives, admitted, [live.request.id for live in preempted]

    def _plan_running(self, planned: dict[RequestId, int], preempted: list[LiveRequest]) -> int:
        """Whoever runs goes on, as far as the step's tokens last, and takes the blocks of others for it. Returns the
        tokens that are left."""
        budget = self._settings.step_tokens_max
        block_size = self._settings.block_size
        wide = _WideTokens(self, planned)
        count_max = self._running_count_max()
        for live in self._running_in_turn():
            if budget == 0 or len(planned) == count_max:
                break
            if preempted and live.status is not RequestStatus.RUNNING:
                continue  # lost its blocks to one that came before it in this loop
            count = len(live.tokens) - live.computed_count
            if count > budget:
                count = budget
            if count > 1 and live.is_wide:
                count = wide.take(count)
                if count == 0:
                    continue
            if live.computed_count + count > len(live.blocks) * block_size:  # one decode in block_size
                budget += self._make_room(live, count, planned, preempted)
                if live.status is not RequestStatus.RUNNING:
                    continue  # it was the last in the queue itself
                self._extend(live, live.computed_count + count)
            planned[live.request.id] = count
            budget -= count
        return budget

    def wide_tokens(self, planned: Mapping[RequestId, int]) -> int:
        """How many tokens of wide prompts the step may take. planned: all its decodes, and maybe more."""
        decode_count = sum([count == 1 for count in planned.values()])
        wide_count = sum([live.is_wide and live.due_count > 1 for live in self.running.values()])
        tokens = self.pace.tokens_max(decode_count, wide_count)
        return self._settings.step_tokens_max if tokens is None else tokens

    def fill_step_ahead(
        self, in_flight: StepPlan, now: float
    ) -> tuple[list[ScheduledChunk], list[LiveRequest], list[RequestId]]:
        """The chunks of the step behind the one in flight, as if every request of that one went on, whose they are, and
        who was admitted. No chunks: nothing to do; or somebody would have to lose its blocks for it, and they are being
        read; or the guide of one of them waits for its token."""
        block_size = self._settings.block_size
        ends = {chunk.request.id: chunk.start + chunk.count for chunk in in_flight.chunks}
        is_apart = self._settings.steps_apart
        if not is_apart and any(live.guide is not None and _holds_up(live, ends) for live in self.running.values()):
            return [], [], []
        planned: dict[RequestId, int] = {}
        budget = self._settings.step_tokens_max
        needed = 0
        wide = _WideTokens(self, planned)
        count_max = self._running_count_max()
        for live, due_count in self._due_behind(ends):
            if budget == 0 or len(planned) == count_max:
                break
            count = min(due_count, budget)
            if count > 1 and live.is_wide:
                count = wide.take(count)
                if count == 0:
                    continue
            end = ends.get(live.request.id, live.computed_count) + count
            needed += max(0, self._settings.blocks_for(end) - len(live.blocks) - len(live.reserved_blocks))
            budget -= count
            planned[live.request.id] = count
        if needed > self._pool.available_count:
            return [], [], []
        for request_id, count in planned.items():
            live = self.running[request_id]
            end = ends.get(request_id, live.computed_count) + count
            if end > len(live.blocks) * block_size:
                live.blocks = live.blocks.copy()  # the step in flight reads the table as it was
                self._extend(live, end)
        self._let_others_go_first(planned)
        admitted = self._admit(planned, budget, now, in_flight)
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
                    samples=start + count >= known_count and not live.is_pooled,
                    awaits_token=start == known_count,
                    states=() if live.state is None else self._spans(live.state, start, count),
                )
            )
        return chunks, lives, admitted

    def leave_batch(self, live: LiveRequest) -> None:
        """A request that has ended runs no longer; it keeps its blocks."""
        del self.running[live.request.id]

    def release(self, live: LiveRequest) -> None:
        """Take a request out of whichever line it is in and give its blocks back. Its state is the caller's to move."""
        if live.status is RequestStatus.RUNNING:
            del self.running[live.request.id]
            self._release_blocks(live)
        elif not live.blocks:
            self.waiting.remove(live)
        else:
            if live.status is RequestStatus.WAITING:
                assert self._loads is not None
                self._loads.ready.remove(live)
            self._release_blocks(live)

    def give_back_rest(self, live: LiveRequest) -> None:
        """Give back the blocks behind what is computed, which draft tokens had that were wrong."""
        needed = self._settings.blocks_for(live.computed_count)
        if needed < len(live.blocks):
            self._pool.release(live.blocks[needed:])
            del live.blocks[needed:]

    def give_back_behind(self, live: LiveRequest) -> None:
        """Give back the blocks that its window has left behind. A step in flight may read the request's blocks: it was
        planned behind what is computed, and sees no more of them."""
        first = self._settings.first_block_kept(live.computed_count)
        if first > live.gone_count:
            self.blocks_given_back_total += first - live.gone_count
            self._give_back_before(first, live)

    def start_over(self, live: LiveRequest) -> None:
        """A request whose load is over, without KV, waits again to compute everything itself."""
        self._release_blocks(live)
        live.move(RequestStatus.WAITING)
        live.blocks_wanted = 0
        self.waiting.put_back(live)

    def preempt_all(self) -> list[RequestId]:
        """Whoever has blocks gives them back, and waits again in its old place. Returns those that ran."""
        preempted = sorted(self.running.values(), key=lambda live: live.order, reverse=True)
        for live in preempted:
            self._preempt(live)
        for live in [] if self._loads is None else self._loads.take_ready():
            self._release_blocks(live)
            live.loaded_token_count = 0
            live.blocks_wanted = 0
            self.waiting.put_back(live)
        return [live.request.id for live in preempted]

    def _spans(self, state: OwnState, start: int, count: int) -> tuple[StateSpan, ...]:
        assert self.states is not None, "it runs, and has a state"
        return self.states.spans(state, start, count)

    def _running_in_turn(self) -> list[LiveRequest]:
        running = self.running.values()
        # due_count, without the calls: nothing else here is done as often.
        decodes = [live for live in running if len(live.tokens) - live.computed_count == 1]
        if len(decodes) == len(running):
            return decodes
        return decodes + [live for live in running if len(live.tokens) - live.computed_count != 1]

    def _due_behind(self, ends: Mapping[RequestId, int]) -> list[tuple[LiveRequest, int]]:
        """Who runs and has tokens to compute behind the step in flight, in turn, and how many. ends: how far that one
        comes. Left out are those that were aborted, and those that have all their tokens when it is back; with
        steps_apart all that it computes."""
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
                due_count = 1  # the token that is sampled right now
            (decodes if due_count == 1 else others).append((live, due_count))
        return decodes + others

    def _running_count_max(self) -> int:
        """How many of those that run one step may have."""
        count = len(self.running)
        return -(-count // STEPS_IN_FLIGHT_MAX) if self._settings.steps_apart else count

    def _let_others_go_first(self, planned: Mapping[RequestId, int]) -> None:
        """Where a step has some of those that run, the next one begins with others."""
        if self._settings.steps_apart:
            for request_id in planned:
                self.running[request_id] = self.running.pop(request_id)

    def _make_room(
        self, live: LiveRequest, count: int, planned: dict[RequestId, int], preempted: list[LiveRequest]
    ) -> int:
        """Preempt from the end of the queue until `live` can compute `count` tokens, or is the end of the queue itself.
        Returns the budget that comes back from chunks that were planned already."""
        budget_back = 0
        needed = self._settings.blocks_for(live.computed_count + count) - len(live.blocks) - len(live.reserved_blocks)
        while needed > self._pool.available_count:
            victim = max(self.running.values(), key=lambda other: other.order)
            budget_back += planned.pop(victim.request.id, 0)
            self._preempt(victim)
            preempted.append(victim)
            if victim is live:
                break
        return budget_back

    def _extend(self, live: LiveRequest, end: int) -> None:
        """Give it the blocks that it lacks for positions 0 to end - 1."""
        needed = self._settings.blocks_for(end) - len(live.blocks)
        if needed > 0:
            if live.reserved_blocks:
                own, live.reserved_blocks = live.reserved_blocks[:needed], live.reserved_blocks[needed:]
                live.blocks += own
                needed -= len(own)
            live.blocks += self._pool.allocate(needed)

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Let the decodes of a small step draft token, each its share of the tokens that are left."""
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
        """At most so many draft tokens, with the blocks they need. A cached block may be evicted for them, as for any
        other token; if they are wrong it is the next one to be handed out, so that no second one has to go."""
        known_count = len(live.tokens)
        room = (len(live.blocks) + self._pool.available_count) * self._settings.block_size - known_count
        # The last token that it may have is sampled after a draft token, and never computed.
        count_max = min(count_max, room, live.request.output_tokens_max - live.output_count - 1)
        if count_max <= 0 or live.output_count == 0:
            return ()
        if live.drafter is None:
            if self.model_drafts is not None:
                return ()  # nothing was proposed yet
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

    def _give_back_before(self, first: int, live: LiveRequest) -> None:
        """From now on there is no block in the first places of its table, which may be more than it has."""
        self._pool.release(live.blocks[live.gone_count : first])
        # A step in flight reads the table as it was.
        live.blocks = [NO_BLOCK] * first + live.blocks[first:]
        live.gone_count = first

    def _release_blocks(self, live: LiveRequest) -> None:
        self._pool.release(live.blocks[live.gone_count :])
        live.blocks = []
        live.gone_count = 0
        if live.reserved_blocks:
            self._pool.release(live.reserved_blocks)
            live.reserved_blocks = []
        if isinstance(live.drafter, ModelDraft):
            live.drafter = None  # its KV was in these blocks
        live.computed_count = 0
        live.chain.restart()
        state, live.state = live.state, None
        if state is not None:
            assert self.states is not None
            self.states.release(state)

    def _admit(
        self, planned: dict[RequestId, int], budget: int, now: float, in_flight: StepPlan | None = None
    ) -> list[RequestId]:
        """Start waiting requests, in order, while places in the batch, budget and blocks last.

        One that has to be computed whole waits for a step with as many tokens left, and holds the line meanwhile: who
        decodes leaves as many, and prompts that were begun come to their end.

        One that does not fit is passed over, and those that start before it are counted. When they are overtakes_max it
        holds the line: whoever runs ends, and its blocks are left for it. So the first of the best priority starts in
        any case, and nobody waits longer for one that does not fit than that takes. A preempted request holds the line
        at once: it was begun, and whoever started before it would have its blocks.

        A request is admitted only when all of its known tokens fit the pool as it is, so that a prompt that is computed
        in chunks does not start what it cannot finish. Behind a sliding window it is enough that as many blocks fit as
        it has at a time. One whose next block is just being computed by another (a shared prefix, n choices) is passed
        over: after this step the block is a hit. One whose KV can be loaded begins to wait for it instead: that takes
        its blocks, and no place. While as many load as may it is passed over, too; at most max_num_seqs are. in_flight:
        the step that runs, if another is planned behind it; what it computes is a hit only behind that one.
        """
        free_seqs = self._settings.max_num_seqs - len(self.running)
        if self.states is not None:
            free_seqs = min(free_seqs, self.states.available_count)
        loads = self._loads
        if free_seqs == 0 or budget == 0 or not self._somebody_waits():
            return []
        admission = _Admission(planned, free_seqs=free_seqs, budget=budget)
        ends: dict[RequestId, int] = {}
        for chunk in () if in_flight is None else in_flight.chunks:
            ends[chunk.request.id] = end = chunk.start + chunk.count
            live = self.running.get(chunk.request.id)
            if live is not None:
                admission.being_computed.update(self._hashes_of_step(live, end, chunk.count))
        for request_id, count in planned.items():
            live = self.running[request_id]
            end = ends.get(request_id, live.computed_count) + count
            admission.being_computed.update(self._hashes_of_step(live, end, count))
        if loads is not None:
            self._start_loaded(loads, admission)
        self._start_waiting(admission, now)
        for live in admission.chosen:
            live.move(RequestStatus.RUNNING)
            self.running[live.request.id] = live
        return [live.request.id for live in admission.chosen]

    def _somebody_waits(self) -> bool:
        """For a place in the batch: whoever waits for KV from elsewhere has its blocks, and nothing here could help
        it."""
        return len(self.waiting) > 0 or (self._loads is not None and len(self._loads.ready) > 0)

    def _start_loaded(self, loads: RemoteLoads, admission: _Admission) -> None:
        """Those whose KV has arrived: they have their blocks, and need nothing more than a place."""
        for live in loads.ready:
            if not admission.goes_on:
                break
            self._start(live, admission)
        for live in admission.chosen:
            loads.ready.remove(live)

    def _start_waiting(self, admission: _Admission, now: float) -> None:
        passed_max = self._settings.max_num_seqs
        overtakes_max = self._settings.overtakes_max
        for live in self.waiting:
            if not admission.goes_on or admission.passed_count > passed_max:
                break
            if live.is_whole and live.due_count > admission.budget:
                break  # a step will have as many tokens left, once what was begun is done: nobody starts before it
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

    def _consider(self, live: LiveRequest, admission: _Admission, now: float) -> bool:
        """Start the next in the queue, begin its load, or pass it over. False: it does not fit."""
        if live.wants_load and self._loading_is_full():
            admission.passed_count += 1
            return True
        # Since it was looked at, others may have come to use or hold blocks that it would hit. While something is
        # computed it is not worth the cost to look again; when nothing is, it may be all that could be.
        if admission.planned and live.blocks_wanted > self._pool.available_count:
            return False
        hit_blocks = self._match(live)
        if self._is_being_computed(live, admission):
            live.chain.restart()
            admission.free_seqs -= 1  # bounds how many are passed over
            return True
        if not self._fits(live, hit_blocks):
            live.chain.restart()
            return False
        load_count = self._loadable_count(live, hit_blocks)
        if load_count > 0 and self._loading_is_full():
            live.chain.restart()
            live.wants_load = True
            admission.passed_count += 1
            return True
        admission.leaving.append(live)
        self._share_hits(live, hit_blocks)
        if load_count > 0:
            self._begin_load(live, load_count, now)
        else:
            self._start(live, admission)
        return True

    def _fits(self, live: LiveRequest, hit_blocks: list[BlockIndex]) -> bool:
        # An idle hit saves computing, not room: it leaves the available blocks like any other.
        settings = self._settings
        first = settings.first_block_read(len(hit_blocks) * settings.block_size)
        busy_hits = sum(1 for block in hit_blocks[first:] if not self._pool.is_idle(block))
        wanted = settings.blocks_for(len(live.tokens)) - first - busy_hits
        live.blocks_wanted = min(wanted, settings.blocks_held_max(len(live.tokens)))
        return live.blocks_wanted <= self._pool.available_count

    def _loading_is_full(self) -> bool:
        return self._loads is not None and self._loads.is_full

    def _loadable_count(self, live: LiveRequest, hit_blocks: list[BlockIndex]) -> int:
        if self._loads is None:
            return 0
        return self._loads.matched_count(live, len(hit_blocks) * self._settings.block_size)

    def _begin_load(self, live: LiveRequest, load_count: int, now: float) -> None:
        assert self._loads is not None
        settings = self._settings
        self._give_back_before(settings.first_block_read(live.computed_count + load_count), live)
        table_count = settings.blocks_for(len(live.tokens))
        table_count = min(table_count, live.gone_count + settings.blocks_held_max(len(live.tokens)))
        live.blocks += self._pool.allocate(table_count - len(live.blocks))
        self._loads.begin(live, load_count, now)

    def _start(self, live: LiveRequest, admission: _Admission) -> None:
        """Give it a place in the batch, and plan the first tokens that it computes."""
        if live.cached_token_count is None:
            live.cached_token_count = live.computed_count - live.loaded_token_count
            if self._takes_hits(live):
                self.prefix_query_tokens_total += len(live.tokens)
                self.prefix_hit_tokens_total += live.cached_token_count
        live.is_wide = live.due_count > self._settings.step_tokens_max
        count = min(live.due_count, admission.budget)
        if live.is_wide and 1 in admission.planned.values():
            count = min(count, CHUNK_TOKENS_MIN)  # beside decodes it begins with what costs them least
        end = live.computed_count + count
        self._extend(live, end)
        if self.states is not None:
            live.state = self.states.take(live.chain, len(live.tokens), live.computed_count)
        admission.planned[live.request.id] = count
        admission.being_computed.update(self._hashes_of_step(live, end, count))
        admission.budget -= count
        admission.free_seqs -= 1
        admission.chosen.append(live)

    def _takes_hits(self, live: LiveRequest) -> bool:
        # A cached prompt token has no hidden state, so who wants that, or logprobs, computes it.
        return self._settings.enable_prefix_caching and not live.needs_every_row

    def _match(self, live: LiveRequest) -> list[BlockIndex]:
        if not self._takes_hits(live):
            return []
        can_go_on = None if self.states is None else self.states.has_snapshot
        return self._cache.match(live.chain, live.tokens, can_go_on)

    def _is_being_computed(self, live: LiveRequest, admission: _Admission) -> bool:
        """Whether it will find more when the step is over than now: its next block, or, where a state is needed, one of
        its blocks with a snapshot behind it."""
        if self.states is None:
            return self._next_hash(live) in admission.being_computed
        if not admission.being_computed or not self._takes_hits(live):
            return False
        full_count = (len(live.tokens) - 1) // self._settings.block_size
        hashes = (
            self._cache.hash_at(live.chain, index, live.tokens) for index in range(live.chain.block_count, full_count)
        )
        return not admission.being_computed.isdisjoint(hashes)

    def _next_hash(self, live: LiveRequest) -> BlockHash | None:
        """The hash of the first full block that is not a hit; None when there is none, or hits are not wanted."""
        if not self._takes_hits(live):
            return None
        index = live.chain.block_count
        if index >= (len(live.tokens) - 1) // self._settings.block_size:
            return None
        return self._cache.hash_at(live.chain, index, live.tokens)

    def _hashes_of_step(self, live: LiveRequest, end: int, count: int) -> Iterator[BlockHash]:
        """The full blocks that computing the `count` tokens before position `end` will complete. Decodes are left out:
        nobody waits for these. Where a state is needed: those behind which a snapshot is to be taken, now or later."""
        if live.state is not None:
            for snapshot_end in live.state.snapshot_ends:
                if snapshot_end > live.computed_count:
                    yield self._cache.hash_at(live.chain, snapshot_end // self._settings.block_size - 1, live.tokens)
            return
        if self._settings.enable_prefix_caching and count > 1:
            for index in range(live.chain.block_count, end // self._settings.block_size):
                yield self._cache.hash_at(live.chain, index, live.tokens)

    def _share_hits(self, live: LiveRequest, hit_blocks: list[BlockIndex]) -> None:
        live.computed_count = len(hit_blocks) * self._settings.block_size
        live.gone_count = self._settings.first_block_read(live.computed_count)
        live.blocks = list(hit_blocks)
        self._pool.share(live.blocks[live.gone_count :])


def _holds_up(live: LiveRequest, ends: Mapping[RequestId, int]) -> bool:
    """Whether its guide has to know the token that the step in flight samples for it. ends: how far that one comes."""
    assert live.guide is not None
    if live.abort_reason is not None or ends.get(live.request.id) != len(live.tokens):
        return False
    return not live.guide.is_free_ahead


class _WideTokens:
    """What a step may take of wide prompts: found out when the first one comes, behind all decodes, and shared out in
    turn. planned: the step's chunks so far, as it grows."""

    __slots__ = ("_left", "_planned", "_scheduler")

    def __init__(self, scheduler: Scheduler, planned: Mapping[RequestId, int]) -> None:
        self._scheduler = scheduler
        self._planned = planned
        self._left: int | None = None

    def take(self, count: int) -> int:
        """As many of these tokens as are left."""
        if self._left is None:
            self._left = self._scheduler.wide_tokens(self._planned)
        taken = min(count, self._left)
        self._left -= taken
        return taken


class _Admission:
    """One step's admitting: what is left of its places and tokens, and who starts.

    planned: the step's chunks so far. being_computed: the full blocks that they will complete. leaving: who leaves the
    waiting queue, to run or to load. unfit: who does not fit, and is passed over. passed_count: how many were passed
    over for that, or because as many load as may.
    """

    __slots__ = ("being_computed", "budget", "chosen", "free_seqs", "leaving", "passed_count", "planned", "unfit")

    def __init__(self, planned: dict[RequestId, int], *, free_seqs: int, budget: int) -> None:
        self.planned = planned
        self.free_seqs = free_seqs
        self.budget = budget
        self.being_computed: set[BlockHash] = set()
        self.chosen: list[LiveRequest] = []
        self.leaving: list[LiveRequest] = []
        self.unfit: list[LiveRequest] = []
        self.passed_count = 0

    @property
    def goes_on(self) -> bool:
        return self.free_seqs > 0 and self.budget > 0
