"""Tests that the number of draft tokens of a draft model follows measured times and acceptance rates."""

from __future__ import annotations

import pytest

from trioserve.contracts.step import DraftTimes
from trioserve.core.drafting import PAUSE_MAX, ModelDraft
from trioserve.core.model_drafts import (
    OTHER_PERIOD,
    PLAIN_PERIOD,
    TRIAL_PERIOD_MAX,
    TRIAL_PERIOD_MIN,
    TRIAL_STEPS,
    TRIAL_TOKENS,
    DraftJudge,
)

TOKENS_MAX = 8


def judge(*, pass_seconds: float, row_seconds: float = 0.0, requests: int = 1) -> DraftJudge:
    """Return a judge that has measured steps and passes of the draft model. A step takes 1 second plus `row_seconds`
    per additional row, and a pass takes `pass_seconds`.
    """
    made = DraftJudge()
    for rows in (requests, *(requests * (1 + count) for count in range(1, TOKENS_MAX + 1))):
        times = DraftTimes(1.0 + row_seconds * (rows - requests), pass_seconds * 2, 2)
        made.note(rows, requests, times, is_usual=True)
    return made


def test_maximum_draft_count_is_used_before_the_first_measurement():
    assert DraftJudge().token_count([0.7], TOKENS_MAX) == TOKENS_MAX
    assert DraftJudge().token_count([0.7], 0) == 0
    assert DraftJudge().token_count([], TOKENS_MAX) == 0


@pytest.mark.parametrize(
    ("acceptance", "pass_seconds", "count"),
    [
        (1.0, 0.1, TOKENS_MAX),
        (0.8, 0.1, 6),
        (0.5, 0.1, 2),
        (0.3, 0.1, 1),
        (0.05, 0.1, 0),
        (0.8, 0.5, 2),
        (0.8, 1.0, 0),
        (0.0, 0.001, 0),
    ],
)
def test_chosen_draft_count_gives_the_most_tokens_per_second(acceptance, pass_seconds, count):
    def speed(tokens: int) -> float:
        return sum(acceptance**place for place in range(tokens + 1)) / (1.0 + tokens * pass_seconds)

    best = max(range(TOKENS_MAX + 1), key=speed)
    assert judge(pass_seconds=pass_seconds).token_count([acceptance], TOKENS_MAX) == count == best


def test_draft_tokens_without_a_gain_are_not_proposed():
    assert judge(pass_seconds=0.1, requests=4).token_count([0.8] * 4, TOKENS_MAX) > 2
    assert judge(pass_seconds=0.1, row_seconds=0.25, requests=4).token_count([0.8] * 4, TOKENS_MAX) == 0


def test_unprofitable_draft_tokens_are_tried_at_growing_intervals():
    made = judge(pass_seconds=2.0)
    counts = [made.token_count([0.9], TOKENS_MAX) for _ in range(4 * TRIAL_PERIOD_MAX)]
    trials = [place for place, count in enumerate(counts, start=1) if count]
    assert {counts[place - 1] for place in trials} == {TRIAL_TOKENS}
    ends = trials[TRIAL_STEPS - 1 :: TRIAL_STEPS]
    assert trials[:TRIAL_STEPS] == list(range(TRIAL_PERIOD_MIN, TRIAL_PERIOD_MIN + TRIAL_STEPS))
    gaps = [later - earlier - TRIAL_STEPS + 1 for earlier, later in zip([0, *ends], ends, strict=False)]
    assert gaps[:3] == [TRIAL_PERIOD_MIN, 2 * TRIAL_PERIOD_MIN, 4 * TRIAL_PERIOD_MIN]
    assert gaps[-1] == TRIAL_PERIOD_MAX


def test_draft_tokens_are_used_again_when_a_try_shows_that_they_are_profitable():
    made = judge(pass_seconds=2.0)
    used, count = 0, 0
    for _ in range(20 * TRIAL_PERIOD_MIN):
        count = made.token_count([0.9], TOKENS_MAX)
        if count:
            # In the first step of a trial, the draft model catches up.
            used += 1
            made.note(1 + count, 1, DraftTimes(1.0, 0.1 * count, count), is_usual=used % TRIAL_STEPS != 1)
    assert count > TRIAL_TOKENS


def test_one_delayed_step_hardly_changes_the_measured_times():
    made = judge(pass_seconds=0.1)
    made.note(7, 1, DraftTimes(50.0, 600.0, 6), is_usual=True)
    assert made.token_count([0.8], TOKENS_MAX) > 2


def test_profitable_drafts_pause_regularly_for_a_plain_step():
    made = judge(pass_seconds=0.1)
    counts = [made.token_count([0.8], TOKENS_MAX) for _ in range(2 * PLAIN_PERIOD)]
    assert [place for place, count in enumerate(counts, start=1) if not count] == [PLAIN_PERIOD, 2 * PLAIN_PERIOD]
    assert {count for count in counts if count} == {6, 7}
    assert counts[OTHER_PERIOD - 1] == 7


def test_time_in_which_the_draft_model_catches_up_is_not_measured_as_a_pass():
    made = judge(pass_seconds=0.1)
    for _ in range(100):
        made.note(2, 1, DraftTimes(1.0, 50.0, 1), is_usual=False)
    assert made.token_count([0.8], TOKENS_MAX) == 6


def test_draft_count_adapts_when_the_machine_becomes_slow():
    made = judge(pass_seconds=0.1)
    for _ in range(100):
        made.note(2, 1, DraftTimes(1.0, 5.0, 1), is_usual=True)
    assert made.token_count([0.8], TOKENS_MAX) == 0


def test_drafts_pause_after_wrong_tokens_and_continue_after_right_tokens():
    draft = ModelDraft()
    pauses = []
    for _ in range(8):
        draft.store_proposal((5, 6), 10)
        assert draft.draft(range(10), 2) == (5, 6)
        draft.learn(2, 0)
        count = 0
        while draft.is_paused:
            assert draft.draft(range(10), 2) == ()
            count += 1
        pauses.append(count)
    assert pauses == [1, 2, 4, 8, 16, PAUSE_MAX, PAUSE_MAX, PAUSE_MAX]
    draft.learn(2, 1)
    assert not draft.is_paused
    draft.learn(2, 0)
    draft.draft((), 2)
    assert not draft.is_paused


def test_acceptance_rate_follows_recent_drafts():
    draft = ModelDraft()
    for _ in range(60):
        draft.learn(4, 4)
    assert draft.acceptance > 0.99
    for _ in range(60):
        draft.learn(4, 1)  # One token is right and the next is wrong. Tokens after the wrong token do not count.
    assert draft.acceptance == pytest.approx(0.5, abs=0.1)


def test_draft_tokens_for_another_position_are_not_used():
    draft = ModelDraft()
    draft.store_proposal((5, 6, 7), 10)
    assert draft.draft(range(11), 8) == ()
    draft.store_proposal((5, 6, 7), 11)
    assert draft.draft(range(11), 2) == (5, 6)
    assert draft.draft(range(11), 2) == ()
