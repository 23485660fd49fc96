"""Tests of the output of one choice: its deltas, its end, and their fields."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from trioserve.contracts.events import FinishReason, Phase, RequestFinished, TokenLogprob
from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import EVENT_ALTERNATIVES_MAX, Delta, hold_unread, join_unread, pop_unread
from trioserve.contracts.sampling import SamplingParams
from trioserve.text.output import ChoiceOutput, merge
from trioserve.text.tokenizer import Tokenizer

END = 0  # End token of the byte-level vocabulary, which is a special token.


def finished(reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> RequestFinished:
    return RequestFinished(request_id=RequestId("r-1"), reason=reason, phase=Phase.DECODE, **fields)


def logprobs_of(token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id, -0.5 * token_id) for token_id in token_ids)


def one_by_one(
    tokenizer: Tokenizer, token_ids: Sequence[int], end: RequestFinished | None = None, **sampling: Any
) -> list[Delta]:
    """Feed tokens one at a time, and the end together with the last token. Stop when the choice has ended."""
    params = SamplingParams(**sampling)
    output = ChoiceOutput(tokenizer, params, index=3)
    deltas = []
    for position, token_id in enumerate(token_ids):
        logprobs = None if params.logprobs is None else logprobs_of([token_id])
        delta = output.feed((token_id,), logprobs, end if position == len(token_ids) - 1 else None)
        if delta is not None:
            deltas.append(delta)
        if output.ended:
            break
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [output.ended]
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return sum((delta.token_ids for delta in deltas), ())


def characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per character of an ASCII text. So a test can compute which token completes which text."""
    return [tokenizer.encode(character)[0] for character in text]


def test_joined_deltas_contain_all_tokens_and_all_text(byte_level: Tokenizer) -> None:
    text = "Größe 🦆 in 日本"
    token_ids = byte_level.encode(text)
    deltas = one_by_one(byte_level, token_ids, finished())
    assert text_of(deltas) == text
    assert tokens_of(deltas) == tuple(token_ids)
    assert {delta.index for delta in deltas} == {3}
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.LENGTH, None)


def test_tokens_of_an_incomplete_character_come_with_the_delta_that_shows_it(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("🦆")
    output = ChoiceOutput(byte_level, SamplingParams(logprobs=0), index=0)
    for token_id in (first, *rest[:-1]):
        assert output.feed((token_id,), logprobs_of([token_id]), None) is None
    delta = output.feed((rest[-1],), logprobs_of([rest[-1]]), None)
    assert delta is not None
    assert delta.text == "🦆"
    assert delta.token_ids == (first, *rest)
    assert delta.logprobs == logprobs_of([first, *rest])


def test_logprobs_come_in_the_delta_of_their_tokens(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("the lazy dog 🦆 sleeps")
    deltas = one_by_one(byte_level, token_ids, finished(), logprobs=2, stop=("cat",))
    for delta in deltas:
        assert delta.logprobs == logprobs_of(delta.token_ids)
    assert tokens_of(deltas) == tuple(token_ids)


def test_logprobs_are_none_if_not_requested(byte_level: Tokenizer) -> None:
    assert {delta.logprobs for delta in one_by_one(byte_level, byte_level.encode("ab"), finished())} == {None}


def test_a_stop_string_ends_the_choice_and_drops_all_later_text(byte_level: Tokenizer) -> None:
    token_ids = characters(byte_level, "one END two")
    deltas = one_by_one(byte_level, token_ids, stop=("END",))
    assert text_of(deltas) == "one "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "END")
    assert tokens_of(deltas) == tuple(token_ids[:7])


def test_tokens_after_the_stop_string_in_one_step_are_dropped(byte_level: Tokenizer) -> None:
    token_ids = tuple(characters(byte_level, "xENDyy"))
    output = ChoiceOutput(byte_level, SamplingParams(stop=("END",), logprobs=0), index=0)
    delta = output.feed(token_ids, logprobs_of(token_ids), finished(FinishReason.LENGTH))
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("x", token_ids[:4], FinishReason.STOP)
    assert delta.logprobs == logprobs_of(token_ids[:4])
    assert output.ended


def test_the_stop_string_is_shown_if_requested(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("one END two")
    assert text_of(one_by_one(byte_level, token_ids, stop=("END",), include_stop_str_in_output=True)) == "one END"


def test_output_shows_text_that_was_held_back_at_its_end(byte_level: Tokenizer) -> None:
    token_ids = characters(byte_level, "one EN")
    deltas = one_by_one(byte_level, token_ids, finished(), stop=("END",))
    assert [delta.text for delta in deltas] == ["o", "n", "e", " ", "EN"]


def test_incomplete_character_at_the_end_becomes_a_replacement_character(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a🦆")[:-1]
    assert text_of(one_by_one(byte_level, token_ids, finished())) == "a�"
    deltas = one_by_one(byte_level, token_ids, finished(), stop=("�",))
    assert (text_of(deltas), deltas[-1].stop_reason) == ("a", "�")


def test_choice_can_end_without_new_tokens(byte_level: Tokenizer) -> None:
    output = ChoiceOutput(byte_level, SamplingParams(stop=("END",), logprobs=0), index=0)
    token_ids = tuple(characters(byte_level, "E"))
    assert output.feed(token_ids, logprobs_of(token_ids), None) is None
    delta = output.feed((), None, finished(FinishReason.ABORT, message="gone"))
    assert delta == Delta(
        index=0, text="E", token_ids=token_ids, logprobs=logprobs_of(token_ids),
        finish_reason=FinishReason.ABORT, message="gone",
    )  # fmt: skip


@pytest.mark.parametrize(("sampling", "text", "stop_reason"), [
    ({}, "a", None),
    ({"skip_special_tokens": False}, "a", None),
    ({"include_stop_str_in_output": True}, "a", None),
    ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<|end|>", None),
    ({"stop_token_ids": (END,)}, "a", END),
    ({"stop_token_ids": (END + 1,)}, "a", None),
])  # fmt: skip
def test_the_end_token_is_counted_but_not_shown(
    sampling: dict[str, Any], text: str, stop_reason: int | None, byte_level: Tokenizer
) -> None:
    token_ids = [*byte_level.encode("a"), END]
    deltas = one_by_one(byte_level, token_ids, finished(FinishReason.STOP, stop_token_id=END), **sampling)
    assert text_of(deltas) == text
    assert tokens_of(deltas) == tuple(token_ids)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop_reason)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_the_text_of_a_stop_token_is_shown_only_if_requested(include: bool, text: str, byte_level: Tokenizer) -> None:
    a, b = characters(byte_level, "ab")
    end = finished(FinishReason.STOP, stop_token_id=b)
    deltas = one_by_one(byte_level, [a, b], end, stop_token_ids=(b,), include_stop_str_in_output=include)
    assert (text_of(deltas), deltas[-1].stop_reason) == (text, b)


def test_an_equal_token_before_the_stop_token_is_shown(byte_level: Tokenizer) -> None:
    token_ids = tuple(characters(byte_level, "aba"))
    output = ChoiceOutput(byte_level, SamplingParams(), index=0)
    delta = output.feed(token_ids, None, finished(FinishReason.STOP, stop_token_id=token_ids[0]))
    assert delta is not None
    assert delta.text == "ab"


def test_a_stop_string_before_the_stop_token_ends_the_choice(byte_level: Tokenizer) -> None:
    token_ids = (*characters(byte_level, "aX"), END)
    output = ChoiceOutput(byte_level, SamplingParams(stop=("X",)), index=0)
    delta = output.feed(token_ids, None, finished(FinishReason.STOP, stop_token_id=END))
    assert delta is not None
    assert (delta.text, delta.stop_reason, delta.token_ids) == ("a", "X", token_ids[:2])


@pytest.mark.parametrize(("min_tokens", "shown", "stop_reason"), [
    (0, "a", "bc"), (2, "a", "bc"), (3, "abcda", "bc"), (7, "abcdabc", None),
])  # fmt: skip
def test_the_first_min_tokens_cannot_complete_a_stop_string(
    min_tokens: int, shown: str, stop_reason: str | None, byte_level: Tokenizer
) -> None:
    # The tokens are a b c d a b c. "bc" is complete after the third and after the seventh token.
    token_ids = characters(byte_level, "abcdabc")
    deltas = one_by_one(byte_level, token_ids, finished(), stop=("bc",), min_tokens=min_tokens)
    assert (text_of(deltas), deltas[-1].stop_reason) == (shown, stop_reason)


def test_a_stop_string_may_begin_in_the_first_min_tokens(byte_level: Tokenizer) -> None:
    token_ids = characters(byte_level, "abcd")
    assert text_of(one_by_one(byte_level, token_ids, finished(), stop=("bc",), min_tokens=2)) == "a"


@pytest.mark.slow
@hypothesis.settings(deadline=None, database=None, max_examples=300)
@hypothesis.given(
    text=strategies.text("ab", min_size=1, max_size=20),
    stop=strategies.lists(strategies.text("ab", min_size=1, max_size=5), min_size=1, max_size=5),
    min_tokens=strategies.integers(0, 8),
    includes_stop=strategies.booleans(),
)
def test_stop_strings_end_a_choice_where_a_search_of_the_whole_text_finds_them(
    text: str, stop: list[str], min_tokens: int, includes_stop: bool, byte_level: Tokenizer
) -> None:
    ends = [
        (end, -len(string), string)
        for string in stop
        for end in range(min_tokens + 1, len(text) + 1)
        if text[:end].endswith(string)
    ]
    end, shown, reason = len(text), text, None
    if ends:
        end, _, reason = min(ends)
        shown = text[:end] if includes_stop else text[: end - len(reason)]
    token_ids = characters(byte_level, text)
    deltas = one_by_one(
        byte_level, token_ids, finished(),
        stop=tuple(stop), min_tokens=min_tokens, include_stop_str_in_output=includes_stop,
    )  # fmt: skip
    assert text_of(deltas) == shown
    assert tokens_of(deltas) == tuple(token_ids[:end])
    assert deltas[-1].stop_reason == reason


def test_responses_keep_their_leading_space(sentence_piece: Tokenizer) -> None:
    token_ids = sentence_piece.encode("the dog", add_special_tokens=False)
    assert text_of(one_by_one(sentence_piece, token_ids, finished())) == " the dog"


def test_special_tokens_are_shown_only_if_requested(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a<|user|>b")
    assert text_of(one_by_one(byte_level, token_ids, finished())) == "ab"
    assert text_of(one_by_one(byte_level, token_ids, finished(), skip_special_tokens=False)) == "a<|user|>b"


def test_feeding_a_choice_that_has_ended_is_an_error(byte_level: Tokenizer) -> None:
    output = ChoiceOutput(byte_level, SamplingParams(), index=0)
    output.feed((), None, finished())
    assert output.ended
    with pytest.raises(RuntimeError, match="has ended"):
        output.feed((5,), None, None)


token_lists = strategies.lists(strategies.integers(0, 300) | strategies.integers(0, 600), max_size=30)


@pytest.mark.slow
@hypothesis.settings(deadline=None, database=None, max_examples=200)
@hypothesis.given(
    token_ids=token_lists,
    cuts=strategies.lists(strategies.integers(0, 30)),
    stop=strategies.lists(strategies.sampled_from(["e", "th", "he ", "�", "é"]), max_size=2),
    with_logprobs=strategies.booleans(),
)
def test_merged_deltas_do_not_depend_on_how_tokens_come_in_steps(
    token_ids: list[int], cuts: list[int], stop: list[str], with_logprobs: bool, byte_level: Tokenizer
) -> None:
    sampling = SamplingParams(stop=tuple(stop), logprobs=0 if with_logprobs else None)
    whole = ChoiceOutput(byte_level, sampling, index=0).feed(
        tuple(token_ids), logprobs_of(token_ids) if with_logprobs else None, finished()
    )
    output = ChoiceOutput(byte_level, sampling, index=0)
    merged = Delta(index=0, text="", token_ids=())
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for begin, end in zip(bounds, [*bounds[1:], None], strict=True):
        step = tuple(token_ids[begin:end])
        is_last = end is None
        delta = output.feed(step, logprobs_of(step) if with_logprobs else None, finished() if is_last else None)
        merged = merged if delta is None else merge(merged, delta)
        if output.ended:
            break
    assert merged == whole
    if not stop:
        assert merged.text == byte_level.decode(token_ids)


def test_merged_deltas_keep_the_order_and_the_end() -> None:
    first = Delta(index=1, text="a", token_ids=(1,), logprobs=logprobs_of([1]))
    second = Delta(
        index=1, text="b", token_ids=(2, 3), logprobs=logprobs_of([2, 3]),
        finish_reason=FinishReason.STOP, stop_reason=3, message="m",
    )  # fmt: skip
    assert merge(first, second) == Delta(
        index=1, text="ab", token_ids=(1, 2, 3), logprobs=logprobs_of([1, 2, 3]),
        finish_reason=FinishReason.STOP, stop_reason=3, message="m",
    )  # fmt: skip
    without_tokens = Delta(index=1, text="", token_ids=(), finish_reason=FinishReason.ABORT)
    assert merge(first, without_tokens).logprobs == logprobs_of([1])


@hypothesis.settings(deadline=None, database=None, max_examples=200)
@hypothesis.given(
    token_ids=token_lists,
    sizes=strategies.lists(strategies.integers(1, 4), min_size=30, max_size=30),
    updates=strategies.dictionaries(strategies.integers(0, 29), strategies.sampled_from(["a", "b"])),
    stop=strategies.lists(strategies.sampled_from(["e", "he "]), max_size=1),
    merges=strategies.lists(strategies.booleans(), min_size=32, max_size=32),
)
def test_each_token_has_the_version_of_the_weights_that_sampled_it(
    token_ids: list[int],
    sizes: list[int],
    updates: dict[int, str],
    stop: list[str],
    merges: list[bool],
    byte_level: Tokenizer,
) -> None:
    output = ChoiceOutput(byte_level, SamplingParams(stop=tuple(stop)), index=0)
    version, sampled_by, place = "default", [], 0
    deltas: list[Delta] = []
    for step, size in enumerate(sizes):
        if step in updates:
            version = updates[step]
            output.use_weights(version)
        tokens = tuple(token_ids[place : place + size])
        place += size
        end = finished() if place >= len(token_ids) else None
        sampled_by += [version] * len(tokens)
        if (delta := output.feed(tokens, None, end)) is not None:
            if deltas and merges[step]:
                delta = merge(deltas.pop(), delta)
            deltas.append(delta)
        if output.ended or end is not None:
            break
    told: list[str] = []
    for delta in deltas:
        runs = delta.weight_versions or (("default", len(delta.token_ids)),)
        assert sum(count for _, count in runs) == len(delta.token_ids)
        assert all(before[0] != after[0] for before, after in itertools.pairwise(runs)), "two runs that are one"
        told += [name for name, count in runs for _ in range(count)]
    assert told == sampled_by[: len(told)]
    assert stop or told == sampled_by


def test_delta_has_no_weight_versions_until_weights_are_replaced(byte_level: Tokenizer) -> None:
    output = ChoiceOutput(byte_level, SamplingParams(), index=0)
    tokens = characters(byte_level, "abc")
    before = output.feed((tokens[0],), None, None)
    output.use_weights("step 1")
    after = output.feed((tokens[1],), None, None)
    assert before is not None
    assert after is not None
    assert (before.weight_versions, after.weight_versions) == ((), (("step 1", 1),))
    assert merge(before, after).weight_versions == (("default", 1), ("step 1", 1))
    end = Delta(index=0, text="", token_ids=(), finish_reason=FinishReason.ABORT)
    assert merge(after, end).weight_versions == (("step 1", 1),)
    assert merge(before, end).weight_versions == ()


def test_merging_deltas_that_do_not_follow_each_other_is_an_error() -> None:
    first = Delta(index=1, text="a", token_ids=(1,))
    with pytest.raises(AssertionError, match="choices 1 and 2"):
        merge(first, Delta(index=2, text="b", token_ids=(2,)))
    with pytest.raises(AssertionError, match="last delta"):
        merge(Delta(index=1, text="", token_ids=(), finish_reason=FinishReason.STOP), first)


# --- deltas that a slow client has not read yet ---


def unread_tokens(count: int, alternatives: int | None) -> list[Delta]:
    """Return one delta per token. The last delta has the end."""
    top = tuple((token_id, -1.0) for token_id in range(alternatives or 0))
    return [
        Delta(
            index=0,
            text=chr(97 + position % 26),
            token_ids=(position,),
            logprobs=None if alternatives is None else (TokenLogprob(position, -0.5, top),),
            finish_reason=FinishReason.LENGTH if position == count - 1 else None,
        )
        for position in range(count)
    ]


@pytest.mark.parametrize("alternatives", [None, 0, 20])
def test_slow_reader_costs_few_copies_of_each_token(alternatives: int | None) -> None:
    copied = 0

    def counted(first: Delta, second: Delta) -> Delta:
        nonlocal copied
        copied += len(first.token_ids) + len(second.token_ids)
        return merge(first, second)

    count = 4096
    deltas = unread_tokens(count, alternatives)
    held: list[Delta] = []
    for delta in deltas:
        hold_unread(held, delta, counted)
    taken = []
    while held:
        taken.append(pop_unread(held, counted))
    # log2(4096) is 12. If each delta were joined to all earlier deltas, each token would be copied 2048 times on
    # average.
    assert copied <= count * 16
    assert functools.reduce(merge, taken) == functools.reduce(merge, deltas)


def test_slow_reader_gets_one_delta_unless_it_has_many_logprobs() -> None:
    def taken_of(deltas: list[Delta]) -> list[Delta]:
        held: list[Delta] = []
        for delta in deltas:
            hold_unread(held, delta, merge)
        assert join_unread(held, merge) == functools.reduce(merge, deltas)
        taken = []
        while held:
            taken.append(pop_unread(held, merge))
        return taken

    assert len(taken_of(unread_tokens(5000, None))) == 1
    many = taken_of(unread_tokens(1000, 20))
    assert len(many) < 15
    assert all(delta.alternative_count <= EVENT_ALTERNATIVES_MAX for delta in many)
    assert [delta.finish_reason for delta in many] == [*[None] * (len(many) - 1), FinishReason.LENGTH]


@hypothesis.given(strategies.lists(strategies.sampled_from(["hold", "hold", "hold", "take"]), max_size=60))
def test_unread_deltas_keep_their_order(steps: list[str]) -> None:
    deltas = unread_tokens(60, 2)
    held: list[Delta] = []
    read: list[int] = []
    put = 0
    for step in steps:
        if step == "hold":
            hold_unread(held, deltas[put], merge)
            put += 1
        elif held:
            read += pop_unread(held, merge).token_ids
    while held:
        read += pop_unread(held, merge).token_ids
    assert read == list(range(put))
