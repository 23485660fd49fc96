"""EngineCore: what an engine decides, as one synchronous object. It computes nothing, waits for nothing, has no clock.

The order of a step is schedule, forward, pending aborts, update_from_output, deliver. An abort is legal at any moment:
while no step runs, or when the running step does not read the request's blocks, they go back at once; otherwise the
request is marked, and update_from_output takes the marked ones first. So the order holds even if the loop around it
forgets it.

A request may have a guide, which says what may come next (guided_steps.py).

With overlap_steps the next step may be planned while one is in flight (schedule_ahead); what that changes is said in
steps_in_flight.py.

Time comes in as an argument, in seconds of any clock that never goes back, where something may begin or end by it: only
waiting for a connector does. Whoever drives the core calls expire() when next_deadline() has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from trioserve.contracts.block_hash import hash_block
from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.events import (
    AbortResult,
    EngineEvent,
    FinishReason,
    PooledReady,
    PromptLogprobs,
    RequestFinished,
    TokenLogprob,
    TokensReady,
)
from trioserve.contracts.guide import MaskMaker
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, KVConnector, TransferEvent, TransferFault
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN, EngineRequest
from trioserve.contracts.stats import EngineStats
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.weights import kept_salt
from trioserve.core.block_holds import Hold
from trioserve.core.guided_steps import GuidedSteps, take_token
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.live_request import LiveRequest
from trioserve.core.prefix_cache import HashBlock, PrefixCache
from trioserve.core.request_state import RequestStatus
from trioserve.core.request_table import RequestTable
from trioserve.core.scheduler import Scheduler
from trioserve.core.settings import CoreSettings
from trioserve.core.steps_in_flight import STEPS_IN_FLIGHT_MAX, StepsInFlight
from trioserve.core.surplus_chunks import lacking_ids, without_ended
from trioserve.core.transfers import Transfers, Unserved

__all__ = ["EngineCore"]

TOKEN_IDS_MAX = 2**32  # what the name of a block has room for; a model's own vocabulary is checked before
NAMES_MAX_FACTOR = 4  # of blocks that were evicted, for each block in the pool and in a full context; about 1 KB each


class EngineCore:
    """One engine. Not thread-safe: every call comes from the thread of the event loop. connector: None carries nothing,
    like connectors.none, and costs nothing. mask_maker: for requests with a guide; None: there are none."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        hash_block: HashBlock = hash_block,
        connector: KVConnector | None = None,
        mask_maker: MaskMaker | None = None,
    ) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.block_count)
        self.cache = PrefixCache(
            self.pool,
            settings.block_size,
            hash_block=hash_block,
            first_block_read=None if settings.window_tokens is None else settings.first_block_read,
            names_max=NAMES_MAX_FACTOR * (settings.block_count + settings.blocks_for(settings.context_tokens_max)),
        )
        assert connector is None or settings.state_slot_count == 0, "a connector carries KV, and no states"
        self.transfers = None if connector is None else Transfers(settings, self.pool, connector)
        self.scheduler = Scheduler(
            settings, self.pool, self.cache, None if self.transfers is None else self.transfers.loads
        )
        self.flights = StepsInFlight[StepPlan, LiveRequest]()
        self._guided = GuidedSteps(mask_maker)
        self._live = RequestTable[LiveRequest](self.flights, self._finish, self._abort_after_finish)
        self._steps_total = 0
        self._drafts_total = 0
        self._draft_tokens_total = 0
        self._accepted_tokens_total = 0

    def add(self, request: EngineRequest) -> None:
        """A new request joins the waiting queue. Raises InvalidRequest if it can never run here: nothing is held. Its
        id must not be that of a live request, nor of one whose blocks are still held or read."""
        assert request.id not in self._live, f"{request.id} is in use"
        assert request.id not in self.flights.ended, f"{request.id} is read"
        assert self.transfers is None or not self.transfers.holds.has(request.id), f"{request.id} is held"
        assert request.guide is None or self._guided.has_masks, f"{request.id} has a guide, and nobody makes masks"
        prompt_count = len(request.prompt_token_ids)
        if prompt_count == 0:
            raise InvalidRequest("the prompt has no tokens: send at least one", param="prompt")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < TOKEN_IDS_MAX:
            raise InvalidRequest(f"the prompt has token ids outside 0 to {TOKEN_IDS_MAX - 1}", param="prompt")
        if request.pooling is not None:
            self._check_pooled(request)
        elif request.output_tokens_max < 1:
            raise InvalidRequest(
                f"max_tokens is {request.output_tokens_max}, the engine needs at least 1", param="max_tokens"
            )
        elif prompt_count + request.output_tokens_max > self.settings.context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {self.settings.context_tokens_max} tokens, prompt and "
                f"response together, but the prompt has {prompt_count} and max_tokens asks for "
                f"{request.output_tokens_max}: shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if request.known_output:
            self._check_known(request)
        if not PRIORITY_MIN <= request.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {request.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )
        live = LiveRequest(request, self._live.arrivals_total)
        self._live.add(live)
        self.scheduler.waiting.add(live)

    def abort(
        self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT, *, now: float
    ) -> dict[RequestId, AbortResult]:
        """End requests, whatever they are doing. O(1) plus the blocks of each. Never raises for an id that is unknown
        or has finished; no token of an aborted request is delivered after this returns."""
        return self._live.abort(request_ids, reason, now)

    def schedule(self, now: float) -> StepPlan | None:
        """What to compute next; None when there is nothing to do, or whoever lives waits for the connector. The plan
        must come back to update_from_output before this is called again."""
        assert not self.flights, "a step is in flight"
        chunks, lives, admitted, preempted = self.scheduler.fill_step(now)
        if not chunks:
            assert not self.scheduler.running, "requests run but nothing can be computed"
            return None
        masks = self._guided.begin(chunks, lives)
        plan = StepPlan(
            self._steps_total,
            tuple(chunks),
            sum([chunk.count for chunk in chunks])
            + (sum(len(chunk.draft) for chunk in chunks) if self.settings.draft_tokens_max else 0),
            tuple(admitted),
            tuple(preempted),
            masks=masks,
        )
        self._begin(plan, lives, now)
        return plan

    @property
    def plans_ahead(self) -> bool:
        return self.settings.overlap_steps

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """What to compute after the one step that is in flight, as if every request of it went on: a token that it
        samples is named by its place (ScheduledChunk.awaits_token). A request that will have all its tokens by then is
        not planned again, nor is one that was aborted. None: nothing can be said yet, so that schedule() has to,
        once the step is back; among others whenever somebody would have to be preempted, or has a guide that has to
        know the token first. With steps_apart nobody is planned who is in the step in flight, and no token awaited."""
        assert self.settings.overlap_steps, "steps do not overlap here"
        assert self.settings.draft_tokens_max == 0, "nobody knows yet which draft tokens are right"
        assert 1 <= len(self.flights) < STEPS_IN_FLIGHT_MAX, f"{len(self.flights)} steps are in flight"
        chunks, lives, admitted = self.scheduler.fill_step_ahead(self.flights.last, now)
        if not chunks:
            return None
        token_count = sum(chunk.count for chunk in chunks)
        masks = self._guided.begin(chunks, lives)
        plan = StepPlan(
            self._steps_total,
            tuple(chunks),
            token_count,
            tuple(admitted),
            is_ahead=not self.settings.steps_apart,
            masks=masks,
        )
        self._begin(plan, lives, now)
        return plan

    def is_abandoned(self, plan: StepPlan) -> bool:
        """Whether the plan is in flight and every request in it was aborted, or has ended."""
        return self.flights.is_abandoned(plan)

    def abandonment(self, plan: StepPlan) -> IsAbandoned:
        """The same, for whoever computes the plan, which is in flight."""
        return self.flights.abandonment(plan)

    def drop_plan(self, plan: StepPlan, now: float) -> list[EngineEvent]:
        """The step of an abandoned plan ended without a result: let its requests go. Nothing of it is published, since
        nobody can say how far it came."""
        assert self.is_abandoned(plan), "somebody waits for this plan, or it is not out"
        lives = self._land(plan, now, is_whole=False)
        return [*self._live.drop(lives, now)]

    def update_from_output(self, plan: StepPlan, result: StepResult, now: float) -> list[EngineEvent]:
        """Take the response to `plan`, the oldest in flight: first the aborts that came while it ran, then the tokens
        of those that stay."""
        assert len(result.token_ids) == len(plan.chunks)
        lives = self._land(plan, now, is_whole=True)
        events: list[EngineEvent] = []
        staying: list[tuple[ScheduledChunk, LiveRequest, int | None]] = []
        publishes, block_size = self.settings.enable_prefix_caching, self.settings.block_size
        states = self.scheduler.states
        has_window = self.settings.window_tokens is not None
        chunks, token_ids = plan.chunks, result.token_ids
        lacking: Collection[RequestId] = result.errors
        if plan.is_ahead:
            chunks, token_ids = without_ended(plan, result, lives)
            lacking = {*result.errors, *lacking_ids(chunks, lives)}
        for chunk, live, token_id in zip(chunks, lives, token_ids, strict=True):
            live.steps_in_flight -= 1
            if not lacking or chunk.request.id not in lacking:
                # Computed is computed: the full blocks of a request that leaves now are as good as anybody's.
                live.computed_count += chunk.count
                if publishes and live.computed_count >= (live.chain.block_count + 1) * block_size:
                    marks = None if live.state is None else live.state.marks(block_size)
                    self.cache.publish(live.chain, live.tokens, live.computed_count, live.blocks, marks)
                if states is not None and live.state is not None:
                    states.note_computed(live.state, live.computed_count)
                if has_window:  # the drafts that were right come later, and leave more behind
                    self.scheduler.give_back_behind(live)
            if live.abort_reason is None:
                staying.append((chunk, live, token_id))
            elif live.steps_in_flight == 0:  # otherwise the step behind reads its blocks
                events.append(self._finish(live, live.abort_reason, now))
        self._advance(staying, result, now, events)
        if self.scheduler.model_drafts is not None:
            self.scheduler.model_drafts.note_times(plan, result)
        return events

    def preempt_all(self, now: float) -> list[RequestId]:
        """Whoever has blocks gives them back and waits again, in its old place: it is computed anew, with the tokens
        that it has. Legal while no step is in flight. Whoever waits for KV from elsewhere does so no longer, and
        computes it; blocks that are still written to are held for as long. What was computed can be found as before.
        Returns those that ran."""
        assert not self.flights, "a step reads their blocks"
        if self.transfers is not None:
            for live in self.transfers.give_up_loads(now):
                self.scheduler.start_over(live)
        return self.scheduler.preempt_all()

    def forget_prefixes(self) -> None:
        """Nothing that is computed by now is a hit for anybody. Legal at any moment: who uses blocks keeps them. What a
        connector keeps elsewhere it keeps."""
        self.cache.forget_all()

    def change_weights(self, salt_of: Callable[[RequestId], str | None]) -> None:
        """What is computed from here on, other weights compute. No step is in flight. salt_of: what the blocks of a
        live request are called by from here on. Whoever has KV goes on with it (unless preempt_all comes first): what
        weights of several versions compute is nobody else's."""
        assert not self.flights, "a step is in flight, and is of either weights"
        for live in self._live.values():
            request_id = live.request.id
            if live.blocks:
                live.rename_blocks(kept_salt(request_id), is_private=True)
            else:
                live.rename_blocks(salt_of(request_id), is_private=False)

    def on_transfer(self, event: TransferEvent, now: float) -> list[EngineEvent]:
        """The connector reports; legal at any moment. What is about nothing is counted and ignored. Returns the end of
        a request that may not go on without its KV."""
        return [] if self.transfers is None else self._go_on_without_kv(self.transfers.report(event, now), now)

    def progress(self, now: float) -> list[EngineEvent]:
        """Ask the connector what it has to report, and take it; once a step, and when it has said that there is
        something. Returns the ends of requests that may not go on without their KV."""
        return [] if self.transfers is None else self._go_on_without_kv(self.transfers.progress(now), now)

    def expire(self, now: float) -> list[EngineEvent]:
        """Let go whatever is overdue; cheap when nothing is. Legal at any moment. Returns the ends of requests that may
        not go on without their KV."""
        return [] if self.transfers is None else self._go_on_without_kv(self.transfers.expire(now), now)

    def next_deadline(self) -> float | None:
        """When expire() has something to do, unless a report comes first; None: nothing is waited for."""
        return None if self.transfers is None else self.transfers.next_deadline()

    def tell_hold_ends(self, told: Callable[[Hold, bool], None]) -> None:
        """Have `told` called when blocks are not held any more: what the hold was, and whether it expired. It must not
        call the core."""
        if self.transfers is not None:
            self.transfers.holds.on_end = told

    def held_block_count(self, request_id: RequestId) -> int:
        """Blocks of a request that is over which are held for another engine."""
        hold = None if self.transfers is None else self.transfers.holds.get(request_id, HoldKind.SEND)
        return 0 if hold is None else len(hold.blocks)

    def hold_of(self, request_id: RequestId) -> Hold | None:
        """What is held of a request that is over, for another engine; for a look, not for a change."""
        return None if self.transfers is None else self.transfers.holds.get(request_id, HoldKind.SEND)

    def blocks_of(self, request_id: RequestId) -> tuple[BlockIndex, ...]:
        """Those that a live request owns; none if it has none, or does not live."""
        live = self._live.get(request_id)
        return () if live is None else tuple(live.own_blocks)

    def block_states(self) -> bytes:
        """The BlockState of every block, a byte each. O(blocks), in C: costs nothing while nobody asks."""
        return self.pool.states()

    def idle_block_count(self, blocks: Iterable[BlockIndex]) -> int:
        """How many of these nobody uses or holds."""
        return sum(map(self.pool.is_idle, blocks))

    @property
    def latest_faults(self) -> Mapping[TransferFault, str]:
        """What went wrong with the connector last, of each kind that did."""
        return {} if self.transfers is None else self.transfers.faults.latest

    def stats(self) -> EngineStats:
        scheduler, transfers = self.scheduler, self.transfers
        blocks_held = 0 if transfers is None else self.pool.held_count
        blocks_free, blocks_cached = self.pool.free_count, self.pool.cached_count
        states = scheduler.states
        return EngineStats(
            running_count=len(scheduler.running),
            waiting_count=len(self._live) - len(scheduler.running),
            remote_kv_count=0 if transfers is None else transfers.loads.pending_count,
            blocks_total=self.pool.block_count,
            blocks_free=blocks_free,
            blocks_cached=blocks_cached,
            blocks_used=self.pool.block_count - blocks_free - blocks_cached - blocks_held,
            blocks_held=blocks_held,
            preemptions_total=scheduler.preemptions_total,
            blocks_given_back_total=scheduler.blocks_given_back_total,
            steps_total=self._steps_total,
            prefix_query_tokens_total=scheduler.prefix_query_tokens_total,
            prefix_hit_tokens_total=scheduler.prefix_hit_tokens_total,
            drafts_total=self._drafts_total,
            draft_tokens_total=self._draft_tokens_total,
            accepted_tokens_total=self._accepted_tokens_total,
            forced_tokens_total=self._guided.forced_tokens_total,
            loaded_tokens_total=0 if transfers is None else transfers.loaded_tokens_total,
            holds_refused_total=0 if transfers is None else transfers.holds_refused_total,
            transfer_faults_total={} if transfers is None else dict(transfers.faults.totals),
            states_total=0 if states is None else states.own.block_count,
            states_used=0 if states is None else states.own.used_count,
            snapshots_total=0 if states is None else states.snapshots.block_count,
            snapshots_kept=0 if states is None else states.kept_count,
        )

    def prompt_saved(self, request_id: RequestId) -> tuple[int, int]:
        """How many tokens of the prompt of a request that runs were found in the prefix cache when it first did, and
        how many were loaded from elsewhere. The rest it computes."""
        live = self._live[request_id]
        cached = min(live.cached_token_count or 0, live.prompt_count)
        return cached, min(live.loaded_token_count, live.prompt_count - cached)

    def live_requests(self) -> Iterable[LiveRequest]:
        """Every request that has not finished; for a look, not for a change."""
        return self._live.values()

    def _advance(
        self,
        staying: list[tuple[ScheduledChunk, LiveRequest, int | None]],
        result: StepResult,
        now: float,
        events: list[EngineEvent],
    ) -> None:
        """Take the tokens of the requests that stay: of nearly all of them one, and nothing else."""
        for chunk, live, token_id in staying:
            request = live.request
            if result.errors and request.id in result.errors:
                message = result.errors[request.id]
                if live.guide is not None:
                    message = live.guide.fault or message  # nothing could be chosen, and it says why
                events.append(self._finish(live, FinishReason.ERROR, now, message=message))
                continue
            if request.sampling.prompt_logprobs is not None:
                self._pass_on_prompt_logprobs(chunk, live, result, events)
            if not chunk.samples:
                if chunk.draft_task is not None and self.scheduler.model_drafts is not None:
                    self.scheduler.model_drafts.take(chunk, live, result)
                if chunk.pools:
                    events.append(PooledReady(request.id, result.pooled[request.id]))
                    events.append(self._finish(live, FinishReason.STOP, now))
                continue
            assert token_id is not None, f"{request.id}: the chunk samples, but no token came"
            reason = take_token(live, token_id)
            if reason is FinishReason.ERROR:
                events.append(self._finish_by_guide(live, reason, now))
                continue
            token_ids: tuple[int, ...] = (token_id,)
            logprobs: tuple[TokenLogprob, ...] | None = None
            if result.logprobs and request.id in result.logprobs:
                logprobs = (result.logprobs[request.id],)
            if chunk.draft:
                more, reason = self._take_draft(chunk, live, result.draft_token_ids[request.id], reason)
                token_ids += more
                if logprobs is not None:
                    logprobs += result.draft_logprobs[request.id][: len(more)]
            # With another step in flight the next token is sampled already, and free.
            if live.guide is not None and reason is None and live.steps_in_flight == 0:
                forced, reason = self._guided.take_forced(live)
                token_ids += forced
            if chunk.draft_task is not None and reason is None and self.scheduler.model_drafts is not None:
                self.scheduler.model_drafts.take(chunk, live, result)
            events.append(TokensReady(request.id, token_ids, logprobs))
            if reason is not None and live.guide is not None:
                events.append(self._finish_by_guide(live, reason, now))
            elif reason is not None:
                stop_token_id = live.tokens[-1] if reason is FinishReason.STOP else None
                events.append(self._finish(live, reason, now, stop_token_id=stop_token_id))

    def _check_known(self, request: EngineRequest) -> None:
        """Raises InvalidRequest."""
        assert request.pooling is None, f"{request.id} is pooled, and has known output"
        known = request.known_output
        if len(known) >= request.output_tokens_max:
            raise InvalidRequest(
                f"{len(known)} tokens of the response are known, and max_tokens is {request.output_tokens_max}: it has "
                "ended, there is nothing to go on with",
                param="resume.token_ids",
            )
        if not 0 <= min(known) <= max(known) < TOKEN_IDS_MAX:
            raise InvalidRequest(
                f"the known output has token ids outside 0 to {TOKEN_IDS_MAX - 1}", param="resume.token_ids"
            )

    def _check_pooled(self, request: EngineRequest) -> None:
        """Raises ContextTooLong."""
        assert request.pooling is not None, request.id
        assert request.output_tokens_max == 0, f"{request.id} is pooled, and is to have tokens"
        assert request.pooling.is_whole or self.settings.keeps_kv, f"{request.id}: without KV all is computed at once"
        prompt_count = len(request.prompt_token_ids)
        if prompt_count > self.settings.context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {self.settings.context_tokens_max} tokens, and the prompt has "
                f"{prompt_count}: shorten it",
                param="prompt",
            )
        if request.pooling.is_whole and prompt_count > self.settings.whole_tokens_max:
            raise ContextTooLong(
                f"the prompt has {prompt_count} tokens, and has to be computed in one step, which has room for "
                f"{self.settings.whole_tokens_max}: shorten it or raise --max-num-batched-tokens",
                param="prompt",
            )

    def _take_draft(
        self, chunk: ScheduledChunk, live: LiveRequest, sampled: tuple[int, ...], reason: FinishReason | None
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Go on behind the first new token of a request for as long as its draft tokens were right: the token that was
        sampled after an accepted draft token is the one that follows. Returns the further tokens, and why they end it,
        if they do. sampled: what follows each draft token. reason: why the first token ends it."""
        known_count = len(live.tokens)
        for draft_token, token_id in zip(chunk.draft, sampled, strict=False):
            if reason is not None or draft_token != live.tokens[-1]:
                break
            reason = take_token(live, token_id)
        accepted_count = len(live.tokens) - known_count
        # Behind the accepted draft tokens the KV is that of wrong ones: it is written anew when its turn comes.
        live.computed_count += accepted_count
        if self.settings.enable_prefix_caching:
            self.cache.publish(live.chain, live.tokens, live.computed_count, live.blocks)
        self.scheduler.give_back_behind(live)
        self.scheduler.give_back_rest(live)
        assert live.drafter is not None
        live.drafter.learn(len(chunk.draft), accepted_count)
        self._drafts_total += 1
        self._draft_tokens_total += len(chunk.draft)
        self._accepted_tokens_total += accepted_count
        return tuple(live.tokens[known_count:]), reason

    def _pass_on_prompt_logprobs(
        self, chunk: ScheduledChunk, live: LiveRequest, result: StepResult, events: list[EngineEvent]
    ) -> None:
        new: list[TokenLogprob | None] = []
        if live.prompt_logprobs_count == 0:
            new.append(None)  # nothing comes before the first token
        entries = result.prompt_logprobs.get(live.request.id, ())
        assert len(entries) == max(0, min(chunk.start + chunk.count, live.prompt_count - 1) - chunk.start)
        for position, entry in enumerate(entries, start=chunk.start + 1):
            if position >= live.prompt_logprobs_count + len(new):
                new.append(entry)
        if new:
            live.prompt_logprobs_count += len(new)
            events.append(PromptLogprobs(live.request.id, tuple(new)))

    def _begin(self, plan: StepPlan, lives: list[LiveRequest], now: float) -> None:
        self.flights.begin(plan, lives)
        self.scheduler.pace.begin(now, plan, lives)
        self._steps_total += 1

    def _land(self, plan: StepPlan, now: float, *, is_whole: bool) -> list[LiveRequest]:
        """The plan has come back, computed to its end or not: its requests, without those that had ended before it. The
        blocks of these are free, or held by a connector."""
        lives = self.flights.end(plan)
        self.scheduler.pace.end(now, is_whole=is_whole)
        self._guided.end(plan)
        if not self.flights.ended:
            return lives
        lives = [live for live in lives if live.request.id not in self.flights.ended]
        for live, reason in self.flights.take_ended():
            live.steps_in_flight -= 1
            self._let_go(live, reason, now)
            if self.transfers is not None and live.abort_reason is not None:
                self.transfers.aborted_after_finish(live.request.id)
        return lives

    def _abort_after_finish(self, request_id: RequestId, reason: FinishReason) -> None:
        """The connector is told, now or when it gets to hold the blocks."""
        if self.transfers is None:
            return
        if request_id in self.flights.ended:
            self.flights.ended[request_id][0].abort_reason = reason
        else:
            self.transfers.aborted_after_finish(request_id)

    def _go_on_without_kv(self, unserved: list[Unserved], now: float) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for live, message in unserved:
            if self.settings.load_failure_policy == "fail":
                message = f"the KV of this prompt could not be loaded: {message}"
                events.append(self._finish(live, FinishReason.ERROR, now, message=message))
            else:
                self.scheduler.start_over(live)
        return events

    def _finish(
        self,
        live: LiveRequest,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        message: str | None = None,
    ) -> RequestFinished:
        """The one way out. The blocks are back when this returns, or a connector holds them; or, if a step that was
        planned ahead reads them once more, they are in its update."""
        phase = live.phase
        kv_transfer = None
        if live.steps_in_flight == 0:
            kv_transfer = self._let_go(live, reason, now)
        else:
            live.move(RequestStatus.ENDED)
            self.scheduler.leave_batch(live)
            self.flights.end_early(live, reason)
        request_id = live.request.id
        self._live.forget(request_id)
        return RequestFinished(
            request_id=request_id,
            reason=reason,
            phase=phase,
            stop_token_id=stop_token_id,
            cached_token_count=min(live.cached_token_count or 0, live.prompt_count),
            message=message,
            kv_transfer=kv_transfer,
        )

    def _finish_by_guide(self, live: LiveRequest, reason: FinishReason, now: float) -> RequestFinished:
        """The end of a request with a guide: its form may be complete without an end token."""
        assert live.guide is not None
        is_stopped = reason is FinishReason.STOP and live.tokens[-1] in live.request.stop_token_ids
        message = live.guide.fault if reason is FinishReason.ERROR else None
        return self._finish(live, reason, now, stop_token_id=live.tokens[-1] if is_stopped else None, message=message)

    def _let_go(self, live: LiveRequest, reason: FinishReason, now: float) -> KVTransferParams | None:
        """Give its blocks back, once; a connector may hold them from now on. Returns how to get at those."""
        assert live.steps_in_flight == 0, f"{live.request.id} is read by a step"
        kv_transfer = None if self.transfers is None else self.transfers.request_ends(live, reason, now)
        self.scheduler.release(live)
        live.move(RequestStatus.FINISHED)
        return kv_transfer
