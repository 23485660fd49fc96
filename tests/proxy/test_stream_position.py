"""Tests positions in streams: the ids that a client gets, and the rest of the stream that a client gets for an id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.api.error_responses import Refusal
from trioserve.api.streams.cursors import CHOICES_NUMBERED_MAX, Position, PositionKeeper, parse_position
from trioserve.contracts.errors import InvalidRequest
from trioserve.proxy.streams.client_events import NumberedEvents


def group(text: str, id: str) -> bytes:
    return f'data: {{"text":"{text}"}}\nid: {id}\n\n'.encode()


ROLE = b'data: {"role":"assistant"}\nid: 0:\n\n'
ONE, TWO, LAST = group("one", "0:12"), group("two", "0:7,9"), group("", "0:!")
DONE = b'data: {"usage":{}}\n\ndata: [DONE]\nid: .\n\n'
STREAM = [ROLE, ONE, TWO, LAST, DONE]


def ids(events: bytes) -> list[str]:
    return [line[4:].decode() for line in events.splitlines() if line.startswith(b"id: ")]


def told(groups, known: str | None = None) -> bytes:
    position = None if known is None else parse_position(known)
    events = NumberedEvents(position)
    return b"".join(events.convert(group) for group in groups)


def test_event_ids_have_the_count_and_checksum_of_the_tokens():
    positions = [id.partition("~")[0] for id in ids(told(STREAM))]
    assert positions == ["0", "1", "3", "3!", "."]
    assert len(set(ids(told(STREAM)))) == 5


@pytest.mark.parametrize("index", range(4))
def test_client_gets_only_events_after_its_position(index):
    everything = told(STREAM)
    known = ids(everything)[index]
    before = told(STREAM[: index + 1])
    assert before + told(STREAM, known) == everything


@pytest.mark.parametrize("index", range(4))
def test_client_can_resume_after_any_event(index):
    known = ids(told(STREAM))[index]
    assert told([b"".join(STREAM)], known) == told(STREAM, known)


def test_event_groups_without_an_output_token_have_different_positions():
    stream = [ROLE, b"data: {}\nid: 0: 1\n\n", b"data: {}\nid: 0: 2\n\n", ONE]
    assert [id.partition("~")[0] for id in ids(told(stream))] == ["0", "0+1", "0+2", "1"]
    assert told(stream, ids(told(stream))[1]) == told(stream)[len(told(stream[:2])) :]


def test_position_includes_the_state_of_the_api():
    stream = [b"data: {}\nid: 0: begun\n\n", b"data: {}\nid: 0:12 7\n\n", b"data: {}\nid: 0:9 a b\n\n"]
    first, second, third = ids(told(stream))
    assert [id.split("~")[2:] for id in (first, second, third)] == [["begun"], ["7"], []]
    assert parse_position(second).state == "7"
    for index, known in enumerate((first, second, third)):
        assert told(stream, known) == told(stream)[len(told(stream[: index + 1])) :]


def test_position_has_a_token_count_for_each_choice():
    stream = [group("a", "0:5"), group("b", "1:6"), group("c", "1:7!"), group("d", "0:8")]
    assert [id.partition("~")[0] for id in ids(told(stream))] == ["1", "1.1", "1.2!", "2.2!"]
    for index, id in enumerate(ids(told(stream))):
        assert told(stream, id) == told(stream)[len(told(stream[: index + 1])) :]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ([ROLE, group("eins", "0:13"), TWO, LAST, DONE], "another token"),
        ([ROLE, group("onetwo", "0:12,7,9"), LAST, DONE], "no such boundary"),
        ([ROLE, ONE, b"data: [DONE]\nid: .\n\n"], "over before"),
        ([group("one", "0:12!"), DONE], "ended before"),
    ],
)
def test_different_response_is_never_sent_as_the_rest(other, what):
    for known in ids(told(STREAM))[1:3]:
        if what == "no such boundary" and known.startswith("3~"):
            continue
        if what == "over before" and known.startswith("1~"):
            continue
        with pytest.raises(Refusal):
            told(other, known)


def test_token_of_another_choice_does_not_match_the_clients_position():
    one = ids(told([group("a", "0:5"), group("b", "1:6")]))[-1]
    with pytest.raises(Refusal):
        told([group("b", "0:6"), group("a", "1:5")], one)


def test_error_event_reaches_the_client_at_any_stream_position():
    error = b'data: {"error":{"code":"timeout"}}\n\n'
    events = NumberedEvents(parse_position(ids(told(STREAM))[2]))
    assert events.convert(ROLE) == events.convert(error) == b""
    assert events.error == error


def test_comments_before_the_clients_position_are_dropped():
    known = ids(told(STREAM))[2]
    assert told([b": keep-alive\n\n", *STREAM], known) == told(STREAM, known)


def test_position_with_the_maximum_number_of_choices_is_parsed():
    keeper = PositionKeeper()
    for choice in range(CHOICES_NUMBERED_MAX):
        keeper.note(b"%d:%s! %s" % (choice, b",".join([b"1"] * 12), b"s" * 32))
    longest = Position((999_999_999,) * CHOICES_NUMBERED_MAX, (True,) * CHOICES_NUMBERED_MAX, 999_999_999, 0, "s" * 32)
    for position in (keeper.position, longest):
        assert parse_position(str(position)) == position


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), max_size=3), st.booleans()), max_size=12))
def test_written_stream_position_is_parsed(groups):
    keeper = PositionKeeper()
    for choice, tokens, ends in groups:
        keeper.note(f"{choice}:{','.join(map(str, tokens))}{'!' if ends else ''}".encode())
        assert str(keeper) == str(keeper.position)
        assert parse_position(str(keeper)) == keeper.position


@pytest.mark.parametrize("choice", ["16384", "9" * 9, "9" * 5000])
def test_id_of_a_choice_out_of_range_is_ignored(choice):
    keeper = PositionKeeper()
    keeper.note(b"0:1")
    before = str(keeper)
    keeper.note(f"{choice}:1".encode())
    assert str(keeper) == before


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=1, max_size=6))
def test_position_does_not_depend_on_the_grouping_of_tokens(groups):
    keeper, at_once = PositionKeeper(), PositionKeeper()
    for tokens in groups:
        keeper.note(f"0:{','.join(map(str, tokens))}".encode())
    at_once.note(("0:" + ",".join(str(token) for tokens in groups for token in tokens)).encode())
    assert str(keeper) == str(at_once)


@pytest.mark.parametrize(
    "text", ["17", "x", "17~9f3a01b", "17~9F3A01BC", "-1~9f3a01bc", "1..2~9f3a01bc", "1~9f3a01bc~", "1" * 2000]
)
def test_invalid_stream_position_is_refused(text):
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        parse_position(text)


def test_empty_stream_id_and_the_end_are_accepted_as_positions():
    assert parse_position("") is None
    assert parse_position(".") == "."
