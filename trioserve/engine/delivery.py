"""Turns the results of steps into deltas for request streams, and tracks blocks held for other engines.

`CoreDelivery` handles requests that end from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec
import trio

from trioserve.contracts.errors import is_request_fault
from trioserve.contracts.events import (
    EngineEvent,
    FinishReason,
    Phase,
    PoolingReady,
    PromptLogprobs,
    RequestFinished,
    TokenLogprob,
    TokensReady,
)
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.contracts.output import Delta
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.step import StepPlan
from trioserve.core.block_holds import Hold
from trioserve.core.engine import EngineCore
from trioserve.engine.engine_metrics import WHOLE, RequestMetrics, TokenTimings
from trioserve.engine.lifecycle.core_delivery import CancelWatch, CoreDelivery
from trioserve.engine.lifecycle.request_scope import ScopeState
from trioserve.engine.lifecycle.step_times import StepWatch
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.metrics.registry import Metrics

__all__ = ["Delivery"]

logger = logging.getLogger(__name__)

MAY_BE_HELD = (*WHOLE, FinishReason.HANDED_OVER)


class Delivery(CoreDelivery[OpenRequest, Choice, StepPlan, EngineEvent]):
    """Delivers the results of an engine for text.

    Args:
        core: plans the steps whose results are delivered.
        metrics: registry of the engine's metrics.
        wake: called when the step loop may have new work.
        step_watch: receives the begin and end of each step. None: a watch of its own.
        cancels: observes cancelled sequences. None: no observer.
        weight_version: version of the weights that sample. None: the weights were never replaced.
    """

    def __init__(
        self,
        core: EngineCore,
        metrics: Metrics,
        *,
        wake: Callable[[], None],
        step_watch: StepWatch | None = None,
        cancels: CancelWatch[OpenRequest] | None = None,
        weight_version: str | None = None,
    ) -> None:
        self._timings = TokenTimings(metrics)
        counts = RequestMetrics(metrics, core.prompt_saved)
        super().__init__(core, self._timings, counts, wake=wake, step_watch=step_watch, cancels=cancels)
        self._core = core
        self._metrics = metrics
        self._held: dict[RequestId, Choice] = {}  # Ended sequences whose blocks are held for another engine.
        self._faults_logged: set[TransferFault] = set()
        self._weight_version = weight_version
        core.notify_hold_ends(self._on_hold_end)

    @property
    def held_count(self) -> int:
        """Number of ended sequences whose blocks are held for another engine."""
        return len(self._held)

    def held_block_count(self, request: OpenRequest) -> int:
        """Return how many blocks of a request are held for another engine."""
        return sum(self._core.held_block_count(choice.sequence_id) for choice in request.choices if choice.is_held)

    def add(self, choice: Choice) -> None:
        super().add(choice)
        if self._weight_version is not None:
            choice.output.use_weights(self._weight_version)

    def use_weights(self, version: str) -> None:
        """Mark new tokens with a weight version from now on. Call this when no step is in flight, and after all
        requests have the version.
        """
        self._core.change_weights(lambda sequence_id: self._choices[sequence_id].request.block_salt)
        self._weight_version = version
        for choice in self._choices.values():
            choice.output.use_weights(version)

    # --- ends from outside of the core ---

    def hand_over(self, request: OpenRequest) -> bool:
        """End a request that another engine will resume. It ends after the step in flight at the latest.

        The reader gets a last delta with finish reason HANDED_OVER for one choice. If there is a connector, it holds
        the blocks of this choice.

        Returns:
            False if the core has no sequence of the request, or if there is nothing to resume.
        """
        choices = [choice for choice in request.choices if choice.sequence_id in self._choices and not choice.is_ended]
        if request.upcoming or not choices or any(choice.is_mute for choice in choices):
            return False
        first, *others = choices
        now = trio.current_time()
        request.is_hold_kept = request.is_handed_over = True
        request.kv_transfer = request.kv_transfer or KVTransferParams(do_remote_decode=True)
        # The reader gets one last delta, that of the first choice. It reports the end of all choices.
        for choice in others:
            request.end_silently(choice)
            self._cancelled[choice.sequence_id] = None
        aborted = self._core.abort([choice.sequence_id for choice in others], now=now)
        for choice in others:
            if (finished := aborted[choice.sequence_id].finished) is not None:
                del self._cancelled[choice.sequence_id]
                self._note_sequence_end(finished, now, FinishReason.ABORT)
        ended = self._core.abort([first.sequence_id], FinishReason.HANDED_OVER, now=now)[first.sequence_id].finished
        if ended is not None:
            self._on_finished(ended, None, now)
        self.wake()
        return True

    def end_holds(self, request: OpenRequest) -> None:
        """End the holds of a request's blocks. The connector is notified, and may release the blocks later."""
        if request.kv_transfer is None:
            return
        # Include sequences that a step planned ahead still reads. Their holds begin only after that step.
        ids = [choice.sequence_id for choice in request.choices if choice.sequence_id not in self._choices]
        self._core.abort(ids, now=trio.current_time())
        self.wake()

    def _push_last(
        self,
        request: OpenRequest,
        choice: Choice,
        reason: FinishReason,
        message: str | None,
        stop_reason: str | None,
    ) -> None:
        """Push the last delta of a choice, with the text that was held back.

        If another engine may resume the request, the delta has no text, because the resumed response will contain it.
        """
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

    # --- after a fault of the engine ---

    def abandon(self) -> list[Choice]:
        """Forget all sequences and holds, because the core has broken. See `CoreDelivery.abandon`."""
        choices = super().abandon()
        for choice in choices:
            if choice.request.is_handed_over and not choice.is_ended and choice.request.scope is not ScopeState.LEFT:
                # This choice would have ended with the step that broke. The other choices have ended already.
                choice.request.push_end(choice, FinishReason.HANDED_OVER)
        held, self._held = self._held, {}
        for choice in held.values():
            choice.is_held = False
            choice.request.note_released()
        return choices

    # --- called by the step loop ---

    def _ids_of(self, plan: StepPlan) -> Iterable[RequestId]:
        return (chunk.request.id for chunk in plan.chunks)

    def _deliver(self, events: list[EngineEvent], now: float) -> None:
        choices = self._choices
        # Delivered one event later, because the next event may be the end of the same request.
        ready: TokensReady | None = None
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
            elif isinstance(event, PoolingReady):
                choices[event.request_id].pooled = event.pooled  # The next event of this choice is its end.
                self._metrics.pooled_inputs_total.inc()
            else:
                self._on_prompt_logprobs(event)
        if ready is not None:
            self._feed(choices[ready.request_id], ready.token_ids, ready.logprobs, None, now)

    def on_ended(self, events: list[EngineEvent]) -> None:
        """Deliver ends that happened between two steps, for requests whose KV could not be loaded. Log the first
        transfer fault of each kind. A metric counts all transfer faults.

        Args:
            events: the ends. May be empty.
        """
        for event in events:
            assert isinstance(event, RequestFinished)
            self._on_finished(event, None, trio.current_time())
        latest = self._core.latest_faults
        if len(latest) > len(self._faults_logged):
            for fault in latest.keys() - self._faults_logged:
                self._faults_logged.add(fault)
                logger.warning('transfer fault kind=%s first="%s"; more are only counted', fault.value, latest[fault])

    def _on_finished(self, event: RequestFinished, ready: TokensReady | None, now: float) -> None:
        reason = event.reason
        has_reader = not self._is_cancelled(event, now)
        if has_reader:
            reason = self._push_core_end(self._choices[event.request_id], event, ready, now)
        self._note_sequence_end(event, now, reason, has_reader=has_reader)

    def _push_core_end(
        self, choice: Choice, event: RequestFinished, ready: TokensReady | None, now: float
    ) -> FinishReason:
        """Push the last delta of a choice that the core ended. Return the finish reason that the reader gets."""
        if event.reason is FinishReason.ERROR:
            choice.request.push_end(choice, FinishReason.ERROR, event.message)
        elif event.reason is FinishReason.HANDED_OVER:
            # The engine that resumes the request sends the held-back text, not this engine.
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
        """Turn a sequence's new tokens into a delta for its reader. Return the finish reason if the choice ended."""
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
        # Tokens after a stop string are dropped and not counted.
        if self._timings.note_tokens(choice, output.token_count - count_before, now):
            choice.request.note_first_token()
        if delta is None:
            return None
        if delta.finish_reason is not None:
            delta = self._ended(choice, delta, finished, now)
        choice.request.push(delta)
        return delta.finish_reason

    def _ended(self, choice: Choice, delta: Delta, finished: RequestFinished | None, now: float) -> Delta:
        """End a choice with its last delta. Abort its sequence if the core still has it.

        Returns:
            The delta, with instructions for reading held KV if there are any.
        """
        choice.is_ended = True
        assert delta.finish_reason is not None
        if finished is None:  # The core did not end this sequence. A stop string or an error in the text did.
            ended = self._core.abort([choice.sequence_id], delta.finish_reason, now=now)
            finished = ended[choice.sequence_id].finished
            if finished is None:
                # A step that was planned ahead still computes this sequence.
                self._cancelled[choice.sequence_id] = None
            else:
                self._note_sequence_end(finished, now, delta.finish_reason)
        if finished is not None and finished.kv_transfer is not None and delta.finish_reason in WHOLE:
            delta = msgspec.structs.replace(delta, kv_transfer=finished.kv_transfer)
        return delta

    def _on_prompt_logprobs(self, event: PromptLogprobs) -> None:
        choice = self._choices[event.request_id]
        request = choice.request
        if choice.index == 0 and len(request.prompt_logprobs or ()) < len(request.prompt_token_ids):
            request.prompt_logprobs = (request.prompt_logprobs or ()) + event.logprobs

    def _note_sequence_end(
        self, event: RequestFinished, now: float, reason: FinishReason, *, has_reader: bool = True
    ) -> None:
        """Process the end of a sequence in the core. The blocks of the sequence are free, unless a connector holds
        them.

        Args:
            event: the end.
            now: current time.
            reason: finish reason that the reader gets. It may differ from the core's, because the last token may
                complete a stop string.
            has_reader: True if the reader gets the end, and with it the instructions for reading held blocks.
        """
        choice = self._choices[event.request_id]
        request = choice.request
        is_held = event.kv_transfer is not None and has_reader and reason in MAY_BE_HELD
        if is_held:
            request.trace.held()
        request.note_cached(choice, event.cached_token_count)
        super()._note_sequence_end(event, now, reason, has_reader=has_reader)
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
    """Return the last delta of a choice whose tokens could not be turned into text. Only this request fails. Call this
    function in an except block.
    """
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
