"""What a step has brought, as text in the hands of the readers; and the end of a sequence, however it comes.

Knows every sequence that the core knows, also those whose reader has left already. Everything here is synchronous and
runs between two steps, or, ending a stream, at any moment.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import trio

from trioserve.contracts.events import (
    EngineEvent,
    FinishReason,
    Phase,
    PromptLogprobs,
    RequestFinished,
    TokenLogprob,
    TokensReady,
)
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.contracts.output import Delta
from trioserve.contracts.step import StepPlan
from trioserve.core.block_holds import Hold
from trioserve.core.engine import EngineCore
from trioserve.metrics.registry import Metrics
from trioserve.runtime.request_stream import Choice, RequestStream
from trioserve.runtime.step_watch import StepWatch

__all__ = ["Delivery"]

logger = logging.getLogger(__name__)

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # an answer that ended so is complete


class _Cancelled(NamedTuple):
    """When a sequence was aborted, and how many steps had ended then."""

    at: float
    step_count: int


class Delivery:
    """wake: called when the step loop may have something new to see to. step_watch: told of each step."""

    def __init__(
        self, core: EngineCore, metrics: Metrics, *, wake: Callable[[], None], step_watch: StepWatch | None = None
    ) -> None:
        self._core = core
        self._metrics = metrics
        self._wake = wake
        self._step_watch = step_watch or StepWatch()
        self._choices: dict[RequestId, Choice] = {}
        # Aborted while a step reads their blocks; None: it was their own text that ended them.
        self._cancelled: dict[RequestId, _Cancelled | None] = {}
        self._step_count = 0  # steps that have ended
        self._token_count = 0  # of the step that is being delivered, without those in _followed
        self._followed: list[float] = []  # of each of its tokens that came alone, when the one before it had come
        self._held: dict[RequestId, Choice] = {}  # over, and their blocks are held for another engine
        self._faults_told: set[TransferFault] = set()
        if core.transfers is not None:
            core.transfers.holds.on_end = self._on_hold_end

    def __len__(self) -> int:
        """Sequences that the core has."""
        return len(self._choices)

    @property
    def held_count(self) -> int:
        """Sequences that are over and held for another engine."""
        return len(self._held)

    def held_block_count(self, stream: RequestStream) -> int:
        """Blocks that are held of a stream for another engine."""
        transfers = self._core.transfers
        if transfers is None or not stream.is_held:
            return 0
        holds = [transfers.holds.get(choice.sequence_id, HoldKind.SEND) for choice in stream.choices if choice.is_held]
        return sum(len(hold.blocks) for hold in holds if hold is not None)

    def add(self, choice: Choice) -> None:
        """The core has the choice's sequence now."""
        self._choices[choice.sequence_id] = choice
        choice.stream.core_count += 1

    # --- ends that come from outside ---

    def end(self, stream: RequestStream, reason: FinishReason) -> None:
        """Abort what of a stream the core still has. From here on nothing of it is delivered."""
        cancelled = _Cancelled(trio.current_time(), self._step_count)
        ids = [choice.sequence_id for choice in stream.choices if choice.sequence_id in self._choices]
        results = self._core.abort(ids, reason, now=cancelled.at)
        now = trio.current_time()
        for sequence_id, result in results.items():
            if result.finished is not None:
                self._let_go(result.finished, now, reason)
                self._observe_abort(result.finished, cancelled, now)
            else:
                self._cancelled.setdefault(sequence_id, cancelled)
        if not stream.core_count:
            stream.on_gone()
        self._wake()  # what a connector still needs of them has a deadline

    def end_holds(self, stream: RequestStream) -> None:
        """Nobody wants any more what is held of a stream for another engine: the connector is told, and lets it go in
        its own time."""
        if stream.kv_transfer is None:
            return
        # Also of those that a step planned ahead still reads: they are held only after it.
        ids = [choice.sequence_id for choice in stream.choices if choice.sequence_id not in self._choices]
        self._core.abort(ids, now=trio.current_time())
        self._wake()

    def end_with_last_word(
        self, stream: RequestStream, reason: FinishReason, message: str | None, *, stop_reason: str | None = None
    ) -> None:
        """The same, and the reader gets, for each choice, what was held back of its text, and why it ended."""
        stream.preparation.cancel()
        unfinished = [choice for choice in stream.choices if not choice.is_ended]
        self.end(stream, reason)
        for choice in unfinished:
            held_back = None
            if not choice.is_mute:
                finished = RequestFinished(request_id=choice.sequence_id, reason=reason, phase=Phase.DECODE)
                try:
                    held_back = choice.output.feed((), None, finished)
                except Exception as error:
                    held_back = _text_failed(choice, (), error)
            stream.push_end(choice, reason, message, stop_reason=stop_reason, held_back=held_back)

    def note_left_line(self, count: int) -> None:
        """So many sequences were aborted before the core had them: nothing had to be freed."""
        phase = Phase.QUEUED.value
        self._metrics.aborts_total.labels(phase).inc(count)
        for _ in range(count):
            self._metrics.cancel_to_free_seconds.labels(phase).observe(0.0)
            self._metrics.cancel_to_free_steps.labels(phase).observe(0)

    # --- called by the step loop ---

    def on_plan(self, plan: StepPlan) -> None:
        now = trio.current_time()
        self._step_watch.begin(now)
        for sequence_id in plan.admitted:
            choice = self._choices[sequence_id]
            if not choice.has_run:  # a preempted one is admitted again
                choice.has_run = True
                choice.stream.note_run()
                self._metrics.request_queue_time_seconds.observe(now - choice.stream.entered_at)
                self._metrics.prompt_tokens_total.inc(len(choice.stream.prompt_token_ids))

    def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
        now = trio.current_time()
        self._step_watch.end(now)
        self._step_count += 1
        self._metrics.step_seconds.observe(step_seconds)
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
            else:
                self._on_prompt_logprobs(event)
        if ready is not None:
            self._feed(choices[ready.request_id], ready.token_ids, ready.logprobs, None, now)
        self._show_counts(now)

    def on_ended(self, events: list[EngineEvent]) -> None:
        """Before each step: requests ended while none did, since the KV they waited for did not come."""
        for event in events:
            assert isinstance(event, RequestFinished)
            self._on_finished(event, None, trio.current_time())
        if self._core.transfers is not None:
            self._tell_faults(self._core.transfers.faults.latest)

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
                self._observe_abort(event, cancelled, now)
        elif event.reason is FinishReason.ERROR:
            choice.stream.push_end(choice, FinishReason.ERROR, event.message)
        else:
            token_ids, logprobs = ((), None) if ready is None else (ready.token_ids, ready.logprobs)
            reason = self._feed(choice, token_ids, logprobs, event, now) or reason
        self._let_go(event, now, reason, has_reader=has_reader)

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
            self._count_tokens(choice, len(token_ids), now)
            kv_transfer = None if finished is None else finished.kv_transfer
            choice.stream.push_end(choice, FinishReason.LENGTH, kv_transfer=kv_transfer)
            return FinishReason.LENGTH
        output = choice.output
        count_before = output.token_count
        try:
            delta = output.feed(token_ids, logprobs, finished)
        except Exception as error:
            delta = _text_failed(choice, token_ids, error)
        # Of several tokens, those behind a stop string are dropped: they are nobody's.
        token_count = output.token_count - count_before
        if token_count == 1 and choice.first_token_at is not None:  # nearly every token
            self._followed.append(choice.last_token_at)
            choice.last_token_at = now
        else:
            self._count_tokens(choice, token_count, now)
        if delta is None:
            return None
        if delta.finish_reason is not None:
            delta = self._ended(choice, delta, finished, now)
        choice.stream.push(delta)
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

    def _count_tokens(self, choice: Choice, count: int, now: float) -> None:
        if count == 0:
            return
        self._token_count += count
        if choice.first_token_at is None:
            choice.first_token_at = now
            choice.stream.note_first_token()
            self._metrics.time_to_first_token_seconds.observe(now - choice.stream.entered_at)
        else:
            # Tokens that come together share the time since the last ones, so that its mean is that of a token.
            self._metrics.inter_token_latency_seconds.observe((now - choice.last_token_at) / count, count)
        choice.last_token_at = now

    def _show_counts(self, now: float) -> None:
        """What a step's tokens have in common is counted once: most of them follow one that came at the same time."""
        self._metrics.generation_tokens_total.inc(self._token_count + len(self._followed))
        self._token_count = 0
        for before, count in Counter(self._followed).items():
            self._metrics.inter_token_latency_seconds.observe(now - before, count)
        self._followed.clear()

    def _on_prompt_logprobs(self, event: PromptLogprobs) -> None:
        choice = self._choices[event.request_id]
        if choice.index == 0:
            stream = choice.stream
            stream.prompt_logprobs = (stream.prompt_logprobs or ()) + event.logprobs

    def _let_go(self, event: RequestFinished, now: float, reason: FinishReason, *, has_reader: bool = True) -> None:
        """The core has let a sequence go; its blocks, too, unless they are held. reason: the one its reader is given,
        since a last token may complete a stop string. has_reader: who gets to know how it is held."""
        choice = self._choices.pop(event.request_id)
        stream = choice.stream
        stream.core_count -= 1
        if not stream.core_count:
            stream.on_gone()
        if event.kv_transfer is not None:
            if has_reader and reason in WHOLE:
                choice.is_held, choice.held_since = True, now
                self._held[event.request_id] = choice
                logger.debug("hold begins request=%s tokens=%d", stream.id, len(stream.prompt_token_ids))
            else:
                self._core.abort([event.request_id], now=now)
        if choice.index == 0:
            stream.cached_token_count = event.cached_token_count
        self._metrics.request_success_total.labels(reason.value).inc()
        if reason in WHOLE:
            self._metrics.e2e_request_latency_seconds.observe(now - stream.entered_at)

    def _on_hold_end(self, hold: Hold, expired: bool) -> None:
        choice = self._held.pop(hold.request_id, None) if hold.kind is HoldKind.SEND else None
        if choice is not None:
            choice.is_held = False
            end = "expired" if expired else "aborted" if hold.is_aborted else "released"
            seconds = trio.current_time() - choice.held_since
            logger.debug("hold ended request=%s end=%s seconds=%.3f", choice.stream.id, end, seconds)
            choice.stream.note_released()

    def _observe_abort(self, event: RequestFinished, cancelled: _Cancelled, now: float) -> None:
        phase = event.phase.value
        self._metrics.aborts_total.labels(phase).inc()
        self._metrics.cancel_to_free_seconds.labels(phase).observe(now - cancelled.at)
        self._metrics.cancel_to_free_steps.labels(phase).observe(self._step_count - cancelled.step_count)


def _text_failed(choice: Choice, token_ids: tuple[int, ...], error: Exception) -> Delta:
    """The fault of one request's text stays with that request. To be called where it is handled."""
    logger.exception("text of a request failed request=%s", choice.stream.id)
    return Delta(
        index=choice.index,
        text="",
        token_ids=token_ids,
        finish_reason=FinishReason.ERROR,
        message=f"the answer could not be turned into text: {error}",
    )
