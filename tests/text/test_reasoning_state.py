"""Tests of the state of reasoning: where it begins and ends for any pieces of the text, and when its end is forced."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import Thinking
from trioserve.text.reasoning_state import ReasoningPhase, ReasoningState, TextFinder

END = (101, 102)


def run(
    limits: Thinking, *pieces: str, begins_inside: bool | None = None, end_due_at: int | None = None
) -> ReasoningState:
    """Return the state after a prompt and the given pieces.

    Args:
        pieces: Texts of one token each. "!" stands for the next forced token.
        end_due_at: Index of the first piece that is processed with is_end_due.
    """
    reasoning = ReasoningState.after_prompt(limits, END, begins_inside=begins_inside)
    for index, piece in enumerate(pieces):
        token = reasoning.forced[0] if reasoning.forced and piece == "!" else 0
        is_end_due = end_due_at is not None and index >= end_due_at
        reasoning = reasoning.after(token, b"" if piece == "!" else piece.encode(), is_end_due=is_end_due)
    return reasoning


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
def test_state_has_the_expected_phase_and_token_count_after_pieces(pieces, begins_inside, phase, count):
    reasoning = run(Thinking(begin="<t>", end="</t>"), *pieces, begins_inside=begins_inside)
    assert reasoning.phase is phase
    if phase is ReasoningPhase.INSIDE:
        assert reasoning.token_count == count


def test_reaching_the_token_limit_forces_the_closing_tag_token_by_token():
    limits = Thinking(end="</t>", tokens_max=2)
    assert run(limits, "a").forced == ()
    assert run(limits, "a", "b").forced == END
    assert run(limits, "a", "b", "!").forced == END[1:]
    assert run(limits, "a", "b", "!", "!").phase is ReasoningPhase.OVER


def test_a_token_sampled_before_the_end_was_forced_belongs_to_reasoning():
    assert run(Thinking(end="</t>"), "a", "b", "c", end_due_at=0).forced == END
    assert run(Thinking(end="</t>"), "a", "b", "!", "c", end_due_at=0).forced == END


def test_a_closing_tag_that_the_model_is_writing_is_not_forced():
    limits = Thinking(end="</t>", tokens_max=2)
    assert run(limits, "a", "</").forced == ()
    assert run(limits, "a", "</", "t>").phase is ReasoningPhase.OVER
    assert run(limits, "a", "</", "b").forced == END


def test_a_token_limit_of_zero_forces_the_closing_tag_at_once():
    assert run(Thinking(end="</t>", tokens_max=0)).forced == END
    assert run(Thinking(begin="<t>", end="</t>", tokens_max=0)).forced == ()
    assert run(Thinking(begin="<t>", end="</t>", tokens_max=0), "<t>").forced == END


@pytest.mark.parametrize("size", range(1, 9))
def test_tag_finder_finds_a_tag_in_pieces_of_any_size(size):
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
def test_invalid_limits_of_reasoning_are_refused(wrong):
    with pytest.raises(InvalidRequest) as raised:
        Thinking(**wrong)
    assert raised.value.param == "thinking"
