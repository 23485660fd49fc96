"""Tasks of the draft model: for which requests it proposes tokens, how many tokens, and how far it must catch up
before.

The draft model works after steps that only decode, and not while a request waits to run. It begins to work for a
request after the request's first token, so it never delays a first token. Before it can propose tokens, it must catch
up: it computes the prompt, or tokens whose KV came from a connector. It computes some of these tokens after each step.
Blocks that it has computed completely are marked in the pool. Requests that share these blocks need no catching up.

A draft head reads the model's hidden states, which exist only during the step that computes them. So a head computes in
every step, including steps with prompts. It proposes tokens under the same conditions as a draft model. It cannot
compute missed tokens later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from trioserve.contracts.step import DraftTask, DraftTimes, ScheduledChunk, StepPlan, StepResult
from trioserve.core.drafting import ACCEPTANCE_FIRST, ModelDraft
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.request_state import LiveRequest
from trioserve.core.settings import CoreSettings

__all__ = ["DraftJudge", "ModelDrafts"]


LEARNING_RATE = 0.2  # Weight of one step in the mean time, after the first few steps.
# Up to this row count, each count has its own mean. Above it, all counts between two powers of two have one mean.
ROWS_APART = 32
GAIN_MIN = 1.1  # A smaller gain may be a measuring error on a busy machine.
TRIAL_TOKENS = 2
# Number of consecutive steps in a trial. The draft model catches up in the first step, and the other steps are timed.
TRIAL_STEPS = 4
# Steps that are slower than the known mean by this factor are not counted, because something else delayed them.
OUTLIER = 2.0
# Number of steps without drafts before the next trial, at least and at most.
TRIAL_PERIOD_MIN, TRIAL_PERIOD_MAX = 32, 512
PLAIN_PERIOD = 32  # Number of steps with drafts before one step without drafts. This keeps the comparison up to date.
# Number of steps with drafts before one step with one draft token more or fewer, for the same reason.
OTHER_PERIOD = 16


class DraftJudge:
    """Chooses the number of draft tokens that a draft model proposes per request.

    The judge chooses the number that gives the most accepted tokens per second, or 0 if steps without drafts are
    faster. A step with draft tokens has more rows, and the draft model runs additional passes before it. The judge
    measures three values: the time of a step as a function of its row count, the time of a draft model pass, and the
    acceptance rate. The measured times are part of the step results.
    """

    def __init__(self) -> None:
        self._step_seconds = _Means()  # Mean time of steps that only decode, by row count.
        self._pass_seconds = _Means()  # Mean time of a draft model pass, by request count.
        self._plain_count = self._draft_count = 0
        self._trial_period = TRIAL_PERIOD_MIN

    def note(self, row_count: int, request_count: int, times: DraftTimes, *, is_usual: bool) -> None:
        """Learn from the times of a step that only decodes.

        Args:
            row_count: rows of the step.
            request_count: number of requests for which the draft model proposed tokens after the step.
            times: measured times of the step.
            is_usual: True if the draft model only proposed tokens, and did not also catch up with missed tokens.
        """
        self._step_seconds.learn(row_count, times.step_seconds)
        if is_usual and request_count > 0 and times.pass_count > 0:
            self._pass_seconds.learn(request_count, times.draft_seconds / times.pass_count)

    def token_count(self, acceptances: Sequence[float], token_count_max: int) -> int:
        """Return how many tokens to propose for each request, from 0 to `token_count_max`.

        Args:
            acceptances: acceptance rate of each request that drafts, 0 to 1.
            token_count_max: highest number of draft tokens per request that the step and the settings allow.
        """
        if not acceptances or token_count_max <= 0:
            return 0
        count = self._best_count(acceptances, token_count_max)
        if count > 0:
            self._plain_count, self._trial_period = 0, TRIAL_PERIOD_MIN
            self._draft_count += 1
            if self._draft_count % PLAIN_PERIOD == 0:
                return 0
            if self._draft_count % OTHER_PERIOD == 0:
                return count + 1 if count < token_count_max else max(1, count - 1)
            return count
        self._plain_count += 1
        if self._plain_count < self._trial_period:
            return 0
        if self._plain_count == self._trial_period + TRIAL_STEPS - 1:
            self._plain_count, self._trial_period = 0, min(2 * self._trial_period, TRIAL_PERIOD_MAX)
        return min(TRIAL_TOKENS, token_count_max)

    def _best_count(self, acceptances: Sequence[float], token_count_max: int) -> int:
        requests = len(acceptances)
        plain_seconds = self._step_seconds.nearest(requests)
        pass_seconds = self._pass_seconds.nearest(requests)
        if plain_seconds is None or pass_seconds is None:
            return token_count_max
        best, best_speed = 0, GAIN_MIN * requests / plain_seconds
        tokens, likely = float(requests), list(acceptances)
        for count in range(1, token_count_max + 1):
            tokens += sum(likely)
            likely = [chance * one for chance, one in zip(likely, acceptances, strict=True)]
            step_seconds = self._step_seconds.nearest(requests * (1 + count))
            assert step_seconds is not None, "a mean is known"
            speed = tokens / (max(step_seconds, plain_seconds) + count * pass_seconds)
            if speed > best_speed:
                best, best_speed = count, speed
        return best


class _Means:
    """Mean seconds for each count. The first values have equal weights. Later, recent values have more weight."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def learn(self, count: int, seconds: float) -> None:
        key = _key(count)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + max(LEARNING_RATE, 1 / seen) * (min(seconds, OUTLIER * known) - known)

    def nearest(self, count: int) -> float | None:
        """Return the mean of the nearest measured count. None if no count was measured. A smaller count is preferred.

        The mean of a smaller count is too low for a larger count. So a count that was not measured seems cheap, and the
        judge tries and measures it.
        """
        if not self._seconds:
            return None
        key = _key(count)
        fewer = [other for other in self._seconds if other <= key]
        return self._seconds[max(fewer) if fewer else min(self._seconds)]


def _key(count: int) -> int:
    return count if count <= ROWS_APART else ROWS_APART + count.bit_length()


# Weight of one draft in the mean acceptance rate of all requests. A new request starts with this mean.
SHARED_RATE = 0.05
# Catching up is worth this number of missed tokens for each expected output token. One step computes about as many.
CATCH_UP_TOKENS_WORTH = 16


class ModelDrafts:
    """Plans the tasks of a draft model or a draft head, and stores its proposals.

    Args:
        settings: limits of the engine core.
        pool: notes which blocks the draft model has computed.
    """

    def __init__(self, settings: CoreSettings, pool: BlockPool) -> None:
        self._settings = settings
        self._pool = pool
        self._judge = DraftJudge()
        # Mean acceptance rate of recent drafts of all requests. A new request starts with this rate.
        self._acceptance = ACCEPTANCE_FIRST

    def add_tasks(self, chunks: list[ScheduledChunk], lives: Sequence[LiveRequest], *, has_waiting: bool) -> None:
        """Add draft tasks to the chunks of a step.

        Args:
            chunks: chunks of the step. A chunk that gets a task is replaced by a copy.
            lives: the request of each chunk.
            has_waiting: True if a request waits to run. In this case, no tokens are proposed.
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
            # The draft model never has the tokens of the last step, so computing them does not count as catching up.
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
        """Let a draft head compute in the same step as the model.

        A request gets no drafts if its KV came from another engine, because this engine does not have its hidden
        states.
        """
        for index, (chunk, live) in enumerate(zip(chunks, lives, strict=True)):
            if live.is_pooling or self._known_draft(chunk, live).drafted_count != chunk.start:
                continue
            if chunk.samples:
                task = DraftTask(chunk.start, None, token_count if index in drafting else 0)
            else:
                task = DraftTask(chunk.start, chunk.start + chunk.count, 0)
            chunks[index] = msgspec.structs.replace(chunk, draft_task=task)

    def take(self, chunk: ScheduledChunk, live: LiveRequest, result: StepResult) -> None:
        """Store the proposal from a step that has returned.

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
        # KV after the computed tokens does not count, because its blocks may be freed.
        covered = live.computed_count if task.end is None else task.end
        size = self._settings.block_size
        for index in range(draft.drafted_count // size, covered // size):
            self._pool.note_drafted(live.blocks[index])
        draft.drafted_count = covered
        if task.end is None and live.computed_count + 1 == len(live.tokens):
            draft.store_proposal(proposed[: task.token_count], len(live.tokens))

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
        """Return the draft state of a request. None if the request should not draft now."""
        settings = self._settings
        # The first remaining token is sampled without drafts, and another token is sampled after the last draft token.
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
        # The draft model may already have computed shared blocks for another request.
        size = self._settings.block_size
        index = draft.drafted_count // size
        while index < chunk.start // size and self._pool.is_drafted(live.blocks[index]):
            index += 1
            draft.drafted_count = index * size
        return draft
