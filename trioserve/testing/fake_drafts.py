"""A fake draft model that checks the content of its KV blocks.

As in FakeExecutor, each slot contains a digest of the prefix, and the draft model uses the same block numbers.
Positions that the core counts as computed must have the digest of the request's own tokens, whichever request computed
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import DraftTask, DraftTimes, ScheduledChunk, StepPlan, StepResult
from trioserve.contracts.weights import kept_salt

__all__ = ["FakeDraftModel"]

PHASE_STEPS = 32  # Drafts are cheap for this many steps, then expensive for as many steps.


class Texts(Protocol):
    """The method of FakeModel that the draft model needs."""

    vocab_size: int

    def digest(self, token_ids: Sequence[int], parent: int = 0) -> int: ...

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int: ...


class FakeDraftModel:
    """A draft model whose drafts are right, wrong in one token, too long, or empty. Sometimes it skips a task and
    returns no result for the task.

    The prefix determines which of these cases occurs.

    Args:
        model: chooses the right tokens.
        block_count: blocks in the KV cache.
        block_size: tokens in one block.
    """

    def __init__(self, model: Texts, *, block_count: int, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._slots: list[tuple[int, str | None] | None] = [None] * (block_count * block_size)

    def propose(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Execute the draft tasks of a step.

        Args:
            plan: the step.
            result: the result of the step.

        Returns:
            The result with the proposed tokens and the draft times.

        Raises:
            AssertionError: a task contradicts itself, or a block does not have the expected content.
        """
        proposed: dict[RequestId, tuple[int, ...]] = {}
        pass_count = 0
        for chunk, token_id in zip(plan.chunks, result.token_ids, strict=True):
            task, name = chunk.draft_task, chunk.request.id
            if task is None:
                continue
            if name in result.errors or (chunk.samples and token_id is None):
                self._spoil(chunk, task, len(chunk.tokens))
                continue
            tokens = [*chunk.tokens] if token_id is None else [*chunk.tokens, token_id]
            for draft_token, follower in zip(chunk.draft, result.draft_token_ids.get(name, ()), strict=False):
                if draft_token != tokens[-1]:
                    break
                tokens.append(follower)
            digest = self._read(chunk, task)
            end = len(tokens) if task.end is None else task.end
            is_done = self._model.digest(tokens) % 8 != 0
            for position in range(task.start, end):
                digest = self._model.digest((tokens[position],), digest)
                if is_done:
                    self._put(chunk, position, (digest, chunk.request.cache_salt))
            if not is_done:
                continue
            proposed[name] = ()
            if task.end is None and task.token_count > 0:
                pass_count = max(pass_count, task.token_count)
                # The next tokens will be written to these positions, so the request must compute the positions again.
                self._spoil(chunk, msgspec.structs.replace(task, start=end), end + task.token_count)
                proposed[name] = self._tokens(chunk.request, tokens, digest, task.token_count)
        is_cheap = plan.step_index // PHASE_STEPS % 2 == 0
        times = DraftTimes(1.0, (0.1 if is_cheap else 10.0) * pass_count, pass_count)
        return msgspec.structs.replace(result, proposed=proposed, draft_times=times)

    def abandon(self, plan: StepPlan) -> None:
        """Write garbage to all positions that an abandoned step might have written.

        Args:
            plan: the abandoned step.
        """
        for chunk in plan.chunks:
            if chunk.draft_task is not None:
                self._spoil(chunk, chunk.draft_task, len(chunk.tokens))

    def _tokens(self, request: EngineRequest, tokens: list[int], digest: int, count: int) -> tuple[int, ...]:
        kind = digest % 7
        if kind == 0:
            return ()
        known_count = len(tokens)
        for index in range(count + 3 if kind == 1 else count):
            token_id = self._model.next_token_id(request, tokens, digest)
            if (kind == 2 and index == 1) or kind == 3:
                token_id = (token_id + 1) % self._model.vocab_size
            tokens.append(token_id)
            digest = self._model.digest((token_id,), digest)
        return tuple(tokens[known_count:])

    def _read(self, chunk: ScheduledChunk, task: DraftTask) -> int:
        """Check all positions before the first position of a task, and return the digest of this prefix."""
        name, digest = chunk.request.id, 0
        last = len(chunk.tokens) if task.end is None else task.end
        assert 0 <= task.start <= last <= len(chunk.tokens), f"{name}: a draft task of {task.start} to {last}"
        assert chunk.samples or task.end is not None, f"{name} has a draft task to draft, but samples nothing"
        assert task.token_count == 0 or task.end is None, f"{name} must draft, but has tokens left to compute"
        for position in range(task.start):
            digest = self._model.digest((chunk.tokens[position],), digest)
            found = self._slots[self._slot(chunk, position)]
            if found is not None and chunk.request.cache_salt == kept_salt(name):
                # Earlier weights computed this position, when the request had another cache salt.
                found = (found[0], chunk.request.cache_salt)
            assert found == (digest, chunk.request.cache_salt), (
                f"{name}: the draft model's position {position}, in block "
                f"{chunk.block_table[position // self._block_size]}, contains {found}"
            )
        return digest

    def _put(self, chunk: ScheduledChunk, position: int, content: tuple[int, str | None] | None) -> None:
        """Write to a slot. Positions after the request's blocks are ignored."""
        if position // self._block_size < len(chunk.block_table):
            self._slots[self._slot(chunk, position)] = content

    def _slot(self, chunk: ScheduledChunk, position: int) -> int:
        return chunk.block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _spoil(self, chunk: ScheduledChunk, task: DraftTask, end: int) -> None:
        digest = self._model.digest(chunk.tokens[: task.start])
        for position in range(task.start, end):
            expected = None
            if position < len(chunk.tokens):
                digest = self._model.digest((chunk.tokens[position],), digest)
                expected = (digest, chunk.request.cache_salt)
            if position // self._block_size >= len(chunk.block_table):
                return
            # A shared block that is already computed keeps its content, which must be the same.
            if self._slots[self._slot(chunk, position)] != expected:
                self._put(chunk, position, None)
