"""EngineCore makes the decisions of one engine as one synchronous object. It never computes or waits, and has no clock.

A step has this order: schedule, forward pass, pending aborts, update_from_output, delivery. An abort is allowed at any
moment. If no step in flight reads the request's blocks, they are freed at once. Otherwise the request is marked, and
the next update_from_output ends marked requests before it processes results. So aborts come first even if the step loop
calls nothing else.

A request may have a guide, which decides which tokens may come next (guided_steps.py).

With overlap_steps, the next step may be planned while another step is in flight (schedule_ahead). steps_in_flight.py
describes the consequences.

Methods that may start or end a wait for a connector have the time as an argument, in seconds of any clock that never
goes back. The caller calls expire() when next_deadline() has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.events import (
    AbortResult,
    EngineEvent,
    FinishReason,
    PoolingReady,
    PromptLogprobs,
    RequestFinished,
    TokenLogprob,
    TokensReady,
)
from trioserve.contracts.guide import MaskMaker
from trioserve.contracts.ids import BlockIndex, RequestId, hash_block
from trioserve.contracts.kv_transfer import HoldKind, KVConnector, TransferEvent, TransferFault
from trioserve.contracts.page import EngineStats
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN, EngineRequest, KVTransferParams, Retention
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.weights import kept_salt
from trioserve.core.block_holds import Hold
from trioserve.core.guided_steps import GuidedSteps, append_token
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefetches import Prefetches
from trioserve.core.prefix_cache import HashBlock, PrefixCache
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.core.scheduler import Scheduler
from trioserve.core.sessions import Sessions
from trioserve.core.settings import CoreSettings
from trioserve.core.steps_in_flight import STEPS_IN_FLIGHT_MAX, RequestTable, StepsInFlight, lacking_ids, without_ended
from trioserve.core.transfers import Transfers, Unserved

__all__ = ["EngineCore"]

TOKEN_IDS_MAX = 2**32  # Block hashes use 4 bytes per token id. The vocabulary size was checked before.
# Maximum number of evicted blocks whose tokens are kept for lookups (evicted_names.py), per block of the pool and of a
# full context. Each needs about 1 KB.
NAMES_MAX_FACTOR = 4


class EngineCore:
    """Makes the decisions of one engine. Not thread-safe: all calls come from the thread of the event loop.

    Args:
        settings: limits of the engine core.
        hash_block: hash of a block, from the hash of its parent and its tokens.
        connector: moves KV between engines. If it is None, no KV is moved.
        mask_maker: creates token masks for guides. If it is None, no request may have a guide.
    """

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
        assert connector is None or settings.state_slot_count == 0, "a connector cannot carry states"
        self.transfers = None if connector is None else Transfers(settings, self.pool, connector)
        self.has_connector = connector is not None
        self.sessions = Sessions(settings, self.pool)
        self.prefetches = Prefetches(settings, self.pool, self.cache, self.sessions, self.transfers)
        loads = None if self.transfers is None else self.transfers.loads
        self.scheduler = Scheduler(settings, self.pool, self.cache, self.sessions, self.prefetches, loads)
        self.flights = StepsInFlight[StepPlan, LiveRequest]()
        self._guided = GuidedSteps(mask_maker)
        self._live = RequestTable[LiveRequest](self.flights, self._finish, self._abort_after_finish)
        self._steps_total = 0
        self._drafts_total = 0
        self._draft_tokens_total = 0
        self._accepted_tokens_total = 0

    def add(self, request: EngineRequest) -> None:
        """Add a request to the waiting queue.

        Args:
            request: the request. Its id must not be the id of a live request, or of a finished request whose blocks are
                still held or read.

        Raises:
            InvalidRequest: this engine can never run the request. Nothing was changed.
        """
        assert request.id not in self._live, f"{request.id} is in use"
        assert request.id not in self.flights.ended, f"{request.id} is still read by a step"
        assert self.transfers is None or not self.transfers.holds.has(request.id), f"{request.id} is held"
        assert request.guide is None or self._guided.has_masks, f"{request.id} has a guide, but there is no mask maker"
        prompt_count = len(request.prompt_token_ids)
        if prompt_count == 0:
            raise InvalidRequest("the prompt has no tokens: send at least one", param="prompt")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < TOKEN_IDS_MAX:
            raise InvalidRequest(f"the prompt has token ids outside 0 to {TOKEN_IDS_MAX - 1}", param="prompt")
        if request.pooling is not None:
            self._check_pooling(request)
        elif request.output_tokens_max < 1:
            raise InvalidRequest(
                f"max_tokens is {request.output_tokens_max}, the engine needs at least 1", param="max_tokens"
            )
        elif prompt_count + request.output_tokens_max > self.settings.context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {self.settings.context_tokens_max} tokens, prompt and "
                f"response together, but the prompt has {prompt_count} and max_tokens asks for "
                f"{request.output_tokens_max}: shorten the prompt, lower max_tokens, or raise max_model_len",
                param="max_tokens",
            )
        if request.resumed_output:
            self._check_known(request)
        if not PRIORITY_MIN <= request.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {request.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )
        live = LiveRequest(request, self._live.arrivals_total)
        if live.joint_tokens_max > self.settings.whole_tokens_max:
            raise InvalidRequest(
                f"an image has {live.joint_tokens_max} tokens that must be computed in one step, but a step has at "
                f"most {self.settings.whole_tokens_max} tokens for them: raise max_num_batched_tokens",
                param="messages",
            )
        live.session = self.sessions.join(request)
        self.prefetches.note_turn(live)
        self._live.add(live)
        self.scheduler.waiting.add(live)

    def abort(
        self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT, *, now: float
    ) -> dict[RequestId, AbortResult]:
        """End requests in any state. No token of an aborted request is delivered after this call.

        Args:
            request_ids: ids to abort. Unknown ids and ids of finished requests are allowed.
            reason: reported as the finish reason.
            now: time in seconds.

        Returns:
            The outcome for each id.

        Cost:
            O(1), plus the number of blocks of each request.
        """
        self.sessions.advance(now)
        return self._live.abort(request_ids, reason, now)

    def open_session(self, session: str, retention: Retention, now: float) -> None:
        """Open a session, or change the retention of an open session.

        The prefix cache prefers to keep the blocks of open sessions between two turns. A request whose session is not
        open opens it with the default retention.

        Args:
            session: id of the session, unique among all callers.
            retention: how strongly the session's blocks are preferred.
            now: time in seconds.
        """
        self.sessions.open(session, retention, now)

    def end_session(self, session: str, now: float) -> None:
        """End a session. This call is allowed at any moment and any number of times. Requests of the session continue.

        Blocks that only requests of this session have used are evicted first from now on.

        Args:
            session: id of any session.
            now: time in seconds.
        """
        self.sessions.end(session, now)

    def hint_session(self, session: str, seconds: float, now: float) -> None:
        """Note that the caller expects the next turn of a session. Unknown sessions are ignored.

        Args:
            session: id of any session.
            seconds: expected time until the next turn, at least 0 and at most the session's idle_seconds. Other values
                are limited. The preference for the session's blocks starts again, and lasts for this time plus
                idle_seconds. With session_prefetch, the session's evicted blocks are loaded shortly before this time.
            now: time in seconds.
        """
        seconds = self.sessions.hint(session, seconds, now)
        hinted = self.sessions.get(session)
        if hinted is not None:
            self.prefetches.expect(session, hinted, now + seconds, now)
            self._start_prefetches(now)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step. No step may be in flight.

        Args:
            now: time in seconds.

        Returns:
            A plan that the caller must pass to update_from_output or drop_plan. None if there is no live request, or if
            all live requests wait for the connector.
        """
        assert not self.flights, "a step is in flight"
        self.sessions.advance(now)
        if self.scheduler.deferred.turns:
            self.scheduler.deferred.expire(now)
        chunks, lives, token_count, admitted, preempted = self.scheduler.fill_step(now)
        if not chunks:
            assert not self.scheduler.running, "requests run but nothing can be computed"
            return None
        return self._begin(chunks, lives, token_count, admitted, preempted, now)

    @property
    def plans_ahead(self) -> bool:
        return self.settings.overlap_steps

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Plan the next step while one step is in flight, as if all requests of that step continued.

        The planned step refers to a token that the step in flight samples by the token's position
        (ScheduledChunk.awaits_token). The planned step does not contain requests that were aborted, or that have all
        their tokens after the step in flight. With steps_apart, it contains no request of the step in flight, and
        awaits no token.

        Args:
            now: time in seconds.

        Returns:
            A plan. None if schedule() must plan this step after the step in flight has returned. Possible reasons are a
            request that would have to be preempted, and a guide that needs the next token before it can restrain the
            following token.
        """
        assert self.settings.overlap_steps, "steps do not overlap here"
        assert self.settings.draft_tokens_max == 0, "draft tokens of the step in flight are not verified yet"
        assert 1 <= len(self.flights) < STEPS_IN_FLIGHT_MAX, f"{len(self.flights)} steps are in flight"
        self.sessions.advance(now)
        if self.scheduler.deferred.turns:
            self.scheduler.deferred.expire(now)
        chunks, lives, token_count, admitted = self.scheduler.fill_step_ahead(self.flights.last, now)
        if not chunks:
            return None
        return self._begin(chunks, lives, token_count, admitted, (), now, is_ahead=not self.settings.steps_apart)

    def drop_plan(self, plan: StepPlan, now: float) -> list[EngineEvent]:
        """End an abandoned plan that has no result. Its blocks are not registered in the prefix cache, because nobody
        knows how far the step was computed.

        Args:
            plan: a plan in flight that is abandoned.
            now: time in seconds.

        Returns:
            The ends of the plan's requests.
        """
        assert self.flights.is_abandoned(plan), "the plan is not in flight, or a request waits for it"
        lives = self._land(plan, now, is_whole=False)
        return [*self._live.drop(lives, now)]

    def update_from_output(self, plan: StepPlan, result: StepResult, now: float) -> list[EngineEvent]:
        """Apply the result of the oldest plan in flight.

        First, end the requests that were aborted while the plan was computed. Then append the new tokens to the other
        requests.

        Args:
            plan: the oldest plan in flight.
            result: the result of computing the plan.
            now: time in seconds.

        Returns:
            New tokens and ends of requests, to be delivered.
        """
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
                # Publish the full blocks of aborted requests too, because these blocks are completely computed.
                live.computed_count += chunk.count
                if publishes and live.computed_count >= (live.chain.block_count + 1) * block_size:
                    marks = None if live.state is None else live.state.marks(block_size)
                    self.cache.publish(live.chain, live.tokens, live.computed_count, live.blocks, marks)
                if states is not None and live.state is not None:
                    states.note_computed(live.state, live.computed_count)
                if has_window:  # Wrong draft tokens are handled later, and may free more blocks.
                    self.scheduler.free_blocks_behind_window(live)
            if live.abort_reason is None:
                staying.append((chunk, live, token_id))
            elif live.steps_in_flight == 0:  # If a later step is in flight, it still reads the blocks.
                events.append(self._finish(live, live.abort_reason, now))
        self._advance(staying, result, now, events)
        if self.scheduler.model_drafts is not None:
            self.scheduler.model_drafts.note_times(plan, result)
        return events

    def preempt_all(self, now: float) -> list[RequestId]:
        """Free the blocks of all requests. The requests return to their old positions in the queue.

        The requests later compute the KV of their known tokens again. Loads from other engines are cancelled, and their
        requests compute the KV in this engine. Blocks that a connector may still write to are held. Cached blocks can
        still be found. No step may be in flight.

        Args:
            now: time in seconds.

        Returns:
            Ids of the requests that were running.
        """
        assert not self.flights, "a step in flight reads the blocks"
        if self.transfers is not None:
            self.prefetches.cancel_all(now)
            for live in self.transfers.abandon_loads(now):
                self.scheduler.start_over(live)
        return self.scheduler.preempt_all()

    def forget_prefixes(self) -> None:
        """Remove all blocks from the prefix cache. Requests that use such blocks keep them.

        Copies that a connector stores outside of this engine are not affected. This call is allowed at any moment.
        """
        self.cache.forget_all()

    def limit_blocks(self, count: int) -> None:
        """Use only the first `count` KV blocks from now on. This call is allowed at any moment.

        Blocks that are in use at a higher index stay in use until their requests and holds release them.

        Args:
            count: number of blocks. At least enough for one full context, at most settings.block_count.

        Raises:
            InvalidRequest: count is out of range.
        """
        least = self.settings.blocks_held_max(self.settings.context_tokens_max)
        if not least <= count <= self.settings.block_count:
            sizes = [f"{blocks * self.settings.block_size}" for blocks in (count, least, self.settings.block_count)]
            raise InvalidRequest(
                f"a KV cache of {sizes[0]} tokens is requested, allowed are {sizes[1]}, for one full context, to "
                f"{sizes[2]}, the size at the start",
                param="tokens",
            )
        self.pool.set_limit(count)

    def change_weights(self, salt_of: Callable[[RequestId], str | None]) -> None:
        """Note that other weights compute all following steps. No step may be in flight.

        A request that has KV continues with this KV. To prevent that, call preempt_all first. The request's blocks
        become private, because they contain KV of two versions of the weights.

        Args:
            salt_of: returns the cache salt for the blocks that a live request computes from now on.
        """
        assert not self.flights, "a step is in flight, and its weights are ambiguous"
        self.prefetches.forget_turns()
        for live in self._live.values():
            request_id = live.request.id
            if live.blocks:
                live.rename_blocks(kept_salt(request_id), is_private=True)
            else:
                live.rename_blocks(salt_of(request_id), is_private=False)

    def on_transfer(self, event: TransferEvent, now: float) -> list[EngineEvent]:
        """Handle a report of the connector. This call is allowed at any moment. Unknown reports are counted and
        ignored.

        Args:
            event: the report.
            now: time in seconds.

        Returns:
            The end of a request that cannot continue without its KV.
        """
        return [] if self.transfers is None else self._resume_without_kv(self.transfers.report(event, now), now)

    def progress(self, now: float) -> list[EngineEvent]:
        """Get the connector's reports and handle them.

        Call this once per step, and whenever the connector has called `wake`.

        Args:
            now: time in seconds.

        Returns:
            The ends of requests that cannot continue without their KV.
        """
        return [] if self.transfers is None else self._resume_without_kv(self.transfers.progress(now), now)

    def expire(self, now: float) -> list[EngineEvent]:
        """End overdue holds, loads and deferrals. This call is allowed at any moment, and cheap if nothing is overdue.

        Args:
            now: time in seconds.

        Returns:
            The ends of requests that cannot continue without their KV.
        """
        if self.scheduler.deferred.turns:
            self.sessions.advance(now)
            self.scheduler.deferred.expire(now)
        if self.transfers is None:
            return []
        if self.prefetches.is_on:
            self._start_prefetches(now)  # Before the deadlines, because a load that cannot start is overdue at once.
        return self._resume_without_kv(self.transfers.expire(now), now)

    def next_deadline(self) -> float | None:
        """Return the time at which expire() and schedule() must be called, unless the connector's report comes first.

        Returns:
            The time in seconds. None if no hold and no load is pending, no turn is deferred and no prefetch is planned.
        """
        deadline = None if self.transfers is None else self.transfers.next_deadline()
        starts_at = self.prefetches.next_start() if self.prefetches.is_on else None
        if starts_at is not None:
            deadline = starts_at if deadline is None else min(deadline, starts_at)
        if not self.scheduler.deferred.turns:
            return deadline
        # A deferral also ends when no session is expected any more.
        ends_at = min(self.scheduler.deferred.next_deadline(), self.sessions.next_change())
        return ends_at if deadline is None else min(deadline, ends_at)

    def notify_hold_ends(self, on_end: Callable[[Hold, bool], None]) -> None:
        """Register a function that is called when the hold on blocks has ended.

        Args:
            on_end: called with the hold, and with True if the hold expired. It must not call the core.
        """
        if self.transfers is not None:
            self.transfers.holds.on_end = on_end

    def held_block_count(self, request_id: RequestId) -> int:
        """Return the number of blocks of a finished request that are held for another engine.

        Args:
            request_id: id of any request.
        """
        hold = None if self.transfers is None else self.transfers.holds.get(request_id, HoldKind.SEND)
        return 0 if hold is None else len(hold.blocks)

    def hold_of(self, request_id: RequestId) -> Hold | None:
        """Return the hold on a finished request's blocks for another engine. None if there is no such hold. The caller
        must not change it.

        Args:
            request_id: id of any request.
        """
        return None if self.transfers is None else self.transfers.holds.get(request_id, HoldKind.SEND)

    def blocks_of(self, request_id: RequestId) -> tuple[BlockIndex, ...]:
        """Return the blocks that a request owns. The tuple is empty if the request owns no blocks or is not live.

        Args:
            request_id: id of any request.
        """
        live = self._live.get(request_id)
        return () if live is None else tuple(live.own_blocks)

    def block_states(self) -> bytes:
        """Return the BlockState of every block, one byte each. The cost is O(blocks), in C."""
        return self.pool.states()

    def idle_block_count(self, blocks: Iterable[BlockIndex]) -> int:
        """Return how many of the given blocks have no users and no holds.

        Args:
            blocks: the given blocks.
        """
        return sum(map(self.pool.is_idle, blocks))

    @property
    def latest_faults(self) -> Mapping[TransferFault, str]:
        """Return the text of the connector's latest fault of each kind."""
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
            blocks_total=(blocks_total := self.pool.total_count),
            blocks_free=blocks_free,
            blocks_cached=blocks_cached,
            blocks_used=blocks_total - blocks_free - blocks_cached - blocks_held,
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
            sessions_active=self.sessions.active_count,
            sessions_waiting=len(self.sessions) - self.sessions.active_count,
            blocks_retained=self.pool.order.retained_count,
            blocks_spared=self.pool.order.spared_count,
            session_hits_total=self.sessions.hits_total,
            session_hit_tokens_total=self.sessions.hit_tokens_total,
            spared_tokens_total=self.pool.order.spared_hits_total * self.settings.block_size,
            turns_deferred_total=self.scheduler.deferred.total,
            evictions_total=dict(self.pool.order.evictions_total),
            session_prefetches_total=dict(self.prefetches.results_total),
            session_prefetched_tokens_total=self.prefetches.tokens_total,
        )

    def prompt_saved(self, request_id: RequestId) -> tuple[int, int]:
        """Return how many prompt tokens a running request did not have to compute.

        Args:
            request_id: id of a live request.

        Returns:
            The number of tokens found in the prefix cache when the request first ran, and the number of tokens loaded
            by the connector.
        """
        live = self._live[request_id]
        cached = min(live.cached_token_count or 0, live.prompt_count)
        return cached, min(live.loaded_token_count, live.prompt_count - cached)

    def live_requests(self) -> Iterable[LiveRequest]:
        """Return every request that has not finished, in order of arrival. The caller must not change them."""
        return self._live.values()

    def _advance(
        self,
        staying: list[tuple[ScheduledChunk, LiveRequest, int | None]],
        result: StepResult,
        now: float,
        events: list[EngineEvent],
    ) -> None:
        """Append the new tokens to each continuing request. In nearly all steps, a request gets exactly one token."""
        for chunk, live, token_id in staying:
            request = live.request
            if result.errors and request.id in result.errors:
                message = result.errors[request.id]
                if live.guide is not None:
                    message = live.guide.fault or message  # The guide's message says why no token could be chosen.
                events.append(self._finish(live, FinishReason.ERROR, now, message=message))
                continue
            if request.sampling.prompt_logprobs is not None:
                self._pass_on_prompt_logprobs(chunk, live, result, events)
            if not chunk.samples:
                if chunk.draft_task is not None and self.scheduler.model_drafts is not None:
                    self.scheduler.model_drafts.take(chunk, live, result)
                if chunk.pools:
                    events.append(PoolingReady(request.id, result.pooled[request.id]))
                    events.append(self._finish(live, FinishReason.STOP, now))
                continue
            assert token_id is not None, f"{request.id}: the chunk samples, but the result has no token"
            reason = append_token(live, token_id)
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
            # If another step is in flight, that step already samples the next token without a mask.
            if live.guide is not None and reason is None and live.steps_in_flight == 0:
                forced, reason = self._guided.append_forced(live)
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
        """Check the known output of a resumed request.

        Raises:
            InvalidRequest: the known output is already complete, or contains invalid token ids.
        """
        assert request.pooling is None, f"{request.id} is pooled, but has known output"
        known = request.resumed_output
        if len(known) >= request.output_tokens_max:
            raise InvalidRequest(
                f"{len(known)} tokens of the response are known, and max_tokens is {request.output_tokens_max}: the "
                "response is complete and cannot be resumed",
                param="resume.token_ids",
            )
        if not 0 <= min(known) <= max(known) < TOKEN_IDS_MAX:
            raise InvalidRequest(
                f"the known output has token ids outside 0 to {TOKEN_IDS_MAX - 1}", param="resume.token_ids"
            )

    def _check_pooling(self, request: EngineRequest) -> None:
        """Check the length of a pooled request.

        Raises:
            ContextTooLong: the prompt is longer than the context. Or the prompt must be computed in one step, and is
                longer than one step.
        """
        assert request.pooling is not None, request.id
        assert request.output_tokens_max == 0, f"{request.id} is pooled, but output_tokens_max is not 0"
        assert request.pooling.is_whole or self.settings.keeps_kv, f"{request.id} needs KV to be computed in chunks"
        prompt_count = len(request.prompt_token_ids)
        if prompt_count > self.settings.context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {self.settings.context_tokens_max} tokens, and the prompt has "
                f"{prompt_count}: shorten it, or raise max_model_len",
                param="prompt",
            )
        if request.pooling.is_whole and prompt_count > self.settings.whole_tokens_max:
            raise ContextTooLong(
                f"the prompt has {prompt_count} tokens and must be computed in one step, but a step has at most "
                f"{self.settings.whole_tokens_max} tokens for it: shorten it or raise max_num_batched_tokens",
                param="prompt",
            )

    def _take_draft(
        self, chunk: ScheduledChunk, live: LiveRequest, sampled: tuple[int, ...], reason: FinishReason | None
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Accept the draft tokens that follow the first new token, up to the first wrong draft token.

        The token that was sampled after the last accepted draft token becomes the next token of the request.

        Args:
            chunk: the request's chunk in the step.
            live: the request. The first new token is already appended.
            sampled: the token that was sampled after each draft token.
            reason: finish reason of the first new token. None if that token does not end the request.

        Returns:
            The tokens after the first new token. And the finish reason if these tokens end the request.
        """
        known_count = len(live.tokens)
        for draft_token, token_id in zip(chunk.draft, sampled, strict=False):
            if reason is not None or draft_token != live.tokens[-1]:
                break
            reason = append_token(live, token_id)
        accepted_count = len(live.tokens) - known_count
        # The KV of rejected draft tokens is wrong. Later steps overwrite it.
        live.computed_count += accepted_count
        if self.settings.enable_prefix_caching:
            self.cache.publish(live.chain, live.tokens, live.computed_count, live.blocks)
        self.scheduler.free_blocks_behind_window(live)
        self.scheduler.free_draft_blocks(live)
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
            new.append(None)  # The first token of a prompt has no logprob.
        entries = result.prompt_logprobs.get(live.request.id, ())
        assert len(entries) == max(0, min(chunk.start + chunk.count, live.prompt_count - 1) - chunk.start)
        for position, entry in enumerate(entries, start=chunk.start + 1):
            if position >= live.prompt_logprobs_count + len(new):
                new.append(entry)
        if new:
            live.prompt_logprobs_count += len(new)
            events.append(PromptLogprobs(live.request.id, tuple(new)))

    def _begin(
        self,
        chunks: list[ScheduledChunk],
        lives: list[LiveRequest],
        token_count: int,
        admitted: Sequence[RequestId],
        preempted: Sequence[RequestId],
        now: float,
        *,
        is_ahead: bool = False,
    ) -> StepPlan:
        masks = self._guided.begin(chunks, lives)
        plan = StepPlan(
            self._steps_total,
            tuple(chunks),
            token_count,
            tuple(admitted),
            tuple(preempted),
            is_ahead=is_ahead,
            masks=masks,
        )
        self.flights.begin(plan, lives)
        self.scheduler.pace.begin(now, plan)
        self._steps_total += 1
        return plan

    def _land(self, plan: StepPlan, now: float, *, is_whole: bool) -> list[LiveRequest]:
        """Remove a returned plan from the plans in flight.

        Returns:
            The requests of the plan that had not ended before. The blocks of requests that had ended are freed, or held
            by a connector.
        """
        self.sessions.advance(now)
        lives = self.flights.end(plan)
        self.scheduler.pace.end(now, is_whole=is_whole)
        if plan.masks is not None:
            self._guided.end(plan)
        if not self.flights.ended:
            return lives
        lives = [live for live in lives if live.request.id not in self.flights.ended]
        for live, reason in self.flights.pop_ended():
            live.steps_in_flight -= 1
            self._release(live, reason, now)
            if self.transfers is not None and live.abort_reason is not None:
                self.transfers.aborted_after_finish(live.request.id)
        return lives

    def _abort_after_finish(self, request_id: RequestId, reason: FinishReason) -> None:
        """Notify the connector of an abort, either at once or when the connector begins to hold the blocks."""
        if self.transfers is None:
            return
        if request_id in self.flights.ended:
            self.flights.ended[request_id][0].abort_reason = reason
        else:
            self.transfers.aborted_after_finish(request_id)

    def _start_prefetches(self, now: float) -> None:
        starts_at = self.prefetches.next_start()
        if starts_at is not None and starts_at <= now:
            self.sessions.advance(now)  # Blocks of sessions that were idle for too long are spare.
            self.prefetches.start_due(now, has_waiting=len(self._live) > len(self.scheduler.running))

    def _resume_without_kv(self, unserved: list[Unserved], now: float) -> list[EngineEvent]:
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
        """End a request. Every request ends with a call of this method.

        After this call, the request's blocks are free or held by a connector. If a step that was planned ahead still
        reads the blocks, they are freed in the update of that step.
        """
        phase = live.phase
        kv_transfer = None
        if live.steps_in_flight == 0:
            kv_transfer = self._release(live, reason, now)
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
        """End a request with a guide. Its output may be complete without an end token."""
        assert live.guide is not None
        is_stopped = reason is FinishReason.STOP and live.tokens[-1] in live.request.stop_token_ids
        message = live.guide.fault if reason is FinishReason.ERROR else None
        return self._finish(live, reason, now, stop_token_id=live.tokens[-1] if is_stopped else None, message=message)

    def _release(self, live: LiveRequest, reason: FinishReason, now: float) -> KVTransferParams | None:
        """Release a request's blocks, exactly once. After this call, a connector may hold them.

        Returns:
            Parameters with which another engine can read the held blocks.
        """
        assert live.steps_in_flight == 0, f"{live.request.id} is read by a step"
        self.prefetches.note_turn_end(live, reason)
        kv_transfer = None if self.transfers is None else self.transfers.request_ends(live, reason, now)
        self.scheduler.release(live)
        if live.session is not None:
            self.sessions.leave(live.session)
        live.move(RequestStatus.FINISHED)
        return kv_transfer
