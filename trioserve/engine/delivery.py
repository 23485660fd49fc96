"""What a step has brought, as text in the hands of the readers, and what is held of it for other engines. The ends that
come from outside are CoreDelivery's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec
import trio

from trioserve.contracts.errors import is_request_fault
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
from trioserve.engine.shell.core_delivery import CoreDelivery, WatchesCancels
from trioserve.engine.shell.step_watch import StepWatch
from trioserve.engine.token_timings import TokenTimings
from trioserve.metrics.registry import Metrics

__all__ = ["Delivery"]

logger = logging.getLogger(__name__)

MAY_BE_HELD = (*WHOLE, FinishReason.HANDED_OVER)


class Delivery(CoreDelivery[OpenRequest, Choice, StepPlan, EngineEvent]):
    """wake: called when the step loop may have something new to see to. step_watch: told of each step. cancels: told
    of each cancel. weight_version: of the weights that sample; None: they were never replaced."""

    def __init__(
        self,
        core: EngineCore,
        metrics: Metrics,
        *,
        wake: Callable[[], None],
        step_watch: StepWatch | None = None,
        cancels: WatchesCancels[OpenRequest] | None = None,
        weight_version: str | None = None,
    ) -> None:
        self._timings = TokenTimings(metrics)
        super().__init__(core, self._timings, wake=wake, step_watch=step_watch, cancels=cancels)
        self._core = core
        self._metrics = metrics
        self._requests = RequestMetrics(metrics)
        self._held: dict[RequestId, Choice] = {}  # over, and their blocks are held for another engine
        self._faults_told: set[TransferFault] = set()
        self._weight_version = weight_version
        core.notify_hold_ends(self._on_hold_end)

    @property
    def held_count(self) -> int:
        """Sequences that are over and held for another engine."""
        return len(self._held)

    def held_block_count(self, request: OpenRequest) -> int:
        """Blocks that are held of a request for another engine."""
        return sum(self._core.held_block_count(choice.sequence_id) for choice in request.choices if choice.is_held)

    def add(self, choice: Choice) -> None:
        super().add(choice)
        if self._weight_version is not None:
            choice.output.use_weights(self._weight_version)

    def use_weights(self, version: str) -> None:
        """What is computed from here on, weights of this version compute. No step is in flight; all requests know of
        it."""
        self._core.change_weights(lambda sequence_id: self._choices[sequence_id].request.block_salt)
        self._weight_version = version
        for choice in self._choices.values():
            choice.output.use_weights(version)

    # --- ends that come from outside ---

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

    def _push_last(
        self,
        request: OpenRequest,
        choice: Choice,
        reason: FinishReason,
        message: str | None,
        stop_reason: str | None,
    ) -> None:
        """It gets what was held back of its text, too. Of one that may go on elsewhere nothing held back is shown: it
        would be said again."""
        held_back = None
        if not choice.is_mute and not request.is_resumable:
            finished = RequestFinished(request_id=choice.sequence_id, reason=reason, phase=Phase.DECODE)
            try:
                held_back = choice.output.feed((), None, finished)
            except BaseException as error:
                if not is_request_fault(error):
                    raise
                held_back = _text_failed(choice, (), None, error)
        request.push_end(choice, reason, message, stop_reason=stop_reason, held_back=held_back)

    # --- when the engine broke ---

    def give_up(self) -> list[Choice]:
        """What was held is held no longer."""
        choices = super().give_up()
        held, self._held = self._held, {}
        for choice in held.values():
            choice.is_held = False
            choice.request.note_released()
        return choices

    # --- called by the step loop ---

    def _ids_of(self, plan: StepPlan) -> Iterable[RequestId]:
        return (chunk.request.id for chunk in plan.chunks)

    def _count_run(self, choice: Choice, now: float) -> None:
        self._requests.note_run(choice, *self._core.prompt_saved(choice.sequence_id), now)

    def _count_step(self, plan: StepPlan, now: float) -> None:
        self._timings.show(now)
        self._metrics.step_tokens.observe(plan.token_count)

    def _count_end(self, choice: Choice, reason: FinishReason, now: float) -> None:
        self._requests.note_end(choice, reason, now)

    def _count_all_ended(self, request: OpenRequest) -> None:
        self._requests.note_all_ended(request)

    def _deliver(self, events: list[EngineEvent], now: float) -> None:
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
        reason = event.reason
        has_reader = not self._is_cancelled(event, now)
        if has_reader:
            reason = self._tell_end(self._choices[event.request_id], event, ready, now)
        self._let_go(event, now, reason, has_reader=has_reader)

    def _tell_end(self, choice: Choice, event: RequestFinished, ready: TokensReady | None, now: float) -> FinishReason:
        """Returns the reason that the reader was given."""
        if event.reason is FinishReason.ERROR:
            choice.request.push_end(choice, FinishReason.ERROR, event.message)
        elif event.reason is FinishReason.HANDED_OVER:  # what was held back is said by who goes on
            choice.request.push_end(choice, FinishReason.HANDED_OVER, kv_transfer=event.kv_transfer)
        else:
            token_ids, logprobs = ((), None) if ready is None else (ready.token_ids, ready.logprobs)
            return self._feed(choice, token_ids, logprobs, event, now) or event.reason
        return event.reason

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
        except BaseException as error:
            if not is_request_fault(error):
                raise
            delta = _text_failed(choice, token_ids, logprobs, error)
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
        """Its blocks, too, unless they are held. reason: the one its reader is given, since a last token may complete a
        stop string. has_reader: who gets to know how it is held."""
        choice = self._choices[event.request_id]
        request = choice.request
        is_held = event.kv_transfer is not None and has_reader and reason in MAY_BE_HELD
        if is_held:
            request.trace.held()
        request.note_cached(choice, event.cached_token_count)
        super()._let_go(event, now, reason, has_reader=has_reader)
        if is_held:
            choice.is_held, choice.held_since = True, now
            self._held[event.request_id] = choice
            logger.debug("hold begins request=%s tokens=%d", request.id, len(request.prompt_token_ids))
        elif event.kv_transfer is not None:
            self._core.abort([event.request_id], now=now)

    def _on_hold_end(self, hold: Hold, expired: bool) -> None:
        choice = self._held.pop(hold.request_id, None) if hold.kind is HoldKind.SEND else None
        if choice is not None:
            choice.is_held = False
            end = "expired" if expired else "aborted" if hold.is_aborted else "released"
            seconds = trio.current_time() - choice.held_since
            logger.debug("hold ended request=%s end=%s seconds=%.3f", choice.request.id, end, seconds)
            choice.request.note_released()


def _text_failed(
    choice: Choice, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None, error: BaseException
) -> Delta:
    """The fault of one request's text stays with that request. To be called where it is handled."""
    logger.exception("text of a request failed request=%s", choice.request.id)
    return Delta(
        index=choice.index,
        text="",
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=choice.output.weights_of(len(token_ids)),
        finish_reason=FinishReason.ERROR,
        message=f"the response could not be turned into text: {error}",
    )
