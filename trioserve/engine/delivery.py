"""What a step has brought, as text in the hands of the readers; and the end of a sequence, however it comes.

Knows every sequence that the core knows, also those whose reader has left already. Everything here is synchronous and
runs between two steps, or, ending a request, at any moment.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import trio

from trioserve.contracts.events import (
    EngineEvent,
    FinishReason,
    Phase,
    PooledReady,
    PromptLogprobs,
    RequestFinished,
    TokenLogprob,
    TokensReady,
)
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.output import Delta
from trioserve.contracts.step import StepPlan
from trioserve.core.block_holds import Hold
from trioserve.core.engine import EngineCore
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.engine.request_metrics import WHOLE, RequestMetrics
from trioserve.engine.step_watch import StepWatch
from trioserve.engine.token_timings import Cancelled, TokenTimings
from trioserve.metrics.registry import Metrics

__all__ = ["Delivery"]

logger = logging.getLogger(__name__)

MAY_BE_HELD = (*WHOLE, FinishReason.HANDED_OVER)


class WatchesCancels(Protocol):
    """Who wants to know what cancels free."""

    def note_cancelled(self, request: OpenRequest, ids: Sequence[RequestId], reason: FinishReason) -> None:
        """A request ends by another hand than its own; ids: of its sequences that the core has, still with their
        blocks. To be called also for one that is over; nothing to do then."""

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        """A sequence that was cancelled has no blocks any more: how many steps ended meanwhile, and how long it
        took."""


class NobodyWatches:
    """The same for nobody."""

    def note_cancelled(self, request: OpenRequest, ids: Sequence[RequestId], reason: FinishReason) -> None:
        pass

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        pass


class Delivery:
    """wake: called when the step loop may have something new to see to. step_watch: told of each step. cancels: told
    of each cancel. weight_version: of the weights that sample; None: they were never replaced."""

    def __init__(
        self,
        core: EngineCore,
        metrics: Metrics,
        *,
        wake: Callable[[], None],
        step_watch: StepWatch | None = None,
        cancels: WatchesCancels | None = None,
        weight_version: str | None = None,
    ) -> None:
        self._cancels = cancels or NobodyWatches()
        self._core = core
        self._metrics = metrics
        self._wake = wake
        self._step_watch = step_watch or StepWatch()
        self._choices: dict[RequestId, Choice] = {}
        # Aborted while a step reads their blocks; None: it was their own text that ended them.
        self._cancelled: dict[RequestId, Cancelled | None] = {}
        self._timings = TokenTimings(metrics)
        self._requests = RequestMetrics(metrics)
        self._held: dict[RequestId, Choice] = {}  # over, and their blocks are held for another engine
        self._faults_told: set[TransferFault] = set()
        self._plans: deque[StepPlan] = deque()  # that have not been delivered, the oldest first
        self.has_brought = False  # a step has brought somebody something
        self._weight_version = weight_version
        core.tell_hold_ends(self._on_hold_end)

    def __len__(self) -> int:
        """Sequences that the core has."""
        return len(self._choices)

    @property
    def held_count(self) -> int:
        """Sequences that are over and held for another engine."""
        return len(self._held)

    def held_block_count(self, request: OpenRequest) -> int:
        """Blocks that are held of a request for another engine."""
        return sum(self._core.held_block_count(choice.sequence_id) for choice in request.choices if choice.is_held)

    def add(self, choice: Choice) -> None:
        """The core has the choice's sequence now."""
        self._choices[choice.sequence_id] = choice
        choice.request.core_count += 1
        if self._weight_version is not None:
            choice.output.use_weights(self._weight_version)

    def use_weights(self, version: str) -> None:
        """What steps bring from here on was sampled by weights of this version."""
        self._weight_version = version
        for choice in self._choices.values():
            choice.output.use_weights(version)

    # --- ends that come from outside ---

    def end(self, request: OpenRequest, reason: FinishReason) -> None:
        """Abort what of a request the core still has. From here on nothing of it is delivered, and no more begun."""
        if not request.is_finished:
            request.trace.cancelled(reason.value)
        request.upcoming.clear()
        cancelled = self._timings.cancelled(trio.current_time())
        ids = [choice.sequence_id for choice in request.choices if choice.sequence_id in self._choices]
        self._cancels.note_cancelled(request, ids, reason)
        results = self._core.abort(ids, reason, now=cancelled.at)
        now = trio.current_time()
        for sequence_id, result in results.items():
            if result.finished is not None:
                self._let_go(result.finished, now, reason)
                self._note_abort(result.finished, cancelled, now)
            else:
                self._cancelled.setdefault(sequence_id, cancelled)
        if not request.core_count:
            request.on_gone()
        self._wake()  # what a connector still needs of them has a deadline

    def hand_over(self, request: OpenRequest) -> bool:
        """End a request that another engine goes on with, at the latest when the step in flight has come back: its
        reader gets a last delta with HANDED_OVER, of one choice. What that one has computed is held, where there is a
        connector. False: nothing of it is in the core, or there is nothing to go on with."""
        choices = [choice for choice in request.choices if choice.sequence_id in self._choices and not choice.is_ended]
        if request.upcoming or not choices or any(choice.is_mute for choice in choices):
            return False
        first, *others = choices
        now = trio.current_time()
        request.is_hold_kept = request.is_given_away = True
        request.kv_transfer = request.kv_transfer or KVTransferParams(do_remote_decode=True)
        for choice in others:  # they say nothing more: their reader has the end of the first for all of them
            request.end_silently(choice)
            self._cancelled[choice.sequence_id] = None
        aborted = self._core.abort([choice.sequence_id for choice in others], now=now)
        for choice in others:
            if (finished := aborted[choice.sequence_id].finished) is not None:
                del self._cancelled[choice.sequence_id]
                self._let_go(finished, now, FinishReason.ABORT)
        ended = self._core.abort([first.sequence_id], FinishReason.HANDED_OVER, now=now)[first.sequence_id].finished
        if ended is not None:
            self._on_finished(ended, None, now)
        self._wake()
        return True

    def end_holds(self, request: OpenRequest) -> None:
        """Nobody wants any more what is held of a request for another engine: the connector is told, and lets it go in
        its own time."""
        if request.kv_transfer is None:
            return
        # Also of those that a step planned ahead still reads: they are held only after it.
        ids = [choice.sequence_id for choice in request.choices if choice.sequence_id not in self._choices]
        self._core.abort(ids, now=trio.current_time())
        self._wake()

    def end_with_final_delta(
        self, request: OpenRequest, reason: FinishReason, message: str | None, *, stop_reason: str | None = None
    ) -> None:
        """The same, and the reader gets, for each choice, what was held back of its text, and why it ended. Of one that
        may go on elsewhere nothing held back is shown: it would be said again."""
        request.preparation.cancel()
        unfinished = [choice for choice in request.choices if not choice.is_ended]
        self.end(request, reason)
        for choice in unfinished:
            held_back = None
            if not choice.is_mute and not request.is_resumable:
                finished = RequestFinished(request_id=choice.sequence_id, reason=reason, phase=Phase.DECODE)
                try:
                    held_back = choice.output.feed((), None, finished)
                except Exception as error:
                    held_back = _text_failed(choice, (), error)
            request.push_end(choice, reason, message, stop_reason=stop_reason, held_back=held_back)

    def note_left_queue(self, count: int) -> None:
        """So many sequences were aborted before the core had them: nothing had to be freed."""
        self._timings.note_left_queue(count)

    # --- when the engine broke ---

    def ids_in_flight(self) -> frozenset[RequestId]:
        """Sequences of the steps that did not come back, or were not delivered."""
        return frozenset(chunk.request.id for plan in self._plans for chunk in plan.chunks)

    def give_up(self) -> list[Choice]:
        """The core is gone. Returns the choices whose sequences it had, in the order in which it got them; nothing of
        them is known here any more. What was held is held no longer."""
        choices = list(self._choices.values())
        self._choices.clear()
        held, self._held = self._held, {}
        for choice in held.values():
            choice.is_held = False
            choice.request.note_released()
        return choices

    def note_lost(self, request: OpenRequest) -> None:
        """What has not ended of a request ends with the core that was given up."""
        now = trio.current_time()
        for choice in request.choices:
            if not choice.is_ended:
                self._requests.note_end(choice, FinishReason.ERROR, now)
        self._requests.note_all_ended(request)

    # --- called by the step loop ---

    def on_plan(self, plan: StepPlan) -> None:
        now = trio.current_time()
        self._plans.append(plan)
        self._step_watch.begin(now)
        for sequence_id in plan.admitted:
            choice = self._choices[sequence_id]
            if not choice.has_run:  # a preempted one is admitted again
                choice.running_at = now
                choice.request.note_run(now)
                self._requests.note_run(choice, *self._core.prompt_saved(sequence_id), now)

    def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
        now = trio.current_time()
        self._step_watch.end(now)
        self._timings.note_step(step_seconds)
        choices = self._choices
        ready: TokensReady | None = None  # not fed yet: its request's end may come next
        for event in events:
            if isinstance(event, TokensReady):
                if ready is not None:
                    self._feed(choices[ready.request_id], ready.token_ids, ready.logprobs, None, now)
                ready = event
            elif isinstance(event, RequestFinished):
                if ready is not None and ready.request_id != event.request_id:
                    self._feed(choices[ready.request_id], ready.token_ids, ready.logprobs, None, now)
                    ready = None
                self._on_finished(event, ready, now)
                ready = None
            elif isinstance(event, PooledReady):
                choices[event.request_id].pooled = event.pooled  # its end comes next
                self._metrics.pooled_inputs_total.inc()
            else:
                self._on_prompt_logprobs(event)
        if ready is not None:
            self._feed(choices[ready.request_id], ready.token_ids, ready.logprobs, None, now)
        self._timings.show(now)
        self._metrics.step_tokens.observe(self._plans.popleft().token_count)
        self.has_brought = self.has_brought or bool(events)

    def on_ended(self, events: list[EngineEvent]) -> None:
        """Before each step: requests ended while none did, since the KV they waited for did not come."""
        for event in events:
            assert isinstance(event, RequestFinished)
            self._on_finished(event, None, trio.current_time())
        self._tell_faults(self._core.latest_faults)

    def _tell_faults(self, latest: Mapping[TransferFault, str]) -> None:
        """Each kind has its line in the log once; the metric counts them all."""
        if len(latest) > len(self._faults_told):
            for fault in latest.keys() - self._faults_told:
                self._faults_told.add(fault)
                logger.warning('transfer fault kind=%s first="%s"; more are only counted', fault.value, latest[fault])

    def _on_finished(self, event: RequestFinished, ready: TokensReady | None, now: float) -> None:
        choice = self._choices[event.request_id]
        reason = event.reason
        has_reader = event.request_id not in self._cancelled
        if not has_reader:
            cancelled = self._cancelled.pop(event.request_id)
            if cancelled is not None:
                self._note_abort(event, cancelled, now)
        elif event.reason is FinishReason.ERROR:
            choice.request.push_end(choice, FinishReason.ERROR, event.message)
        elif event.reason is FinishReason.HANDED_OVER:  # what was held back is said by who goes on
            choice.request.push_end(choice, FinishReason.HANDED_OVER, kv_transfer=event.kv_transfer)
        else:
            token_ids, logprobs = ((), None) if ready is None else (ready.token_ids, ready.logprobs)
            reason = self._feed(choice, token_ids, logprobs, event, now) or reason
        self._let_go(event, now, reason, has_reader=has_reader)

    def _note_abort(self, event: RequestFinished, cancelled: Cancelled, now: float) -> None:
        """The blocks of a sequence that was aborted are back."""
        self._timings.note_abort(event.phase, cancelled, now)
        self._cancels.note_freed(event.request_id, self._timings.steps_since(cancelled), now - cancelled.at)

    def _feed(
        self,
        choice: Choice,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        finished: RequestFinished | None,
        now: float,
    ) -> FinishReason | None:
        """Turn a sequence's new tokens into text for its reader. Returns the reason if that was the end."""
        assert not choice.is_ended
        if choice.is_mute:
            if choice.pooled is not None or self._timings.note_tokens(choice, len(token_ids), now):
                choice.request.note_first_token()
            kv_transfer = None if finished is None else finished.kv_transfer
            reason = FinishReason.LENGTH if choice.pooled is None else FinishReason.STOP
            choice.request.push_end(choice, reason, kv_transfer=kv_transfer)
            return reason
        output = choice.output
        count_before = output.token_count
        try:
            delta = output.feed(token_ids, logprobs, finished)
        except Exception as error:
            delta = _text_failed(choice, token_ids, error)
        # Of several tokens, those behind a stop string are dropped: they are nobody's.
        if self._timings.note_tokens(choice, output.token_count - count_before, now):
            choice.request.note_first_token()
        if delta is None:
            return None
        if delta.finish_reason is not None:
            delta = self._ended(choice, delta, finished, now)
        choice.request.push(delta)
        return delta.finish_reason

    def _ended(self, choice: Choice, delta: Delta, finished: RequestFinished | None, now: float) -> Delta:
        """A choice gets its last delta; its sequence ends with it, if it has not. Returns the delta as it is told."""
        choice.is_ended = True
        assert delta.finish_reason is not None
        if finished is None:  # a stop string ended it, or its text failed
            ended = self._core.abort([choice.sequence_id], delta.finish_reason, now=now)
            finished = ended[choice.sequence_id].finished
            if finished is None:
                self._cancelled[choice.sequence_id] = None  # a step that was planned ahead has it once more
            else:
                self._let_go(finished, now, delta.finish_reason)
        if finished is not None and finished.kv_transfer is not None and delta.finish_reason in WHOLE:
            delta = msgspec.structs.replace(delta, kv_transfer=finished.kv_transfer)
        return delta

    def _on_prompt_logprobs(self, event: PromptLogprobs) -> None:
        choice = self._choices[event.request_id]
        request = choice.request
        if choice.index == 0 and len(request.prompt_logprobs or ()) < len(request.prompt_token_ids):
            request.prompt_logprobs = (request.prompt_logprobs or ()) + event.logprobs

    def _let_go(self, event: RequestFinished, now: float, reason: FinishReason, *, has_reader: bool = True) -> None:
        """The core has let a sequence go; its blocks, too, unless they are held. reason: the one its reader is given,
        since a last token may complete a stop string. has_reader: who gets to know how it is held."""
        choice = self._choices.pop(event.request_id)
        request = choice.request
        is_held = event.kv_transfer is not None and has_reader and reason in MAY_BE_HELD
        if is_held:
            request.trace.held()
        request.core_count -= 1
        if request.upcoming:
            request.begin_next()
        if not request.core_count:
            request.on_gone()
        if is_held:
            choice.is_held, choice.held_since = True, now
            self._held[event.request_id] = choice
            logger.debug("hold begins request=%s tokens=%d", request.id, len(request.prompt_token_ids))
        elif event.kv_transfer is not None:
            self._core.abort([event.request_id], now=now)
        request.note_cached(choice, event.cached_token_count)
        self._requests.note_end(choice, reason, now)
        if not request.core_count and not request.upcoming:
            self._requests.note_all_ended(request)

    def _on_hold_end(self, hold: Hold, expired: bool) -> None:
        choice = self._held.pop(hold.request_id, None) if hold.kind is HoldKind.SEND else None
        if choice is not None:
            choice.is_held = False
            end = "expired" if expired else "aborted" if hold.is_aborted else "released"
            seconds = trio.current_time() - choice.held_since
            logger.debug("hold ended request=%s end=%s seconds=%.3f", choice.request.id, end, seconds)
            choice.request.note_released()


def _text_failed(choice: Choice, token_ids: tuple[int, ...], error: Exception) -> Delta:
    """The fault of one request's text stays with that request. To be called where it is handled."""
    logger.exception("text of a request failed request=%s", choice.request.id)
    return Delta(
        index=choice.index,
        text="",
        token_ids=token_ids,
        weight_versions=choice.output.weights_of(len(token_ids)),
        finish_reason=FinishReason.ERROR,
        message=f"the response could not be turned into text: {error}",
    )
