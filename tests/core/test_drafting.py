"""Tests of draft tokens from a request's own text: their source, their number, and how the core uses them.

Drafts never change a response. The drivers compare every token with the reference, and check the blocks after every
event.
"""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepResult
from trioserve.core.drafting import ENTERED_MAX, NGRAM_MAX, NGRAM_MIN, PAUSE_MAX, PLACES_MAX, Drafter
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeModel


def drafter(draft_tokens_max: int = 16) -> Drafter:
    made = Drafter(draft_tokens_max, 4096)
    for _ in range(5):
        made.learn(16, 16)  # From now on, the drafts have the maximum length.
    return made


def draft_token(text: str, count: int = 16, *, draft_tokens_max: int = 16) -> str:
    return "".join(map(chr, drafter(draft_tokens_max).draft([ord(letter) for letter in text], count)))


# --- source of draft tokens ---


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ("one two three, one two", " three, one two "),
        ("nothing comes twice", ""),
        ("ab", ""),
        ("ab ab", ""),  # Two equal tokens are too few.
        ("abc-abc", "-abc-abc-abc-abc"),  # The draft repeats itself.
        ("aaaa", "aaaaaaaaaaaaaaaa"),
        ("axyz1bxyz2cxyz", "2cxyz2cxyz2cxyz2"),  # If several places are equally good, the latest place is used.
        ("wxyz1 xyz2 wxyz", "1 xyz2 wxyz1 xyz"),  # The place with more equal tokens is used.
    ],
)
def test_draft_copies_the_tokens_that_followed_an_earlier_match(text, drafted):
    assert draft_token(text) == drafted


def test_a_draft_has_at_most_count_max_tokens():
    assert draft_token("one two three, one two", 3) == " th"
    assert draft_token("one two three, one two", 16, draft_tokens_max=2) == " t"


def test_draft_does_not_depend_on_how_the_text_was_divided_between_calls():
    text = [ord(letter) for letter in "to be or not to be, that is to be or not"]
    grown = drafter()
    for count in range(1, len(text)):
        grown.draft(text[:count], 1)
    assert grown.draft(text, 9) == drafter().draft(text, 9)


def test_drafter_indexes_a_long_prompt_over_several_drafts():
    text = [*range(3 * ENTERED_MAX), 5, 6, 7, 8]
    one = drafter()
    assert one.draft([*text[:-4], *range(900, 904)], 2) == ()  # The drafter has not entered the last tokens yet.
    assert one.draft(text, 2) == (9, 10)


class Watched(list):
    """A text that counts how many of its tokens are read."""

    looked_at = 0

    def __getitem__(self, index):
        self.looked_at += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)


GUESS_LOOKS_MAX = 2 * NGRAM_MIN + PLACES_MAX * 2 * NGRAM_MAX + 8


@pytest.mark.parametrize(
    "piece",
    [lambda number: [100 + number, 200_000 + number, 400_000 + number], lambda number: [100 + number, 1, 2, 3]],
    ids=["of new tokens", "in which every place is like the last"],
)
def test_a_draft_in_a_long_text_reads_few_tokens(piece):
    text = Watched(token for number in range(5_000) for token in piece(number))
    one = Drafter(8, 40_000)
    for _ in range(len(text) // ENTERED_MAX + 1):
        one.draft(text, 8)
    for number in range(5_000, 5_020):
        text += piece(number)
        text.looked_at = 0
        one.draft(text, 8)
        assert text.looked_at <= GUESS_LOOKS_MAX


@pytest.mark.slow
def test_a_drafter_uses_a_few_bytes_per_token():
    text = list(range(30_000))
    gc.collect()
    tracemalloc.start()
    try:
        one = Drafter(8, len(text))
        for _ in range(len(text) // ENTERED_MAX + 1):
            one.draft(text, 8)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 10 * len(text)


# --- length of drafts ---


def lengths(one: Drafter, accepted: list[int]) -> list[int]:
    text = [ord(letter) for letter in "abcabc"]
    found = []
    for count in accepted:
        found.append(len(one.draft(text, 100)))
        if found[-1]:
            one.learn(found[-1], min(count, found[-1]))
    return found


def test_drafts_become_longer_after_right_draft_tokens_up_to_the_limit():
    assert lengths(Drafter(20, 100), [100] * 5) == [4, 8, 16, 20, 20]
    assert lengths(Drafter(3, 100), [100] * 3) == [3, 3, 3]


def test_next_draft_is_as_long_as_the_accepted_part_of_the_last_draft():
    assert lengths(Drafter(20, 100), [100, 100, 3, 100, 1, 1]) == [4, 8, 16, 3, 6, 1]


def test_pauses_become_longer_after_wrong_draft_tokens():
    found = lengths(Drafter(8, 100), [0] * 200)
    assert found[:14] == [4, 2, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0]
    assert max("".join(map(str, found)).split("1"), key=len).count("0") == PAUSE_MAX
    assert sum(found[100:]) <= 4  # There are nearly no drafts in a hundred tokens.


def test_pauses_are_short_again_after_a_right_draft():
    one = Drafter(8, 100)
    lengths(one, [0] * 200)
    found = lengths(one, [1] * 60 + [0] * 10)
    assert found[-10:].count(0) < 10


# --- use in the core ---


def repeating(period: int) -> FakeModel:
    """Return a model that repeats the token that came `period` tokens earlier."""

    class Repeating(FakeModel):
        def next_token_id(self, request, tokens, digest):
            return tokens[-period]

    return Repeating()


def test_right_draft_tokens_yield_several_tokens_per_step(drive):
    driver = drive(model=repeating(5), draft_tokens_max=4, step_tokens_max=64)
    driver.add("a", (1, 2, 3, 4, 5, 1, 2, 3, 4, 5), 41)
    driver.run()
    stats = driver.core.stats()
    # The prompt gives one token. After that, every step gives five tokens.
    assert (stats.steps_total, stats.drafts_total, stats.draft_tokens_total, stats.accepted_tokens_total) == (
        9,
        8,
        32,
        32,
    )
    assert len(driver.tokens["a"]) == 41


def test_wrong_draft_tokens_cost_no_token_and_no_block(drive):
    driver = drive(model=FakeModel(vocab_size=2), draft_tokens_max=8, block_size=2, block_count=40, step_tokens_max=40)
    driver.add("a", (0, 1, 0, 0, 1, 1, 0, 1), 30)
    driver.run()
    stats = driver.core.stats()
    assert stats.accepted_tokens_total < stats.draft_tokens_total
    assert stats.steps_total == 30 - stats.accepted_tokens_total


def test_no_tokens_are_drafted_without_the_setting(drive):
    driver = drive(model=repeating(5), step_tokens_max=64)
    driver.add("a", (1, 2, 3, 4, 5) * 2, 20)
    driver.run()
    assert driver.core.stats().steps_total == 20
    assert driver.core.stats().drafts_total == 0


def test_a_stop_token_ends_a_request_in_the_middle_of_its_draft(drive):
    driver = drive(model=repeating(5), draft_tokens_max=8, step_tokens_max=64)
    driver.add("a", (1, 2, 3, 4, 5) * 3, 40, stop_token_ids=frozenset({3}), logprobs=1)
    driver.run()
    assert driver.tokens["a"] == [1, 2, 3]
    assert len(driver.logprobs["a"]) == 3
    assert (driver.finished["a"].reason, driver.finished["a"].stop_token_id) == (FinishReason.STOP, 3)


def test_stop_token_in_a_draft_before_min_tokens_does_not_end_the_request(drive):
    driver = drive(draft_tokens_max=8, step_tokens_max=64, model=FakeModel(vocab_size=2, stop_token_id=0))
    driver.add("a", (1, 1, 1, 1, 1, 1), 30, stop_token_ids=frozenset({0}), min_tokens=25)
    driver.run()
    assert len(driver.tokens["a"]) >= 25
    assert driver.core.stats().accepted_tokens_total > 10


@pytest.mark.parametrize("output_tokens_max", range(1, 14))
def test_no_tokens_are_drafted_beyond_max_tokens(drive, output_tokens_max):
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, context_tokens_max=8 + output_tokens_max)
    driver.add("a", (1, 2) * 4, output_tokens_max)
    count = 0
    while (plan := driver.step()) is not None:
        assert count + len(plan.chunks[0].draft) < output_tokens_max
        count = len(driver.tokens["a"])
    assert len(driver.tokens["a"]) == output_tokens_max
    assert driver.finished["a"].reason is FinishReason.LENGTH


def test_no_tokens_are_drafted_while_a_request_waits(drive):
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, max_num_seqs=1)
    driver.add("a", (1, 2) * 4, 12)
    driver.step()
    driver.add("b", (3, 4) * 4, 12)
    while "a" not in driver.finished:
        assert not driver.step().chunks[0].draft
    assert driver.step().chunks[0].request.id == "b"
    assert driver.step().chunks[0].draft  # No other request waits now.
    driver.run()


def test_drafts_use_the_remaining_tokens_of_a_step(drive):
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, draft_step_tokens_max=9)
    for name in "abc":
        driver.add(name, (ord(name), 1) * 4, 60)
    driver.step()
    plan = driver.step()
    assert [len(chunk.draft) for chunk in plan.chunks] == [2, 2, 2]
    driver.add("d", range(200, 220), 1)
    plan = driver.step()
    assert [chunk.count for chunk in plan.chunks] == [1, 1, 1, 20]
    assert not any(chunk.draft for chunk in plan.chunks)  # The step is full without draft tokens.
    driver.run()


def test_drafts_use_only_remaining_blocks(drive):
    """The pool has three blocks of four tokens. There is space for one token in addition to the known tokens."""
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, block_count=3, block_size=4)
    driver.add("a", (1, 2) * 3, 5)
    driver.add("b", (3, 3), 1)  # The block of b stays cached, and can be evicted.
    driver.step()
    plan = driver.step()
    assert len(plan.chunks[0].draft) == 3
    driver.run()


def test_an_abort_during_a_step_with_drafts_frees_every_block_in_its_update(drive):
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, block_size=1)
    driver.add("a", (1, 2) * 4, 40)
    driver.step()
    plan = driver.step(abort=["a"])
    assert plan.chunks[0].draft
    assert driver.finished["a"].reason is FinishReason.ABORT
    assert len(driver.tokens["a"]) == 1
    assert driver.core.stats().blocks_used == 0
    driver.run()


def test_a_failing_step_with_drafts_frees_every_block(drive):
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, block_size=1)
    driver.add("a", (1, 2) * 4, 40)
    driver.step()
    assert driver.step(fail=["a"]).chunks[0].draft
    assert driver.finished["a"].reason is FinishReason.ERROR
    assert driver.core.stats().blocks_used == 0
    driver.run()


def test_an_abandoned_step_with_drafts_frees_every_block(drive):
    driver = drive(model=repeating(2), draft_tokens_max=8, step_tokens_max=64, block_size=1)
    driver.add("a", (1, 2) * 4, 40)
    driver.step()
    plan = driver.core.schedule(0.0)
    assert plan.chunks[0].draft
    driver.abort("a")
    assert driver.core.flights.is_abandoned(plan)
    driver.core.drop_plan(plan, 0.0)
    assert driver.core.stats().blocks_used == 0


def test_only_accepted_draft_tokens_are_found_in_the_cache(drive):
    """A second request begins with the text of the first one. The fake KV shows which tokens each block really
    contains.
    """
    driver = drive(model=FakeModel(vocab_size=2), draft_tokens_max=8, block_size=1, block_count=80, step_tokens_max=80)
    driver.add("a", (0, 1, 0, 0, 1, 1, 0, 1), 30)
    driver.run()
    stats = driver.core.stats()
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total
    text = [*driver.requests["a"].prompt_token_ids, *driver.tokens["a"]]
    for name, length in (("b", len(text)), ("c", 20)):
        driver.add(name, (*text[:length], 0, 1), 3)
        driver.run()
    assert driver.finished["b"].cached_token_count == len(text) - 1  # The last token was never computed.


def test_a_preempted_request_drafts_again(drive):
    driver = drive(
        model=repeating(2), draft_tokens_max=4, step_tokens_max=64, block_count=10, block_size=2, max_num_seqs=2
    )
    driver.add("a", (1, 2) * 2, 16)
    driver.add("b", (3, 4) * 2, 16)
    driver.run()
    stats = driver.core.stats()
    assert stats.preemptions_total > 0
    assert stats.accepted_tokens_total > 0


def test_draft_ends_where_the_executor_sampled_no_token():
    """The executor returns fewer tokens than there are draft tokens. The request continues after the last sampled
    token.
    """
    core = EngineCore(CoreSettings(block_count=16, context_tokens_max=64, draft_tokens_max=4))
    core.add(_request((1, 2) * 4, 20))
    plan = core.schedule(0.0)
    core.update_from_output(plan, StepResult((1,)), 0.0)
    plan = core.schedule(0.0)
    assert plan.chunks[0].draft == (2, 1, 2, 1)
    (event,) = core.update_from_output(plan, StepResult((2,), draft_token_ids={"a": (1,)}), 0.0)
    assert event.token_ids == (2, 1)
    chunk = core.schedule(0.0).chunks[0]
    assert (chunk.start, chunk.count, list(chunk.tokens)) == (10, 1, [1, 2] * 4 + [1, 2, 1])


def _request(prompt, output_tokens_max):
    return EngineRequest(
        id="a",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=output_tokens_max,
        stop_token_ids=frozenset(),
        seed=0,
    )


@pytest.mark.parametrize("name", ["draft_tokens_max", "draft_step_tokens_max"])
def test_negative_draft_limit_is_refused(name):
    with pytest.raises(StartupError, match=name):
        CoreSettings(block_count=16, context_tokens_max=64, **{name: -1})
