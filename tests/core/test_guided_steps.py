"""Tests of guides in the core: masks by row, forced tokens, and ends without an end token, in all situations.

The drivers compare every response with a reference that chooses each token without the core.
"""

from __future__ import annotations

import pytest

from trioserve.contracts.events import FinishReason, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.fake_executor import FakeModel


def chain(*parts: tuple[int, ...], ends: bool = True) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return an automaton with consecutive states, each with its allowed tokens. If `ends` is True, the automaton ends
    after its last state. Otherwise it starts again.
    """
    states = [tuple((token, index + 1) for token in tokens) for index, tokens in enumerate(parts)]
    if ends:
        return (*states, ())
    *first, last = states
    return (*first, tuple((token, 0) for token, _ in last))


ANY = (1, 2, 3, 4, 5, 6, 7)


def model() -> FakeModel:
    return FakeModel(vocab_size=40)


def add(driver, name="a", automaton=(), prompt=(9, 8, 7, 6, 5), output=30, **more):
    driver.add(name, prompt, output, guide=AutomatonGuide(automaton), **more)


def test_output_matches_its_grammar_and_ends_when_the_grammar_ends(drive):
    driver = drive(model=model())
    add(driver, automaton=chain((1, 2), (3, 4), (5, 6)))
    driver.run()
    tokens = driver.tokens["a"]
    assert [token in allowed for token, allowed in zip(tokens, [(1, 2), (3, 4), (5, 6)], strict=True)] == [True] * 3
    assert driver.finished["a"].reason is FinishReason.STOP
    assert driver.finished["a"].stop_token_id is None


def test_an_allowed_stop_token_ends_a_guided_request(drive):
    driver = drive(model=model())
    add(driver, automaton=chain((1,), (2,), (39,), ANY, ends=False), stop_token_ids=frozenset((39,)))
    driver.run()
    assert driver.tokens["a"] == [1, 2, 39]
    assert driver.finished["a"].stop_token_id == 39


def test_forced_tokens_are_computed_in_one_step(drive):
    driver = drive(model=model(), step_tokens_max=16)
    add(driver, automaton=chain(ANY, (11,), (12,), (13,), ANY, (14,)))
    driver.step()
    assert driver.tokens["a"][1:] == [11, 12, 13]
    plan = driver.step()
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks] == [(5, 4, True)]
    assert driver.finished["a"].reason is FinishReason.STOP
    assert driver.core.stats().forced_tokens_total == 4
    assert driver.core.stats().steps_total == 2
    driver.run()


def test_forced_tokens_and_the_sampled_token_before_are_one_event(drive):
    driver = drive(model=model())
    add(driver, automaton=chain(ANY, (11,), (12,)), prompt=(9, 8))
    plan = driver.core.schedule(0.0)
    events = driver.take_result(plan, driver.executor.execute(plan))
    assert [len(event.token_ids) for event in events if isinstance(event, TokensReady)] == [3]


@pytest.mark.parametrize("output", range(1, 8))
def test_forced_tokens_end_at_max_tokens(drive, output):
    driver = drive(model=model())
    add(driver, automaton=chain(ANY, (11,), (12,), (13,), (14,), (15,)), output=output)
    driver.run()
    assert len(driver.tokens["a"]) == min(output, 6)
    is_whole = output >= 6
    assert driver.finished["a"].reason is (FinishReason.STOP if is_whole else FinishReason.LENGTH)


def test_forced_stop_token_ends_the_request(drive):
    driver = drive(model=model())
    add(driver, automaton=chain(ANY, (11,), (39,), (12,), ANY), stop_token_ids=frozenset((39,)))
    driver.run()
    assert driver.tokens["a"][1:] == [11, 39]


def test_a_forced_stop_token_does_not_count_before_min_tokens(drive):
    driver = drive(model=model())
    add(driver, automaton=chain(ANY, (11,), (39,), (12,), ANY), stop_token_ids=frozenset((39,)), min_tokens=3)
    plan = driver.core.schedule(0.0)
    driver.take_result(plan, driver.executor.execute(plan))
    assert driver.tokens["a"][1:] == [11, 39, 12]
    driver.abort("a")


def test_a_long_forced_run_is_computed_within_the_budget_of_a_step(drive):
    driver = drive(model=model(), step_tokens_max=6, context_tokens_max=200)
    add(driver, automaton=chain(ANY, *([(token,) for token in range(20)] * 2), ANY), output=60)
    driver.run()
    assert len(driver.tokens["a"]) == 42


def test_request_with_logprobs_samples_every_token_and_gets_its_logprob(drive):
    driver = drive(model=model())
    add(driver, automaton=chain(ANY, (11,), (12,), ANY), logprobs=1)
    driver.run()
    assert len(driver.logprobs["a"]) == len(driver.tokens["a"]) == 4
    assert driver.core.stats().forced_tokens_total == 0


def test_other_requests_of_the_step_are_not_masked(drive):
    driver = drive(model=model(), step_tokens_max=32)
    add(driver, automaton=chain(*[(1, 2)] * 8))
    driver.add("b", (3, 3, 3), 8)
    add(driver, "c", automaton=chain(*[(5, 6)] * 8), prompt=(2, 2))
    plan = driver.step()
    assert [chunk.mask_row for chunk in plan.chunks] == [0, None, 1]
    driver.run()
    assert set(driver.tokens["c"]) <= {5, 6}


def test_a_step_without_guides_has_no_masks(drive):
    driver = drive(model=model())
    driver.add("b", (3, 3, 3), 2)
    assert driver.step().masks is None


def test_a_prompt_in_chunks_is_masked_where_it_samples(drive):
    driver = drive(model=model(), step_tokens_max=4)
    add(driver, automaton=chain((1,)), prompt=range(10, 20))
    rows = [[chunk.mask_row for chunk in driver.step().chunks] for _ in range(3)]
    assert rows == [[None], [None], [0]]


def test_forced_tokens_are_computed_again_after_a_preemption(drive):
    driver = drive(model=model(), block_count=7, block_size=2, context_tokens_max=14, step_tokens_max=8)
    forms = [ANY, (11,), (12,), ANY, (13,), (14,), ANY, (15,), ANY]
    for name in "ab":
        add(driver, name, automaton=chain(*forms), prompt=(ord(name) % 40, 1), output=12)
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert driver.core.stats().forced_tokens_total >= 8


def test_forced_tokens_are_cached_for_the_next_request(drive):
    driver = drive(model=model(), block_size=2, step_tokens_max=32)
    add(driver, automaton=chain((1,), (11,), (12,), (13,), (14,), (15,), (16,)), prompt=(9, 9))
    driver.run()
    driver.add("b", (9, 9, 1, 11, 12, 13, 14), 1)
    driver.run()
    assert driver.finished["b"].cached_token_count == 2  # The last token was never computed.
    add(driver, "c", automaton=chain((1,), (11,), (12,), (13,), (14, 15), (16,)), prompt=(9, 9))
    driver.run()
    driver.add("d", (9, 9, 1, 11, 12, 13, 14), 1)
    driver.run()
    assert driver.finished["d"].cached_token_count == 6


def test_failed_guide_ends_only_its_own_request(drive):
    driver = drive(model=model())
    driver.add("a", (9, 8), 9, guide=AutomatonGuide(chain(*[ANY] * 8), fails_after=3))
    driver.add("b", (3, 3, 3), 8)
    driver.run()
    assert driver.finished["a"].reason is FinishReason.ERROR
    assert driver.finished["a"].message == "the guide has failed"
    assert len(driver.tokens["a"]) == 2
    assert driver.finished["b"].reason is FinishReason.LENGTH


def test_a_mask_that_allows_no_token_ends_the_request_with_the_guides_fault(drive):
    driver = drive(model=model())

    class Broken(AutomatonGuide):
        def fill_masks(self, address, words_per_row, draft):
            self.fault = "its lexer has become too complex"
            raise RuntimeError("inside")

    driver.add("a", (9, 8), 9, guide=Broken(chain(*[ANY] * 8)))
    driver.add("b", (3, 3, 3), 2)
    driver.run()
    assert driver.finished["a"].reason is FinishReason.ERROR
    assert driver.finished["a"].message == "its lexer has become too complex"
    assert driver.finished["b"].reason is FinishReason.LENGTH


def test_an_abort_during_a_masked_step_releases_everything(drive):
    driver = drive(model=model())
    add(driver, automaton=chain(ANY, (11,), (12,), ANY, ends=False), output=30)
    driver.step()
    driver.step(abort=["a"])
    assert driver.finished["a"].reason is FinishReason.ABORT
    driver.run()


def test_drafts_are_shortened_where_the_guide_rejects_a_token(drive):
    loop = chain((1, 2), (3,), (4,), (5, 6), ends=False)
    driver = drive(model=FakeModel(vocab_size=8), draft_tokens_max=8, step_tokens_max=32)
    guide = AutomatonGuide(loop)
    driver.add("a", (1, 3, 4, 5, 1, 3, 4, 5), 40, guide=guide)
    drafted = 0
    while list(driver.core.live_requests()):
        state = guide.state
        plan = driver.core.schedule(0.0)
        (chunk,) = plan.chunks
        if chunk.draft:
            assert plan.masks.row_count == 1 + len(chunk.draft)
            drafted += 1
        result = driver.executor.execute(plan)
        assert guide.state == state
        driver.take_result(plan, result)
    assert drafted > 0
    driver.run()


def test_no_step_is_planned_ahead_if_a_guide_needs_the_token_in_flight(drive):
    driver = drive(model=model(), overlap_steps=True)
    add(driver, automaton=chain(*[ANY] * 6), output=6)
    driver.add("b", (3, 3, 3), 8)
    plan = driver.core.schedule(0.0)
    assert driver.core.schedule_ahead(0.0) is None
    driver.take_result(plan, driver.executor.execute(plan))
    driver.run()


def test_a_step_without_awaited_guided_tokens_is_planned_ahead(drive):
    driver = drive(model=model(), overlap_steps=True, step_tokens_max=4)
    add(driver, automaton=chain((1,), (2,)), prompt=range(10, 18))
    first = driver.core.schedule(0.0)
    behind = driver.core.schedule_ahead(0.0)
    assert [chunk.mask_row for chunk in behind.chunks] == [0]
    results = [driver.executor.execute(first), driver.executor.execute(behind)]
    driver.take_result(first, results[0])
    driver.take_result(behind, results[1])
    driver.run()
    assert driver.tokens["a"] == [1, 2]


def test_the_guide_of_an_aborted_request_blocks_no_step_ahead(drive):
    driver = drive(model=model(), overlap_steps=True)
    add(driver, automaton=chain(*[ANY] * 6), output=6)
    driver.add("b", (3, 3, 3), 8)
    first = driver.core.schedule(0.0)
    driver.core.abort([RequestId("a")], now=0.0)
    behind = driver.core.schedule_ahead(0.0)
    assert [chunk.request.id for chunk in behind.chunks] == ["b"]
    for plan, result in [(plan, driver.executor.execute(plan)) for plan in (first, behind)]:
        driver.take_result(plan, result)
    driver.run()


def test_a_forced_token_that_the_guide_rejects_is_not_in_the_response(drive):
    driver = drive(model=model())
    driver.add("a", (9, 8), 9, guide=AutomatonGuide(chain(ANY, (11,), (12,), (13,)), fails_after=3))
    driver.step()
    assert driver.tokens["a"][1:] == [11]
    assert driver.finished["a"].reason is FinishReason.ERROR
    driver.run()


class EndOfReasoning(AutomatonGuide):
    """A guide that allows any token, and forces the end of the reasoning after two tokens. A token that was sampled
    ahead also belongs to the reasoning.
    """

    is_free_ahead = True

    def __init__(self):
        super().__init__(())
        self.taken = []

    def wants_mask(self, draft):
        return False

    is_over = False

    def accept(self, token_id):
        self.taken.append(token_id)
        return True

    def forced_tokens(self, count_max):
        return (11, 12)[:count_max] if len(self.taken) >= 2 and 12 not in self.taken else ()


def test_no_token_is_forced_while_the_next_token_is_being_sampled(drive):
    driver = drive(model=model(), overlap_steps=True)
    guide = EndOfReasoning()
    driver.add("a", (9, 8), 8, guide=guide)
    plans = [driver.core.schedule(0.0)]
    for _ in range(3):
        plans.append(driver.core.schedule_ahead(0.0))
        plan = plans.pop(0)
        driver.take_result(plan, driver.executor.execute(plan))
    assert driver.tokens["a"] == guide.taken
    assert 11 not in guide.taken, "the third token is already being sampled"
    (plan,) = plans
    driver.take_result(plan, driver.executor.execute(plan))
    assert guide.taken[-2:] == [11, 12]
