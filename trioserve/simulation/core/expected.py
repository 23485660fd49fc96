"""Expected state of one sequence of a simulation: its request, the reference response, and the core's events so far.

Each event is compared when the core reports it, with records that share nothing with the core.

A WatchedGuide raises AssertionError if it is called while its masks are being filled. LateMasks fills masks as late as
possible, as a slow thread would.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.events import (
    AbortOutcome,
    AbortResult,
    EngineEvent,
    FinishReason,
    Phase,
    PoolingReady,
    PromptLogprobs,
    RequestFinished,
    TokensReady,
)
from trioserve.contracts.guide import GuidedRows, TokenMasks
from trioserve.contracts.ids import BlockHash
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.core.prefix_cache import PrefixCache
from trioserve.engine.structured_output import MaskBuffers, MaskRows
from trioserve.simulation.reference_engine import ReferenceResponse
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide

__all__ = ["ExpectedSequence", "LateMasks", "WatchedGuide", "forced_count", "state_behind"]


class WatchedGuide(AutomatonGuide):
    """A guide that raises AssertionError if it is called while its masks are being filled.

    Args:
        automaton: the automaton that defines the allowed tokens.

    Attributes:
        being_filled: number of steps whose masks of this guide are not filled yet.
    """

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(automaton)
        self.being_filled = 0

    def accept(self, token_id: int) -> bool:
        assert not self.being_filled, "a guide accepts a token while its masks are being filled"
        return super().accept(token_id)

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        assert not self.being_filled, "a guide is queried while its masks are being filled"
        return super().forced_tokens(count_max)

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        assert not self.being_filled, "a guide is queried while its masks are being filled"
        return super().acceptable_count(token_ids)


class LateMasks:
    """A MaskMaker that fills masks late.

    Args:
        vocab_size: number of token ids.

    Attributes:
        waiting: steps whose masks are not filled yet, oldest first.
    """

    def __init__(self, vocab_size: int) -> None:
        self._buffers = MaskBuffers(vocab_size)
        self.waiting: list[tuple[MaskRows, Sequence[GuidedRows]]] = []

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        rows = self._buffers.take(guided, row_count)
        assert all(rows is not other for other, _ in self.waiting), "masks are reused while they are being filled"
        for own in guided:
            _watched(own).being_filled += 1
        self.waiting.append((rows, guided))
        return rows

    def end(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        self._buffers.release_rows(masks)

    def fill_until(self, masks: TokenMasks | None) -> None:
        """Fill the waiting masks, oldest first, up to the masks of one step.

        Args:
            masks: the last masks to fill. None: fill all waiting masks.
        """
        while self.waiting and (masks is None or any(rows is masks for rows, _ in self.waiting)):
            rows, guided = self.waiting.pop(0)
            rows.fill()
            for own in guided:
                _watched(own).being_filled -= 1


def _watched(rows: GuidedRows) -> WatchedGuide:
    assert isinstance(rows.guide, WatchedGuide)
    return rows.guide


def state_behind(automaton: Automaton, token_ids: Sequence[int]) -> int:
    """Return the automaton's state after some tokens. A stop token at the end does not change the state."""
    state = 0
    for token_id in token_ids:
        state = dict(automaton[state]).get(token_id, state)
    return state


def forced_count(automaton: Automaton, response: Sequence[int], count: int) -> int:
    """Return how many tokens of a response are forced after its first `count` tokens.

    A token is forced if the automaton allows no other token at its position.

    Args:
        response: tokens of the response.
        count: number of tokens that come before the forced ones.
    """
    forced = 0
    while count + forced < len(response) and len(automaton[state_behind(automaton, response[: count + forced])]) == 1:
        forced += 1
    return forced


class ResidencyBook:
    """Collects the residency reports of a prefix cache: which blocks it has stored and evicted.

    Args:
        cache: the prefix cache.

    Attributes:
        resident: hashes of the blocks that are in the cache, according to its reports.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.resident: set[BlockHash] = set()
        self._cache = cache
        cache.on_residency = self._note

    def check(self) -> None:
        """Assert that the reports agree with the cache.

        Cost:
            O(blocks).
        """
        real = set(self._cache.resident_hashes())
        assert real == self.resident, (
            f"{len(self.resident - real)} reported blocks are absent, {len(real - self.resident)} not reported"
        )

    def _note(self, block_hash: BlockHash, is_resident: bool) -> None:
        if is_resident:
            assert block_hash not in self.resident, "a block is reported twice"
            self.resident.add(block_hash)
        else:
            assert block_hash in self.resident, "a block is reported as removed, but was not reported as resident"
            self.resident.remove(block_hash)


class ExpectedSequence:
    """Expected state of one sequence.

    Args:
        request: the request as it was added to the core.
        arrival_index: number of the arrival.
        response: the whole expected response. It includes tokens that were known at the arrival.

    Attributes:
        order: sort key of the sequence. The scheduler serves smaller keys first.
        known: tokens of the prompt and delivered tokens.
        output_count: number of delivered tokens of the response, including tokens that were known at the arrival.
        cached_count: number of prompt tokens from the prefix cache when the sequence first ran. None before that.
        loaded_count: number of tokens whose KV a connector has loaded.
        lacks_kv: True if the sequence must end because its KV did not arrive.
        message: error text of the step in which the sequence fails. None: no step has failed it.
        is_running: True while the sequence is admitted.
        steps_in_flight: number of steps in flight that compute the sequence.
        computed_end: number of tokens that are computed after the steps in flight.
        has_surplus: True if the sequence has ended, but a step in flight still computes it.
        draft_counts: numbers of verified drafts, of their draft tokens, and of accepted draft tokens.
        proposed: draft tokens that a draft model proposed in the sequence's last step.
        forced_count: forced tokens so far.
        prompt_logprobs_count: delivered prompt log probabilities.
        is_pooling: True after the pooled vector was delivered.
        left_out_count: number of consecutive steps without a chunk of the sequence while it was the first prompt.
        overtaken_count_min: number of later requests that started earlier, certainly because this sequence did not fit.
        overtaken_count_max: number of later requests that started earlier for any reason.
        aborted_for: reason of the abort. None: the sequence was not aborted.
        finished: the core's event for the end of the sequence. None: the sequence has not ended.
    """

    __slots__ = (
        "aborted_for",
        "cached_count",
        "computed_end",
        "draft_counts",
        "finished",
        "forced_count",
        "has_surplus",
        "is_pooling",
        "is_running",
        "known",
        "lacks_kv",
        "left_out_count",
        "loaded_count",
        "message",
        "order",
        "output_count",
        "overtaken_count_max",
        "overtaken_count_min",
        "prompt_logprobs_count",
        "proposed",
        "request",
        "response",
        "steps_in_flight",
    )

    def __init__(self, request: EngineRequest, arrival_index: int, response: ReferenceResponse) -> None:
        self.request = request
        self.order = (request.priority, arrival_index)
        self.response = response
        self.known = [*request.prompt_token_ids, *request.resumed_output]
        self.output_count = len(request.resumed_output)
        self.loaded_count = 0
        self.lacks_kv = False
        self.draft_counts = (0, 0, 0)
        self.proposed: tuple[int, ...] = ()
        self.forced_count = 0
        self.prompt_logprobs_count = 0
        self.cached_count: int | None = None
        self.left_out_count = 0
        self.overtaken_count_min = 0
        self.overtaken_count_max = 0
        self.is_running = False
        self.is_pooling = False
        self.steps_in_flight = 0
        self.computed_end = 0
        self.has_surplus = False
        self.aborted_for: FinishReason | None = None
        self.message: str | None = None
        self.finished: RequestFinished | None = None

    @property
    def is_whole(self) -> bool:
        return self.request.pooling is not None and self.request.pooling.is_whole

    @property
    def needs_every_row(self) -> bool:
        """True if no token of the prompt may come from the prefix cache."""
        return self.is_whole or self.request.sampling.prompt_logprobs is not None

    @property
    def phase(self) -> Phase:
        if self.cached_count is None:
            return Phase.QUEUED
        return Phase.DECODE if self.output_count else Phase.PREFILL

    @property
    def automaton(self) -> Automaton | None:
        """Automaton of the sequence's guide. None: the sequence has no grammar."""
        guide = self.request.guide
        return guide.automaton if isinstance(guide, AutomatonGuide) else None

    @property
    def will_have_ended(self) -> bool:
        """True if the sequence certainly ends with its step in flight, because that step delivers its last token."""
        samples = self.steps_in_flight > 0 and self.computed_end == len(self.known)
        return samples and (self.request.pooling is not None or self.output_count + 1 == self.request.output_tokens_max)

    def record_chunk(self, chunk: ScheduledChunk) -> None:
        """Check a chunk that the next step computes, and record it."""
        name = self.request.id
        assert self.is_running, f"{name} is computed, but was never admitted"
        assert self.aborted_for is None, f"{name} is computed after its abort"
        assert chunk.tokens == self.known, f"{name} has {len(self.known)} tokens, its chunk {len(chunk.tokens)}"
        if self.cached_count is None:
            self.cached_count = chunk.start - self.loaded_count
        if self.steps_in_flight:
            assert chunk.start == self.computed_end, (
                f"{name} continues at {chunk.start}, but is computed up to {self.computed_end}"
            )
            assert not self.will_have_ended, f"{name} has all its tokens after the step in flight, but is planned again"
        assert chunk.awaits_token == (chunk.start == len(self.known)), (
            f"{name}: its chunk awaits a known token, or does not await an unknown one"
        )
        self._check_mask(chunk)
        self.steps_in_flight += 1
        self.computed_end = chunk.start + chunk.count

    def _check_mask(self, chunk: ScheduledChunk) -> None:
        """Check that a chunk that samples has a token mask, and that the grammar allows its draft tokens."""
        name, automaton = self.request.id, self.automaton
        assert (chunk.mask_row is not None) == (automaton is not None and chunk.samples), (
            f"{name} has a mask that it does not need, or lacks a mask"
        )
        if automaton is None:
            return
        assert not chunk.awaits_token, f"{name} awaits a token that its guide has not accepted yet"
        state = state_behind(automaton, self.response.token_ids[: self.output_count])
        for token_id in chunk.draft:
            assert token_id in dict(automaton[state]), (
                f"{name} has draft token {token_id}, which is not allowed in state {state}"
            )
            state = dict(automaton[state])[token_id]

    def record_abort(self, result: AbortResult, reason: FinishReason) -> None:
        """Check the core's result of an abort.

        Args:
            result: result of the core.
            reason: reason of the abort.
        """
        name = self.request.id
        if self.finished is not None:
            assert result == AbortResult(AbortOutcome.ALREADY_FINISHED), (
                f"{name} has finished, but its abort returns {result}"
            )
            return
        assert result.outcome is AbortOutcome.ABORTED, f"{name} has not ended, but its abort returns {result.outcome}"
        self.aborted_for = self.aborted_for or reason
        if self.steps_in_flight:
            assert result.finished is None, f"{name} is finished while a step reads its blocks"
        else:
            assert result.finished is not None, f"{name}: no step reads its blocks, but its abort has to wait"
            self.take(result.finished)

    def record_retraction(self) -> None:
        """Record that the sequence lost its blocks, including the KV that a connector had loaded for it."""
        self.is_running = False
        if self.cached_count is None:
            self.loaded_count = 0

    def record_update(self, chunk: ScheduledChunk, tokens_before: int) -> None:
        """Check the sequence after all events of a step.

        Args:
            chunk: the sequence's chunk of the step.
            tokens_before: number of delivered tokens before the step.
        """
        name = self.request.id
        self.steps_in_flight -= 1
        if self.has_surplus:
            self.has_surplus = False
            assert self.output_count == tokens_before, f"{name}gets a token after its end"
        elif self.aborted_for is not None and self.steps_in_flight:
            assert self.finished is None, f"{name} is finished while a step reads its blocks"
        elif self.aborted_for is not None or self.message is not None:
            assert self.finished is not None, f"{name} must have ended with the step, but has not"
        else:
            count = self.output_count - tokens_before
            expected = int(chunk.samples)
            if chunk.draft:
                expected += self._verified_count(chunk.draft, tokens_before)
                drafts, tokens, accepted = self.draft_counts
                self.draft_counts = (drafts + 1, tokens + len(chunk.draft), accepted + expected - 1)
            if self.automaton is not None and chunk.samples and self.request.sampling.logprobs is None:
                forced = forced_count(self.automaton, self.response.token_ids, tokens_before + expected)
                self.forced_count += forced
                expected += forced
            assert count == expected, f"{name}: {count} tokens from a chunk with {expected} expected tokens"
            if self.request.pooling is not None:
                is_over = chunk.start + chunk.count == len(self.known)
                assert self.is_pooling == is_over, (
                    f"{name}: pooled is {self.is_pooling}, but its last chunk was computed: {is_over}"
                )
                assert (self.finished is not None) == is_over, (
                    f"{name}: ended or not, but its last chunk was computed: {is_over}"
                )
            elif self.output_count == len(self.response.token_ids):
                assert self.finished is not None, f"{name} has its whole response, but has not ended"
        # If a sequence ends in one step and the next step is already in flight, its chunk of the next step is surplus.
        self.has_surplus = self.finished is not None and self.steps_in_flight > 0

    def _verified_count(self, draft: tuple[int, ...], tokens_before: int) -> int:
        """Return the number of draft tokens that the model must accept, at most the remaining tokens minus one."""
        tokens = self.response.token_ids[tokens_before:]
        count = 0
        while count < min(len(draft), len(tokens) - 1) and draft[count] == tokens[count]:
            count += 1
        return count

    def take(self, event: EngineEvent) -> None:
        """Check an event of the core."""
        name = self.request.id
        assert self.finished is None, f"{name} has finished, but gets {event}"
        if type(event) is RequestFinished:
            self._record_end(event)
            return
        assert self.aborted_for is None, f"{name} was aborted, but gets {event}"
        if type(event) is TokensReady:
            self._record_tokens(event)
        elif type(event) is PoolingReady:
            assert not self.is_pooling, f"{name} is pooled twice"
            assert event.pooled == self.response.pooled, f"{name} has another vector than expected"
            self.is_pooling = True
        elif type(event) is PromptLogprobs:
            entries = event.logprobs
            assert self.output_count == len(self.request.resumed_output), (
                f"{name}: prompt logprobs after the first token"
            )
            begin, self.prompt_logprobs_count = self.prompt_logprobs_count, self.prompt_logprobs_count + len(entries)
            expected = (self.response.prompt_logprobs or ())[begin : self.prompt_logprobs_count]
            assert entries == expected, f"{name}: prompt logprobs from {begin} on are {entries}, expected {expected}"

    def _record_tokens(self, event: TokensReady) -> None:
        name, begin = self.request.id, self.output_count
        end = begin + len(event.token_ids)
        expected = self.response.token_ids[begin:end]
        assert end > begin, f"{name}: an event without tokens"
        assert event.token_ids == expected, f"{name}: tokens {event.token_ids} at {begin}, the reference has {expected}"
        assert (event.logprobs is None) == (self.response.logprobs is None), (
            f"{name}: logprobs were not requested, or are missing"
        )
        assert event.logprobs is None or event.logprobs == (self.response.logprobs or ())[begin:end], name
        self.known += event.token_ids
        self.output_count = end

    def _record_end(self, event: RequestFinished) -> None:
        name = self.request.id
        phase = self.phase
        cached_count = min(self.cached_count or 0, len(self.request.prompt_token_ids))
        self.finished = event
        if self.aborted_for is not None:
            reason, stop_token_id, message = self.aborted_for, None, None
        elif self.lacks_kv:
            reason, stop_token_id, message = FinishReason.ERROR, None, event.message
            assert message, f"{name}: an error has no message"
        elif self.message is not None:
            reason, stop_token_id, message = FinishReason.ERROR, None, self.message
        else:
            reason, stop_token_id, message = self.response.reason, self.response.stop_token_id, None
            count = len(self.response.token_ids)
            assert self.output_count == count, f"{name} ends with {self.output_count} of {count} tokens"
            asked = self.response.prompt_logprobs
            assert asked is None or self.prompt_logprobs_count == len(asked), f"{name}: prompt logprobs are missing"
            assert self.is_pooling == (self.response.pooled is not None), (
                f"{name} ends, but pooled is {self.is_pooling}"
            )
        expected = RequestFinished(
            request_id=name,
            reason=reason,
            phase=phase,
            stop_token_id=stop_token_id,
            cached_token_count=cached_count,
            message=message,
            kv_transfer=event.kv_transfer,  # TransferWatch checks the parameters.
        )
        assert event == expected, f"{name} ends with {event}, expected is {expected}"
        self.is_running = False
