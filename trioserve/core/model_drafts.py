"""Tasks of the draft model: for which requests it proposes tokens, how many, and how far it must catch up first.

The draft model works after steps that only decode, and not while a request waits to run. The draft model begins to work
for a request after the request's first token, so it never delays a first token. Then it computes the tokens that it has
not computed yet (a prompt, or tokens whose KV came from a connector), some of them after each step. Blocks that it has
computed completely are noted in the pool. Requests that share these blocks need no catching up.

A head reads the model's hidden states, which exist only during the step that computes them. So a head computes along
with every step, prompts included, and proposes under the same conditions. It never catches up with missed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from trioserve.contracts.step import DraftTask, ScheduledChunk, StepPlan, StepResult
from trioserve.core.draft_judge import DraftJudge
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.live_request import LiveRequest
from trioserve.core.model_draft import ACCEPTANCE_FIRST, ModelDraft
from trioserve.core.settings import CoreSettings

__all__ = ["ModelDrafts"]

SHARED_RATE = 0.05  # weight of one draft in the mean acceptance rate, with which new requests start
# Missed tokens that are worth computing for each output token still to come: the draft model computes so many in about
# one step.
CATCH_UP_TOKENS_WORTH = 16


class ModelDrafts:
    """Plans the tasks of a draft model or a head, and stores its proposals.

    Args:
        settings: limits of the engine core.
        pool: notes which blocks the draft model has computed.
    """

    def __init__(self, settings: CoreSettings, pool: BlockPool) -> None:
        self._settings = settings
        self._pool = pool
        self._judge = DraftJudge()
        # Mean acceptance rate of recent drafts of all requests. New requests start with this rate.
        self._acceptance = ACCEPTANCE_FIRST

    def add_tasks(self, chunks: list[ScheduledChunk], lives: Sequence[LiveRequest], *, has_waiting: bool) -> None:
        """Add draft tasks to the chunks of a step.

        Args:
            chunks: chunks of the step. A chunk that gets a task is replaced by a copy.
            lives: the request of each chunk.
            has_waiting: True if a request waits to run. Then no tokens are proposed.
        """
        drafting: dict[int, ModelDraft] = {}
        token_count = 0
        if not has_waiting and all(chunk.count == 1 and chunk.samples for chunk in chunks):
            for index, (chunk, live) in enumerate(zip(chunks, lives, strict=True)):
                draft = self._draft_of(chunk, live)
                if draft is not None and not draft.is_paused:
                    drafting[index] = draft
            token_count = self._token_count(chunks, drafting)
        if self._settings.draft_source == "head":
            self._follow(chunks, lives, drafting, token_count)
        elif token_count > 0:
            self._propose(chunks, drafting, token_count)

    def _token_count(self, chunks: Sequence[ScheduledChunk], drafting: Mapping[int, ModelDraft]) -> int:
        settings = self._settings
        left = min(settings.step_tokens_max, settings.draft_step_tokens_max) - len(chunks)
        share = min(settings.draft_tokens_max, left // max(1, len(drafting)))
        return self._judge.token_count([draft.acceptance for draft in drafting.values()], share)

    def _propose(self, chunks: list[ScheduledChunk], drafting: Mapping[int, ModelDraft], token_count: int) -> None:
        settings = self._settings
        budget = settings.draft_catch_up_tokens_max
        for index, draft in sorted(drafting.items(), key=lambda entry: chunks[entry[0]].start - entry[1].drafted_count):
            chunk = chunks[index]
            # The draft model has never computed the tokens of the last step. Computing them does not count as catching
            # up.
            missing = max(0, chunk.start - draft.drafted_count - settings.draft_tokens_max)
            if missing <= budget:
                task = DraftTask(draft.drafted_count, None, token_count)
            elif budget > 0:
                task = DraftTask(draft.drafted_count, draft.drafted_count + budget, 0)
            else:
                break
            budget = max(0, budget - missing)
            chunks[index] = msgspec.structs.replace(chunk, draft_task=task)

    def _follow(
        self,
        chunks: list[ScheduledChunk],
        lives: Sequence[LiveRequest],
        drafting: Mapping[int, ModelDraft],
        token_count: int,
    ) -> None:
        """Let a head compute along with the step.

        A request gets no drafts if its KV came from another engine, because then its hidden states do not exist here.
        """
        for index, (chunk, live) in enumerate(zip(chunks, lives, strict=True)):
            if live.is_pooled or self._known_draft(chunk, live).drafted_count != chunk.start:
                continue
            if chunk.samples:
                task = DraftTask(chunk.start, None, token_count if index in drafting else 0)
            else:
                task = DraftTask(chunk.start, chunk.start + chunk.count, 0)
            chunks[index] = msgspec.structs.replace(chunk, draft_task=task)

    def take(self, chunk: ScheduledChunk, live: LiveRequest, result: StepResult) -> None:
        """Store the proposal of a step that has returned.

        Args:
            chunk: the request's chunk in the step.
            live: the request. Its new tokens are already appended.
            result: result of the step.
        """
        task, draft = chunk.draft_task, live.drafter
        if chunk.draft and isinstance(draft, ModelDraft):
            self._acceptance += SHARED_RATE * (draft.acceptance - self._acceptance)
        proposed = result.proposed.get(live.request.id)
        if task is None or proposed is None:
            return
        assert isinstance(draft, ModelDraft), f"{live.request.id} has a task but no draft state"
        # KV after the computed tokens does not count: these blocks may be freed.
        covered = live.computed_count if task.end is None else task.end
        size = self._settings.block_size
        for index in range(draft.drafted_count // size, covered // size):
            self._pool.note_drafted(live.blocks[index])
        draft.drafted_count = covered
        if task.end is None and live.computed_count + 1 == len(live.tokens):
            draft.take_proposed(proposed[: task.token_count], len(live.tokens))

    def note_times(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from the measured times of a step that only decodes.

        Args:
            plan: the plan of the step.
            result: its result.
        """
        times = result.draft_times
        if times is None or not all(chunk.count == 1 and chunk.samples for chunk in plan.chunks):
            return
        tasks = [(chunk, chunk.draft_task) for chunk in plan.chunks if chunk.draft_task is not None]
        usual = self._settings.draft_tokens_max
        is_usual = all(task.end is None and chunk.start - task.start <= usual for chunk, task in tasks)
        self._judge.note(plan.token_count, len(tasks), times, is_usual=is_usual)

    def _draft_of(self, chunk: ScheduledChunk, live: LiveRequest) -> ModelDraft | None:
        """Return the draft state of a request, or None if it should not draft now."""
        settings = self._settings
        # One token is sampled without drafts, and one token is sampled after the last draft token.
        to_come = live.request.output_tokens_max - live.output_count - 2
        context_max = settings.draft_context_tokens_max
        if to_come <= 0 or live.output_count == 0:
            return None
        if context_max is not None and len(live.tokens) + 2 * settings.draft_tokens_max > context_max:
            return None
        draft = self._known_draft(chunk, live)
        missing = chunk.start - draft.drafted_count
        is_lost = settings.draft_source == "head" and missing != 0
        return None if is_lost or missing > CATCH_UP_TOKENS_WORTH * to_come else draft

    def _known_draft(self, chunk: ScheduledChunk, live: LiveRequest) -> ModelDraft:
        if not isinstance(live.drafter, ModelDraft):
            live.drafter = ModelDraft(self._acceptance)
        draft = live.drafter
        # The draft model may have computed shared blocks for another request.
        size = self._settings.block_size
        index = draft.drafted_count // size
        while index < chunk.start // size and self._pool.is_drafted(live.blocks[index]):
            index += 1
            draft.drafted_count = index * size
        return draft
