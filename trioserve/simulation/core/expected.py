"""One sequence of a simulation: what was asked, what the reference answers, and what the core said. The core's word
is compared as it comes, with a bookkeeping of its own that shares nothing with the core's."""

from __future__ import annotations

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.events import (
    AbortOutcome,
    AbortResult,
    EngineEvent,
    FinishReason,
    Phase,
    PooledReady,
    PromptLogprobs,
    RequestFinished,
    TokensReady,
)
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.core.prefix_cache import PrefixCache
from trioserve.simulation.core.guides import forced_count, state_behind
from trioserve.simulation.reference_engine import ReferenceResponse
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide

__all__ = ["ExpectedSequence"]


class ResidencyBook:
    """Follows the residency reports of a prefix cache from its start.

    Attributes:
        resident: hashes of the blocks that the cache has, according to its reports.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.resident: set[BlockHash] = set()
        self._cache = cache
        cache.on_residency = self._note

    def check(self) -> None:
        """Assert that the reports agree with the cache. Costs O(blocks)."""
        real = set(self._cache.resident_hashes())
        assert real == self.resident, (
            f"{len(self.resident - real)} blocks are told and not there, {len(real - self.resident)} there and not told"
        )

    def _note(self, block_hash: BlockHash, is_resident: bool) -> None:
        if is_resident:
            assert block_hash not in self.resident, "a block is told twice"
            self.resident.add(block_hash)
        else:
            assert block_hash in self.resident, "a block is removed that was not told, or was removed before"
            self.resident.remove(block_hash)


class ExpectedSequence:
    """order: who goes first, the smaller one. known: prompt and delivered tokens. cached_count: the prompt tokens that
    were cached when it first ran; None before. message: what its failing step says. lacks_kv: it has to end, since its
    KV did not come. steps_in_flight: that compute it. computed_end: how far these come. has_surplus: it has ended, and
    a step in flight computes it once more. loaded_count: the tokens whose KV a connector has brought. draft_counts: of
    its drafts that were verified: how many, their tokens, those of them that were right. proposed: what a draft model
    said in the last step that it was in. overtaken_count_min, _max: how many started before it that came later; of some
    it is not known whether that was for want of room for it.
    response: all of it, also what was known when it came."""

    __slots__ = (
        "aborted_for",
        "cached_count",
        "computed_end",
        "draft_counts",
        "finished",
        "forced_count",
        "has_surplus",
        "is_pooled",
        "is_running",
        "known",
        "lacks_kv",
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
        self.known = [*request.prompt_token_ids, *request.known_output]
        self.output_count = len(request.known_output)
        self.loaded_count = 0
        self.lacks_kv = False
        self.draft_counts = (0, 0, 0)
        self.proposed: tuple[int, ...] = ()
        self.forced_count = 0
        self.prompt_logprobs_count = 0
        self.cached_count: int | None = None
        self.overtaken_count_min = 0
        self.overtaken_count_max = 0
        self.is_running = False
        self.is_pooled = False
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
        """Nothing of its prompt may be a hit."""
        return self.is_whole or self.request.sampling.prompt_logprobs is not None

    @property
    def phase(self) -> Phase:
        if self.cached_count is None:
            return Phase.QUEUED
        return Phase.DECODE if self.output_count else Phase.PREFILL

    @property
    def automaton(self) -> Automaton | None:
        """Of its guide."""
        guide = self.request.guide
        return guide.automaton if isinstance(guide, AutomatonGuide) else None

    @property
    def will_have_ended(self) -> bool:
        """Whether it ends with the step in flight that it is in, whatever that brings: it has all its tokens then."""
        samples = self.steps_in_flight > 0 and self.computed_end == len(self.known)
        return samples and (self.request.pooling is not None or self.output_count + 1 == self.request.output_tokens_max)

    def take_chunk(self, chunk: ScheduledChunk) -> None:
        """It computes in the step that begins."""
        name = self.request.id
        assert self.is_running, f"{name} computes, and was never admitted"
        assert self.aborted_for is None, f"{name} computes after its abort"
        assert chunk.tokens == self.known, f"{name} has {len(self.known)} tokens, its chunk {len(chunk.tokens)}"
        if self.cached_count is None:
            self.cached_count = chunk.start - self.loaded_count
        if self.steps_in_flight:
            assert chunk.start == self.computed_end, f"{name} goes on at {chunk.start} behind {self.computed_end}"
            assert not self.will_have_ended, f"{name} has all its tokens with the step in flight, and is planned again"
        assert chunk.awaits_token == (chunk.start == len(self.known)), f"{name} awaits a token that is known, or not"
        self._check_mask(chunk)
        self.steps_in_flight += 1
        self.computed_end = chunk.start + chunk.count

    def _check_mask(self, chunk: ScheduledChunk) -> None:
        """What is chosen for it is masked, and it drafts what may come."""
        name, automaton = self.request.id, self.automaton
        assert (chunk.mask_row is not None) == (automaton is not None and chunk.samples), f"{name} is masked, or not"
        if automaton is None:
            return
        assert not chunk.awaits_token, f"{name} goes on, and its guide does not know behind which token"
        state = state_behind(automaton, self.response.token_ids[: self.output_count])
        for token_id in chunk.draft:
            assert token_id in dict(automaton[state]), f"{name} drafts {token_id}, which may not come in state {state}"
            state = dict(automaton[state])[token_id]

    def take_abort(self, result: AbortResult, reason: FinishReason) -> None:
        """What the core said to an abort of this sequence."""
        name = self.request.id
        if self.finished is not None:
            assert result == AbortResult(AbortOutcome.ALREADY_FINISHED), f"{name} has finished, its abort says {result}"
            return
        assert result.outcome is AbortOutcome.ABORTED, f"{name} lives, its abort says {result.outcome}"
        self.aborted_for = self.aborted_for or reason
        if self.steps_in_flight:
            assert result.finished is None, f"{name} is finished while a step reads its blocks"
        else:
            assert result.finished is not None, f"{name}: no step reads its blocks, and its abort has to wait"
            self.take(result.finished)

    def take_retraction(self) -> None:
        """It has no blocks any more, nor what a connector had brought for it."""
        self.is_running = False
        if self.cached_count is None:
            self.loaded_count = 0

    def take_update(self, chunk: ScheduledChunk, tokens_before: int) -> None:
        """All events of the step that it was in have been taken. tokens_before: how many it had before them."""
        name = self.request.id
        self.steps_in_flight -= 1
        if self.has_surplus:
            self.has_surplus = False
            assert self.output_count == tokens_before, f"{name}: a token after its end"
        elif self.aborted_for is not None and self.steps_in_flight:
            assert self.finished is None, f"{name} is finished while a step reads its blocks"
        elif self.aborted_for is not None or self.message is not None:
            assert self.finished is not None, f"{name} ought to have ended with the step, and lives"
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
            assert count == expected, f"{name}: {count} tokens from a chunk that gives {expected}"
            if self.request.pooling is not None:
                is_over = chunk.start + chunk.count == len(self.known)
                assert self.is_pooled == is_over, f"{name}: pooled, or not, with its last chunk: {is_over}"
                assert (self.finished is not None) == is_over, f"{name}: ended, or not, with its last chunk: {is_over}"
            elif self.output_count == len(self.response.token_ids):
                assert self.finished is not None, f"{name} has its whole response, and no end"
        # Whoever ends with one step and is in the next: there it is surplus.
        self.has_surplus = self.finished is not None and self.steps_in_flight > 0

    def _verified_count(self, draft: tuple[int, ...], tokens_before: int) -> int:
        """How many tokens a draft brings besides the one that every decode does: one for each accepted draft token in a
        row, as far as the response goes."""
        tokens = self.response.token_ids[tokens_before:]
        count = 0
        while count < min(len(draft), len(tokens) - 1) and draft[count] == tokens[count]:
            count += 1
        return count

    def take(self, event: EngineEvent) -> None:
        """Whatever the core says of it."""
        name = self.request.id
        assert self.finished is None, f"{name} has finished, and now {event}"
        if type(event) is RequestFinished:
            self._take_end(event)
            return
        assert self.aborted_for is None, f"{name} was aborted, and now {event}"
        if type(event) is TokensReady:
            self._take_tokens(event)
        elif type(event) is PooledReady:
            assert not self.is_pooled, f"{name} is pooled twice"
            assert event.pooled == self.response.pooled, f"{name} is pooled to something else"
            self.is_pooled = True
        elif type(event) is PromptLogprobs:
            entries = event.logprobs
            assert self.output_count == len(self.request.known_output), f"{name}: prompt logprobs after the first token"
            begin, self.prompt_logprobs_count = self.prompt_logprobs_count, self.prompt_logprobs_count + len(entries)
            expected = (self.response.prompt_logprobs or ())[begin : self.prompt_logprobs_count]
            assert entries == expected, f"{name}: prompt logprobs from {begin} on are {entries}, expected {expected}"

    def _take_tokens(self, event: TokensReady) -> None:
        name, begin = self.request.id, self.output_count
        end = begin + len(event.token_ids)
        expected = self.response.token_ids[begin:end]
        assert end > begin, f"{name}: an event without tokens"
        assert event.token_ids == expected, f"{name}: tokens {event.token_ids} at {begin}, the reference has {expected}"
        assert (event.logprobs is None) == (self.response.logprobs is None), (
            f"{name}: logprobs nobody asked for, or none"
        )
        assert event.logprobs is None or event.logprobs == (self.response.logprobs or ())[begin:end], name
        self.known += event.token_ids
        self.output_count = end

    def _take_end(self, event: RequestFinished) -> None:
        name = self.request.id
        phase = self.phase
        cached_count = min(self.cached_count or 0, len(self.request.prompt_token_ids))
        self.finished = event
        if self.aborted_for is not None:
            reason, stop_token_id, message = self.aborted_for, None, None
        elif self.lacks_kv:
            reason, stop_token_id, message = FinishReason.ERROR, None, event.message
            assert message, f"{name}: an error without a word"
        elif self.message is not None:
            reason, stop_token_id, message = FinishReason.ERROR, None, self.message
        else:
            reason, stop_token_id, message = self.response.reason, self.response.stop_token_id, None
            count = len(self.response.token_ids)
            assert self.output_count == count, f"{name} ends with {self.output_count} of {count} tokens"
            asked = self.response.prompt_logprobs
            assert asked is None or self.prompt_logprobs_count == len(asked), f"{name}: prompt logprobs are missing"
            assert self.is_pooled == (self.response.pooled is not None), f"{name} ends, and pooled is {self.is_pooled}"
        expected = RequestFinished(
            request_id=name,
            reason=reason,
            phase=phase,
            stop_token_id=stop_token_id,
            cached_token_count=cached_count,
            message=message,
            kv_transfer=event.kv_transfer,  # transfer_watch knows what is right there
        )
        assert event == expected, f"{name} ends with {event}, expected is {expected}"
        self.is_running = False
