"""What a draft model is to do behind a step: for which requests, how many tokens, and how far it first has to catch up.

It works behind steps of decodes alone, and not while anybody waits to run. It begins with a request when that has its
first token, so that no first token waits for it; tokens that it has not seen, a prompt or what came by way of a
connector, it computes then, a part behind each step. Blocks that it has computed wholly are noted in the pool: for
whoever hits them they need no catching up.

A head reads hidden states of the model, which are there in the step that computes them and never again: it computes
along with every step, prompts and all, and proposes on the same terms. What it has not seen is never caught up with.
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

OTHERS_RATE = 0.05  # of one draft
CATCH_UP_TOKENS_WORTH = 16  # for each token that is still to come: the draft model computes as many in about a step


class ModelDrafts:
    def __init__(self, settings: CoreSettings, pool: BlockPool) -> None:
        self._settings = settings
        self._pool = pool
        self._judge = DraftJudge()
        self._acceptance = ACCEPTANCE_FIRST  # of whoever drafted lately: a new request begins with it

    def add_tasks(self, chunks: list[ScheduledChunk], lives: Sequence[LiveRequest], *, somebody_waits: bool) -> None:
        """Tokens are proposed behind steps of decodes alone. A head computes along with every step."""
        drafting: dict[int, ModelDraft] = {}
        token_count = 0
        if not somebody_waits and all(chunk.count == 1 and chunk.samples for chunk in chunks):
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
            # Those of the step before are always among them, and no catching up.
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
        """Whoever's hidden states are not there any more, of KV that came from elsewhere, goes on without drafts."""
        for index, (chunk, live) in enumerate(zip(chunks, lives, strict=True)):
            if live.is_pooled or self._known_draft(chunk, live).drafted_count != chunk.start:
                continue
            if chunk.samples:
                task = DraftTask(chunk.start, None, token_count if index in drafting else 0)
            else:
                task = DraftTask(chunk.start, chunk.start + chunk.count, 0)
            chunks[index] = msgspec.structs.replace(chunk, draft_task=task)

    def take(self, chunk: ScheduledChunk, live: LiveRequest, result: StepResult) -> None:
        """The step has come back; its tokens are the request's, which goes on."""
        task, draft = chunk.draft_task, live.drafter
        if chunk.draft and isinstance(draft, ModelDraft):
            self._acceptance += OTHERS_RATE * (draft.acceptance - self._acceptance)
        proposed = result.proposed.get(live.request.id)
        if task is None or proposed is None:
            return
        assert isinstance(draft, ModelDraft), f"{live.request.id} has a task and no draft"
        # What stands behind the computed tokens is in blocks that may go.
        covered = live.computed_count if task.end is None else task.end
        size = self._settings.block_size
        for index in range(draft.drafted_count // size, covered // size):
            self._pool.note_drafted(live.blocks[index])
        draft.drafted_count = covered
        if task.end is None and live.computed_count + 1 == len(live.tokens):
            draft.take_proposed(proposed[: task.token_count], len(live.tokens))

    def note_times(self, plan: StepPlan, result: StepResult) -> None:
        times = result.draft_times
        if times is None or not all(chunk.count == 1 and chunk.samples for chunk in plan.chunks):
            return
        tasks = [(chunk, chunk.draft_task) for chunk in plan.chunks if chunk.draft_task is not None]
        usual = self._settings.draft_tokens_max
        is_usual = all(task.end is None and chunk.start - task.start <= usual for chunk, task in tasks)
        self._judge.note(plan.token_count, len(tasks), times, is_usual=is_usual)

    def _draft_of(self, chunk: ScheduledChunk, live: LiveRequest) -> ModelDraft | None:
        """None: drafts are not for it, or bring nothing any more."""
        settings = self._settings
        # One token comes in any case, and another one behind the last that may be drafted.
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
        # Others may have computed what it shares with them.
        size = self._settings.block_size
        index = draft.drafted_count // size
        while index < chunk.start // size and self._pool.is_drafted(live.blocks[index]):
            index += 1
            draft.drafted_count = index * size
        return draft
