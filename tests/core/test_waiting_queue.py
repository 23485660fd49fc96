"""Tests of the order of the waiting queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.request_state import LiveRequest
from trioserve.core.waiting_queue import WaitingQueue


def live_request(name: str, priority: int, arrival_index: int) -> LiveRequest:
    request = EngineRequest(
        id=RequestId(name),
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=0,
        priority=priority,
    )
    return LiveRequest(request, arrival_index)


def check(words: str, expect: str) -> None:
    """Apply the words and compare the queue. "a0" joins with priority 0, "-a" leaves, and "+a" is put back."""
    queue = WaitingQueue()
    known: dict[str, LiveRequest] = {}
    for word in words.split():
        if word[0] == "-":
            queue.remove(known[word[1:]])
        elif word[0] == "+":
            queue.put_back(known[word[1:]])
        else:
            known[word[0]] = live_request(word[0], int(word[1:]), len(known))
            queue.add(known[word[0]])
    assert "".join(live.request.id for live in queue) == expect
    assert len(queue) == len(expect)


@pytest.mark.parametrize(
    ("words", "expect"),
    [
        ("", ""),
        ("a0 b0 c0", "abc"),
        ("a0 b-1 c1 d0 e-1", "beadc"),
        ("a0 b0 c0 -b", "ac"),
        ("a0 -a", ""),
        ("a0 -a b0", "b"),
        ("a0 b0 c0 -a +a", "abc"),
        ("a0 b0 c0 -b +b", "abc"),
        ("a0 b0 c0 -c +c", "abc"),
        ("a0 b0 c0 -a -b +b +a", "abc"),
        ("a0 b0 c0 -a -b +a +b", "abc"),
        ("a0 -a b0 c0 +a", "abc"),
        ("a0 b1 -b +b", "ab"),
        ("a0 b1 c0 -b +b", "acb"),
        ("a100 b-100 c0", "bca"),
    ],
)
def test_the_queue_is_sorted_by_priority_then_arrival(words, expect):
    check(words, expect)


def test_a_request_that_is_not_queued_cannot_be_removed():
    queue = WaitingQueue()
    live = live_request("a", 0, 0)
    with pytest.raises(KeyError):
        queue.remove(live)
    queue.add(live)
    queue.remove(live)
    with pytest.raises(KeyError):
        queue.remove(live)
    assert len(queue) == 0


@pytest.mark.slow
@given(st.data())
def test_random_histories_keep_the_order_of_the_waiting_queue(data):
    queue = WaitingQueue()
    inside: list[LiveRequest] = []
    outside: list[LiveRequest] = []
    for arrival_index in range(data.draw(st.integers(1, 20))):
        live = live_request(f"r{arrival_index}", data.draw(st.integers(-1, 1)), arrival_index)
        queue.add(live)
        inside.append(live)
        for _ in range(data.draw(st.integers(0, 2))):
            source, target, move = data.draw(
                st.sampled_from([(inside, outside, queue.remove), (outside, inside, queue.put_back)])
            )
            if source:
                chosen = source.pop(data.draw(st.integers(0, len(source) - 1)))
                move(chosen)
                target.append(chosen)
        assert list(queue) == sorted(inside, key=lambda live: live.order)
        assert len(queue) == len(inside)
