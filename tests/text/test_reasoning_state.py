"""Where a thought begins and ends, in whatever pieces its text comes, and when its end is forced."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.thinking import Thinking
from trioserve.text.reasoning_state import ReasoningPhase, ReasoningState, TextFinder

END = (101, 102)


def run(
    limits: Thinking, *pieces: str, begins_inside: bool | None = None, hurried_at: int | None = None
) -> ReasoningState:
    """Each piece is a token without an id; the forced end's tokens are written as they come."""
    thought = ReasoningState.after_prompt(limits, END, begins_inside=begins_inside)
    for index, piece in enumerate(pieces):
        token = thought.forced[0] if thought.forced and piece == "!" else 0
        is_end_due = hurried_at is not None and index >= hurried_at
        thought = thought.after(token, b"" if piece == "!" else piece.encode(), is_end_due=is_end_due)
    return thought


@pytest.mark.parametrize(
    ("pieces", "begins_inside", "phase", "count"),
    [
        ((), None, ReasoningPhase.BEFORE, 0),
        ((), True, ReasoningPhase.INSIDE, 0),
        ((), False, ReasoningPhase.OVER, 0),
        (("<t>", "a"), False, ReasoningPhase.OVER, 0),
        (("\n", "<", "t"), None, ReasoningPhase.BEFORE, 0),
        (("\n", "<", "t", ">"), None, ReasoningPhase.INSIDE, 0),
        (("<t>a",), None, ReasoningPhase.INSIDE, 0),
        (("<t", "x"), None, ReasoningPhase.OVER, 0),
        (("hello",), None, ReasoningPhase.OVER, 0),
        (("<t>", "a", "b"), None, ReasoningPhase.INSIDE, 2),
        (("<t>", "a", "b</", "t", ">c"), None, ReasoningPhase.OVER, 0),
        (("<t>", "a", "</t", ">"), None, ReasoningPhase.OVER, 0),
    ],
)
def test_phases(pieces, begins_inside, phase, count):
    thought = run(Thinking(begin="<t>", end="</t>"), *pieces, begins_inside=begins_inside)
    assert thought.phase is phase
    if phase is ReasoningPhase.INSIDE:
        assert thought.token_count == count


def test_a_spent_budget_forces_the_end_token_by_token():
    limits = Thinking(end="</t>", tokens_max=2)
    assert run(limits, "a").forced == ()
    assert run(limits, "a", "b").forced == END
    assert run(limits, "a", "b", "!").forced == END[1:]
    assert run(limits, "a", "b", "!", "!").phase is ReasoningPhase.OVER


def test_what_was_sampled_before_the_end_was_forced_is_one_more_token_of_the_thought():
    assert run(Thinking(end="</t>"), "a", "b", "c", hurried_at=0).forced == END
    assert run(Thinking(end="</t>"), "a", "b", "!", "c", hurried_at=0).forced == END


def test_an_end_that_is_being_written_is_not_forced_as_well():
    limits = Thinking(end="</t>", tokens_max=2)
    assert run(limits, "a", "</").forced == ()
    assert run(limits, "a", "</", "t>").phase is ReasoningPhase.OVER
    assert run(limits, "a", "</", "b").forced == END


def test_a_budget_of_nothing():
    assert run(Thinking(end="</t>", tokens_max=0)).forced == END
    assert run(Thinking(begin="<t>", end="</t>", tokens_max=0)).forced == ()
    assert run(Thinking(begin="<t>", end="</t>", tokens_max=0), "<t>").forced == END


@pytest.mark.parametrize("size", range(1, 9))
def test_a_text_is_found_in_pieces_of_any_size(size):
    text = b"aab aabaab and more"
    finder = TextFinder(b"aabaab")
    for begin in range(0, len(text), size):
        piece = text[begin : begin + size]
        finder = finder.after(piece)
        if finder.is_found:
            assert text.index(b"aabaab") + 6 == begin + len(piece) - len(finder.rest)
            return
    raise AssertionError("not found")


@pytest.mark.parametrize("wrong", [{"end": ""}, {"end": "x" * 257}, {"end": "x", "tokens_max": -1}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(InvalidRequest) as raised:
        Thinking(**wrong)
    assert raised.value.param == "thinking"
