"""Tests of the tasks that a draft model gets after a step. The model and the draft model are simulated."""

from __future__ import annotations

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import DraftTask, DraftTimes, StepPlan
from trioserve.core.drafting import ACCEPTANCE_FIRST, ModelDraft
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core, check_idle


class Drafted:
    """A simulated core. Each step takes `seconds[0]`, and the draft model takes `seconds[1]` per token."""

    def __init__(self, *, seconds: tuple[float, float] = (1.0, 0.1), source: str = "model", **changes: object) -> None:
        self.executor = FakeExecutor(block_count=64, block_size=4, model=FakeModel(vocab_size=4), has_draft_model=True)
        self.core = EngineCore(
            CoreSettings(
                **{
                    "block_count": 64,
                    "block_size": 4,
                    "context_tokens_max": 128,
                    "max_num_seqs": 8,
                    "draft_tokens_max": 4,
                    "draft_source": source,
                    **changes,
                }
            )
        )
        self.seconds = seconds

    def add(self, name: str, prompt_tokens: int, output_tokens: int = 20) -> None:
        self.core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(position % 4 for position in range(prompt_tokens)),
                sampling=SamplingParams(temperature=1.0),
                output_tokens_max=output_tokens,
                stop_token_ids=frozenset(),
                seed=sum(name.encode()),
            )
        )

    def step(self) -> StepPlan | None:
        plan = self.core.schedule(0.0)
        if plan is not None:
            result = self.executor.execute(plan)
            assert result is not None
            count = result.draft_times.pass_count if result.draft_times else 0
            times = DraftTimes(self.seconds[0], self.seconds[1] * count, count)
            self.core.update_from_output(plan, type(result)(**{**_fields(result), "draft_times": times}), 0.0)
        check_core(self.core)
        return plan

    def draft_of(self, name: str) -> ModelDraft:
        drafter = next(live.drafter for live in self.core.live_requests() if live.request.id == name)
        assert isinstance(drafter, ModelDraft)
        return drafter


def _fields(result: object) -> dict[str, object]:
    return {name: getattr(result, name) for name in type(result).__struct_fields__}  # type: ignore[attr-defined]


def tasks(plan: StepPlan | None) -> list[DraftTask | None]:
    return [] if plan is None else [chunk.draft_task for chunk in plan.chunks]


def test_draft_model_starts_after_the_first_token_and_catches_up_over_several_steps():
    drafted = Drafted(draft_catch_up_tokens_max=8)
    drafted.add("a", 30)
    assert tasks(drafted.step()) == [None]
    # A task that was not executed is repeated.
    given = [tasks(drafted.step())[0] for _ in range(8)]
    ends = [task.end for task in given if task is not None]
    assert ends[0] == 8
    assert sorted({end for end in ends if end is not None}) == [8, 16, 24]
    assert ends[-1] is None
    first = next(task for task in given if task is not None and task.end is None)
    assert (first.start, first.token_count) == (24, 4)


def test_no_drafts_for_a_short_response_to_a_long_prompt():
    drafted = Drafted()
    drafted.add("a", 60, output_tokens=4)
    plans = [drafted.step() for _ in range(5)]
    assert [tasks(plan) for plan in plans] == [[None]] * 4 + [[]]
    check_idle(drafted.core)


def test_no_draft_tokens_are_proposed_while_a_request_waits():
    drafted = Drafted(max_num_seqs=1)
    drafted.add("a", 4)
    drafted.step()
    assert tasks(drafted.step()) != [None]
    drafted.add("b", 4)
    assert tasks(drafted.step()) == [None]


def test_no_draft_tokens_are_proposed_after_a_step_with_a_prompt():
    drafted = Drafted()
    drafted.add("a", 4)
    drafted.step()
    drafted.add("b", 4)
    assert tasks(drafted.step()) == [None, None]
    assert None not in tasks(drafted.step())


def test_no_draft_tokens_are_proposed_if_draft_passes_cost_more_than_they_gain():
    drafted = Drafted(seconds=(1.0, 3.0))
    drafted.add("a", 4, output_tokens=100)
    given = [any(tasks(drafted.step())) for _ in range(30)]
    assert any(given[:6])  # Trials measure the time of a pass.
    assert not any(given[10:])


def test_new_request_starts_with_the_draft_acceptance_rate_of_other_requests():
    drafted = Drafted()
    drafted.add("a", 4, output_tokens=60)
    for _ in range(12):
        drafted.step()
    learned = drafted.draft_of("a").acceptance
    assert learned != ACCEPTANCE_FIRST
    drafted.add("b", 4)
    drafted.step()
    drafted.step()
    begun = drafted.draft_of("b").acceptance
    assert begun != ACCEPTANCE_FIRST
    assert (begun > ACCEPTANCE_FIRST) == (learned > ACCEPTANCE_FIRST)


def test_draft_head_computes_in_every_step_from_the_first_chunk():
    drafted = Drafted(source="head", step_tokens_max=16)
    drafted.add("a", 30)
    assert tasks(drafted.step()) == [DraftTask(0, 16, 0)]
    # If a task was not executed, the head makes no more drafts, because a head cannot catch up.
    following = [task for _ in range(4) for task in tasks(drafted.step())]
    assert all(task is None or task.end in (30, None) for task in following)
