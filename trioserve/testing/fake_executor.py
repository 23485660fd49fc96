"""A fake model and its executor, which checks the content of the KV blocks.

The next token depends only on the previous tokens, and on the request's seed if the temperature is above 0. So every
schedule must give the same text. Instead of keys and values, each slot contains a digest of the prefix that ends at
this slot. The executor writes digests through the block table and reads them back through the block table before every
sample. So the first read detects a block that has two owners, was freed too early, or was shared between different
prefixes or cache salts.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.ids import NO_BLOCK, RequestId
from trioserve.contracts.pooling import TOKEN_TASKS, Pooling, PoolingResult
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult, never_abandoned
from trioserve.contracts.weights import kept_salt
from trioserve.testing.fake_drafts import FakeDraftModel

__all__ = ["EMBEDDING_SIZE", "NOTHING_MAY_COME", "FakeExecutor", "FakeModel", "IsAllowed"]

IsAllowed = Callable[[int], bool]
"""Return True if a token id is allowed as the next token."""

NOTHING_MAY_COME = "no token may come next"
_MASK_64 = 2**64 - 1
EMBEDDING_SIZE = 8


class FakeModel:
    """A deterministic model that computes the next token or a vector from the previous tokens.

    Filters, penalties and logit_bias of the sampling parameters have no effect. As a real sampler, the model chooses no
    stop token of the request before the output has min_tokens tokens.

    Args:
        vocab_size: token ids are 0 .. vocab_size - 1.
        stop_token_id: the end token. None if the model has no end token.
        stop_period: average number of prefixes per end token. One prefix in `stop_period` is followed by the end token.
    """

    def __init__(self, *, vocab_size: int = 256, stop_token_id: int | None = None, stop_period: int = 16) -> None:
        assert vocab_size >= 1
        assert stop_token_id is None or 0 <= stop_token_id < vocab_size
        assert stop_period >= 1
        self.vocab_size = vocab_size
        self.stop_token_id = stop_token_id
        self.stop_period = stop_period

    def digest(self, token_ids: Sequence[int], parent: int = 0, *, weights: int = 0) -> int:
        """Return a number that identifies a prefix, 0 <= digest < 2**64.

        Args:
            token_ids: tokens to append to the prefix.
            parent: digest of the previous tokens. 0 if there are no previous tokens.
            weights: number of the weights that compute these tokens. 0 is the number of the first weights.
        """
        for token_id in token_ids:
            before = _mixed(parent ^ weights) if weights else parent
            parent = _mixed(before ^ (token_id + 1))
        return parent

    def root(self, request: EngineRequest) -> int:
        """Return the digest of the empty prefix. Each adapter has another digest, so it changes every token.

        Args:
            request: the request, which may have an adapter.
        """
        return 0 if request.adapter is None else self.digest(request.adapter.digest.encode())

    def prefix_digest(self, request: EngineRequest, token_ids: Sequence[int]) -> int:
        """Return the digest of a prefix of this request, with its adapter and the image rows in its prompt.

        Args:
            token_ids: the first tokens of the request.
        """
        digest = self.root(request)
        if not request.given:
            return self.digest(token_ids, digest)
        for position, token_id in enumerate(token_ids):
            digest = self.digest((token_id,), _given_at(request, position, digest))
        return digest

    def chosen_token_id(
        self, request: EngineRequest, tokens: Sequence[int], digest: int, is_allowed: IsAllowed | None
    ) -> int | None:
        """Return the next token that is allowed, or None if no token is allowed.

        Args:
            request: request with a seed, and perhaps a grammar.
            tokens: prompt and output so far.
            digest: digest of `tokens`.
            is_allowed: returns True for an allowed token id. None allows all ids. If the result of next_token_id is not
                allowed, the next larger allowed id is chosen. After the largest id, the search continues at 0.
        """
        token_id = self.next_token_id(request, tokens, digest)
        if is_allowed is None:
            return token_id
        hidden: frozenset[int] = frozenset()
        if len(tokens) - len(request.prompt_token_ids) < request.sampling.min_tokens:
            hidden = request.stop_token_ids
        others: list[int] = [*range(token_id, self.vocab_size), *range(token_id)]
        for other in others:
            if other not in hidden and is_allowed(other):
                return other
        return None

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        """Return the token that follows `tokens`.

        Args:
            request: request with a seed.
            tokens: prompt and output so far.
            digest: digest of `tokens`.
        """
        number = _mixed(digest ^ request.seed) if request.sampling.temperature > 0.0 else _mixed(digest)
        token_id = number % self.vocab_size
        if self.stop_token_id is not None and (number >> 32) % self.stop_period == 0:
            token_id = self.stop_token_id
        if len(tokens) - len(request.prompt_token_ids) < request.sampling.min_tokens:
            for _ in range(self.vocab_size):
                if token_id not in request.stop_token_ids:
                    break
                token_id = (token_id + 1) % self.vocab_size
        return token_id

    def pooled(self, pooling: Pooling, digest: int) -> PoolingResult:
        """Return the vector or score of a prompt. The result depends on every field of the pooling parameters, so that
        a test notices a lost field.

        Args:
            pooling: parameters of the pooling.
            digest: digest of the prompt.

        Returns:
            For an embedding: EMBEDDING_SIZE numbers from -1 to 1, or only the first `dimensions` numbers. For a task of
            TOKEN_TASKS: the same, as the row of the only token. For a score: one number from 0 to 1. For labels: one
            log probability per label.
        """
        if pooling.task == "labels":
            return PoolingResult.of([self.logprob(token_id, digest, 0).logprob for token_id in pooling.label_token_ids])
        if pooling.task == "score":
            return PoolingResult.of([_mixed(digest ^ (pooling.first_segment_tokens or 0)) / _MASK_64])
        digest = _mixed(digest ^ len(pooling.method))
        numbers = [2.0 * _mixed(digest + index) / _MASK_64 - 1.0 for index in range(EMBEDDING_SIZE)]
        numbers = numbers[: pooling.dimensions]
        length = math.sqrt(sum(number * number for number in numbers)) if pooling.normalize else 1.0
        found = PoolingResult.of([number / length for number in numbers])
        return PoolingResult(found.data, len(numbers)) if pooling.task in TOKEN_TASKS else found

    def logprob(self, token_id: int, digest: int, top_count: int) -> TokenLogprob:
        """Return deterministic log probabilities that are not real. If the chosen token is one of the best tokens, both
        entries have the same value.

        Args:
            token_id: the chosen token.
            digest: digest of the prefix before `token_id`.
            top_count: number of best tokens to return in addition to the chosen token, best first.
        """
        best = _mixed(digest) % self.vocab_size

        def logprob_of(other: int) -> float:
            return -0.25 - 0.5 * ((other - best) % self.vocab_size)

        top = tuple(
            (other, logprob_of(other))
            for other in ((best + rank) % self.vocab_size for rank in range(min(top_count, self.vocab_size)))
        )
        return TokenLogprob(token_id, logprob_of(token_id), top)


class FakeExecutor:
    """An Executor (contracts.step) over a FakeModel.

    Args:
        block_count: blocks in the KV cache.
        block_size: tokens in one block.
        model: the fake model. The default is a FakeModel.
        keeps_kv: False simulates a model that computes every prompt in one step and needs no blocks.
        state_slot_count: if above 0, the model has layers that keep a state per sequence. This is the number of slots
            for states, including snapshots.
        has_draft_model: if True, a fake draft model proposes tokens (fake_drafts.py).
        window_tokens: sliding window of all layers, in tokens. Blocks before the window are not read. None for no
            window.

    Attributes:
        errors: requests that fail at their next chunk, each with the error text for the client. A test may change it at
            any time. A failing chunk leaves garbage in its slots, as on a real device.
        plans: number of executed steps.
        adapters: ids of the loaded adapters. The digest of a request's adapter changes its output.
    """

    def __init__(
        self,
        *,
        block_count: int,
        block_size: int = 16,
        model: FakeModel | None = None,
        keeps_kv: bool = True,
        state_slot_count: int = 0,
        has_draft_model: bool = False,
        window_tokens: int | None = None,
    ) -> None:
        self.keeps_kv = keeps_kv
        self.window_tokens = window_tokens
        self.block_count = block_count
        self.block_size = block_size
        self.model = FakeModel() if model is None else model
        self.errors: dict[RequestId, str] = {}
        self._drafts = (
            FakeDraftModel(self.model, block_count=block_count, block_size=block_size) if has_draft_model else None
        )
        self.plans = 0
        self.adapters: set[int] = set()
        # For each slot: the digest of the prefix that ends at the slot, and the cache salt of the request that wrote
        # it.
        self._slots: list[tuple[int, str | None] | None] = [None] * (block_count * block_size)
        self._weights = [0]  # numbers of all weights so far; the last number is that of the current weights
        # The digest and the cache salt of each state. None if the state has garbage or was never written.
        self._states: list[tuple[int, str | None] | None] = [None] * state_slot_count
        # The previous plan and its token ids, for a plan that was made before the previous step had ended. A request
        # without an entry failed in the previous step.
        self._last_plan: StepPlan | None = None
        self._last_token_ids: dict[RequestId, int | None] = {}

    def use_weights(self, number: int) -> None:
        """Compute with other weights in all later steps. This changes every token.

        Args:
            number: identifies the weights. 0 is the number of the first weights.
        """
        if number != self._weights[-1]:
            self._weights.append(number)

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        """Compute a step, and check the plan and the blocks that the step reads.

        Args:
            plan: the step.
            is_abandoned: returns True if the result is no longer needed.

        Returns:
            The result, or None if the step was abandoned. An abandoned step leaves garbage in its slots, as a real step
            may.

        Raises:
            AssertionError: the plan contradicts itself, or a block does not have the content that its reader expects.
        """
        chunks = self._continued(plan) if plan.is_ahead else dict(enumerate(plan.chunks))
        self._check_plan(plan, chunks.values())
        self.plans += 1
        self._last_plan, self._last_token_ids = plan, {}
        if is_abandoned():
            for chunk in plan.chunks:
                self._spoil(chunk)
            if self._drafts is not None:
                self._drafts.abandon(plan)
            return None
        # All chunks write before any chunk reads, as in the layers of a real forward pass.
        for index, chunk in enumerate(plan.chunks):
            if index in chunks:
                self._write(chunks[index])
            else:
                self._spoil(chunk)
        result = self._sampled(plan, chunks)
        for chunk, token_id in zip(plan.chunks, result.token_ids, strict=True):
            if chunk.request.id not in result.errors and not (chunk.samples and token_id is None):
                self._last_token_ids[chunk.request.id] = token_id
        return result if self._drafts is None else self._drafts.propose(plan, result)

    def _sampled(self, plan: StepPlan, chunks: dict[int, ScheduledChunk]) -> StepResult:
        """Sample the tokens of a step.

        Args:
            plan: the step.
            chunks: the chunks to compute, by index in the plan.
        """
        token_ids: list[int | None] = []
        result = StepResult((), {}, {}, {}, {}, {}, {})
        for index in range(len(plan.chunks)):
            if index not in chunks:
                token_ids.append(None)
                continue
            chunk = chunks[index]
            request = chunk.request
            if request.id in self.errors:
                result.errors[request.id] = self.errors.pop(request.id)
                token_ids.append(None)
                continue
            digests = self._read(chunk)
            if request.adapter is not None and request.adapter.id not in self.adapters:
                result.errors[request.id] = "the adapter of this request is not loaded here any more"
                token_ids.append(None)
                continue
            sampling = request.sampling
            if sampling.prompt_logprobs is not None:
                result.prompt_logprobs[request.id] = self._prompt_logprobs(chunk, digests, sampling.prompt_logprobs)
            if not chunk.samples:
                if chunk.pools and request.pooling is not None:
                    result.pooled[request.id] = self.model.pooled(request.pooling, digests[-1])
                token_ids.append(None)
                continue
            # Sample one token after the last known token, and one token after each draft token.
            tokens = [*chunk.tokens, *chunk.draft]
            ends = range(len(chunk.tokens), len(tokens) + 1)
            sampled = self._chosen(plan, chunk, tokens, digests)
            if not sampled:
                result.errors[request.id] = NOTHING_MAY_COME
                token_ids.append(None)
                continue
            token_ids.append(sampled[0])
            if chunk.draft:
                result.draft_token_ids[request.id] = tuple(sampled[1:])
            if sampling.logprobs is not None:
                logprobs = [
                    self.model.logprob(token_id, digests[end - 1], sampling.logprobs)
                    for token_id, end in zip(sampled, ends, strict=False)
                ]
                result.logprobs[request.id] = logprobs[0]
                if chunk.draft:
                    result.draft_logprobs[request.id] = tuple(logprobs[1:])
        return msgspec.structs.replace(result, token_ids=tuple(token_ids))

    def _chosen(
        self, plan: StepPlan, chunk: ScheduledChunk, tokens: Sequence[int], digests: Sequence[int]
    ) -> list[int]:
        """Choose a token after the last known token and after each draft token. Stop where no token is allowed.

        Args:
            plan: the step, with its token masks.
            chunk: the chunk of one request.
            tokens: the known tokens and the draft tokens.
            digests: digest of the prefix that ends at each position.
        """
        chosen: list[int] = []
        for index, end in enumerate(range(len(chunk.tokens), len(tokens) + 1)):
            is_allowed = None if chunk.mask_row is None else _mask_of(plan, chunk.mask_row + index)
            token_id = self.model.chosen_token_id(chunk.request, tokens[:end], digests[end - 1], is_allowed)
            if token_id is None:
                break
            chosen.append(token_id)
        return chosen

    # --- methods for connectors that move KV outside of steps ---

    def write_prompt(self, request: EngineRequest, block_table: Sequence[int], start: int, count: int) -> None:
        """Write the KV of known tokens at positions start .. start + count - 1, as a step would. Skip positions without
        a block.

        Args:
            request: request that owns the blocks.
            block_table: blocks of the request, with NO_BLOCK for positions outside of the sliding window.
            start: first position.
            count: number of positions.
        """
        known = request.known_token_ids
        digest = self.model.digest(known[:start], self.model.root(request))
        for position in range(start, start + count):
            digest = self.model.digest((known[position],), digest)
            if block_table[position // self.block_size] == NO_BLOCK:
                continue
            slot = block_table[position // self.block_size] * self.block_size + position % self.block_size
            self._slots[slot] = (digest, request.cache_salt)

    def spoil(self, block_table: Sequence[int], start: int, count: int) -> None:
        """Write garbage to positions start .. start + count - 1. Skip positions without a block.

        Args:
            block_table: blocks of a request, or NO_BLOCK.
            start: first position.
            count: number of positions.
        """
        for position in range(start, start + count):
            if block_table[position // self.block_size] != NO_BLOCK:
                self._slots[block_table[position // self.block_size] * self.block_size + position % self.block_size] = (
                    None
                )

    def get_slots(
        self, block_table: Sequence[int], start: int, count: int
    ) -> tuple[tuple[int, str | None] | None, ...]:
        """Return the content of positions start .. start + count - 1.

        Args:
            block_table: blocks of a request.
            start: first position.
            count: number of positions.
        """
        size = self.block_size
        return tuple(
            self._slots[block_table[position // size] * size + position % size]
            for position in range(start, start + count)
        )

    def put_slots(
        self, block_table: Sequence[int], start: int, content: Sequence[tuple[int, str | None] | None]
    ) -> None:
        """Write content that get_slots returned.

        Args:
            block_table: blocks of a request.
            start: first position to write.
            content: one entry per position.
        """
        size = self.block_size
        for position, slot in enumerate(content, start=start):
            self._slots[block_table[position // size] * size + position % size] = slot

    def content(self, blocks: Sequence[int]) -> tuple[object, ...]:
        """Return the content of blocks, so that a caller can compare it with later content.

        Args:
            blocks: indexes of the blocks. NO_BLOCK is skipped.
        """
        size = self.block_size
        present = [block for block in blocks if block != NO_BLOCK]
        return tuple(slot for block in present for slot in self._slots[block * size : (block + 1) * size])

    def _continued(self, plan: StepPlan) -> dict[int, ScheduledChunk]:
        """Return the chunks of a plan that was made before the previous step had ended, by index in the plan.

        The tokens of the previous step are added. Chunks of requests that failed in the previous step are left out.
        """
        assert self._last_plan is not None, "a step was planned ahead, and there was no step before"
        before = {chunk.request.id: chunk for chunk in self._last_plan.chunks}
        chunks: dict[int, ScheduledChunk] = {}
        for index, chunk in enumerate(plan.chunks):
            name = chunk.request.id
            if name in before:
                end = before[name].start + before[name].count
                assert chunk.start == end, f"{name} continues at {chunk.start}, but the step before ended at {end}"
                if name not in self._last_token_ids:
                    continue
            if not chunk.awaits_token:
                chunks[index] = chunk
                continue
            token_id = self._last_token_ids.get(name)
            assert token_id is not None, f"{name} awaits a token that no step has sampled"
            assert (chunk.count, chunk.samples) == (1, True), f"{name} awaits a token, but its chunk is not a decode"
            known = chunk.tokens[chunk.start :]
            assert list(known) in ([], [token_id]), f"{name} awaits {token_id}, but has {known}"
            tokens = [*chunk.tokens[: chunk.start], token_id]
            chunks[index] = msgspec.structs.replace(chunk, tokens=tokens, awaits_token=False)
        return chunks

    def _check_plan(self, plan: StepPlan, chunks: Iterable[ScheduledChunk]) -> None:
        assert plan.step_index == self.plans, f"step {plan.step_index} follows {self.plans} steps"
        assert plan.chunks, "an empty step"
        assert plan.token_count == sum(chunk.row_count for chunk in plan.chunks)
        ids = [chunk.request.id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids), f"a request is in the step twice: {ids}"
        continued = set(ids) - set(plan.admitted)
        assert not continued & set(plan.preempted), "a request continues in the step that preempts it"
        assert set(plan.admitted) <= set(ids), "a request is admitted and computes nothing"
        assert not (plan.is_ahead and plan.preempted), "a request was preempted while a step reads its blocks"
        masked = [chunk for chunk in plan.chunks if chunk.mask_row is not None]
        assert (plan.masks is not None) == bool(masked), "the plan has masks without rows, or rows without masks"
        self._check_states(plan.chunks)
        rows = [(chunk.mask_row or 0) + index for chunk in masked for index in range(1 + len(chunk.draft))]
        assert plan.masks is None or sorted(rows) == list(range(plan.masks.row_count)), f"the masks' rows are {rows}"
        for chunk in chunks:
            name, end = chunk.request.id, chunk.start + chunk.count
            assert not chunk.awaits_token, f"{name} awaits a token, but no step is before this one"
            prompt = chunk.request.prompt_token_ids
            assert chunk.count >= 1, f"{name}: an empty chunk"
            assert 0 <= chunk.start < end <= len(chunk.tokens), f"{name}: {chunk.start} to {end} of {len(chunk.tokens)}"
            known = chunk.request.known_token_ids
            assert tuple(chunk.tokens[: len(known)]) == known, f"{name}: its known tokens have changed"
            for image in chunk.request.given:
                is_cut = image.is_bidirectional and image.start < end < image.end
                assert not is_cut, f"{name}: a chunk ends at {end}, inside the image at {image.start} to {image.end}"
            assert chunk.mask_row is None or chunk.samples, f"{name} has a mask but samples nothing"
            pooling = chunk.request.pooling
            samples = pooling is None and end == len(chunk.tokens)
            assert chunk.samples == samples, f"{name}: samples at the wrong place"
            if pooling is not None:
                assert end <= len(prompt), f"{name}: a pooled request continues after its prompt"
                is_whole = chunk.start == 0 and end == len(prompt)
                assert is_whole or not pooling.is_whole, (
                    f"{name}: {chunk.start} to {end} of a prompt that must be computed whole"
                )
            assert pooling is not None or self.keeps_kv, f"{name}: a model without KV continues after the prompt"
            assert chunk.draft_task is None or self._drafts is not None, (
                f"{name} has a draft task, but there is no draft model"
            )
            assert not chunk.draft or (chunk.samples and chunk.count == 1), (
                f"{name} has draft tokens, but its chunk is not a decode"
            )
            block_count = -(-(end + len(chunk.draft)) // self.block_size) if self.keeps_kv else 0
            assert len(chunk.block_table) == block_count, f"{name}: {len(chunk.block_table)} blocks"
            table = chunk.block_table[self._first_seen(chunk) // self.block_size :]
            assert len(set(table)) == len(table), f"{name}: its table has a block twice"
            assert all(0 <= block < self.block_count for block in table), f"{name}: no such block"

    def _first_seen(self, chunk: ScheduledChunk) -> int:
        """Return the first position that any token of a chunk attends to."""
        return 0 if self.window_tokens is None else max(0, chunk.start - self.window_tokens + 1)

    def _slot(self, chunk: ScheduledChunk, position: int) -> int:
        return chunk.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, chunk: ScheduledChunk) -> None:
        positions = range(chunk.start, chunk.start + chunk.row_count)
        if not self.keeps_kv:
            return
        if chunk.request.id in self.errors:
            self._spoil(chunk)
            return
        self._write_states(chunk)
        if chunk.start > 0:
            # The new digests depend on the content of the slot before this chunk, whichever request wrote the slot.
            before = self._slots[self._slot(chunk, chunk.start - 1)]
            assert before is not None, f"{chunk.request.id}: position {chunk.start - 1} was never written"
            parent = before[0]
        else:
            parent = self.model.root(chunk.request)
        for position, token_id in zip(positions, chunk.row_tokens, strict=True):
            given = _given_at(chunk.request, position, parent)
            parent = self.model.digest((token_id,), given, weights=self._weights[-1])
            self._slots[self._slot(chunk, position)] = (parent, chunk.request.cache_salt)

    def _write_states(self, chunk: ScheduledChunk) -> None:
        """Compute new states from the states in the slots, whichever request wrote those states."""
        name, salt, position = chunk.request.id, chunk.request.cache_salt, chunk.start
        for span in chunk.states:
            root = self.model.root(chunk.request)
            found = (root, salt) if span.reads is None else self._states[span.reads]
            expected = (self.model.digest(chunk.tokens[:position], root), salt)
            if found is not None and _is_kept(chunk.request):
                found = (found[0], salt)
            assert found == expected, (
                f"{name}: state {span.reads} before position {position} is {found}, not {expected}"
            )
            tokens = chunk.tokens[position : position + span.count]
            self._states[span.writes] = (self.model.digest(tokens, found[0]), salt)
            position += span.count

    def _check_states(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Check that every chunk reads its own states, and that no chunk uses a slot that another chunk writes."""
        touched: dict[int, RequestId] = {}
        written: set[int] = set()
        for chunk in chunks:
            name = chunk.request.id
            assert bool(chunk.states) == bool(self._states), f"{name}: spans {chunk.states}, {len(self._states)} states"
            if not chunk.states:
                continue
            assert not chunk.draft, f"{name} has draft tokens and a state"
            assert sum(span.count for span in chunk.states) == chunk.count, f"{name}: {chunk.states} of {chunk.count}"
            writes = [span.writes for span in chunk.states]
            assert len(set(writes)) == len(writes), f"{name} writes a state twice: {chunk.states}"
            for slot in writes:
                assert slot not in touched, f"{name} writes state {slot}, which {touched[slot]} uses in the same step"
            for span in chunk.states:
                assert span.reads is None or span.reads not in written, (
                    f"{name} reads a state that the same step writes: {chunk.states}"
                )
            touched |= {slot: name for span in chunk.states for slot in (span.reads, span.writes) if slot is not None}
            written |= set(writes)

    def _spoil(self, chunk: ScheduledChunk) -> None:
        for span in chunk.states:
            self._states[span.writes] = None
        if not self.keeps_kv:
            return
        for position in range(chunk.start, chunk.start + chunk.row_count):
            self._slots[self._slot(chunk, position)] = None

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        """Return the digest at each position of the context. Compare each visible digest with the digest of the
        request's own tokens.
        """
        digests: list[int] = []
        expected = self.model.root(chunk.request)
        tokens = [*chunk.tokens[: chunk.start + chunk.count], *chunk.draft]
        first = self._first_seen(chunk)
        for position, token_id in enumerate(tokens):
            before = _given_at(chunk.request, position, expected)
            expected = self.model.digest((token_id,), before, weights=self._weights[-1])
            if not self.keeps_kv or position < first:
                digests.append(expected)
                continue
            found = self._slots[self._slot(chunk, position)]
            # Earlier weights may have computed this position, when the request had another cache salt.
            if found is not None and _is_kept(chunk.request):
                digests_of_all = [self.model.digest((token_id,), before, weights=weights) for weights in self._weights]
                expected = found[0] if found[0] in digests_of_all else expected
                found = (found[0], chunk.request.cache_salt)
            assert found == (expected, chunk.request.cache_salt), (
                f"{chunk.request.id}: position {position}, in block {chunk.block_table[position // self.block_size]}, "
                f"contains {found} instead of {(expected, chunk.request.cache_salt)}"
            )
            digests.append(found[0])
        return digests

    def _prompt_logprobs(self, chunk: ScheduledChunk, digests: list[int], top_count: int) -> tuple[TokenLogprob, ...]:
        first, last = chunk.start + 1, min(chunk.start + chunk.count, len(chunk.request.prompt_token_ids) - 1)
        return tuple(
            self.model.logprob(chunk.tokens[position], digests[position - 1], top_count)
            for position in range(first, last + 1)
        )


def _is_kept(request: EngineRequest) -> bool:
    """Return True if the request continues with KV that earlier weights computed."""
    return request.cache_salt == kept_salt(request.id)


def _given_at(request: EngineRequest, position: int, parent: int) -> int:
    """Return the digest of the prefix before a position. If the position has an image row, mix it into the digest."""
    for rows in request.given:
        if rows.start <= position < rows.end:
            row_bytes = memoryview(rows.values).nbytes // rows.count  # type: ignore[arg-type]  # it has a buffer
            row = memoryview(rows.values).cast("B")[(position - rows.start) * row_bytes :][:row_bytes]  # type: ignore[arg-type]
            return _mixed(parent ^ zlib.crc32(row))
    return parent


def _mask_of(plan: StepPlan, row: int) -> IsAllowed:
    masks = plan.masks
    assert masks is not None
    masks.wait()
    words = (ctypes.c_uint32 * masks.words_per_row).from_address(masks.address + 4 * masks.words_per_row * row)
    return lambda token_id: bool(words[token_id // 32] >> token_id % 32 & 1)


def _mixed(number: int) -> int:
    """Mix a number with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). Every input bit affects every output
    bit.
    """
    number = (number + 0x9E3779B97F4A7C15) & _MASK_64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return number ^ (number >> 31)
